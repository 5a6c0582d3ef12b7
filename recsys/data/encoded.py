"""Encoded rows, in a form that is quick to shuffle: all numbers of a row lie side by side.

Picking rows at random out of columns costs a cache miss for every value; out of a matrix of rows, one for every row.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from recsys.data.columns import places


@dataclasses.dataclass(frozen=True)
class Lists:
    """Lists of n rows, for k inputs in step.

    Attributes:
        offsets: (n + 1,) int64; row i has the values offsets[i] to offsets[i + 1].
        values: (m, k) integer rows of the tables.
        weights: (m,) float32; None: unweighted.
    """

    offsets: Tensor
    values: Tensor
    weights: Tensor | None = None

    def take(self, indices: Tensor) -> "Lists":
        """The lists of some rows."""
        starts = self.offsets.index_select(0, indices)
        lengths = self.offsets.index_select(0, indices + 1) - starts
        at = torch.from_numpy(places(starts.numpy(), lengths.numpy()))
        weights = None if self.weights is None else self.weights.index_select(0, at)
        return Lists(offsets_of(lengths), _picked(self.values, at), weights)

    def slice(self, start: int, stop: int) -> "Lists":
        """The lists of the rows from `start` to `stop`."""
        offsets = self.offsets[start : stop + 1]
        inside = slice(int(offsets[0]), int(offsets[-1]))
        return Lists(offsets - offsets[0], self.values[inside], None if self.weights is None else self.weights[inside])

    @classmethod
    def concat(cls, parts: Sequence["Lists"]) -> "Lists":
        """The lists of all parts, one part after another."""
        ends = np.cumsum([0, *(len(part.values) for part in parts)])
        offsets = [part.offsets[:-1] + int(end) for part, end in zip(parts, ends, strict=False)]
        weights = [part.weights for part in parts if part.weights is not None]
        return cls(
            torch.cat([*offsets, torch.tensor(ends[-1:])]),
            torch.cat([part.values for part in parts]),
            torch.cat(weights) if weights else None,
        )

    @classmethod
    def in_step(cls, parts: Sequence["Lists"]) -> "Lists":
        """Inputs of the same lengths as one."""
        return parts[0] if len(parts) == 1 else cls(parts[0].offsets, torch.cat([p.values for p in parts], dim=1))


def _picked(values: Tensor, at: Tensor) -> Tensor:
    """values[at]; two int32 side by side are picked as one int64, which is much quicker than row by row."""
    if values.shape[1] == 2 and values.dtype == torch.int32:
        return values.view(torch.int64).squeeze(1).index_select(0, at).view(torch.int32).view(-1, 2)
    return values.squeeze(1).index_select(0, at).unsqueeze(1) if values.shape[1] == 1 else values.index_select(0, at)


def offsets_of(lengths: Tensor) -> Tensor:
    """(n,) int64 lengths -> (n + 1,) offsets."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


@dataclasses.dataclass(frozen=True)
class EncodedRows:
    """n rows of data, encoded.

    Attributes:
        rows: (n,) int64 position of each row in its data set.
        labels: (n,) float32 in {0, 1}.
        counted: (n,) float32, 1; 0 for rows that must not count because their label is bad.
        groups: (n,) int64.
        dense: (n, D) float32, from the encoder column by column.
        ids: (n, F) integer rows of the tables, for the inputs that have exactly one; as `dense`.
        lists: The other inputs.
    """

    rows: Tensor
    labels: Tensor
    counted: Tensor
    groups: Tensor
    dense: Tensor
    ids: Tensor
    lists: tuple[Lists, ...]

    @property
    def num_rows(self) -> int:
        """Number of rows n."""
        return len(self.rows)

    def take(self, indices: np.ndarray) -> "EncodedRows":
        """Rows by their number, in the order given."""
        at = torch.from_numpy(indices)
        return self._of([part.index_select(0, at) for part in self._flat], [lists.take(at) for lists in self.lists])

    def slice(self, start: int, stop: int) -> "EncodedRows":
        """The rows from `start` to `stop`, without a copy."""
        lists = [lists.slice(start, stop) for lists in self.lists]
        return self._of([part[start:stop] for part in self._flat], lists)

    @classmethod
    def concat(cls, parts: Sequence["EncodedRows"]) -> "EncodedRows":
        """The rows of all parts, one part after another, each row in one place; at least one part."""
        if len(parts) == 1:
            return cls._of([part.contiguous() for part in parts[0]._flat], parts[0].lists)
        lists = [Lists.concat(column) for column in zip(*(part.lists for part in parts), strict=True)]
        return cls._of([torch.cat(column) for column in zip(*(part._flat for part in parts), strict=True)], lists)

    @property
    def _flat(self) -> tuple[Tensor, ...]:
        return (self.rows, self.labels, self.counted, self.groups, self.dense, self.ids)

    @classmethod
    def _of(cls, flat: Sequence[Tensor], lists: Sequence[Lists]) -> "EncodedRows":
        rows, labels, counted, groups, dense, ids = flat
        return cls(rows, labels, counted, groups, dense, ids, tuple(lists))


class ArrowRows(NamedTuple):
    """Rows as they were read, and the position of each in its data set."""

    table: pa.Table
    positions: np.ndarray

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.table.num_rows

    def take(self, indices: np.ndarray) -> "ArrowRows":
        """Rows by their number, in the order given."""
        return ArrowRows(self.table.take(pa.array(indices)), self.positions[indices])

    def slice(self, start: int, stop: int) -> "ArrowRows":
        """The rows from `start` to `stop`, without a copy."""
        return ArrowRows(self.table.slice(start, stop - start), self.positions[start:stop])

    @classmethod
    def concat(cls, parts: Sequence["ArrowRows"]) -> "ArrowRows":
        """The rows of all parts, one part after another; at least one part."""
        if len(parts) == 1:
            return parts[0]
        return cls(pa.concat_tables([p.table for p in parts]), np.concatenate([p.positions for p in parts]))
