import functools
import json
import pathlib
import subprocess
import sys

import pytest
import torch
import yaml

from recsys import models, recipe_file
from recsys.data.batch import Batch
from recsys.embedding import table_of_parameter
from tests._train_batches import random_rows, run

WORKER = pathlib.Path(__file__).parent / "_train_batches.py"
HARD_LIMIT_S = 120

FEATURES = [
    {"kind": "id", "columns": ["user", "city", "type"]},
    {"kind": "id", "columns": ["item"]},
    {"kind": "id", "columns": ["category"]},
    {"kind": "history", "of": {"seen_items": "item", "seen_categories": "category"}},
    {"kind": "number", "columns": ["age"]},
]


def recipe(model: str, sharding: str = "row_wise", **sparse: object) -> str:
    return yaml.safe_dump(
        {
            "model": {"name": model, "hidden": [16, 8], **({"attention_hidden": [8]} if model == "din" else {})},
            "data": {"train": "unused"},
            "features": FEATURES,
            # 7 rows and 1 row: fewer than divide evenly, fewer than ranks; width 3 is padded to 4
            "tables": {
                "default": {"dim": 3, "rows": 40, "sharding": sharding, "init_std": 0.3},
                "city": {"rows": 1},
                "category": {"rows": 4},
            },
            "optimizer": {"sparse": {"learning_rate": 0.1, **sparse}, "dense": {"learning_rate": 0.01}},
        }
    )


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """`train(ranks, recipe, steps=, cut=)`: weights before and after, on real ranks; one rank runs in this process."""

    @functools.cache
    def train(ranks: int, text: str, *, steps: int, cut: int = 16) -> dict:
        folder = tmp_path_factory.mktemp("trained")
        config = {
            "recipe": text,
            "steps": steps,
            "global_rows": 32,
            "cuts": [cut],
            "output": str(folder / "weights.pt"),
        }
        if ranks == 1:
            run(config)
        else:
            (folder / "config.json").write_text(json.dumps(config))
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            command = [*launcher, str(WORKER), str(folder / "config.json")]
            done = subprocess.run(command, capture_output=True, text=True, timeout=HARD_LIMIT_S, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
        return torch.load(folder / "weights.pt", weights_only=True)

    return train


def assert_close(one: dict, two: dict, tolerance: float = 1e-5) -> None:
    assert one.keys() == two.keys()
    for name in one:
        assert (one[name].double() - two[name].double()).abs().max() <= tolerance, name


@pytest.mark.dist
@pytest.mark.parametrize("cut", [16, 25, 32], ids=["equal", "uneven", "empty"])
@pytest.mark.parametrize("model", ["din", "deepfm"])
def test_two_ranks_train_the_same_weights_as_one(train, model, cut):
    one = train(1, recipe(model), steps=20)
    two = train(2, recipe(model), steps=20, cut=cut)
    assert set(two["kinds"].values()) == {"row_wise"}
    assert_close(one["before"], two["before"], 0.0)
    assert_close(one["after"], two["after"])
    for name, value in one["after"].items():
        assert name.endswith("bias") or not torch.equal(one["before"][name], value), f"{name} never moved"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("model", "sharding"), [("din", "table_wise"), ("deepfm", "table_wise"), ("deepfm", "data_parallel")]
)
def test_every_plan_trains_the_same_weights(train, model, sharding):
    two = train(2, recipe(model, sharding), steps=20)
    assert set(two["kinds"].values()) == {sharding}
    assert_close(train(1, recipe(model), steps=20)["after"], two["after"])


@pytest.mark.dist
def test_tables_cut_by_columns_train_the_same_weights(train):
    """TorchRec cuts no narrower than 128 columns; 5 steps, since rounding grows with the width."""
    wide = recipe("din", "column_wise", name="adagrad").replace("dim: 3", "dim: 256")
    two = train(2, wide, steps=5)
    assert set(two["kinds"].values()) == {"column_wise"} and set(two["num_shards"].values()) == {2}
    one = train(1, wide.replace("column_wise", "row_wise"), steps=5)
    assert_close(one["before"], two["before"], 0.0)
    assert_close(one["after"], two["after"], 1e-4)


@pytest.mark.dist
@pytest.mark.parametrize("sharding", ["row_wise", "table_wise"])
def test_one_step_changes_the_rows_that_were_looked_up_and_no_others(train, sharding):
    text = recipe("din", sharding)
    found = train(2, text, steps=1)
    assert set(found["kinds"].values()) == {sharding}
    parsed = recipe_file.parse(text)
    layout, inputs = parsed.layout, parsed.inputs
    rows_of = {name: inputs.table_of(name).rows for name in (*layout.pooled, *layout.sequence)}
    ids = random_rows(layout, rows_of, list(inputs.history_columns), 32, seed=0)["ids"]
    for table in inputs.tables:
        seen = {
            row
            for name, values in ids.items()
            if inputs.table_of(name) == table
            for value in values
            for row in (value if isinstance(value, list) else [value])
        }
        (name,) = [n for n in found["after"] if table_of_parameter(n) == table.name]
        changed = (found["after"][name] != found["before"][name]).any(1).nonzero().flatten().tolist()
        assert set(changed) == seen
        assert table.name == "city" or len(seen) < table.rows, "a test in which every row was looked up"


@pytest.mark.dist
def test_the_tables_follow_plain_rowwise_adagrad_of_their_unpadded_width(train):
    """Width 5 with its first-order weight is stored as 8; the update must be the one of the formula for 6 columns."""
    text = recipe("deepfm", "row_wise", eps=1e-3).replace("dim: 3", "dim: 5")
    found = train(1, text, steps=3)
    parsed = recipe_file.parse(text)
    torch.manual_seed(parsed.train.seed)
    model = models.build(parsed.inputs, parsed.model)
    model.load_state_dict(
        {
            name: torch.nn.functional.pad(value, (0, state.shape[1] - value.shape[1])) if state.dim() == 2 else value
            for name, state in model.state_dict().items()
            for value in [found["before"]["model." + name]]
        }
    )
    tables = {n: p for n, p in model.named_parameters() if table_of_parameter(n)}
    dense = torch.optim.Adam([p for n, p in model.named_parameters() if n not in tables], lr=0.01)
    squares = {name: torch.zeros(len(table)) for name, table in tables.items()}
    rows_of = {name: parsed.inputs.table_of(name).rows for name in parsed.layout.pooled}
    for step in range(3):
        rows = random_rows(parsed.layout, rows_of, list(parsed.inputs.history_columns), 32, seed=step)
        batch = Batch.from_lists(parsed.layout, rows["ids"], dense=rows["dense"], labels=rows["labels"])
        model.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels).backward()
        dense.step()
        with torch.no_grad():
            for name, table in tables.items():
                gradient = table.grad[:, :6]  # 5 columns of the vector and the first-order weight
                squares[name] += gradient.square().mean(1)
                table[:, :6] -= 0.1 * gradient / (squares[name].sqrt() + 1e-3).unsqueeze(1)
    for name, value in model.state_dict().items():
        width = found["after"]["model." + name].shape[-1] if value.dim() == 2 else None
        assert (value[..., :width] - found["after"]["model." + name]).abs().max() < 1e-5, name
