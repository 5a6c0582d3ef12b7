"""Every way to split a table, to read it and to train it: the cases, and the worker that trains them on real ranks.

    torchrun --nproc-per-node N tests/_matrix.py CONFIG.json

CONFIG has `per_node`, the ranks of a simulated node, `cells`, and `output`, where rank 0 saves what became of them.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import sys
import unittest.mock

import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn

from recsys import models, recipe_file
from recsys.data.batch import Batch
from recsys.distributed import Ranks, gather, process_group
from recsys.embedding import Embeddings, table_of_parameter
from recsys.job import Job, assemble
from recsys.optim import ModelOptimizer
from recsys.recipe import Recipe
from recsys.schema import Inputs, Layout
from recsys.stack import require_stack
from recsys.table_settings import KINDS

POOLINGS = ("sum", "mean", "sequence")
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")
CELLS = tuple(itertools.product(KINDS, POOLINGS, OPTIMIZERS))
ROWS = {"one": 1, "seven": 7, "big": 4091}  # one row is fewer than there are ranks
DIMS = {"one": 8, "seven": 5, "big": 8}  # a vector of 5 is stored as 8
STEPS, GLOBAL_ROWS = 4, 24
RATE, EPS = 0.1, 1e-2
CUTS = {1: [()] * STEPS, 2: [(12,), (0,), (24,), (17,)], 4: [(6, 12, 18), (0, 8, 8), (24, 24, 24), (1, 9, 20)]}
"""Ranks -> where each step's global batch is cut; some ranks have no rows in the second and third step."""


class Probe(nn.Module):
    """A model that is little more than its embeddings: logits by which every vector gets a gradient of its own.

    Args:
        inputs: Tables and features.
        config: Of the model in whose place this one is built.
        table_device: Where the tables are allocated.
        embeddings: What looks vectors up; None: what the library has.
    """

    def __init__(
        self, inputs: Inputs, config, *, table_device: str | None = None, embeddings: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.attends, self.inputs = config.attends, inputs
        self.scales = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.bias = nn.Parameter(torch.zeros(1))
        self.embeddings = embeddings or Embeddings(inputs, attends=config.attends, table_device=table_device)

    def forward(self, batch: Batch) -> Tensor:
        vectors, events, _ = self.embeddings(batch.pooled, batch.sequence, batch.weights)
        logits = self.bias.expand(len(batch))
        for place, vector in enumerate(vectors.values()):
            logits = logits + 0.2 * (place + 1) * (vector * self.scales[: vector.shape[1]]).sum(1)
        for history in self.inputs.histories:
            for column, target in history.of.items():
                values, lengths = events[column]
                row = torch.repeat_interleave(torch.arange(len(batch)), lengths)
                logits = logits.index_add(0, row, (values * (0.5 + vectors[target][row])).sum(1))
        return logits


def recipe_of(kind: str, pooling: str, optimizer: str) -> Recipe:
    """The recipe of a cell; its tables have exactly `ROWS` rows.

    Raises:
        UserError: The cell is impossible.
    """
    model: dict = {"name": "deepfm", "hidden": []}
    table_of = {"one_ids": "one", "seven_ids": "seven", "big_ids": "big", "more_ids": "big"}
    features: list[dict] = [
        {"kind": "id_list", "columns": [name], "pooling": pooling, "table": table} for name, table in table_of.items()
    ]
    if pooling == "sequence":
        model = {"name": "din", "hidden": [4], "attention_hidden": [4]}
        features = [{"kind": "id", "columns": list(ROWS)}, {"kind": "history", "of": table_of}]
    settings = {"name": optimizer, "learning_rate": RATE} | ({} if optimizer == "sgd" else {"eps": EPS})
    content = {
        "model": model,
        "data": {"train": "unused", "batch_size_per_rank": GLOBAL_ROWS},
        "features": features,
        "tables": {"default": {"init_std": 0.3, "sharding": kind}},
        "optimizer": {"sparse": settings, "dense": {"name": "sgd", "learning_rate": RATE}},
        "train": {"device": "cpu"},
    }
    recipe = recipe_file.parse(yaml.safe_dump(content))
    tables = [dataclasses.replace(t, rows=ROWS[t.name], dim=DIMS[t.name]) for t in recipe.inputs.tables]
    recipe.__dict__["inputs"] = dataclasses.replace(recipe.inputs, tables=tuple(tables))
    return recipe


def global_batch(layout: Layout, table_of: dict[str, str], step: int) -> tuple[dict[str, list[list[int]]], list[int]]:
    """Bags of ids by feature, and labels. Bags repeat ids, are empty, and hold ids from all over their table."""
    generator = torch.Generator().manual_seed(step)
    bags: dict[str, list[list[int]]] = {}
    for name in (*layout.pooled, *layout.sequence):
        rows = ROWS[table_of[name]]
        frequent = torch.randint(0, rows, (3,), generator=generator)
        ids = torch.randint(0, rows, (GLOBAL_ROWS, 6), generator=generator)
        ids[:, ::2] = frequent[torch.randint(0, 3, (GLOBAL_ROWS, 3), generator=generator)]
        lengths = torch.randint(0, 7, (GLOBAL_ROWS,), generator=generator).tolist()
        if not name.endswith("_ids"):
            lengths = [1] * GLOBAL_ROWS
        bags[name] = [row[:length] for row, length in zip(ids.tolist(), lengths, strict=True)]
    # Few zeros: where gradients of both signs cancel out, what remains is mostly rounding.
    labels = torch.rand(GLOBAL_ROWS, generator=generator) < 0.8
    return bags, labels.long().tolist()


def batches_of(recipe: Recipe) -> list[tuple[dict[str, list[list[int]]], list[int]]]:
    """The global batches of all steps."""
    layout = recipe.layout
    table_of = {name: recipe.inputs.table_of(name).name for name in (*layout.pooled, *layout.sequence)}
    return [global_batch(layout, table_of, step) for step in range(STEPS)]


def part_of(recipe: Recipe, step: int, rank: int, world_size: int) -> Batch:
    """One rank's rows of a global batch, as the trainer prepares them."""
    bags, labels = batches_of(recipe)[step]
    cuts = [0, *CUTS[world_size][step], GLOBAL_ROWS]
    low, high = cuts[rank : rank + 2]
    batch = Batch.from_lists(recipe.layout, {n: b[low:high] for n, b in bags.items()}, labels=labels[low:high])
    batch.weights = torch.full((len(batch),), world_size / GLOBAL_ROWS)
    batch.pad_bags(max(high - low for low, high in itertools.pairwise(cuts)))
    return batch


def whole(value) -> Tensor | None:
    """A sharded or plain tensor as one, on rank 0; None on other ranks."""
    if not hasattr(value, "local_shards"):
        return value.detach().clone()
    metadata = value.metadata()
    out = torch.zeros(metadata.size, dtype=metadata.tensor_properties.dtype) if dist.get_rank() == 0 else None
    value.gather(0, out)
    return out


def whole_weights(job: Job) -> dict[str, Tensor | None]:
    """Every table by its name, padding included, and every dense weight."""
    state = job.task.state_dict()
    return {table_of_parameter(name) or name.rpartition(".")[2]: whole(value) for name, value in state.items()}


def whole_states(optimizer: ModelOptimizer) -> dict[str, Tensor]:
    """What the optimizer keeps of each table, one number per row or per weight; NaN where no rank has any."""
    mine = []
    for part in (optimizer._fused, optimizer._optimizer):
        for name, state in part.state_dict()["state"].items():
            for key, value in state.items():
                if (table := table_of_parameter(name)) and key.rpartition(".")[2] in ("momentum1", "sum"):
                    shards = value.local_shards() if hasattr(value, "local_shards") else ()
                    mine += [(table, shard.metadata.shard_offsets, shard.tensor) for shard in shards]
                    mine += [] if hasattr(value, "local_shards") else [(table, [0] * value.dim(), value)]
    found: dict[str, Tensor] = {}
    for table, offsets, value in itertools.chain(*gather(mine)):
        size = (
            ROWS[table],
            *([-(-DIMS[table] // 4) * 4] if value.dim() == 2 and value.shape[1] > 1 else value.shape[1:]),
        )
        place = tuple(slice(start, start + length) for start, length in zip(offsets, value.shape, strict=True))
        found.setdefault(table, torch.full(size, torch.nan))[place] = value
    return found


def digests(job: Job) -> dict[str, str]:
    """Digest of everything that a rank holds whole: replicated tables, dense weights, buffers."""
    held = {name: value for name, value in job.task.state_dict().items() if not hasattr(value, "local_shards")}
    return {name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in sorted(held.items())}


def train(recipe: Recipe, ranks: Ranks) -> dict:
    """What became of one cell: weights before and after, states, the plan; and each rank's digests at the start."""
    torch.manual_seed(ranks.rank)  # Nothing that ranks must share may come from here.
    job = assemble(recipe, ranks, encoder=None)
    optimizer = job.optimizer(STEPS)
    found = {"before": whole_weights(job), "digests": gather(digests(job))}
    job.task.train()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, _ = job.task(part_of(recipe, step, ranks.rank, ranks.world_size))
        loss.backward()
        optimizer.step()
    tables = job.describe_plan()["tables"]
    found["kinds"] = {table["name"]: table["kind"] for table in tables}
    found["areas"] = {t["name"]: [[s["rank"], s["rows"], s["cols"]] for s in t["shards"]] for t in tables}
    return found | {"after": whole_weights(job), "states": whole_states(optimizer)}


def run(config: dict) -> None:
    """Train the cells on this rank and all others; the ranks of each kind meet anew."""
    if per_node := config["per_node"]:
        os.environ["LOCAL_WORLD_SIZE"] = str(per_node)
        os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % per_node)
    found, probe = {}, dict.fromkeys(("deepfm", "din"), "tests._matrix:Probe")
    with unittest.mock.patch.dict(models.MODELS, probe):
        for _, cells in itertools.groupby(config["cells"], lambda cell: cell[0]):
            with process_group("cpu", threads=1) as ranks:
                found |= {tuple(cell): train(recipe_of(*cell), ranks) for cell in cells}
    if ranks.rank == 0:
        torch.save(found, config["output"])


if __name__ == "__main__":
    require_stack()
    run(json.loads(pathlib.Path(sys.argv[1]).read_text()))
