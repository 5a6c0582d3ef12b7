"""Number columns -> dense inputs and buckets: checks, statistics of the training data, transforms.

`Numbers.forward` and `Numbers.buckets` are plain torch with their state in buffers, so a checkpoint carries it and an
exported model contains it. Missing numbers are NaN up to there.
"""

import collections
import dataclasses
import itertools

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from recsys import ids
from recsys.data import columns
from recsys.errors import UserError
from recsys.features import NumberFeature
from recsys.recipe import Recipe

_LARGEST = float(np.finfo(np.float32).max)
_ROUNDING = 8 * float(np.finfo(np.float64).eps)
"""Relative spread below which a column is constant: its deviations are rounding errors of the mean."""
_SAMPLE_ROWS = 65_536
"""Rows that bucket limits are taken from: a bucket's share is then off by 1 / sqrt(65536), 0.4 %, or less."""


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What one pass over the training data measures of N number columns, transformed but not yet scaled, in float64.

    Attributes:
        count: (N,) numbers that are there.
        mean: (N,), zeros where there are none.
        squares: (N,) sum of squared deviations from the mean.
        low: (N,) smallest number; infinity where there are none.
        high: (N,) largest number; minus infinity where there are none.
        priority: (S,) int64, S <= 65536: what the sampled rows were chosen by, a hash of their position, in order.
        sample: (Q, S) numbers of those rows in the last Q columns: the same rows however the data was divided.
    """

    count: np.ndarray
    mean: np.ndarray
    squares: np.ndarray
    low: np.ndarray
    high: np.ndarray
    priority: np.ndarray
    sample: np.ndarray

    @classmethod
    def of(cls, numbers: np.ndarray, rows: np.ndarray, num_sampled: int) -> "Statistics":
        """Statistics of (N, B) float64 numbers, NaN where missing, in (B,) rows of a data set; the last Q sampled."""
        there = ~np.isnan(numbers)
        count = there.sum(axis=1)
        mean = np.where(there, numbers, 0).sum(axis=1) / np.maximum(count, 1)
        squares = np.square(np.where(there, numbers - mean[:, None], 0)).sum(axis=1)
        low = np.where(there, numbers, np.inf).min(axis=1, initial=np.inf)
        high = np.where(there, numbers, -np.inf).max(axis=1, initial=-np.inf)
        priority = ids.mix(torch.tensor(rows if num_sampled else rows[:0], dtype=torch.int64)).numpy()
        sample = numbers[len(numbers) - num_sampled :, : len(priority)]
        return cls(count, mean, squares, low, high, *_lowest(priority, sample))

    def merge(self, other: "Statistics") -> "Statistics":
        """Statistics of both sets of rows together; the order of merging matters only to rounding."""
        count = self.count + other.count
        share = other.count / np.maximum(count, 1)
        delta = other.mean - self.mean
        squares = self.squares + other.squares + np.square(delta) * (self.count * share)
        low, high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        priority = np.concatenate([self.priority, other.priority])
        sample = np.concatenate([self.sample, other.sample], axis=1)
        return Statistics(count, self.mean + delta * share, squares, low, high, *_lowest(priority, sample))


def _lowest(priority: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(priority)[:_SAMPLE_ROWS]
    return priority[order], numbers[:, order]


def _runs(flags: list[bool]) -> list[slice]:
    """Where flags are set, as slices."""
    runs = itertools.groupby(range(len(flags)), key=flags.__getitem__)
    places = [list(run) for flag, run in runs if flag]
    return [slice(run[0], run[-1] + 1) for run in places]


class Numbers(nn.Module):
    """The number columns of a recipe.

    Attributes:
        columns: N columns that become dense inputs, then Q that become buckets.
        num_dense: N.
        shift: (N,) float64, subtracted from the numbers; NaN until `fit` or a checkpoint sets it.
        scale: (N,) float64, the numbers are divided by it.
        edges_0, ...: For each of the Q columns (buckets - 1,) float64, the least number of every bucket but the first.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        features = [f for f in recipe.features if isinstance(f, NumberFeature)]
        dense = [(c, f) for f in features for c in f.columns if f.transform != "quantile"]
        bucketed = [(c, f) for f in features for c in f.columns if f.transform == "quantile"]
        self.columns = tuple(c for c, _ in (*dense, *bucketed))
        self.num_dense = len(dense)
        self._features = [f for _, f in (*dense, *bucketed)]
        self._fills = np.array([f.missing == "fill" for f in self._features], dtype=bool)
        self._logs = _runs([f.transform == "signed_log" for _, f in dense])
        self._clips = [n for n, (_, f) in enumerate(dense) if f.transform == "min_max"]
        self._filled = [n for n, (_, f) in enumerate(dense) if f.missing == "fill"]
        names = [*(c for c, _ in dense), *(f"{dense[n][0]}_missing" for n in self._filled)]
        self._order = [names.index(name) for name in recipe.dense_inputs]
        learnt = torch.tensor([f.transform != "none" for _, f in dense], dtype=torch.bool)
        shift = torch.zeros(len(dense), dtype=torch.float64)
        self.register_buffer("shift", shift.masked_fill(learnt, torch.nan))
        self.register_buffer("scale", torch.ones_like(shift))
        for number, (_, feature) in enumerate(bucketed):
            unknown = torch.full((feature.buckets - 1,), torch.nan, dtype=torch.float64)
            self.register_buffer(f"edges_{number}", unknown)

    # The tensor side: what an exported model contains.

    def forward(self, numbers: Tensor) -> Tensor:
        """(B, N) float64 raw numbers, NaN where missing -> (B, D) float32 dense inputs in the recipe's order.

        Differences are taken before digits are dropped.
        """
        missing = numbers[:, self._filled].isnan() if self._filled else None
        if missing is not None:
            fill = numbers.new_tensor([self._features[n].fill for n in self._filled])
            numbers = numbers.clone()
            numbers[:, self._filled] = torch.where(missing, fill, numbers[:, self._filled])
        scaled = (self._transformed(numbers) - self.shift).div_(self.scale)
        if self._clips:
            scaled[:, self._clips] = scaled[:, self._clips].clamp(0, 1)
        dense = scaled.to(torch.float32).clamp_(-_LARGEST, _LARGEST)
        return dense if missing is None else torch.cat([dense, missing.float()], dim=1)[:, self._order]

    def buckets(self, column: str, numbers: Tensor) -> Tensor:
        """(B,) float64 raw numbers of a bucketed column -> (B,) int64 buckets from 0 on."""
        edges = getattr(self, f"edges_{self.columns.index(column) - self.num_dense}")
        return torch.bucketize(numbers, edges, right=True)

    def _transformed(self, numbers: Tensor) -> Tensor:
        if not self._logs:
            return numbers
        numbers = numbers.clone()
        for run in self._logs:
            logs = numbers[:, run]
            logs.copy_(logs.abs().log1p_().copysign_(logs))
        return numbers

    # The Arrow side.

    def read(
        self, table: pa.Table | pa.RecordBatch, rows: np.ndarray, counters: collections.Counter[str]
    ) -> np.ndarray:
        """(N + Q, B) float64, NaN where a number is missing and its feature fills it, which `counters` counts.

        Raises:
            UserError: A number is infinite, beyond float32, or missing where that is not allowed.
        """
        numbers = np.empty((len(self.columns), len(rows)))
        for n, name in enumerate(self.columns):
            numbers[n] = columns.numbers(columns.single_array(table, name))
            if len(rows) and not (numbers[n].min() >= -_LARGEST and numbers[n].max() <= _LARGEST):  # NaN is neither
                self._check(table, rows, n, numbers[n], counters)
        return numbers

    def _check(
        self,
        table: pa.Table | pa.RecordBatch,
        rows: np.ndarray,
        n: int,
        numbers: np.ndarray,
        counters: collections.Counter[str],
    ) -> None:
        legal = np.abs(numbers) <= _LARGEST
        if self._fills[n]:
            missing = np.isnan(numbers)
            counters[f"filled/{self.columns[n]}"] += int(missing.sum())
            legal |= missing
        if not legal.all():
            row = int(np.argmin(legal))
            fix = "" if self._fills[n] else ", or declare the feature with missing: fill"
            raise UserError(
                f"The number {self.columns[n]!r} has an illegal value in row {rows[row]}",
                received=columns.shown(table, self.columns[n], row),
                allowed=f"finite numbers from -{_LARGEST:.3g} to {_LARGEST:.3g}",
                fix=f"fill or drop such rows when the data is prepared{fix if np.isnan(numbers[row]) else ''}",
            )

    def measure(self, numbers: np.ndarray, rows: np.ndarray) -> Statistics:
        """Statistics of what `read` gave for (B,) rows of a data set."""
        dense = torch.from_numpy(numbers[: self.num_dense]).t()
        transformed = np.concatenate([self._transformed(dense).t(), numbers[self.num_dense :]])
        return Statistics.of(transformed, rows, len(numbers) - self.num_dense)

    def fit(self, statistics: Statistics) -> None:
        """Take scale and bucket limits from the training data; a constant column is divided by 1."""
        for n, feature in enumerate(self._features[: self.num_dense]):
            if feature.transform == "none":
                continue
            there = statistics.count[n] > 0
            shift = statistics.mean[n]
            scale = np.sqrt(statistics.squares[n] / max(statistics.count[n], 1))
            if feature.transform == "min_max":
                shift = statistics.low[n] if there else 0.0
                scale = statistics.high[n] - shift if there else 0.0
            self.shift[n] = shift
            self.scale[n] = scale if scale > _ROUNDING * abs(shift) else 1.0
        for number, feature in enumerate(self._features[self.num_dense :]):
            sample = statistics.sample[number]
            sample = np.sort(sample[~np.isnan(sample)])
            first = len(sample) * np.arange(1, feature.buckets) // feature.buckets
            edges = sample[first] if len(sample) else np.zeros(feature.buckets - 1)
            getattr(self, f"edges_{number}").copy_(torch.from_numpy(edges))

    @property
    def is_fitted(self) -> bool:
        """Whether scale and limits are known."""
        return not any(bool(buffer.isnan().any()) for buffer in self.buffers())
