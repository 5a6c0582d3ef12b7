"""Which ids of a `hot_cold` table have rows of their own: one parquet file per table, beside the counts of all ids.

The file holds every id of the training data, `value, key, count, row`, in the order of `counting.combine`, so that
other hot ids can be chosen, and their worth be told, without another pass over the data. All work streams through it:
memory grows with the number of hot ids, not with that of all ids.
"""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys.counting import NO_IDS, Run, combine, merged_kind, mixed, raw_ids, select
from recsys.errors import UserError
from recsys.frequencies import Coverage, look_up, most_frequent, report, written_aside

if TYPE_CHECKING:
    from rich.console import RenderableType

SUGGESTED_PERCENT = 99
"""Share of the training data's ids that the suggested number of hot ids covers."""
_ABOUT, _DIGEST = b"recsys.vocabulary", b"recsys.vocabulary.sha256"
_FORMAT = 1
_LONGEST_NAME = 150
_ROW_GROUP_ROWS, _ROW_GROUP_BYTES = 1 << 18, 1 << 26
"""A row group is closed when it has so many ids, or bytes of text and all."""
_READ_ROWS, _READ_BYTES = 1 << 16, 1 << 18
"""Ids, and bytes of a column, that are read at once."""
_FIX = "delete it, so that the ids are counted again"


class Counted(Protocol):
    """What a vocabulary is chosen from: `IdCounts`, or another `Vocabulary`."""

    occurrences: int
    missing: int
    kind: pa.DataType | None

    def parts(self) -> Iterator[Run]:
        """All ids that occurred, each once, in order."""
        ...


@dataclasses.dataclass(frozen=True)
class Origin:
    """What the ids of a table were counted in.

    Attributes:
        table: Name of the table.
        fingerprint: That of the training data.
        columns: Columns that feed the table -> settings, as plain data, that decide which of their ids are read.
    """

    table: str
    fingerprint: str
    columns: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Same digest, same ids and counts; how many of them are hot is no part of it."""
        text = json.dumps([_FORMAT, _contract(), dataclasses.asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def path(self, root: pathlib.Path, folder: pathlib.Path | None = None) -> pathlib.Path:
        """Where the vocabulary stands: in a folder of its digest under `root`, or right in one that the user named."""
        name = urllib.parse.quote(self.table, safe="")
        if len(name) > _LONGEST_NAME:  # file systems allow 255 bytes
            name = name[:_LONGEST_NAME] + "-" + hashlib.sha256(self.table.encode()).hexdigest()[:16]
        name += ".parquet"
        return (root / self.digest if folder is None else folder) / name


@dataclasses.dataclass(frozen=True)
class About:
    """What the file of a vocabulary says of itself.

    Attributes:
        origin: What was counted.
        hash: Name and version of the hash that made the keys.
        hot: Rows for hot ids, the most there can be.
        min_count: Ids that occurred less often are cold, unless they have been hot before.
        occurrences: Ids in the training data, nulls aside.
        missing: Nulls in the training data.
        num_refused: Ids that occurred often enough, but found no free row.
    """

    origin: Origin
    hash: str
    hot: int
    min_count: int
    occurrences: int
    missing: int
    num_refused: int


class Vocabulary:
    """The vocabulary of one table: a file, checked in full; from `load`, `choose`, `grow` or `rechoose`.

    Attributes:
        path: The file. An object whose file has been replaced by another vocabulary is of no more use.
        about: What was chosen, and from what.
        kind: Type of the raw ids, as `IdCounts.kind`.
        coverage: What share of the training data the most frequent ids make up.
        num_hot: Hot ids, those included that no longer occur.
        num_cold: Ids without a row of their own.
        hot_occurrences: How often hot ids occurred, all together.
    """

    def __init__(self, path: pathlib.Path, about: About, kind: pa.DataType) -> None:
        """Read a file whose metadata `load` has read."""
        self.path, self.about = path, about
        self._holds_text = kind == pa.large_string()
        self.occurrences, self.missing = about.occurrences, about.missing
        self._hot_keys, self._hot_rows, self.hot_occurrences, self.coverage, num_ids = self._read()
        self.num_hot = len(self._hot_keys)
        self.num_cold = num_ids - self.num_hot
        self.kind = kind if num_ids else None

    @classmethod
    def load(cls, path: str | pathlib.Path, origin: Origin | None = None) -> "Vocabulary":
        """Read and check a file.

        Args:
            path: The file.
            origin: What its ids must have been counted in; None: anything.

        Raises:
            UserError: There is no such file, it is damaged or no vocabulary, or its ids are of another origin or hash.
        """
        path = pathlib.Path(path)
        with _reading(path), pq.ParquetFile(path) as file:
            schema = file.schema_arrow
        about = _about(schema, path)
        if origin is not None and about.origin.digest != origin.digest:
            found, wanted = (dataclasses.asdict(each) for each in (about.origin, origin))
            differs = [name for name in wanted if found[name] != wanted[name]]
            raise UserError(
                f"The vocabulary {str(path)!r} was made from something else",
                received=", ".join(f"{name} {found[name]}" for name in differs),
                allowed=", ".join(f"{name} {wanted[name]}" for name in differs),
                fix=f"grow it, name another folder, or {_FIX}",
            )
        return cls(path, about, schema.field("value").type)

    @classmethod
    def choose(
        cls, counted: Counted, path: str | pathlib.Path, origin: Origin, *, hot: int, min_count: int = 1
    ) -> "Vocabulary":
        """Write a new vocabulary: the most frequent ids get the rows from 3 on, ties by key ascending.

        Args:
            counted: All ids and their counts.
            path: File to write, complete or not at all; what stands there is replaced.
            origin: What was counted.
            hot: Most hot ids.
            min_count: Ids that occurred less often stay cold.

        Raises:
            UserError: The file cannot be written.
        """
        return _write(counted, pathlib.Path(path), origin, hot, min_count, None)

    def grow(
        self, counted: Counted, path: str | pathlib.Path, origin: Origin, *, hot: int, min_count: int = 1
    ) -> "Vocabulary":
        """Write a new vocabulary in which all hot ids of this one keep their rows, whatever has become of their counts.

        Others follow behind the highest row, in the order of `choose`. No row is ever given to a second id: those that
        find no free row stay cold, and `about.num_refused` counts them. Arguments are those of `choose`.

        Raises:
            UserError: The other ids are of another table or kind, or `hot` has no room for the rows that are taken.
        """
        if origin.table != self.about.origin.table:
            raise UserError(
                f"The vocabulary {str(self.path)!r} can grow only by ids of its own table",
                received=origin.table,
                allowed=self.about.origin.table,
            )
        return _write(counted, pathlib.Path(path), origin, hot, min_count, self)

    def rechoose(self, *, hot: int, min_count: int = 1, path: str | pathlib.Path | None = None) -> "Vocabulary":
        """As `choose`, from the counts in this file instead of the data; `path` None replaces the file.

        All rows are given anew. To keep those of a trained model, and add to them, `grow` by this vocabulary itself.
        """
        return _write(self, pathlib.Path(path or self.path), self.about.origin, hot, min_count, None)

    def parts(self) -> Iterator[Run]:
        """All ids that occurred, each once, in order."""
        for run, _ in self._runs():
            if run.counts.any():
                yield select(run, run.counts > 0)

    def index(self) -> tuple[np.ndarray, np.ndarray]:
        """(hot,) int64 sorted keys and (hot,) int64 rows of the hot ids, to look ids up in.

        Entries that no id has are the last, with the key 2^63 - 1 and the row -1. An id may have that key, too: then
        its own entry is the first of them.
        """
        free = self.about.hot - self.num_hot
        keys = np.concatenate([self._hot_keys, np.full(free, np.iinfo(np.int64).max)])
        return keys, np.concatenate([self._hot_rows, np.full(free, -1)])

    def hot_run(self) -> Run:
        """The hot ids alone, in order."""
        return combine([NO_IDS, *(select(run, rows >= 0) for run, rows in self._runs())])

    def as_dict(self, *, cold: int, dim: int) -> dict[str, Any]:
        """What the vocabulary is worth, as plain data; shares of nothing are None.

        Args:
            cold: Rows that cold ids share.
            dim: Width of the table's vectors.
        """
        coverage = self.coverage
        suggested = min(coverage.num_covering(SUGGESTED_PERCENT), coverage.num_with(self.about.min_count))

        first_row, _ = _contract()

        def num_bytes(hot: int) -> int:
            return (first_row + hot + cold) * (dim + 1) * 4  # float32; row-wise Adagrad keeps one number per row

        return {
            "table": self.about.origin.table,
            "distinct": coverage.num_ids,
            "occurrences": self.occurrences,
            "nulls": self.missing,
            "hot": self.num_hot,
            "hot_rows": self.about.hot,
            "min_count": self.about.min_count,
            "refused": self.about.num_refused,
            "cold_distinct": self.num_cold,
            "cold_rows": cold,
            "hot_share": self.hot_occurrences / self.occurrences if self.occurrences else None,
            **coverage.as_dict(),
            "suggested_hot": suggested,
            "bytes": num_bytes(self.about.hot),
            "suggested_bytes": num_bytes(suggested),
        }

    def report(self, *, cold: int, dim: int) -> "RenderableType":
        """`as_dict` as tables that a rich console prints."""
        return report(self.as_dict(cold=cold, dim=dim))

    def _runs(self) -> Iterator[tuple[Run, np.ndarray]]:
        """The file in pieces: ids, and the row of each, -1 where it is cold."""
        options = {"pre_buffer": False, "buffer_size": _READ_BYTES, "page_checksum_verification": True}
        with _reading(self.path), pq.ParquetFile(self.path, **options) as file:
            for batch in file.iter_batches(_READ_ROWS, columns=["value", "key", "count", "row"]):
                value, keys, counts, rows = batch.columns
                texts = value if self._holds_text else None
                yield Run(keys.to_numpy(), counts.to_numpy(), texts), rows.fill_null(-1).to_numpy()

    def _read(self) -> tuple[np.ndarray, np.ndarray, int, Coverage, int]:
        """Hot keys, sorted, with their rows and occurrences, the coverage, and the number of ids; all of it checked."""
        first_row, _ = _contract()
        none = np.zeros(0, dtype=np.int64)
        hot, histogram, last = [(none, none)], [(none, none)], none.view(np.uint64)
        num_ids = occurrences = hot_occurrences = 0
        for run, rows in self._runs():
            places = np.concatenate([last, mixed(run.keys)])
            twice = np.flatnonzero(places[1:] <= places[:-1])
            if len(twice):
                at = num_ids + int(twice[0]) + 1 - len(last)
                raise _unreadable(self.path, f"an id twice, or out of order, at row {at}")
            is_hot, last = rows >= 0, places[-1:]
            hot.append((run.keys[is_hot], rows[is_hot]))
            histogram.append(np.unique(run.counts, return_counts=True))
            num_ids += len(rows)
            occurrences += int(run.counts.sum())
            hot_occurrences += int(run.counts[is_hot].sum())
        keys, rows = (np.concatenate(arrays) for arrays in zip(*hot, strict=True))
        counts, numbers = (np.concatenate(arrays) for arrays in zip(*histogram, strict=True))
        taken, end = np.sort(rows), first_row + self.about.hot
        if len(taken) and (taken[0] < first_row or taken[-1] >= end or (taken[1:] == taken[:-1]).any()):
            raise _unreadable(self.path, f"rows of hot ids that are shared or outside {first_row}..{end - 1}")
        if occurrences != self.occurrences or (counts < 0).any():
            raise _unreadable(self.path, f"counts of {occurrences} occurrences instead of {self.occurrences}")
        order = np.argsort(keys)
        return keys[order], rows[order], hot_occurrences, Coverage(counts, numbers), num_ids


def _write(
    counted: Counted, path: pathlib.Path, origin: Origin, hot: int, min_count: int, old: Vocabulary | None
) -> Vocabulary:
    first_row, hash_name = _contract()
    assert hot >= 0 and min_count >= 1, "sizes and limits of a vocabulary are checked where they are set"
    taken_keys = taken_rows = np.zeros(0, dtype=np.int64)
    kind = counted.kind
    if old is not None:
        kind = merged_kind(old.kind, kind)
        taken_keys, taken_rows = old.index()
        taken_keys, taken_rows = taken_keys[: old.num_hot], taken_rows[: old.num_hot]
    first_free = int(taken_rows.max(initial=first_row - 1)) + 1
    num_free = first_row + hot - first_free
    if num_free < 0:
        raise UserError(
            f"Table {origin.table!r} has fewer hot rows than its old vocabulary has given away",
            received=hot,
            allowed=f"at least {first_free - first_row}",
            fix="raise `hot`",
        )
    new_keys, num_refused = most_frequent(counted.parts(), num_free, min_count, taken_keys)
    keys = np.concatenate([taken_keys, new_keys])
    rows = np.concatenate([taken_rows, np.arange(first_free, first_free + len(new_keys))])
    order = np.argsort(keys)
    keys, rows = keys[order], rows[order]
    about = About(origin, hash_name, hot, min_count, counted.occurrences, counted.missing, num_refused)
    schema = _schema(about, kind or pa.null())
    parts = counted.parts() if old is None else _with_hot(counted.parts(), old.hot_run())
    options = {"compression": "zstd", "use_dictionary": ["count"], "write_page_checksum": True}
    with written_aside(path) as aside, pq.ParquetWriter(aside, schema, **options) as writer:
        for table in _row_groups(_table(part, look_up(part.keys, keys, rows, -1), schema) for part in parts):
            writer.write_table(table, row_group_size=len(table))
    return Vocabulary.load(path)


def _table(run: Run, rows: np.ndarray, schema: pa.Schema) -> pa.Table:
    values = raw_ids(run, schema.field("value").type)
    columns = [values, pa.array(run.keys), pa.array(run.counts), pa.array(rows, mask=rows < 0)]
    return pa.Table.from_arrays(columns, schema=schema)


def _row_groups(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Small tables put together: the writer keeps a description of each row group in memory to the end."""
    waiting: list[pa.Table] = []
    for table in tables:
        waiting.append(table)
        if sum(map(len, waiting)) >= _ROW_GROUP_ROWS or sum(each.nbytes for each in waiting) >= _ROW_GROUP_BYTES:
            yield pa.concat_tables(waiting)
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting)


def _with_hot(parts: Iterator[Run], hot: Run) -> Iterator[Run]:
    """The parts with all hot ids in their places, those that no longer occur with the count 0."""
    places = mixed(hot.keys)
    hot, first = hot._replace(counts=np.zeros_like(hot.counts)), 0
    for part in parts:
        end = int(np.searchsorted(places, mixed(part.keys[-1:])[0], side="right"))
        yield combine([part, select(hot, slice(first, end))])
        first = end
    if first < len(places):
        yield select(hot, slice(first, len(places)))


def _schema(about: About, kind: pa.DataType) -> pa.Schema:
    text = json.dumps({"format": _FORMAT, **dataclasses.asdict(about)}, sort_keys=True)
    columns = [("value", kind), *((name, pa.int64()) for name in ("key", "count", "row"))]
    return pa.schema(columns, {_ABOUT: text, _DIGEST: hashlib.sha256(text.encode()).hexdigest()})


def _about(schema: pa.Schema, path: pathlib.Path) -> About:
    """What `_schema` has written into a file."""
    text, digest = ((schema.metadata or {}).get(name, b"") for name in (_ABOUT, _DIGEST))
    if not text or hashlib.sha256(text).hexdigest() != digest.decode(errors="replace"):
        raise _unreadable(path, "nothing, or something else, in the metadata that a vocabulary has")
    told, (_, hash_name) = json.loads(text), _contract()
    number = told.pop("format")
    if number != _FORMAT or told["hash"] != hash_name:
        raise UserError(
            f"The vocabulary {str(path)!r} was made by another version of this library: its ids have other keys",
            received=f"format {number}, hash {told['hash']}",
            allowed=f"format {_FORMAT}, hash {hash_name}",
            fix=f"use that version, or {_FIX}",
        )
    about = About(**{**told, "origin": Origin(**told["origin"])})
    kind = schema.field(0).type
    if not schema.equals(_schema(about, kind)) or kind not in (pa.int64(), pa.uint64(), pa.large_string(), pa.null()):
        raise _unreadable(path, f"columns {schema.names} of types {schema.types}")
    return about


def _contract() -> tuple[int, str]:
    """The first row of ids and the name of the hash; imported late, since torch comes with them."""
    from recsys.ids import FIRST_ROW, HASH

    return FIRST_ROW, HASH


def _unreadable(path: pathlib.Path, received: str) -> UserError:
    return UserError(f"{str(path)!r} is no vocabulary, or is damaged", received=received, fix=_FIX)


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, pa.ArrowException) as error:
        raise _unreadable(path, " ".join(str(error).split())) from error
