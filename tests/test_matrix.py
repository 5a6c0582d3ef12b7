"""Every way to split a table, to read it and to train it, on one rank and several, against torch on one process."""

import dataclasses
import itertools
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from recsys.data.batch import Batch
from recsys.embedding import initial_rows
from recsys.errors import UserError
from recsys.recipe import Recipe
from tests import _matrix
from tests._matrix import CELLS, DIMS, EPS, GLOBAL_ROWS, RATE, ROWS, STEPS, Probe, batches_of, recipe_of

ROOT = pathlib.Path(__file__).parents[1]
HARD_LIMIT_S = 300
TOLERANCE = 1e-6

REASONS = {
    ("column_wise", "rowwise_adagrad"): "rowwise_adagrad keeps one number each",
    ("grid", "rowwise_adagrad"): "rowwise_adagrad keeps one number each",
    ("table_row_wise", "sequence"): "cannot do this with the table of a history",
    ("grid", "sequence"): "cannot do this with the table of a history",
    ("data_parallel", "sequence"): "cannot do this with the table of a history",
}
"""What is impossible, and a part of the reason that the recipe gives."""


def reason(kind: str, pooling: str, optimizer: str) -> str | None:
    return REASONS.get((kind, pooling)) or REASONS.get((kind, optimizer))


POSSIBLE = [cell for cell in CELLS if reason(*cell) is None]
IMPOSSIBLE = [cell for cell in CELLS if reason(*cell) is not None]
BY_NODE = [cell for cell in POSSIBLE if cell[0] in ("table_row_wise", "grid")]
WHERE = {"1 rank": (1, 0), "2 ranks": (2, 2), "2 nodes x 1": (2, 1), "2 nodes x 2": (4, 2)}
"""Name -> ranks, and ranks of a simulated node (0: no launcher)."""
CASES = [
    (where, cell)
    for where in WHERE
    for cell in (BY_NODE if where == "2 nodes x 1" else POSSIBLE)
]  # fmt: skip
EVERY_CASE = pytest.mark.parametrize(
    ("where", "cell"), CASES, ids=[f"{where}, {' '.join(cell)}" for where, cell in CASES]
)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict]:
    """Where -> cell -> what became of it: one rank in this process, all others in one launch for each place."""
    folder, found = tmp_path_factory.mktemp("matrix"), {}
    for number, (where, (ranks, per_node)) in enumerate(WHERE.items()):
        cells = [cell for place, cell in CASES if place == where]
        config = {"cells": cells, "per_node": per_node, "output": str(folder / f"{number}.pt")}
        if ranks == 1:
            _matrix.run(config)
        else:
            (folder / "config.json").write_text(json.dumps(config))
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            done = subprocess.run(
                [*launcher, _matrix.__file__, str(folder / "config.json")],
                capture_output=True,
                text=True,
                timeout=HARD_LIMIT_S,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                check=False,
            )
            assert done.returncode == 0, done.stderr[-3000:]
        found[where] = torch.load(folder / f"{number}.pt", weights_only=True)
    return found


# The reference: plain torch in double precision, on the whole global batch.


class PlainEmbeddings(nn.Module):
    """What `recsys.embedding.Embeddings` does, of nn.EmbeddingBag and nn.Embedding.

    Args:
        recipe: Tables and features.
        pooling: `sum`, `mean` or `sequence`.
        parts: Numbers of the rows of a table that naive ranks hold, one after another; more than one: means are taken
            over the part of a bag that a rank holds, and added up.
    """

    def __init__(self, recipe: Recipe, pooling: str, parts: int = 1) -> None:
        super().__init__()
        self.inputs, self.layout, self.pooling, self.parts = recipe.inputs, recipe.layout, pooling, parts
        self.tables = nn.ParameterDict(
            {
                table.name: initial_rows(table, recipe.train.seed, 0, table.rows, table.dim).double()
                for table in recipe.inputs.tables
            }
        )

    def _bags(self, table: str, bags: list[list[int]]) -> Tensor:
        ids = torch.tensor([i for bag in bags for i in bag], dtype=torch.int64)
        offsets = torch.tensor([0, *itertools.accumulate(len(bag) for bag in bags[:-1])])
        return nn.functional.embedding_bag(ids, self.tables[table], offsets, mode=self.pooling)

    def forward(self, pooled, sequence, weights) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
        vectors, events = {}, {}
        for name in self.layout.pooled:
            table, bags = self.inputs.table_of(name), pooled[name].to_dense()
            bags = [bag.tolist() for bag in bags]
            block = -(-table.rows // self.parts)
            own = [[[i for i in bag if i // block == part] for bag in bags] for part in range(self.parts)]
            vectors[name] = sum(self._bags(table.name, some) for some in own)
        for name in self.layout.sequence:
            values = nn.functional.embedding(sequence[name].values(), self.tables[self.inputs.table_of(name).name])
            if name in self.inputs.history_columns:
                events[name] = (values, sequence[name].lengths())
            else:
                vectors[name] = values
        return vectors, events, {}


class RowwiseAdagrad(torch.optim.Optimizer):
    """Adagrad with the mean of a row's squared gradients in place of each of them."""

    def __init__(self, params, lr: float, eps: float) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for table in group["params"]:
                squares = self.state[table].setdefault("sum", torch.zeros(len(table), dtype=table.dtype))
                squares += table.grad.square().mean(1)
                table -= group["lr"] * table.grad / (squares.sqrt() + group["eps"]).unsqueeze(1)


@dataclasses.dataclass
class Reference:
    weights: dict[str, Tensor]
    states: dict[str, Tensor]
    read: dict[str, set[int]]


def reference(cell: tuple[str, str, str], *, parts: int = 1, divided_by: int = 1) -> Reference:
    """Train a cell in plain torch.

    Args:
        cell: Of the matrix.
        parts: As of `PlainEmbeddings`: 1 is right.
        divided_by: What the gradients of tables are divided by: 1 is right.
    """
    _, pooling, optimizer = cell
    recipe = recipe_of(*cell)
    embeddings = PlainEmbeddings(recipe, pooling, parts)
    model = Probe(recipe.inputs, recipe.model, embeddings=embeddings).double()
    tables = list(embeddings.tables.values())
    if optimizer == "sgd":
        of_tables: torch.optim.Optimizer = torch.optim.SGD(tables, RATE)
    else:
        of_tables = (torch.optim.Adagrad if optimizer == "adagrad" else RowwiseAdagrad)(tables, lr=RATE, eps=EPS)
    of_dense = torch.optim.SGD([model.scales, model.bias], RATE)
    read: dict[str, set[int]] = {name: set() for name in ROWS}
    for bags, labels in batches_of(recipe):
        for name, rows in bags.items():
            read[recipe.inputs.table_of(name).name] |= {i for bag in rows for i in bag}
        batch = Batch.from_lists(recipe.layout, bags, labels=labels)
        model.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels.double()).backward()
        for table in tables:
            table.grad /= divided_by
        of_tables.step()
        of_dense.step()
    weights = {name: table.detach() for name, table in embeddings.tables.items()}
    states = {n: of_tables.state[t]["sum"].sqrt() for n, t in embeddings.tables.items() if optimizer != "sgd"}
    return Reference(
        weights | {"scales": model.scales.detach(), "bias": model.bias.detach()},
        states,
        read,
    )


REFERENCES: dict[tuple[str, ...], Reference] = {}


def right(cell: tuple[str, str, str]) -> Reference:
    """The reference of a cell, which is the same for every kind."""
    key = ("row_wise", *cell[1:])
    if key not in REFERENCES:
        REFERENCES[key] = reference(key)
    return REFERENCES[key]


def worst(expected: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """The largest difference of any number, relative to the largest one of its tensor."""
    assert expected.keys() == found.keys()
    return max(
        ((expected[name] - found[name].double()).abs().max() / expected[name].abs().max()).item() for name in expected
    )


def unpadded(cell: tuple[str, str, str], result: dict) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights of a result without the padding of widths, and the roots of the sums of squared gradients."""
    weights = {n: value[:, : DIMS[n]] if n in DIMS else value for n, value in result["after"].items()}
    states = {}
    for name, value in result["states"].items():
        width, padded = DIMS[name], -(-DIMS[name] // 4) * 4
        # The kernel's mean is taken over the stored width, in which the padding's gradients are 0.
        states[name] = value.flatten() * padded / width if cell[2] == "rowwise_adagrad" else value[:, :width]
    return weights, {name: value.sqrt() for name, value in states.items()}


# The claims.


@pytest.mark.dist
@EVERY_CASE
def test_weights_and_states_after_some_steps_are_those_of_torch_on_one_process(found, where, cell):
    result, expected = found[where][cell], right(cell)
    weights, states = unpadded(cell, result)
    assert set(result["kinds"].values()) == {cell[0]}
    assert worst(expected.weights, weights) < TOLERANCE
    assert worst(expected.states, states) < TOLERANCE if expected.states else not states


@pytest.mark.dist
@EVERY_CASE
def test_rows_that_were_looked_up_changed_and_no_others(found, where, cell):
    result, read = found[where][cell], right(cell).read
    for name in ROWS:
        changed = (result["after"][name] != result["before"][name]).any(1).nonzero().flatten().tolist()
        assert set(changed) == read[name]
    assert len(read["big"]) < ROWS["big"]


@pytest.mark.dist
def test_initial_values_are_the_same_in_every_plan_and_on_any_number_of_ranks(found):
    recipe = recipe_of("row_wise", "sum", "sgd")
    expected = {t.name: initial_rows(t, recipe.train.seed, 0, t.rows, t.dim) for t in recipe.inputs.tables}
    for where, cell in CASES:
        before = found[where][cell]["before"]
        for name, rows in expected.items():
            assert torch.equal(before[name][:, : DIMS[name]], rows), (where, cell, name)
            assert not before[name][:, DIMS[name] :].any(), "padding"
    assert len({tuple(row.tolist()) for table in ("big", "seven") for row in expected[table][:, :5]}) == 4091 + 7


@pytest.mark.dist
@EVERY_CASE
def test_what_every_rank_holds_whole_starts_equal_whatever_their_own_seeds(found, where, cell):
    first, *others = found[where][cell]["digests"]
    assert len(others) == WHERE[where][0] - 1
    assert all(other == first for other in others)
    tables = {name for name in first if "table_" in name}
    assert len(tables) == (3 if cell[0] == "data_parallel" else 0) and len(first) == len(tables) + 2


@pytest.mark.parametrize("cell", IMPOSSIBLE, ids=" ".join)
def test_what_is_impossible_is_refused_with_the_reason_and_what_is_allowed(cell):
    with pytest.raises(UserError, match=rf"tables.big.sharding: .*{reason(*cell)}.*Received: {cell[0]}. Allowed: auto"):
        recipe_of(*cell)


# The test of the test.


@pytest.mark.dist
@pytest.mark.parametrize(("where", "parts"), [("2 ranks", 2), ("2 nodes x 2", 4)])
def test_the_comparison_would_catch_means_over_the_part_of_a_bag_that_a_rank_holds(found, where, parts):
    for optimizer in _matrix.OPTIMIZERS:
        cell = ("row_wise", "mean", optimizer)
        naive = reference(cell, parts=parts)
        weights, _ = unpadded(cell, found[where][cell])
        assert worst(naive.weights, weights) > 100 * TOLERANCE
        assert worst(right(cell).weights, reference(cell).weights) == 0


@pytest.mark.dist
@pytest.mark.parametrize(("where", "ranks"), [("2 ranks", 2), ("2 nodes x 2", 4)])
def test_the_comparison_would_catch_gradients_divided_by_the_number_of_ranks(found, where, ranks):
    for cell in POSSIBLE:
        naive = reference(("row_wise", *cell[1:]), divided_by=ranks)
        weights, _ = unpadded(cell, found[where][cell])
        assert worst(naive.weights, weights) > 100 * TOLERANCE


def test_the_batches_have_what_the_matrix_is_about():
    for pooling in _matrix.POOLINGS:
        recipe = recipe_of("row_wise", pooling, "sgd")
        for bags, labels in batches_of(recipe):
            lists = [bag for name, rows in bags.items() if name.endswith("_ids") for bag in rows]
            assert any(len(bag) > len(set(bag)) > 1 for bag in lists), "repeated ids"
            assert any(not bag for bag in lists), "empty bags"
            for parts in (2, 4):
                block = -(-ROWS["big"] // parts)
                assert any(len({i // block for i in bag}) > 1 for bag in bags["big_ids"]), "bags of several shards"
            assert set(labels) == {0, 1} and len(labels) == GLOBAL_ROWS
    for ranks in (2, 4):
        bounds = [[0, *cuts, GLOBAL_ROWS] for cuts in _matrix.CUTS[ranks]]
        assert len(bounds) == STEPS >= 3
        assert {low == high for cuts in bounds for low, high in itertools.pairwise(cuts)} == {True, False}
        assert ROWS["one"] < ranks
