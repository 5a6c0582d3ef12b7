"""The made-up data that scripts.bench_train trains on, and what describes it to each library.

`spec.json` beside the parquet file says all that the other libraries need; `recipe.yaml` is ours. Ids are rows of their
tables, 0 .. rows - 1, the smallest the most frequent, as with Zipf's law of exponent 1. Needs no recsys, so that the
contestants of another environment can read it.
"""

import json
import pathlib
from typing import Any

import numpy as np

BATCH_ROWS = {"deepfm": 4_096, "din": 1_024}
DIM = 16
DEEPFM_HIDDEN = (400, 400, 400)
DIN_ATTENTION, DIN_HIDDEN = (80, 40), (256, 128)
MEAN_HISTORY, MAX_HISTORY = 15, 100
NUM_NUMBERS = 13

_CRITEO_IDS = (
    *(1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194),
    *(27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)
"""Distinct ids of C1 to C26 in the Kaggle display advertising challenge, as DLRM's reference code prints them."""
_DIN_TABLES = {"user_id": 300_000, "item_id": 60_000, "category_id": 1_000}
_HISTORIES = {"item_id": "items", "category_id": "categories"}


def criteo_tables(num_rows: int) -> dict[str, int]:
    """Rows of the tables of C1 to C26: as in Criteo's data, the large ones cut alike so that `num_rows` come out."""
    low, high = 1, max(_CRITEO_IDS)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if sum(min(ids, middle) for ids in _CRITEO_IDS) <= num_rows else (low, middle - 1)
    return {f"C{n + 1}": min(ids, low) for n, ids in enumerate(_CRITEO_IDS)}


def write(folder: pathlib.Path, model: str, num_rows: int, *, table_rows: int | None = None, batch_rows: int) -> None:
    """Write data.parquet, spec.json and recipe.yaml.

    Args:
        folder: Where to; it is made.
        model: "deepfm": 13 numbers and 26 ids. "din": a user, a candidate and its category, and a history of both.
        num_rows: Rows of data.
        table_rows: Rows of all tables together, for "deepfm"; for "din" the most that a table may have, None: as is.
        batch_rows: Rows of a batch over all ranks.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    columns: dict[str, pa.Array] = {"label": pa.array((rng.random(num_rows) < 0.25).astype(np.int8))}
    if model == "deepfm":
        tables = criteo_tables(table_rows or sum(_CRITEO_IDS))
        for n in range(NUM_NUMBERS):
            columns[f"I{n + 1}"] = pa.array(np.exp(rng.normal(2, 2, num_rows)).astype(np.int32))
    else:
        tables = {name: min(rows, table_rows or rows) for name, rows in _DIN_TABLES.items()}
        lengths = np.minimum(rng.geometric(1 / MEAN_HISTORY, num_rows), MAX_HISTORY)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        for target, history in _HISTORIES.items():
            values = pa.array(_skewed(rng, int(lengths.sum()), tables[target]))
            columns[history] = pa.ListArray.from_arrays(offsets, values)
    for name, rows in tables.items():
        columns[name] = pa.array(_skewed(rng, num_rows, rows))
    pq.write_table(pa.table(columns), folder / "data.parquet", row_group_size=131_072)
    spec = {"model": model, "tables": tables, "dim": DIM, "batch_rows": batch_rows, "data_rows": num_rows}
    (folder / "spec.json").write_text(json.dumps(spec))
    (folder / "recipe.yaml").write_text(json.dumps(_recipe(spec, folder)))  # JSON is YAML.


def _skewed(rng: np.random.Generator, size: int, distinct: int) -> np.ndarray:
    drawn = np.exp(rng.random(size) * np.log(distinct + 1)).astype(np.int64) - 1
    return np.minimum(drawn, distinct - 1)


def _recipe(spec: dict[str, Any], folder: pathlib.Path) -> dict[str, Any]:
    ids: dict[str, Any] = {"kind": "id", "columns": list(spec["tables"])}
    if spec["model"] == "deepfm":
        model: dict[str, Any] = {"name": "deepfm", "hidden": DEEPFM_HIDDEN}
        numbers = [f"I{n + 1}" for n in range(NUM_NUMBERS)]
        features = [ids, {"kind": "number", "columns": numbers, "transform": "signed_log"}]
    else:
        model = {"name": "din", "attention_hidden": DIN_ATTENTION, "hidden": DIN_HIDDEN}
        history = {history: target for target, history in _HISTORIES.items()}
        features = [ids, {"kind": "history", "of": history, "max_length": MAX_HISTORY}]
    return {
        "model": model,
        "features": features,
        "data": {"train": str(folder / "data.parquet"), "batch_size_per_rank": spec["batch_rows"]},
        "tables": {name: {"ids": "exact", "rows": rows, "dim": spec["dim"]} for name, rows in spec["tables"].items()},
        "train": {"device": "cpu"},
    }


def read_arrays(folder: pathlib.Path, num_rows: int) -> dict[str, np.ndarray]:
    """The first rows of the data as arrays, for libraries that train from memory.

    Histories are padded at their end to `MAX_HISTORY` with 0, and ids of the tables that they share begin at 1;
    `length` tells their lengths. Numbers are scaled as ours are: log(1 + x), mean 0, deviation 1.
    """
    import pyarrow.parquet as pq

    table = pq.read_table(folder / "data.parquet").slice(0, num_rows)
    arrays: dict[str, np.ndarray] = {"label": table["label"].to_numpy().astype(np.float32)}
    for name in table.column_names:
        column = table[name].combine_chunks()
        if name.startswith("I"):
            logs = np.log1p(column.to_numpy())
            arrays[name] = ((logs - logs.mean()) / logs.std()).astype(np.float32)
        elif name in _HISTORIES.values():
            offsets = column.offsets.to_numpy()
            lengths = np.diff(offsets)
            there = np.arange(MAX_HISTORY) < lengths[:, None]
            arrays[name] = np.zeros(there.shape, dtype=np.int64)
            arrays[name][there] = column.flatten().to_numpy() + 1
            arrays["length"] = lengths.astype(np.int64)
        elif name != "label":
            arrays[name] = column.to_numpy() + (name in _HISTORIES)
    return arrays
