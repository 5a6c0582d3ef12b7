"""Worker of the sharding tests: train recipes' models on given global batches and save their whole weights.

    torchrun --nproc-per-node N tests/_train_batches.py CONFIGS.json

Rank r of N takes the r-th slice of each global batch, cut unevenly when a configuration says so. Rank 0 writes a plain
{name: tensor} of every table, unpadded, and every dense weight.
"""

import itertools
import json
import pathlib
import sys

import torch
import torch.distributed as dist

from recsys import recipe_file
from recsys.data.batch import Batch
from recsys.distributed import process_group
from recsys.embedding import table_of_parameter
from recsys.job import Job, assemble
from recsys.schema import Layout
from recsys.stack import require_stack

FEATURES = [
    {"kind": "id", "columns": ["user", "city", "type"]},
    {"kind": "id", "columns": ["item"]},
    {"kind": "id", "columns": ["category"]},
    {"kind": "history", "of": {"seen_items": "item", "seen_categories": "category"}},
    {"kind": "number", "columns": ["age"]},
]
"""Fields that share a table with a history and such that do not, and a number."""


def random_rows(layout: Layout, rows_of: dict[str, int], histories: list[str], num_rows: int, seed: int) -> dict:
    """Ids, histories (some empty), one dense column and labels of one global batch, as plain lists."""
    generator = torch.Generator().manual_seed(seed)
    ids: dict[str, list] = {}
    lengths = torch.randint(0, 6, (num_rows,), generator=generator)
    for name in (*layout.pooled, *layout.sequence):
        draw = torch.randint(1, rows_of[name], (num_rows, 6), generator=generator).tolist()
        ids[name] = [row[:length] for row, length in zip(draw, lengths.tolist(), strict=True)]
        if name not in histories:
            ids[name] = [row[0] for row in draw]
    return {
        "ids": ids,
        "dense": torch.randn(num_rows, 1, generator=generator).tolist(),
        "labels": torch.randint(0, 2, (num_rows,), generator=generator).tolist(),
    }


def whole_weights(job: Job) -> dict[str, torch.Tensor]:
    """Every weight as one plain tensor on every rank; tables without their padding."""
    weights = {}
    for name, value in job.task.state_dict().items():
        if hasattr(value, "local_shards"):
            size = value.metadata().size
            whole = torch.zeros(size) if dist.get_rank() == 0 else None
            value.gather(0, whole)
            value = whole
        table = table_of_parameter(name)
        if value is not None and table is not None:
            value = value[:, : job.embeddings.inputs.table(table).dim + job.embeddings.extra_columns]
        weights[name] = None if value is None else value.detach().clone()
    return weights


def slice_of(rows: dict, low: int, high: int) -> dict:
    """Rows [low, high) of a global batch."""
    return {
        "ids": {name: values[low:high] for name, values in rows["ids"].items()},
        "dense": rows["dense"][low:high],
        "labels": rows["labels"][low:high],
    }


def run(config: dict) -> None:
    """Train and save as the configuration says, on this rank and all others."""
    recipe = recipe_file.parse(config["recipe"], config.get("overrides", []))
    with process_group("cpu") as ranks:
        layout, inputs = recipe.layout, recipe.inputs
        rows_of = {name: inputs.table_of(name).rows for name in (*layout.pooled, *layout.sequence)}
        job = assemble(recipe, ranks, encoder=None)
        optimizer = job.optimizer()
        before = whole_weights(job)
        job.task.train()
        for step in range(config["steps"]):
            num_rows = config["global_rows"]
            rows = random_rows(layout, rows_of, list(inputs.history_columns), num_rows, seed=step)
            cuts = [0, *(config["cuts"] if ranks.world_size > 1 else []), num_rows]
            mine = slice_of(rows, cuts[ranks.rank], cuts[ranks.rank + 1])
            batch = Batch.from_lists(layout, mine["ids"], dense=mine["dense"], labels=mine["labels"])
            batch.dense = batch.dense.view(len(batch), 1)  # a list of no rows does not say how many columns it has
            batch.weights = torch.full((len(batch),), ranks.world_size / num_rows)
            batch.pad_bags(max(high - low for low, high in itertools.pairwise(cuts)))
            optimizer.zero_grad()
            loss, _ = job.task(batch)
            loss.backward()
            optimizer.step()
        after = whole_weights(job)
        if ranks.rank == 0:
            tables = job.describe_plan()["tables"]
            kinds = {table["name"]: table["kind"] for table in tables}
            found = {"before": before, "after": after, "kinds": kinds}
            torch.save(found, config["output"])


if __name__ == "__main__":
    require_stack()
    for config in json.loads(pathlib.Path(sys.argv[1]).read_text()):
        run(config)
