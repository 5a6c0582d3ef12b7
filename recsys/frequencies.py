"""How often ids occur: looked up by id; what share of the data the most frequent ones make up; told as tables."""

import contextlib
import dataclasses
import os
import pathlib
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys.errors import UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from recsys.counting import IdCounts, Run

_MANY = 1 << 16
"""Candidates that are sorted at once, beside twice as many as are wanted."""


def look_up(keys: np.ndarray, known: np.ndarray, values: np.ndarray, default: int) -> np.ndarray:
    """(n,) the value of each key: `values` stand beside the sorted keys `known`; `default` where a key is not known."""
    if not len(known):
        return np.full(len(keys), default, dtype=values.dtype)
    order = np.argsort(keys)  # Neighbours find their place in the same cache lines.
    positions = np.empty(len(keys), dtype=np.int64)
    positions[order] = np.searchsorted(known, keys[order])
    positions[positions == len(known)] = 0
    return np.where(known[positions] == keys, values[positions], default)


@contextlib.contextmanager
def written_aside(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A path to write a file to, which takes the place of `path` when the block ends, and is removed when it fails.

    Raises:
        UserError: It cannot be written.
    """
    aside = path.with_name(f".{uuid.uuid4().hex}.aside")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield aside
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        raise UserError(
            f"The file {str(path)!r} cannot be written", received=str(error), fix="make room or choose another folder"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True, eq=False)
class Frequencies:
    """How often each id occurred, to be looked up: 16 bytes per id in memory.

    Attributes:
        keys: (m,) int64, sorted.
        counts: (m,) int64.
    """

    keys: np.ndarray
    counts: np.ndarray

    @classmethod
    def from_counts(cls, counts: "IdCounts") -> "Frequencies":
        """Those of all ids that were counted."""
        none = np.zeros(0, dtype=np.int64)
        parts = [(none, none), *(part[:2] for part in counts.parts())]
        keys, numbers = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        order = np.argsort(keys)
        return cls(keys[order], numbers[order])

    def of(self, keys: np.ndarray) -> np.ndarray:
        """(n,) int64 counts of (n,) int64 keys; 0 for ids that were never seen."""
        return look_up(keys, self.keys, self.counts, 0)

    def write(self, path: str | pathlib.Path) -> None:
        """Write a parquet file with the columns `key` and `count`; it is there complete or not at all."""
        with written_aside(pathlib.Path(path)) as aside:
            pq.write_table(
                pa.table({"key": self.keys, "count": self.counts}), aside, compression="zstd", write_page_checksum=True
            )

    @classmethod
    def read(cls, path: str | pathlib.Path) -> "Frequencies":
        """Read what `write` wrote.

        Raises:
            UserError: There is no such file, it is damaged, or it is another.
        """
        try:
            table = pq.read_table(path, page_checksum_verification=True)
            found = cls(*(table.column(name).to_numpy() for name in ("key", "count")))
            if (
                not (found.keys.dtype == found.counts.dtype == np.int64 and (found.keys[1:] > found.keys[:-1]).all())
                or (found.counts < 0).any()
            ):
                raise ValueError("its columns key (sorted, each once) and count are not int64")
        except (OSError, KeyError, ValueError, pa.ArrowException) as error:
            raise UserError(
                f"{str(path)!r} is no file of id frequencies, or is damaged",
                received=" ".join(str(error).split()),
                allowed="what `Frequencies.write` wrote",
                fix="count the ids again",
            ) from error
        return found


def most_frequent(parts: Iterator["Run"], num_free: int, min_count: int, taken: np.ndarray) -> tuple[np.ndarray, int]:
    """Keys of the most frequent ids that are not taken, in their order, and how many more occurred often enough."""
    found = [(taken[:0], taken[:0])]
    size = num_eligible = 0
    floor = min_count
    for part in parts:
        eligible = (part.counts >= min_count) & ~look_up(part.keys, taken, np.ones(len(taken), dtype=bool), False)
        num_eligible += int(np.count_nonzero(eligible))
        wanted = eligible & (part.counts >= floor)
        found.append((part.keys[wanted], part.counts[wanted]))
        size += len(found[-1][0])
        if size > 2 * num_free + _MANY:
            found = [_first(found, num_free)]
            size, floor = num_free, int(found[0][1][-1]) if num_free else floor
    keys, _ = _first(found, num_free)
    return keys, num_eligible - len(keys)


def _first(found: list[tuple[np.ndarray, np.ndarray]], num: int) -> tuple[np.ndarray, np.ndarray]:
    """So many keys and counts: largest counts first, of equal ones the smallest key."""
    keys, counts = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    order = np.lexsort((keys, -counts))[:num]
    return keys[order], counts[order]


class Coverage:
    """How many ids make up which share of all occurrences, exactly, from the number of ids that have each count.

    Attributes:
        num_ids: Ids that occurred.
        occurrences: How often, all together.
    """

    def __init__(self, counts: np.ndarray, num_ids: np.ndarray) -> None:
        """Take (n,) counts, in any order and repeated at will, and (n,) how many ids have each."""
        order = np.argsort(-counts, kind="stable")
        order = order[counts[order] > 0]
        counts, num_ids = counts[order], num_ids[order]
        starts = np.flatnonzero(np.diff(counts, prepend=0))
        self._counts = counts[starts]  # from the largest down
        self._ids = np.cumsum(np.add.reduceat(num_ids, starts) if len(starts) else num_ids)
        self._covered = np.cumsum(np.diff(self._ids, prepend=0) * self._counts)
        self.num_ids, self.occurrences = (int(sums[-1]) if len(sums) else 0 for sums in (self._ids, self._covered))

    def of_most_frequent(self, num_ids: int) -> int:
        """Occurrences of so many of the most frequent ids."""
        if num_ids >= self.num_ids:
            return self.occurrences
        place = int(np.searchsorted(self._ids, num_ids, side="right"))
        ids, covered = (int(sums[place - 1]) if place else 0 for sums in (self._ids, self._covered))
        return covered + (num_ids - ids) * int(self._counts[place])

    def num_with(self, min_count: int) -> int:
        """Ids that occurred at least so often."""
        place = int(np.searchsorted(-self._counts, -min_count, side="right"))
        return int(self._ids[place - 1]) if place else 0

    def num_covering(self, percent: int) -> int:
        """The fewest ids that make up so many percent of all occurrences."""
        wanted = -(-self.occurrences * percent // 100)
        if not wanted:
            return 0
        place = int(np.searchsorted(self._covered, wanted))
        ids, covered = (int(sums[place - 1]) if place else 0 for sums in (self._ids, self._covered))
        return ids - (covered - wanted) // int(self._counts[place])  # rounds up: covered < wanted

    def as_dict(self) -> dict[str, list[dict[str, float]]]:
        """Shares of the 1, 2, 5, 10, ... most frequent ids, up to all, and of ids with at least so many occurrences."""
        if not self.num_ids:
            return {"coverage": [], "coverage_by_min_count": []}
        by_ids = [*_steps(self.num_ids - 1), self.num_ids]
        by_count = [(least, self.num_with(least)) for least in _steps(int(self._counts[0]))]
        return {
            "coverage": [{"ids": n, "share": self.of_most_frequent(n) / self.occurrences} for n in by_ids],
            "coverage_by_min_count": [
                {"min_count": least, "ids": n, "share": self.of_most_frequent(n) / self.occurrences}
                for least, n in by_count
            ],
        }


def _steps(last: int) -> Iterator[int]:
    for exponent in range(len(str(last))):
        yield from (step for digit in (1, 2, 5) if (step := digit * 10**exponent) <= last)


def report(facts: dict[str, Any]) -> "RenderableType":
    """What `Vocabulary.as_dict` tells, as tables that a rich console prints."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    def percent(share: float | None) -> str:
        return "undefined" if share is None else f"{share:.2%}"

    summary = Table("table", escape(facts["table"]))
    for name, value in {
        "distinct ids": f"{facts['distinct']:,}",
        "occurrences": f"{facts['occurrences']:,}",
        "nulls": f"{facts['nulls']:,}",
        "hot ids": f"{facts['hot']:,} in {facts['hot_rows']:,} rows; min_count {facts['min_count']:,}",
        "without a free row": f"{facts['refused']:,}",
        "cold ids": f"{facts['cold_distinct']:,} in {facts['cold_rows']:,} rows",
        "hot share of occurrences": percent(facts["hot_share"]),
        "MiB": f"{facts['bytes'] / 2**20:,.1f}",
        "suggested hot": f"{facts['suggested_hot']:,}",
        "MiB then": f"{facts['suggested_bytes'] / 2**20:,.1f}",
    }.items():
        summary.add_row(name, value)
    by_ids = Table("most frequent ids", "share of occurrences")
    for step in facts["coverage"]:
        by_ids.add_row(f"{step['ids']:,}", percent(step["share"]))
    by_count = Table("min_count", "ids", "share of occurrences")
    for step in facts["coverage_by_min_count"]:
        by_count.add_row(f"{step['min_count']:,}", f"{step['ids']:,}", percent(step["share"]))
    return Group(summary, by_ids, by_count)
