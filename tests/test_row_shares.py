"""Real ranks train an epoch on few and uneven rows: every row once, no hang, and what was padded is told.

    torchrun --nproc-per-node N tests/test_row_shares.py CONFIG.json

trains the recipes of CONFIG one after another and writes which rows each rank trained on.
"""

import itertools
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from recsys import recipe_file
from recsys.stack import require_stack

ROOT = pathlib.Path(__file__).parents[1]
HARD_LIMIT_S = 240
RANKS = 3
BATCH = 10
# Name -> rows of each row group of each file.
DATA = {
    "uneven rows in one row group": [[37]],
    "uneven files": [[1], [100], [], [3, 2], [17]],
    "7 and 3 batches": [[7 * BATCH], [3 * BATCH]],
    "one row less than ranks": [[2]],
    "one row": [[1]],
    "a row for each rank, and one": [[1], [3]],
}


def write(folder: pathlib.Path, files: list[list[int]]) -> int:
    """Parquet files with these row groups; returns the number of rows."""
    folder.mkdir()
    first = 0
    for number, groups in enumerate(files):
        schema = pa.schema({"row": pa.int64(), "item": pa.int64(), "tags": pa.list_(pa.int64()), "label": pa.int64()})
        with pq.ParquetWriter(folder / f"{number}.parquet", schema) as writer:
            for size in groups:
                rows = np.arange(first, first + size)
                columns = [rows, rows % 7, [list(range(r % 4)) for r in rows], rows % 2]
                writer.write_table(
                    pa.table([pa.array(c, t) for c, t in zip(columns, schema.types, strict=True)], schema=schema)
                )
                first += size
    return first


def recipe(folder: pathlib.Path, model: str, shuffle: int) -> str:
    din = model == "din"
    features = [{"kind": "id", "columns": ["row", "item"]}]
    features.append({"kind": "history", "of": {"tags": "item"}} if din else {"kind": "id_list", "columns": ["tags"]})
    return yaml.safe_dump(
        {
            "model": {"name": model, "hidden": [4], **({"attention_hidden": [4]} if din else {})},
            "data": {split: str(folder) for split in ("train", "valid")}
            | {"batch_size_per_rank": BATCH, "shuffle_rows": shuffle},
            "features": features,
            "tables": {"default": {"rows": 50, "sharding": "row_wise"}},
            "train": {"device": "cpu", "threads_per_rank": 1, "epochs": 2, "timeout_s": 60},
        }
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[pathlib.Path, dict[str, int]]:
    """Folder of all runs, and the number of rows of each data set; all of them in one launch."""
    folder = tmp_path_factory.mktemp("shares")
    num_rows = {name: write(folder / name, files) for name, files in DATA.items()}
    models = itertools.cycle((("din", 0), ("deepfm", 15)))
    config = {name: recipe(folder / name, *next(models)) for name in DATA}
    (folder / "config.json").write_text(json.dumps(config))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    done = subprocess.run(
        [*launcher, __file__, str(folder / "config.json")],
        capture_output=True,
        text=True,
        timeout=HARD_LIMIT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RECSYS_DATA": str(folder / "home")},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, num_rows


@pytest.mark.dist
@pytest.mark.parametrize("name", DATA)
def test_every_row_is_trained_on_by_one_rank_once_in_each_epoch(runs, name):
    folder, num_rows = runs
    ranks = [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(RANKS)]
    steps = {len(rank) for rank in ranks}
    assert len(steps) == 1, "all ranks make the same steps"
    half = steps.pop() // 2
    for epoch in (slice(0, half), slice(half, None)):
        rows = [row for rank in ranks for step in rank[epoch] for row in step]
        assert sorted(rows) == list(range(num_rows[name]))


@pytest.mark.dist
@pytest.mark.parametrize("name", DATA)
def test_the_end_of_a_run_tells_what_was_padded_and_that_nothing_was_left_out(runs, name):
    folder, num_rows = runs
    ranks = [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(RANKS)]
    batches = [[len(step) for step in rank[: len(rank) // 2]] for rank in ranks]
    padded = sum(RANKS * max(sizes) - sum(sizes) for sizes in zip(*batches, strict=True))
    told = json.loads((folder / f"{name}-run" / "metrics.json").read_text())["shared_out"]
    totals = [sum(sizes) for sizes in batches]
    assert told == {
        "rows": num_rows[name],
        "steps": len(batches[0]),
        "rows_by_rank": [min(totals), max(totals)],
        "empty_bags": padded,
        "left_out": 0,
    }
    log = (folder / f"{name}-run" / "log.txt").read_text()
    assert f"{num_rows[name]} rows in {len(batches[0])} steps" in log
    assert f"left out: 0; empty bags that fill up batches: {padded}" in log
    tested = json.loads((folder / f"{name}-run" / "metrics.json").read_text())["valid"]
    assert tested["rows"] == num_rows[name]


def main(path: pathlib.Path) -> None:
    """The worker: train all recipes, and note the rows of each batch that the model trains on."""
    from recsys.job import Task
    from recsys.train import train

    trained: list[list[int]] = []

    def note(module: torch.nn.Module, batches: tuple) -> None:
        if isinstance(module, Task) and module.training:
            trained.append(batches[0].rows.tolist())

    torch.nn.modules.module.register_module_forward_pre_hook(note)
    for name, text in json.loads(path.read_text()).items():
        trained.clear()
        train(recipe_file.parse(text), run=str(path.parent / f"{name}-run"))
        (path.parent / f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(trained))


if __name__ == "__main__":
    import logging

    logging.getLogger("recsys").setLevel(logging.INFO)
    require_stack()
    main(pathlib.Path(sys.argv[1]))
