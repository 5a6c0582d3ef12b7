"""A recipe with every kind of feature, four good rows of it, and its encoding in plain Python."""

import collections

import numpy as np
import pyarrow as pa

from recsys import ids
from recsys.data.batch import Batch
from recsys.encoder import Encoder
from recsys.numbers import Statistics
from recsys.recipe import Recipe
from tests._reference_hash import WORD, fnv1a, splitmix64

ROWS = 10
MAX_LENGTH = 3


def recipe(keep: str = "newest", name: str = "din", transform: str = "standardize") -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"name": name},
            "data": {"train": "t", "group": "user"},
            "features": [
                {"kind": "number", "columns": ["price", "age"], "transform": transform},
                {"kind": "id", "columns": ["user", "item", "shop"]},
                {"kind": "id_list", "columns": ["tags"], "max_length": MAX_LENGTH, "keep": keep},
                {"kind": "history", "of": {"items": "item", "shops": "shop"}, "max_length": MAX_LENGTH, "keep": keep},
            ],
            "tables": {"default": {"rows": 1000}, "shop": {"ids": "exact", "rows": ROWS}},
        }
    )


def good_columns() -> dict[str, list]:
    return {
        "price": [1.0, 2.0, 4.0, 5.0],
        "age": [30, 40, 50, 60],
        "user": ["a", "b", None, "b"],
        "item": [1, None, -5, 2**53 + 1],
        "shop": [0, 9, None, 3],
        "tags": [[], ["x", None], None, ["a", "b", "c", "d", "e"]],
        "items": [[1, 2], [], [2**53 + 1], [1, 2, 3, 4]],
        "shops": [[0, 1], [], [None], [1, 2, 3, 4]],
        "label": [0, 1, 1, 0],
    }


TYPES = {"price": pa.float32(), "user": pa.string(), "tags": pa.list_(pa.string())}


def table_of(values: dict[str, list], **types: pa.DataType) -> pa.Table:
    types = {**TYPES, **types}
    return pa.table({name: pa.array(column, types.get(name)) for name, column in values.items()})


def fitted(used: Recipe) -> Encoder:
    encoder = Encoder(used)
    count, none = np.array([3, 3]), np.zeros(0, dtype=np.int64)
    encoder.fit(Statistics(count, np.array([3.0, 45.0]), np.array([30.0, 300.0]), count, count, none, np.zeros((0, 0))))
    return encoder


def scan(encoder: Encoder, table: pa.Table, rows: np.ndarray) -> Statistics:
    """Check rows and measure their numbers, as the survey before a run does."""
    encoder.check(table, rows)
    return encoder.numbers.measure(encoder.numbers.read(table, rows, collections.Counter()), rows)


def encode(table: pa.Table, used: Recipe | None = None, **options: bool) -> Batch:
    return fitted(used or recipe()).encode(table, np.arange(100, 100 + table.num_rows), **options)


def bags(batch: Batch, name: str) -> list[list[int]]:
    jagged = (batch.pooled if name in batch.pooled.keys() else batch.sequence)[name]
    return [part.tolist() for part in jagged.values().split(jagged.lengths().tolist())]


def reference_row(value: int | str | bool | None, *, exact: bool) -> int:
    if value is None:
        return ids.MISSING
    if exact:
        return ids.FIRST_ROW + value
    return ids.FIRST_ROW + (
        splitmix64(fnv1a(value.encode()) if isinstance(value, str) else int(value) % WORD) * 1000 >> 64
    )


def reference_bags(values: list, name: str, keep: str = "newest") -> list[list[int]]:
    found = []
    for value in values:
        bag = value if name in ("tags", "items", "shops") else [value]
        bag = [] if bag is None else bag
        bag = bag[-MAX_LENGTH:] if keep == "newest" else bag[:MAX_LENGTH]
        found.append([reference_row(v, exact=name in ("shop", "shops")) for v in bag])
    return found
