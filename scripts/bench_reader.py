"""How fast rows become batches, against what pyarrow alone needs to decode them; and whether training waits for them.

    python -m scripts.bench_reader [--rows 4000000] [--rounds 5]

Three layouts: Criteo's own (13 integers, 26 texts of 8 hexadecimal digits), the same with integer ids, and histories
(3 ids, two lists in step with 15 events on average). `raw` is `pyarrow.parquet.ParquetFile.iter_batches` over the same
columns; `ours` is reader + encoder: shuffled batches ready for the model, read and encoded by one background thread,
picked and put together by the thread that asks for them, as in training. Arrow has one thread in both. Rounds
alternate, and the best of each counts; CPU time is given beside wall time since it depends less on what else the
machine does. The first window of 262,144 rows is filled before the first batch and the last is used up after the last
block is read, so that few rows would measure these two alone. Then one epoch of DeepFM and of DIN tells what share of
it training waited.

Prints a table and writes benchmarks/reader.json.
"""

import argparse
import datetime
import json
import logging
import pathlib
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.table import Table

from recsys.data.parquet import ParquetData
from recsys.data.reader import Prefetcher, Reader
from recsys.encoder import Encoder
from recsys.recipe import Recipe
from recsys.recipe_file import parse
from recsys.train import train

_ROOT = pathlib.Path(__file__).parent.parent
_SHUFFLE_ROWS = 262_144
_BATCH_ROWS = 4_096
_DISTINCT = (30, 1_000, 30_000, 300_000, 3_000_000)
_RECIPES = {
    "wide, text ids": "{kind: id, columns: [C1..C26]}, {kind: number, columns: [I1..I13]}",
    "wide, integer ids": "{kind: id, columns: [C1..C26]}, {kind: number, columns: [I1..I13]}",
    "histories": "{kind: id, columns: [user_id, item_id, category_id]}, "
    "{kind: history, of: {items: item_id, categories: category_id}, max_length: 100}",
}
_MODELS = {
    "wide, text ids": "{name: deepfm}",
    "wide, integer ids": "{name: deepfm}",
    "histories": "{name: din, hidden: [256, 128]}",
}


def main() -> None:
    """Measure all layouts and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--training-rows", type=int, default=300_000)
    parser.add_argument("--output", type=pathlib.Path, default=_ROOT / "benchmarks" / "reader.json")
    arguments = parser.parse_args()
    pa.set_cpu_count(1)
    logging.getLogger("recsys").setLevel(logging.WARNING)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in _RECIPES:
            path = pathlib.Path(folder) / name.replace(", ", "-").replace(" ", "-")
            path.mkdir()
            results[name] = {**measure(_data(name, arguments.rows, path), arguments.rounds)}
            shown = _data(name, arguments.training_rows, path / "short")
            results[name]["training"] = _waiting(shown, path / "run")
    _print(results)
    environment = results["histories"]["training"].pop("environment")
    for found in results.values():
        found["training"].pop("environment", None)
    facts = {
        "command": shlex.join(["python", "-m", "scripts.bench_reader", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "environment": environment,
        "rows": arguments.rows,
        "batch_rows": _BATCH_ROWS,
        "shuffle_rows": _SHUFFLE_ROWS,
        "layouts": results,
    }
    arguments.output.parent.mkdir(exist_ok=True)
    arguments.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def _data(layout: str, num_rows: int, folder: pathlib.Path) -> Recipe:
    """Write a data set, of at most a million different rows, and give its recipe."""
    folder.mkdir(exist_ok=True)
    num_times = -(-num_rows // 1_000_000)
    num_rows //= num_times
    rng = np.random.default_rng(1)
    columns: dict[str, pa.Array] = {"label": pa.array((rng.random(num_rows) < 0.25).astype(np.int8))}
    if layout == "histories":
        lengths = np.minimum(rng.geometric(1 / 15, num_rows), 100)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        for name, distinct in (("user_id", 300_000), ("item_id", 60_000), ("category_id", 1_000)):
            columns[name] = pa.array(_skewed(rng, num_rows, distinct))
        for name, distinct in (("items", 60_000), ("categories", 1_000)):
            columns[name] = pa.ListArray.from_arrays(offsets, pa.array(_skewed(rng, int(lengths.sum()), distinct)))
    else:
        for n in range(13):
            columns[f"I{n + 1}"] = pa.array(np.exp(rng.normal(2, 2, num_rows)).astype(np.int64))
        for n in range(26):
            ids = _skewed(rng, num_rows, _DISTINCT[n % 5])
            if layout == "wide, text ids":
                texts = pa.array([f"{i * 2_654_435_761 % 2**32:08x}" for i in range(_DISTINCT[n % 5])])
                columns[f"C{n + 1}"] = texts.take(pa.array(ids))
            else:
                columns[f"C{n + 1}"] = pa.array(ids)
    table = pa.table(columns)
    with pq.ParquetWriter(folder / "part.parquet", table.schema) as writer:
        for _ in range(num_times):
            writer.write_table(table, row_group_size=131_072)
    return parse(
        f"{{model: {_MODELS[layout]}, features: [{_RECIPES[layout]}], data: {{train: {folder}/part.parquet, "
        f"batch_size_per_rank: {_BATCH_ROWS}, shuffle_rows: {_SHUFFLE_ROWS}}}, "
        f"tables: {{default: {{dim: 16, rows: 100_000}}}}, train: {{device: cpu}}}}"
    )


def _skewed(rng: np.random.Generator, size: int, distinct: int) -> np.ndarray:
    """Ids from 0 on, of which the smallest are the most frequent, as with Zipf's law of exponent 1."""
    return np.minimum(np.exp(rng.random(size) * np.log(distinct + 1)).astype(np.int64) - 1, distinct - 1)


def measure(recipe: Recipe, rounds: int) -> dict[str, Any]:
    """Rows per second of pyarrow alone and of reader + encoder, by wall time and by CPU time."""
    torch.set_num_threads(1)
    data, encoder = ParquetData(recipe.data.train), Encoder(recipe)
    encoder.numbers.shift.zero_()  # Their values do not matter here.
    columns = list(encoder.columns)

    def raw() -> Iterator[int]:
        with pq.ParquetFile(recipe.data.train) as file:
            for batch in file.iter_batches(65_536, columns=columns):
                yield batch.num_rows

    def ours() -> Iterator[int]:
        reader = Reader(data, columns, batch_size=_BATCH_ROWS, shuffle_rows=_SHUFFLE_ROWS)
        steps = reader.steps(0, encoder.encode_rows)
        for batch in Prefetcher(steps, finish=lambda step: encoder.batch(step.rows()), depth=reader.depth):
            yield len(batch)

    timed: dict[str, list[tuple[float, float]]] = {"raw": [], "ours": []}
    for _ in range(rounds):
        for name, run in (("raw", raw), ("ours", ours)):
            timed[name].append(_timed(run, data.num_rows))
    best = {name: [min(column) for column in zip(*found, strict=True)] for name, found in timed.items()}
    return {
        "rows_per_s": {name: round(data.num_rows / wall_s) for name, (wall_s, _) in best.items()},
        "rows_per_cpu_s": {name: round(data.num_rows / cpu_s) for name, (_, cpu_s) in best.items()},
        "share_of_raw": round(best["raw"][0] / best["ours"][0], 3),
        "share_of_raw_by_cpu_time": round(best["raw"][1] / best["ours"][1], 3),
    }


def _timed(run: Callable[[], Iterator[int]], num_rows: int) -> tuple[float, float]:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    assert sum(run()) == num_rows, "every row comes once"
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


def _waiting(recipe: Recipe, run: pathlib.Path) -> dict[str, Any]:
    """One epoch on one rank: rows per second, and the share of its time in which training waited for a batch."""
    found = train(recipe, run=str(run))
    environment = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    names = ("git_commit", "python", "torch", "torchrec", "pyarrow", "numpy", "processor", "cores", "threads_per_rank")
    return {
        "rows_per_s": round(found.metrics["rows_per_s"]),
        "reader_wait_share": round(found.metrics["reader_wait_share"], 4),
        "environment": {name: environment.get(name) for name in names},
    }


def _print(results: dict[str, Any]) -> None:
    table = Table("layout", "raw rows/s", "ours rows/s", "of raw", "of raw, CPU time", "training rows/s", "waiting")
    for name, found in results.items():
        rates, training = found["rows_per_s"], found["training"]
        table.add_row(
            name,
            f"{rates['raw']:,}",
            f"{rates['ours']:,}",
            f"{found['share_of_raw']:.0%}",
            f"{found['share_of_raw_by_cpu_time']:.0%}",
            f"{training['rows_per_s']:,}",
            f"{training['reader_wait_share']:.1%}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
