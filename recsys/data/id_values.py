"""Columns -> keys of ids, for every kind of feature: lists cut, histories in step, weights, crosses, times, tokens."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import TypeAlias, cast

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
import torch

from recsys.data import columns
from recsys.errors import UserError
from recsys.features import CrossFeature, Granularity, IdInput, TextFeature, TimestampFeature
from recsys.ids import crossed
from recsys.recipe import TableSettings
from recsys.text import Tokenizer

Table: TypeAlias = pa.Table | pa.RecordBatch
Lists = tuple[np.ndarray, np.ndarray]
"""(B,) lengths and (n,) keys."""
Counters = collections.Counter[str]

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_FIRST_S, _LAST_S = (int(np.datetime64(day, "s").astype(np.int64)) for day in ("0001-01-01", "9999-12-31T23:59:59"))


@dataclasses.dataclass(frozen=True)
class IdValues:
    """The ids of one input in B rows of data.

    Attributes:
        lengths: (B,) int64 ids of each row; None: one each.
        coded: Keys of the n ids, all rows one after another.
        raw: The ids as they stand in the data; None where there are none, as for a cross.
        weights: (n,) float32; None: they have none.
    """

    lengths: np.ndarray | None
    coded: columns.Keys
    raw: pa.Array | None = None
    weights: np.ndarray | None = None

    @classmethod
    def of(cls, lengths: np.ndarray | None, keys: np.ndarray, missing: np.ndarray | None = None) -> "IdValues":
        """Ids without raw values, by their keys."""
        return cls(lengths, columns.Keys(keys, None, missing))

    @property
    def missing(self) -> np.ndarray | None:
        """(n,) bool, True where the id is null; None: nowhere."""
        return self.coded.missing

    @property
    def keys(self) -> np.ndarray:
        """(n,) int64 keys; those of nulls are any."""
        return self.coded.distinct if self.coded.index is None else self.coded.distinct[self.coded.index]


class IdReader:
    """Reads the id inputs of a recipe, but for bucketed numbers."""

    def __init__(self, inputs: tuple[IdInput, ...]) -> None:
        self._inputs = inputs
        self._tokenizers: dict[TextFeature, Tokenizer] = {}
        for i in inputs:
            f = i.feature
            if isinstance(f, TextFeature) and f not in self._tokenizers:
                self._tokenizers[f] = Tokenizer(f.tokens, segmenter=f.segmenter, ngram=f.ngram, max_length=f.max_length)

    @property
    def versions(self) -> dict[str, str]:
        """What the tokens of texts depend on."""
        return {f"text.{k}": v for t in self._tokenizers.values() for k, v in t.versions().items()}

    def read(self, table: Table, rows: np.ndarray, counters: Counters) -> Iterator[tuple[IdInput, IdValues]]:
        """Each input with its ids, in order.

        Args:
            table: B rows.
            rows: (B,) position of each row in its data set, for messages.
            counters: Counts what is cut: `cut/<column>`, in rows.

        Raises:
            UserError: Histories out of step, lists without their weights, a time out of range.
        """
        leaders: dict[str, np.ndarray] = {}
        tokens: dict[tuple[str, TextFeature], dict[Granularity, Lists]] = {}
        for i in self._inputs:
            if isinstance(i.feature, CrossFeature):
                yield i, _cross(table, i)
            elif isinstance(i.feature, TimestampFeature):
                yield i, _time_part(table, rows, i, i.feature)
            elif isinstance(i.feature, TextFeature):
                source = i.columns[0], i.feature
                if source not in tokens:
                    tokens[source] = self._tokens(table, *source, counters)
                yield i, IdValues.of(*tokens[source][cast(Granularity, i.part)])
            elif i.raw and i.max_length is None:
                array = columns.single_array(table, i.name)
                yield i, IdValues(None, columns.coded_keys(array), array)
            elif i.raw:
                yield i, _list(table, rows, i, leaders, counters)

    def _tokens(self, table: Table, column: str, feature: TextFeature, counters: Counters) -> dict[Granularity, Lists]:
        cut: collections.Counter[Granularity] = collections.Counter()
        try:
            found = self._tokenizers[feature].keys(columns.single_array(table, column), cut)
        except UserError as error:
            raise UserError(f"The text {column!r} cannot be read: {error}") from error
        counters.update({f"cut/{column}_{part}": count for part, count in cut.items() if count})
        return found


def _list(table: Table, rows: np.ndarray, i: IdInput, leaders: dict[str, np.ndarray], counters: Counters) -> IdValues:
    assert i.max_length is not None, "lists have a limit"
    lengths, values = columns.list_parts(columns.single_array(table, i.name))
    if i.leader is not None:
        expected = leaders.setdefault(i.leader, lengths)
        if not np.array_equal(lengths, expected):
            row = int(np.argmax(lengths != expected))
            raise UserError(
                f"The history columns {i.leader!r} and {i.name!r} are out of step in row {rows[row]}",
                received=f"{expected[row]} and {lengths[row]} events",
                allowed="the same number of events in all columns of a history",
                fix="correct the lists when the data is prepared, null events included",
            )
    kept, num_cut = columns.cut_lists(lengths, i.max_length, newest=i.newest)
    weights = None if i.weights is None else _weights(table, rows, i, lengths)
    if kept is not None:
        counters[f"cut/{i.name}"] += num_cut
        lengths, values = np.minimum(lengths, i.max_length), values.take(pa.array(kept))
        weights = None if weights is None else weights[kept]
    return IdValues(lengths, columns.coded_keys(values), values, weights)


def _weights(table: Table, rows: np.ndarray, i: IdInput, lengths: np.ndarray) -> np.ndarray:
    """(n,) float32 weights of all ids of a list column, before it is cut."""
    name = str(i.weights)
    found, values = columns.list_parts(columns.single_array(table, name))
    if not np.array_equal(found, lengths):
        row = int(np.argmax(found != lengths))
        raise UserError(
            f"The list {i.name!r} and its weights {name!r} are out of step in row {rows[row]}",
            received=f"{lengths[row]} ids and {found[row]} weights",
            allowed="one weight for each id",
            fix="correct the lists when the data is prepared",
        )
    weights = columns.numbers(values)
    legal = (weights >= 0) & (weights <= np.finfo(np.float32).max)
    if not legal.all():
        place = int(np.argmin(legal))
        raise UserError(
            f"The weights {name!r} hold an illegal value in row {rows[columns.row_of(place, lengths)]}",
            received=values[place].as_py(),
            allowed="finite numbers from 0 on",
            fix="correct them when the data is prepared",
        )
    return weights.astype(np.float32)


def _cross(table: Table, i: IdInput) -> IdValues:
    keys, missing = columns.id_keys(columns.single_array(table, i.columns[0]))
    for column in i.columns[1:]:
        others, others_missing = columns.id_keys(columns.single_array(table, column))
        keys = crossed(torch.tensor(keys), torch.tensor(others)).numpy()
        missing = others_missing if missing is None else missing if others_missing is None else missing | others_missing
    return IdValues.of(None, keys, missing)


def _time_part(table: Table, rows: np.ndarray, i: IdInput, feature: TimestampFeature) -> IdValues:
    array = columns.single_array(table, i.columns[0])
    seconds, missing = _seconds(array, feature.unit)
    legal = (seconds >= _FIRST_S) & (seconds <= _LAST_S)
    if missing is not None:
        legal |= missing
    if not legal.all():
        row = int(np.argmin(legal))
        raise UserError(
            f"The timestamp {i.columns[0]!r} is out of range in row {rows[row]}",
            received=columns.shown(table, i.columns[0], row),
            allowed=f"years 1 to 9999; integers are read in the unit {feature.unit!r}",
            fix="set the feature's unit, or correct the data",
        )
    if missing is not None:
        seconds = np.where(missing, 0, seconds)
    seconds = seconds + round(feature.utc_offset_hours * 3600)
    if i.part == "hour":
        keys = seconds // 3600 % 24
    elif i.part == "weekday":
        keys = (seconds // 86_400 + 3) % 7  # The first of January 1970 was a Thursday.
    else:
        day = seconds.astype("datetime64[s]").astype("datetime64[D]")
        month = day.astype("datetime64[M]")
        keys = month.astype(np.int64) % 12 + 1 if i.part == "month" else (day - month).astype(np.int64) + 1
    return IdValues.of(None, keys, missing)


def _seconds(array: pa.Array, unit: str) -> tuple[np.ndarray, np.ndarray | None]:
    """(n,) int64 whole seconds since 1970 UTC, rounded down, and the mask of the nulls."""
    if pt.is_date(array.type):
        array = array.cast(pa.timestamp("ms"))
    if pt.is_timestamp(array.type):
        unit = array.type.unit
        array = array.cast(pa.int64())
    keys, missing = columns.id_keys(array)
    seconds = keys // _PER_SECOND[unit]
    if pt.is_uint64(array.type):  # Numbers beyond int64 have negative keys.
        seconds = np.where(keys < 0, np.iinfo(np.int64).max, seconds)
    return seconds, missing


def inside(i: IdInput, settings: TableSettings, found: IdValues, rows: np.ndarray, counters: Counters) -> IdValues:
    """Ids of an exact table, those outside it treated as its `bad_ids` says: unknown ones get the key -1."""
    keys = found.keys if found.missing is None else np.where(found.missing, 0, found.keys)
    if not len(keys) or (keys.min() >= 0 and keys.max() < settings.rows):
        return found
    bad = (keys < 0) | (keys >= settings.rows)
    assert found.raw is not None, "exact ids stand in the data as they are"
    if settings.bad_ids == "error":
        place = int(np.argmax(bad))
        row = place if found.lengths is None else columns.row_of(place, found.lengths)
        raise UserError(
            f"The id feature {i.name!r} leaves its table {i.table!r} in row {rows[row]}",
            received=found.raw[place].as_py(),
            allowed=f"0..{settings.rows - 1}",
            fix=f"raise tables.{i.table}.rows, set its ids to hashed or its bad_ids to unknown, or correct the data",
        )
    counters[f"{'unknown' if settings.bad_ids == 'unknown' else 'clamped'}/{i.name}"] += int(bad.sum())
    if settings.bad_ids == "unknown":
        keys = np.where(bad, -1, keys)
    else:  # An unsigned number beyond int64 has a negative key.
        below = settings.rows - 1 if pt.is_uint64(columns.value_type(found.raw.type)) else 0
        keys = np.where(keys < 0, below, np.minimum(keys, settings.rows - 1))
    return dataclasses.replace(found, coded=columns.Keys(keys, None, found.missing))
