"""Columns -> `Batch`: checks, rows of the tables, normalised numbers. The same object trains, evaluates and serves.

Two halves. The Arrow side runs on the host, names feature, row, value and limit of whatever is wrong, and ends in
plain arrays. The tensor side (`table_rows`, `normalize`) is plain torch with its state in buffers, so a checkpoint
carries it and an exported model contains it.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from recsys import ids
from recsys.data import columns
from recsys.data.column_types import IdColumn, id_columns, id_type_problems, mixed_tables
from recsys.errors import UserError, nearest
from recsys.recipe import NumberFeature, Recipe
from recsys.schema import Layout

if TYPE_CHECKING:  # `recsys check` uses the encoder where torchrec is not installed.
    from recsys.data.batch import Batch

NULL_GROUP = -(2**63)
"""Group key of rows whose group is null: they form one group."""

_LARGEST = float(np.finfo(np.float32).max)
_ROUNDING = 8 * float(np.finfo(np.float64).eps)
"""Relative spread below which a column is constant: its deviations are rounding errors of the mean."""


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What one pass over the training data measures, per number column (N of them), in float64.

    Attributes:
        count: Rows seen.
        mean: (N,), zeros when there were no rows.
        squares: (N,) sum of squared deviations from the mean.
    """

    count: int
    mean: np.ndarray
    squares: np.ndarray

    @classmethod
    def empty(cls, encoder: "Encoder") -> "Statistics":
        """Statistics of no rows, to merge others into."""
        return cls.of(np.zeros((len(encoder.mean), 0)))

    @classmethod
    def of(cls, numbers: np.ndarray) -> "Statistics":
        """Statistics of (N, B) float64 values."""
        count = numbers.shape[1]
        mean = numbers.sum(axis=1) / max(count, 1)
        return cls(count, mean, np.square(numbers - mean[:, None]).sum(axis=1))

    def merge(self, other: "Statistics") -> "Statistics":
        """Statistics of both sets of rows together; the order of merging matters only to rounding."""
        count = self.count + other.count
        share = other.count / max(count, 1)
        delta = other.mean - self.mean
        squares = self.squares + other.squares + np.square(delta) * (self.count * share)
        return Statistics(count, self.mean + delta * share, squares)


class Encoder(nn.Module):
    """Encodes rows of Arrow data for one recipe.

    Attributes:
        columns: Columns to read: features, label, group.
        feature_columns: Columns to read when there is no label (`labelled=False`).
        counters: What was changed silently since the caller last cleared it: `cut/<column>` counts lists that were
            longer than their limit.
        mean: (N,) float64, subtracted from the numbers; NaN until `fit` or a checkpoint sets it.
        std: (N,) float64, the numbers are divided by it.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, recipe: Recipe, layout: Layout | None = None) -> None:
        """Prepare for a recipe.

        Args:
            recipe: Describes the columns and tables.
            layout: Order of the id features in a batch; None takes that of the recipe's model.
        """
        super().__init__()
        self.layout = layout = recipe.layout if layout is None else layout
        by_name = {column.name: column for column in id_columns(recipe)}
        self._ids = [by_name[name] for name in (*layout.pooled, *layout.sequence)]
        self._runs = [
            (exact, num_rows, len(list(run)))
            for (exact, num_rows), run in itertools.groupby(self._ids, key=lambda c: (c.exact, c.num_rows))
        ]
        self._numbers = recipe.dense_columns
        self._label, self._group = recipe.data.label, recipe.data.group
        self.feature_columns = (*(column.name for column in self._ids), *self._numbers)
        names = (*self.feature_columns, self._label, *([self._group] if self._group else []))
        self.columns: tuple[str, ...] = tuple(dict.fromkeys(names))
        self.counters: collections.Counter[str] = collections.Counter()
        self._checked: tuple[pa.Schema, bool] | None = None
        standardized = [
            feature.transform == "standardize"
            for feature in recipe.features
            if isinstance(feature, NumberFeature)
            for _ in feature.columns
        ]
        mean = torch.zeros(len(standardized), dtype=torch.float64)
        self.register_buffer("mean", mean.masked_fill(torch.tensor(standardized, dtype=torch.bool), torch.nan))
        self.register_buffer("std", torch.ones_like(mean))
        self._standardized = np.array(standardized, dtype=bool)

    # The tensor side: what an exported model contains.

    def table_rows(self, keys: Tensor, sizes: Sequence[int], missing: Tensor | None = None) -> Tensor:
        """Rows of the embedding tables.

        Args:
            keys: (n,) int64, the ids of all features one after another, in the order of the layout.
            sizes: Number of ids of each feature; their sum is n.
            missing: (n,) bool, True where the id is null; none means nowhere.

        Returns:
            (n,) int64. An id outside an exact table becomes UNKNOWN here; `encode` has refused it before.
        """
        rest = iter(sizes)
        parts = keys.split([sum(itertools.islice(rest, length)) for _, _, length in self._runs])
        rows = [
            (ids.exact_rows if exact else ids.hashed_rows)(part, num_rows)
            for part, (exact, num_rows, _) in zip(parts, self._runs, strict=True)
        ]
        all_rows = rows[0] if len(rows) == 1 else torch.cat(rows) if rows else keys
        return all_rows if missing is None else all_rows.masked_fill(missing, ids.MISSING)

    def normalize(self, numbers: Tensor) -> Tensor:
        """(B, N) float64 raw numbers -> (B, N) float32; the difference is taken before digits are dropped."""
        return ((numbers - self.mean) / self.std).to(torch.float32).contiguous()

    # The Arrow side.

    def schema_problems(self, schema: pa.Schema, path: str, *, labelled: bool = True) -> list[str]:
        """What stands in the way of reading data with this schema: missing columns and wrong types, all of them.

        Args:
            schema: Schema of the data.
            path: Where the data is, to begin each sentence with.
            labelled: False: label and group are not needed.
        """
        problems = []
        for name in self.columns if labelled else self.feature_columns:
            found = schema.get_all_field_indices(name)
            if not found:
                problems.append(
                    f"{path}: column {name!r} is missing. Allowed: {schema.names}.{nearest(name, schema.names)}"
                )
            elif len(found) > 1:
                problems.append(f"{path}: column {name!r} stands {len(found)} times. Do: keep one")
            else:
                kind = schema.field(found[0]).type
                problems += [f"{path}: column {name!r} {problem}" for problem in self._type_problems(name, kind)][:1]
        return problems

    def kind_problems(self, schemas: Mapping[str, pa.Schema]) -> list[str]:
        """Tables that are given text by one column or data set and integers by another: equal ids would never meet.

        Args:
            schemas: Schemas of all data sets of a run, by the name that each has in a sentence.
        """
        return list(mixed_tables(self._ids, schemas))

    def encode(self, table: "pa.Table | pa.RecordBatch", rows: np.ndarray, *, labelled: bool = True) -> "Batch":
        """Check B rows and encode them.

        Args:
            table: B rows with the columns of `columns` (or more, in any order).
            rows: (B,) position of each row in its data set, for messages and for `Batch.rows`.
            labelled: False reads the features only; labels and groups are zeros.

        Raises:
            UserError: Anything that is wrong with the data; nothing is replaced silently except lists cut to their
                limit, which `counters` counts.
        """
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        from recsys.data.batch import Batch

        self._require(table, rows, labelled)
        if self.mean.isnan().any():
            raise UserError(
                "The encoder does not know the scale of the number columns yet",
                received=f"no statistics of {list(self._numbers)}",
                fix="call `encoder.fit(encoder.scan(table, rows))` on the training data, or load a checkpoint",
            )
        dense = self.normalize(torch.from_numpy(self._read_numbers(table, rows)).t())
        labels, groups = np.zeros(len(rows), dtype=np.float32), np.zeros(len(rows), dtype=np.int64)
        if labelled:
            labels = self._read_labels(table, rows).astype(np.float32)
            groups = self._read_groups(table) if self._group else groups
        lengths = np.ones((len(self._ids), len(rows)), dtype=np.int64)
        keys, missing = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=bool)]
        for i, (column, own_lengths, values) in enumerate(self._read_values(table, rows, self.counters)):
            if own_lengths is not None:
                lengths[i] = own_lengths
            column_keys, column_missing = _read_keys(column, own_lengths, values, rows)
            keys.append(column_keys)
            missing.append(np.zeros(len(column_keys), dtype=bool) if column_missing is None else column_missing)
        all_missing = np.concatenate(missing)
        table_rows = self.table_rows(
            torch.from_numpy(np.concatenate(keys)),
            [len(part) for part in keys[1:]],
            torch.from_numpy(all_missing) if all_missing.any() else None,
        )
        # The values already lie in the layout's order: two slices are the two KeyedJaggedTensors, without a copy.
        num_pooled = len(self.layout.pooled)
        end = sum(len(part) for part in keys[1 : num_pooled + 1])
        all_lengths = torch.from_numpy(lengths)
        return Batch(
            dense=dense,
            pooled=KeyedJaggedTensor(
                list(self.layout.pooled), table_rows[:end], lengths=all_lengths[:num_pooled].view(-1)
            ),
            sequence=KeyedJaggedTensor(
                list(self.layout.sequence), table_rows[end:], lengths=all_lengths[num_pooled:].view(-1)
            ),
            labels=torch.from_numpy(labels),
            weights=torch.full((len(rows),), 1 / max(len(rows), 1)),
            groups=torch.from_numpy(np.array(groups)),
            rows=torch.from_numpy(np.array(rows, dtype=np.int64)),
        )

    def scan(self, table: "pa.Table | pa.RecordBatch", rows: np.ndarray, *, labelled: bool = True) -> Statistics:
        """Check rows exactly as `encode` does, without encoding them, and measure their numbers."""
        self._require(table, rows, labelled=labelled)
        if labelled:
            self._read_labels(table, rows)
        for column, lengths, values in self._read_values(table, rows, collections.Counter()):
            if column.exact:
                _read_keys(column, lengths, values, rows)
        return Statistics.of(self._read_numbers(table, rows))

    def fit(self, statistics: Statistics) -> None:
        """Take mean and standard deviation from the training data; a constant column is divided by 1."""
        std = np.sqrt(statistics.squares / max(statistics.count, 1))
        std = np.where(std <= _ROUNDING * np.abs(statistics.mean), 1.0, std)
        self.mean.copy_(torch.from_numpy(np.where(self._standardized, statistics.mean, 0.0)))
        self.std.copy_(torch.from_numpy(np.where(self._standardized, std, 1.0)))

    def _require(self, table: "pa.Table | pa.RecordBatch", rows: np.ndarray, labelled: bool) -> None:
        assert len(rows) == table.num_rows, f"{len(rows)} row positions were given for {table.num_rows} rows"
        if self._checked is None or self._checked[1] != labelled or not self._checked[0].equals(table.schema):
            problems = self.schema_problems(table.schema, "table", labelled=labelled)
            if problems:
                raise UserError.collect("The data does not fit the recipe", problems)
            self._checked = (table.schema, labelled)

    def _type_problems(self, name: str, kind: pa.DataType) -> Iterator[str]:
        for column in self._ids:
            if column.name == name:
                yield from id_type_problems(column, kind)
        if name in self._numbers and not columns.is_number(kind):
            yield f"has the type {kind}, but the recipe reads it as a number. Do: store it as an integer or float"
        if name == self._label and not columns.is_number(kind):
            yield f"has the type {kind}, but the label must be a number or boolean. Do: store it as 0 and 1"
        if name == self._group and not columns.is_id(kind):
            yield f"has the type {kind}, but groups are ids. Do: store it as an integer or text"

    def _read_numbers(self, table: "pa.Table | pa.RecordBatch", rows: np.ndarray) -> np.ndarray:
        """(N, B) float64, all finite and within float32's range."""
        numbers = np.empty((len(self._numbers), len(rows)))
        for i, name in enumerate(self._numbers):
            numbers[i] = columns.numbers(columns.single_array(table, name))
        legal = np.abs(numbers) <= _LARGEST
        if not legal.all():
            column, row = np.argwhere(~legal)[0]
            name = self._numbers[column]
            raise UserError(
                f"The number {name!r} has an illegal value in row {rows[row]}",
                received=columns.shown(table, name, row),
                allowed=f"finite numbers from -{_LARGEST:.3g} to {_LARGEST:.3g}",
                fix="fill or drop such rows when the data is prepared",
            )
        return numbers

    def _read_labels(self, table: "pa.Table | pa.RecordBatch", rows: np.ndarray) -> np.ndarray:
        labels = columns.numbers(columns.single_array(table, self._label))
        legal = (labels == 0) | (labels == 1)
        if not legal.all():
            row = int(np.argmin(legal))
            raise UserError(
                f"The label {self._label!r} has an illegal value in row {rows[row]}",
                received=columns.shown(table, self._label, row),
                allowed="0 or 1",
                fix="fill or drop such rows when the data is prepared",
            )
        return labels

    def _read_groups(self, table: "pa.Table | pa.RecordBatch") -> np.ndarray:
        keys, missing = columns.id_keys(columns.single_array(table, str(self._group)))
        return keys if missing is None else np.where(missing, NULL_GROUP, keys)

    def _read_values(
        self, table: "pa.Table | pa.RecordBatch", rows: np.ndarray, counters: collections.Counter[str]
    ) -> Iterator[tuple[IdColumn, np.ndarray | None, pa.Array]]:
        """Each id column with its list lengths (None: one id per row) and ids, lists cut, histories in step."""
        leaders: dict[str, np.ndarray] = {}
        for column in self._ids:
            array = columns.single_array(table, column.name)
            if column.max_length is None:
                yield column, None, array
                continue
            lengths, values = columns.list_parts(array)
            if column.leader is not None:
                expected = leaders.setdefault(column.leader, lengths)
                if not np.array_equal(lengths, expected):
                    row = int(np.argmax(lengths != expected))
                    raise UserError(
                        f"The history columns {column.leader!r} and {column.name!r} are out of step in row {rows[row]}",
                        received=f"{expected[row]} and {lengths[row]} events",
                        allowed="the same number of events in all columns of a history",
                        fix="correct the lists when the data is prepared, null events included",
                    )
            lengths, values, num_cut = columns.cut_lists(lengths, values, column.max_length, newest=column.newest)
            if num_cut:
                counters[f"cut/{column.name}"] += num_cut
            yield column, lengths, values


def _read_keys(
    column: IdColumn, lengths: np.ndarray | None, values: pa.Array, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """Keys and mask of the nulls, as `columns.id_keys`; ids of an exact table are checked."""
    keys, missing = columns.id_keys(values)
    if column.exact and len(keys) and (keys.min() < 0 or keys.max() >= column.num_rows):
        position = int(np.argmax((keys < 0) | (keys >= column.num_rows)))
        row = position if lengths is None else int(np.searchsorted(np.cumsum(lengths), position, side="right"))
        raise UserError(
            f"The id feature {column.name!r} leaves its table {column.table!r} in row {rows[row]}",
            received=values[position].as_py(),
            allowed=f"0..{column.num_rows - 1}",
            fix=f"raise tables.{column.table}.rows, set tables.{column.table}.ids to hashed, or correct the data",
        )
    return keys, missing
