"""Which rows of a table are looked up, how often, and by how many ids: what sharing rows costs.

Memory is that of the tracked rows, 24 bytes each, however many distinct ids come. Of each row the lowest and the
highest key are kept: they differ exactly when two ids share the row, and lookups, minima and maxima can be brought
together from blocks and ranks in any order.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from recsys import ids

RANGES = ("hot", "cold", "unknown", "missing")
"""Kinds of rows: own rows of ids, shared rows of ids, and the two reserved rows that are looked up."""

_INT64 = np.iinfo(np.int64)


class Traffic:
    """Lookups of one table by kind of row.

    Args:
        hot: Rows that belong to one id each, the first ones: all of an exact table, none of a hashed one.
        cold_hashes: Cold rows that one cold id reads. Each of them counts as that part of a lookup, so that the
            shares are shares of ids.

    Attributes:
        lookups: (4,) int64, in the order of `RANGES`; cold ones are rows read.
    """

    def __init__(self, hot: int = 0, cold_hashes: int = 1) -> None:
        self.hot, self.cold_hashes = hot, cold_hashes
        self.lookups = np.zeros(len(RANGES), dtype=np.int64)

    def add(self, rows: npt.NDArray[np.integer], counts: npt.NDArray[np.int64] | None = None) -> None:
        """Count lookups.

        Args:
            rows: (n,) rows of the table.
            counts: (n,) times that each was looked up; None means once.
        """
        unknown, missing = (_total(rows == row, counts) for row in (ids.UNKNOWN, ids.MISSING))
        cold = _total(rows >= ids.FIRST_ROW + self.hot, counts)
        everything = len(rows) if counts is None else int(counts.sum())
        self.lookups += np.array([everything - cold - unknown - missing, cold, unknown, missing])

    def merge(self, other: "Traffic") -> None:
        """Take in the lookups of another part of the data."""
        assert (self.hot, self.cold_hashes) == (other.hot, other.cold_hashes), "traffic of two different tables"
        self.lookups += other.lookups

    def merge_ranks(self) -> None:
        """Take in the lookups of all other ranks. A collective; with it every rank has the same."""
        dist.all_reduce(torch.from_numpy(self.lookups))

    def per_id(self) -> npt.NDArray[np.float64]:
        """(4,) ids that were looked up, repeats included, in the order of `RANGES`."""
        return self.lookups / np.array([1, self.cold_hashes, 1, 1])

    def shares(self) -> dict[str, float | None]:
        """Share of each of `RANGES` in all lookups; None where there were none."""
        weights = self.per_id()
        total = weights.sum()
        return {name: float(weight / total) if total else None for name, weight in zip(RANGES, weights, strict=True)}


class TableUsage:
    """What one table's rows were used for.

    A table with more rows for ids than `max_tracked_rows` is sampled: of every `one_row_in` adjacent rows, one that a
    hash chooses is tracked, so that no pattern in the ids can fool the sample. With 4 million tracked rows, occupancy
    is then good to 0.001 (three standard errors) and collisions nearly so. `shared_traffic` is rough where frequent
    ids share rows: for Zipf ids and one row in 5 of a hashed table it was off by up to a half of its value. Raise the
    bound for a better one. `traffic` is always exact.

    Args:
        num_rows: Rows of the table, the reserved ones included.
        hot: As in `Traffic`.
        cold_hashes: As in `Traffic`.
        max_tracked_rows: Bound of memory; each takes 24 bytes.

    Attributes:
        one_row_in: 1 where every row is tracked and all results are exact.
        traffic: Lookups by kind of row.
    """

    def __init__(self, num_rows: int, *, hot: int = 0, cold_hashes: int = 1, max_tracked_rows: int = 2**22) -> None:
        self.num_id_rows = num_rows - ids.FIRST_ROW
        assert 0 <= hot <= self.num_id_rows > 0, f"{hot} hot rows do not fit a table of {num_rows} rows"
        self.one_row_in = -(-self.num_id_rows // max_tracked_rows)
        num_tracked = -(-self.num_id_rows // self.one_row_in)
        self.traffic = Traffic(hot, cold_hashes)
        # Side by side in memory: a lookup that meets a row outside the cache then waits once, not three times.
        state = np.empty((num_tracked, 3), dtype=np.int64)
        state[:] = 0, _INT64.max, _INT64.min
        self._lookups, self._lowest_keys, self._highest_keys = state.T

    def add(
        self,
        rows: npt.NDArray[np.integer],
        keys: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Count lookups: 6 ns each in small tables, 20 ns where the tracked rows do not fit into the cache.

        Args:
            rows: (n,) rows that were looked up. An id that reads several rows comes once with each.
            keys: (n,) keys of the ids that looked them up; those of reserved rows are not read.
            counts: (n,) times that each was looked up, at least 1; None means once.
        """
        if not len(rows):
            return
        inside = ids.MISSING <= rows.min() and rows.max() < self.num_id_rows + ids.FIRST_ROW
        assert inside, f"rows {rows.min()} to {rows.max()} leave a table with rows for {self.num_id_rows} ids"
        assert counts is None or counts.min() >= 1, "a row that is not looked up has no key"
        self.traffic.add(rows, counts)
        slots = offsets = rows.astype(np.int64, copy=False) - ids.FIRST_ROW
        is_tracked = offsets >= 0
        if self.one_row_in > 1:
            slots = offsets // self.one_row_in
            is_tracked &= offsets == self._tracked_offsets(slots)
        if not is_tracked.all():
            slots, keys = slots[is_tracked], keys[is_tracked]
            counts = None if counts is None else counts[is_tracked]
        np.add.at(self._lookups, slots, 1 if counts is None else counts)
        np.minimum.at(self._lowest_keys, slots, keys)
        np.maximum.at(self._highest_keys, slots, keys)

    def merge(self, other: "TableUsage") -> None:
        """Take in what another part of the data was looked up with; exact, in any order."""
        sizes = (self.num_id_rows, self.one_row_in)
        assert sizes == (other.num_id_rows, other.one_row_in), "usage of two different tables"
        self.traffic.merge(other.traffic)
        self._lookups += other._lookups
        np.minimum(self._lowest_keys, other._lowest_keys, out=self._lowest_keys)
        np.maximum(self._highest_keys, other._highest_keys, out=self._highest_keys)

    def merge_ranks(self) -> None:
        """Take in what all other ranks have. A collective; with it every rank has the same."""
        self.traffic.merge_ranks()
        for part, merge in (
            (self._lookups, dist.ReduceOp.SUM),
            (self._lowest_keys, dist.ReduceOp.MIN),
            (self._highest_keys, dist.ReduceOp.MAX),
        ):
            whole = torch.tensor(part)  # collectives take no strided memory
            dist.all_reduce(whole, merge)
            part[:] = whole.numpy()

    @property
    def occupancy(self) -> float:
        """Share of the rows for ids that were looked up."""
        # The last of the groups of adjacent rows may end behind the table, and so may its tracked row.
        last = np.array([len(self._lookups) - 1])
        num_tracked = len(self._lookups) - int(self._tracked_offsets(last)[0] >= self.num_id_rows)
        return int(np.count_nonzero(self._lookups)) / num_tracked

    @property
    def collision_rate(self) -> float | None:
        """Share of the rows that were looked up which serve two ids or more; None where none was looked up.

        Of rows, not of ids: cold ids that read two rows seldom share both with the same other id.
        """
        occupied = int(np.count_nonzero(self._lookups))
        return int(np.count_nonzero(self._is_shared())) / occupied if occupied else None

    @property
    def shared_traffic(self) -> float | None:
        """Share of the ids' lookups that met a row with two ids or more.

        None where no id was looked up, or none of the rows that were is tracked.
        """
        weights = self.traffic.per_id()[: RANGES.index("cold") + 1]
        if not weights.sum():
            return None
        # Hot and cold rows are estimated apart and weighed with their exact lookups: the few rows that carry most of
        # the traffic then decide nothing by being in the sample or out of it. Without sampling nothing changes.
        edge = np.array([self.traffic.hot // self.one_row_in])
        first_cold = int(edge[0]) + int(self._tracked_offsets(edge)[0] < self.traffic.hot)
        shared_lookups = np.where(self._is_shared(), self._lookups, 0)
        shared = 0.0
        for weight, part in zip(weights, (slice(first_cold), slice(first_cold, None)), strict=True):
            tracked = int(self._lookups[part].sum())
            if weight and not tracked:
                return None
            shared += weight * int(shared_lookups[part].sum()) / max(tracked, 1)
        return float(shared / weights.sum())

    def as_dict(self) -> dict[str, Any]:
        """All results as they stand in metrics.json, where the table's policy joins them."""
        return {
            "rows": self.num_id_rows,
            "hot": self.traffic.hot,
            "cold": self.num_id_rows - self.traffic.hot,
            "lookups": float(self.traffic.per_id().sum()),
            "occupancy": self.occupancy,
            "collision_rate": self.collision_rate,
            "shared_traffic": self.shared_traffic,
            "estimated_from_one_row_in": self.one_row_in,
            "traffic": self.traffic.shares(),
        }

    def _is_shared(self) -> npt.NDArray[np.bool_]:
        return self._lowest_keys < self._highest_keys

    def _tracked_offsets(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The one tracked row, counted from the first row for ids, of each group of adjacent rows."""
        chosen = ids.hashed_rows(torch.from_numpy(slots), self.one_row_in).sub_(ids.FIRST_ROW)
        return slots * self.one_row_in + chosen.numpy()


def _total(mask: npt.NDArray[np.bool_], counts: npt.NDArray[np.int64] | None) -> int:
    return int(np.count_nonzero(mask)) if counts is None else int(counts[mask].sum())
