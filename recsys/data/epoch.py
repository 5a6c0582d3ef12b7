"""Whose rows an epoch's are, step by step: arithmetic on positions, the same on all ranks, without a message.

A rank's *stream* is its range of the data set in the order in which it leaves the windows (`data/reader.py`). Where the
ranks of a run change in the middle of an epoch, what is left of all streams is shared out anew: every rank then reads
*segments*, pieces of the old streams. This may happen any number of times in one epoch.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Segment(NamedTuple):
    """Rows number `begin` to `end` of the stream of the rows `first` to `last` of the data set."""

    first: int
    last: int
    begin: int
    end: int

    @property
    def num_rows(self) -> int:
        """Its rows."""
        return self.end - self.begin


class Part(NamedTuple):
    """A part of an epoch that was read by one number of ranks, as numbers: so many of its steps are done."""

    world_size: int
    num_steps: int
    steps_done: int


Share = tuple[Segment, ...]


@dataclasses.dataclass(frozen=True)
class Epoch:
    """What is left of one pass over the data, or all of it.

    Attributes:
        number: Of the epoch.
        shares: What each rank reads.
        num_steps: Steps in which they do, the same on all ranks.
        start_step: The step to begin with: those before it are done.
        parts: What other numbers of ranks have read before.
    """

    number: int
    shares: tuple[Share, ...]
    num_steps: int
    start_step: int = 0
    parts: tuple[Part, ...] = ()

    @classmethod
    def whole(cls, number: int, num_rows: int, world_size: int, batch_size: int) -> "Epoch":
        """An epoch from its beginning: every rank has one range of the data set."""
        bounds = [num_rows * rank // world_size for rank in range(world_size + 1)]
        shares = tuple((Segment(low, high, 0, high - low),) for low, high in itertools.pairwise(bounds))
        return cls(number, shares, _num_steps(num_rows, world_size, batch_size))

    @classmethod
    def going_on(cls, position: Mapping[str, Any], num_rows: int, world_size: int, batch_size: int) -> "Epoch":
        """The rest of an epoch.

        Args:
            position: What `position` gave.
            num_rows: Rows of the data set.
            world_size: Number of ranks now. With as many as before, each goes on as if nothing had happened.
            batch_size: Most rows of one rank in one step; it counts where the rows are shared out anew.
        """
        *former, last = (Part(*part) for part in position["parts"])
        epoch = cls.whole(position["epoch"], num_rows, (*former, last)[0].world_size, 1)
        for part, following in itertools.pairwise((*former, last)):
            epoch = dataclasses.replace(epoch, num_steps=part.num_steps)._shared_out(part, following.world_size)
        epoch = dataclasses.replace(epoch, num_steps=last.num_steps)
        if last.world_size == world_size:
            return dataclasses.replace(epoch, start_step=last.steps_done)
        epoch = epoch._shared_out(last, world_size)
        left = sum(epoch.rows_of(share) for share in epoch.shares)
        return dataclasses.replace(epoch, num_steps=_num_steps(left, world_size, batch_size))

    def position(self, steps_done: int) -> dict[str, Any]:
        """Where the epoch stands after a step, as plain data."""
        parts = (*self.parts, Part(len(self.shares), self.num_steps, steps_done))
        return {"epoch": self.number, "parts": [list(part) for part in parts]}

    @staticmethod
    def rows_of(share: Share) -> int:
        """Rows of a share."""
        return sum(segment.num_rows for segment in share)

    def before(self, share: Share, step: int) -> int:
        """Rows of a share that are read before a step."""
        return self.rows_of(share) * step // max(self.num_steps, 1)

    def rows_by_rank(self, step: int) -> list[int]:
        """Rows of each rank in a step."""
        return [self.before(share, step + 1) - self.before(share, step) for share in self.shares]

    def shared_out(self) -> dict[str, Any]:
        """How the rows of an epoch are spread, as plain data.

        Returns:
            `rows`, `steps`; `rows_by_rank`, as (fewest, most); `empty_bags`: by how many rows the batches of an epoch
            are smaller than the largest ones of their steps, which is what id features are padded with; `left_out`:
            rows that no rank reads, always 0.
        """
        rows_of_ranks = [self.rows_of(share) for share in self.shares]
        shares, counts = np.unique(rows_of_ranks, return_counts=True)
        ends = shares[:, None] * np.arange(self.num_steps + 1) // max(self.num_steps, 1)
        batches = np.diff(ends, axis=1)
        empty_bags = int((batches.max(axis=0) * len(self.shares) - (batches * counts[:, None]).sum(axis=0)).sum())
        return {
            "rows": sum(rows_of_ranks),
            "steps": self.num_steps,
            "rows_by_rank": [int(shares[0]), int(shares[-1])],
            "empty_bags": empty_bags,
            "left_out": sum(rows_of_ranks) - int((batches * counts[:, None]).sum()),
        }

    def _shared_out(self, done: Part, world_size: int) -> "Epoch":
        """What a part leaves of this epoch, for some number of ranks: equal pieces of all of it in a row."""
        rest = [s for share in self.shares for s in cut(share, self.before(share, done.steps_done), None)]
        left = self.rows_of(tuple(rest))
        bounds = [left * rank // world_size for rank in range(world_size + 1)]
        shares = tuple(tuple(cut(rest, low, high)) for low, high in itertools.pairwise(bounds))
        return Epoch(self.number, shares, 0, parts=(*self.parts, done))


def _num_steps(num_rows: int, world_size: int, batch_size: int) -> int:
    return -(-num_rows // (world_size * batch_size))


def cut(segments: Sequence[Segment], low: int, high: int | None) -> list[Segment]:
    """Rows `low` to `high` of some segments in a row."""
    found, start = [], 0
    for segment in segments:
        end = start + segment.num_rows
        begin, stop = max(low, start), end if high is None else min(high, end)
        if begin < stop:
            found.append(segment._replace(begin=segment.begin + begin - start, end=segment.begin + stop - start))
        start = end
    return found
