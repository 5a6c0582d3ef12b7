"""Columns -> `Batch`: checks, rows of the tables, normalised numbers. The same object trains, evaluates and serves.

Two halves. The Arrow side runs on the host, names feature, row, value and limit of whatever is wrong, and ends in
plain arrays. The tensor side (`numbers`, `policies`) is plain torch with its state in buffers, so a checkpoint carries
it and an exported model contains it.
"""

import collections
import itertools
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from recsys import ids
from recsys.data import columns
from recsys.data.column_types import id_kinds, id_places, mixed_places, type_problems
from recsys.data.encoded import EncodedRows, Lists, offsets_of
from recsys.data.id_values import IdReader, IdValues, Table, inside
from recsys.errors import UserError, nearest
from recsys.features import IdInput, NumberFeature
from recsys.numbers import Numbers, Statistics
from recsys.recipe import RESERVED_ROWS, Recipe, TableSettings
from recsys.schema import Layout

if TYPE_CHECKING:  # `recsys check` uses the encoder where torchrec is not installed.
    from recsys.data.batch import Batch

NULL_GROUP = -(2**63)
"""Group key of rows whose group is null: they form one group."""

# Arrow's memory is read-only, of which torch warns once per process, in vain: keys are never written to.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(bytes(8), dtype=np.int64))

_KINDS = ("", "integers", "text")
"""What the ids of a table are stored as; the buffer `kinds` holds places in it."""


class Encoder(nn.Module):
    """Encodes rows of Arrow data for one recipe.

    Attributes:
        inputs: The id inputs, in the order of the layout.
        columns: Columns to read: features, label, group.
        feature_columns: Columns to read when there is no label (`labelled=False`).
        counters: What was changed since the caller last cleared it: `cut/<input>` rows whose list was longer than its
            limit, `unknown/<input>` and `clamped/<input>` ids outside their table, `filled/<column>` missing numbers,
            `skipped/<label>` rows without a usable label.
        tables: All tables.
        id_tables: Those whose ids have no range of their own, unlike parts of timestamps and buckets.
        numbers: Scales the numbers.
        policies: `table_NAME` -> raw keys to rows of that table.
        kinds: What the ids of each table, and of each column of a cross, were stored as in the training data; 0 is not
            known.
    """

    kinds: Tensor

    def __init__(self, recipe: Recipe, layout: Layout | None = None) -> None:
        """Prepare for a recipe.

        Args:
            recipe: Describes the columns and tables.
            layout: Order of the id inputs in a batch; None takes that of the recipe's model.
        """
        super().__init__()
        self._recipe = recipe
        self.layout = layout = recipe.layout if layout is None else layout
        by_name = {i.name: i for i in recipe.id_inputs}
        self.inputs = tuple(by_name[name] for name in (*layout.pooled, *layout.sequence))
        self.tables = tuple(dict.fromkeys(i.table for i in recipe.id_inputs))
        self.id_tables = tuple(dict.fromkeys(i.table for i in recipe.id_inputs if i.num_rows is None))
        self.numbers = Numbers(recipe)
        self._reader = IdReader(self.inputs)
        self._label, self._group = recipe.data.label, recipe.data.group
        sources = [c for i in self.inputs for c in (*i.columns, *([i.weights] if i.weights else []))]
        self.feature_columns = tuple(dict.fromkeys([*sources, *self.numbers.columns]))
        extra = [c for c in (self._label, self._group, recipe.item) if c]
        self.columns: tuple[str, ...] = tuple(dict.fromkeys([*self.feature_columns, *extra]))
        self.counters: collections.Counter[str] = collections.Counter()
        self._checked: tuple[pa.Schema, bool] | None = None
        self.settings = {name: recipe.table_settings(name) for name in self.tables}
        fits = all(s.id_rows + RESERVED_ROWS <= torch.iinfo(torch.int32).max for s in self.settings.values())
        self._dtype = torch.int32 if fits else torch.int64
        self.policies = nn.ModuleDict({f"table_{name}": _policy(self.settings[name]) for name in self.tables})
        shared = {s.rows: ids.SmallIds(ids.HashedIds(s.rows), self._dtype) for s in self.settings.values()}
        self._small = {
            name: shared[s.rows] if s.ids == "hashed" else ids.SmallIds(self.policy(name), self._dtype)
            for name, s in self.settings.items()
        }
        self._kind_places = tuple(dict.fromkeys(place for place, _ in id_places(recipe)))
        self.register_buffer("kinds", torch.zeros(len(self._kind_places), dtype=torch.int8))
        self.register_load_state_dict_post_hook(lambda module, _: module._forget())
        self._place_inputs()

    def policy(self, table: str) -> Any:
        """What turns the keys of a table into its rows."""
        return self.policies[f"table_{table}"]

    def _place_inputs(self) -> None:
        """Where each input lies in `EncodedRows`: a column of `ids`, or of one of the `lists`."""
        self._columns: dict[str, int] = {}
        self._groups: list[list[IdInput]] = []
        self._groups_of: dict[str, int] = {}
        leaders: dict[str, int] = {}
        num_ids = 0
        for i in self.inputs:
            two_rows = self.settings[i.table].second_row is not None
            if i.max_length is None and not two_rows:
                self._columns[i.name] = num_ids
                num_ids += 1
                continue
            if i.leader is None or two_rows or i.leader not in leaders:
                self._groups.append([])
            group = len(self._groups) - 1
            if i.leader is not None and not two_rows:
                group = leaders.setdefault(i.leader, group)
            self._groups_of[i.name] = group
            self._columns[i.name] = len(self._groups[group])
            self._groups[group].append(i)
        self._num_ids = num_ids

    # What is known of the training data.

    def fit(self, statistics: Statistics) -> None:
        """Take the scales of the number columns from the training data."""
        self.numbers.fit(statistics)

    def know_kinds(self, schema: pa.Schema) -> None:
        """Remember what the training data stores the ids of each table as, text or integers."""
        for place, kinds in id_kinds(self._recipe, schema).items():
            self.kinds[self._kind_places.index(place)] = _KINDS.index(next(iter(kinds)))

    def set_vocabulary(self, table: str, keys: np.ndarray, rows: np.ndarray) -> None:
        """Take the hot ids of a `hot_cold` table: (hot,) sorted keys, (hot,) rows, filled up with rows of -1."""
        policy = self.policy(table)
        policy.keys.copy_(torch.from_numpy(keys))
        policy.rows.copy_(torch.from_numpy(rows))
        self._small[table].forget()

    def _forget(self) -> None:
        """Rows that were remembered may be others now."""
        for small in self._small.values():
            small.forget()

    @property
    def versions(self) -> dict[str, str]:
        """What rows depend on besides the recipe and the buffers: to be stored with a model and compared."""
        return {"hash": ids.HASH, **self._reader.versions}

    # Checks.

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
                wrong = type_problems(self._recipe, name, kind)
                problems += [f"{path}: column {name!r} {problem}" for problem in wrong][:1]
        return problems

    def kind_problems(self, schemas: Mapping[str, pa.Schema]) -> list[str]:
        """Tables that are given text in one place and integers in another: equal ids would never meet.

        Args:
            schemas: Schemas of data sets, by the name that each has in a sentence. What the training data was is
                known once `know_kinds` or a checkpoint has told it.
        """
        trained = {p: _KINDS[kind] for p, kind in zip(self._kind_places, self.kinds.tolist(), strict=True) if kind}
        return list(mixed_places(self._recipe, schemas, trained))

    def check(self, table: Table, rows: np.ndarray, *, labelled: bool = True) -> None:
        """Check rows exactly as `encode` does, without encoding them."""
        for _ in self.values(table, rows, collections.Counter(), labelled=labelled):
            pass

    def values(
        self, table: Table, rows: np.ndarray, counters: collections.Counter[str], *, labelled: bool = True
    ) -> Iterator[tuple[IdInput, IdValues]]:
        """All id inputs of B rows, checked, with ids outside their table replaced where the recipe says so.

        Args: as in `encode`; `counters` counts what is cut and replaced.
        """
        self._require(table, rows, labelled)
        numbers = self.numbers.read(table, rows, counters)
        if labelled:
            self._read_labels(table, rows, counters)
        yield from self._read_ids(table, rows, numbers, counters)

    # Encoding.

    def encode(self, table: Table, rows: np.ndarray, *, labelled: bool = True) -> "Batch":
        """Check B rows and encode them.

        Args:
            table: B rows with the columns of `columns` (or more, in any order).
            rows: (B,) position of each row in its data set, for messages and for `Batch.rows`.
            labelled: False reads the features only; labels and groups are zeros.

        Raises:
            UserError: Anything that is wrong with the data; nothing is replaced but what `counters` counts.
        """
        return self.batch(self.encode_rows(table, rows, labelled=labelled))

    def encode_rows(self, table: Table, rows: np.ndarray, *, labelled: bool = True) -> EncodedRows:
        """The first part of `encode`: rows that may still be shuffled and cut into batches."""
        self._require(table, rows, labelled)
        if not self.numbers.is_fitted:
            raise UserError(
                "The encoder does not know the scale of the number columns yet",
                received=f"no statistics of {list(self.numbers.columns)}",
                fix="call `encoder.fit` with the statistics of the training data, or load a checkpoint",
            )
        num_rows = len(rows)
        numbers = self.numbers.read(table, rows, self.counters)
        labels, counted, groups = torch.zeros(num_rows), torch.ones(num_rows), torch.zeros(num_rows, dtype=torch.int64)
        if labelled:
            read, bad = self._read_labels(table, rows, self.counters)
            labels = torch.from_numpy(read.astype(np.float32))
            counted = counted if bad is None else torch.from_numpy(1 - bad.astype(np.float32))
            groups = torch.tensor(self._read_groups(table)) if self._group else groups
        one = torch.empty(self._num_ids, num_rows, dtype=self._dtype)
        lists: dict[str, Lists] = {}
        for i, values in self._read_ids(table, rows, numbers, self.counters):
            found, second = self.table_rows(i, values)
            if i.name not in self._groups_of:
                one[self._columns[i.name]] = found
            else:
                lists[i.name] = self._as_lists(values, found, second)
        return EncodedRows(
            torch.tensor(rows, dtype=torch.int64),
            labels,
            counted,
            groups,
            # Not by a call, which torch.fx takes for the model's where another thread traces that meanwhile.
            self.numbers.forward(torch.from_numpy(numbers[: self.numbers.num_dense]).t()),
            one.t(),
            tuple(Lists.in_step([lists[i.name] for i in group]) for group in self._groups),
        )

    def table_rows(self, i: IdInput, values: IdValues) -> tuple[Tensor, Tensor | None]:
        """Rows of n ids, and second rows where the table has two hashes: -1 for ids that have none."""
        found, second = self._small[i.table](torch.from_numpy(values.coded.distinct))
        if values.coded.index is not None:
            index = torch.from_numpy(values.coded.index)
            found, second = found[index], None if second is None else second[index]
        if values.missing is not None and values.missing.any():
            missing = torch.from_numpy(values.missing)
            found = found.masked_fill(missing, ids.MISSING)
            second = None if second is None else second.masked_fill(missing, -1)
        return found, second

    def _as_lists(self, values: IdValues, found: Tensor, second: Tensor | None) -> Lists:
        if values.lengths is None:
            offsets = torch.arange(len(found) + 1)
        else:
            offsets = offsets_of(torch.from_numpy(values.lengths))
        weights = None if values.weights is None else torch.from_numpy(values.weights)
        if second is not None:
            # Every second row stands behind the first row of its id, with the same weight.
            both = torch.stack([found, second.to(found.dtype)], dim=1).flatten()
            there = both >= 0
            offsets = offsets_of(there.long())[2 * offsets]
            found = both[there]
            weights = None if weights is None else weights.repeat_interleave(2)[there]
        return Lists(offsets, found.to(self._dtype).unsqueeze(1), weights)

    def batch(self, encoded: EncodedRows) -> "Batch":
        """The second part of `encode`: rows -> the batch that models read."""
        from recsys.data.batch import Batch

        num_pooled = len(self.layout.pooled)
        return Batch(
            dense=encoded.dense.contiguous(),
            pooled=self._keyed(self.inputs[:num_pooled], encoded),
            sequence=self._keyed(self.inputs[num_pooled:], encoded),
            labels=encoded.labels,
            weights=encoded.counted / max(encoded.num_rows, 1),
            groups=encoded.groups,
            rows=encoded.rows,
        )

    def _keyed(self, inputs: tuple[IdInput, ...], encoded: EncodedRows) -> Any:
        """The KeyedJaggedTensor of some inputs: one after another, each with its rows in order."""
        from recsys.data.batch import keyed

        num_rows = encoded.num_rows
        lists = [encoded.lists[self._groups_of[i.name]] if i.name in self._groups_of else None for i in inputs]
        ends = np.cumsum([num_rows if found is None else len(found.values) for found in lists]).tolist()
        lengths = torch.ones(len(inputs), num_rows, dtype=torch.int64)
        values = torch.empty(ends[-1] if ends else 0, dtype=torch.int64)
        weights = torch.ones(len(values)) if any(i.weights for i in inputs) else None
        start = 0
        for has_one, run in itertools.groupby(range(len(inputs)), lambda n: lists[n] is None):
            at = list(run)
            if has_one:  # They lie side by side in `ids`, in the same order.
                first = self._columns[inputs[at[0]].name]
                values[start : ends[at[-1]]].view(len(at), num_rows).copy_(encoded.ids[:, first : first + len(at)].t())
                start = ends[at[-1]]
                continue
            for n in at:
                found = lists[n]
                assert found is not None, "those without lists are above"
                lengths[n] = found.offsets.diff()
                values[start : ends[n]] = found.values[:, self._columns[inputs[n].name]]
                if found.weights is not None and weights is not None:
                    weights[start : ends[n]] = found.weights
                start = ends[n]
        return keyed([i.name for i in inputs], values, lengths.view(-1), weights)

    # Reading.

    def _require(self, table: Table, rows: np.ndarray, labelled: bool) -> None:
        assert len(rows) == table.num_rows, f"{len(rows)} row positions were given for {table.num_rows} rows"
        if self._checked is None or self._checked[1] != labelled or not self._checked[0].equals(table.schema):
            problems = self.schema_problems(table.schema, "table", labelled=labelled)
            if problems:
                raise UserError.collect("The data does not fit the recipe", problems)
            self._checked = (table.schema, labelled)

    def _read_labels(
        self, table: Table, rows: np.ndarray, counters: collections.Counter[str]
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """(B,) labels, and (B,) True where a label is bad and skipped, None: nowhere; those are 0."""
        labels = columns.numbers(columns.single_array(table, self._label))
        legal = (labels == 0) | (labels == 1)
        if legal.all():
            return labels, None
        if self._recipe.data.bad_labels == "error":
            row = int(np.argmin(legal))
            raise UserError(
                f"The label {self._label!r} has an illegal value in row {rows[row]}",
                received=columns.shown(table, self._label, row),
                allowed="0 or 1",
                fix="fill or drop such rows when the data is prepared, or set data.bad_labels to skip",
            )
        counters[f"skipped/{self._label}"] += int((~legal).sum())
        return np.where(legal, labels, 0), ~legal

    def _read_groups(self, table: Table) -> np.ndarray:
        keys, missing = columns.id_keys(columns.single_array(table, str(self._group)))
        return keys if missing is None else np.where(missing, NULL_GROUP, keys)

    def _read_ids(
        self, table: Table, rows: np.ndarray, numbers: np.ndarray, counters: collections.Counter[str]
    ) -> Iterator[tuple[IdInput, IdValues]]:
        for i in self.inputs:
            if isinstance(i.feature, NumberFeature):
                values = torch.from_numpy(numbers[self.numbers.columns.index(i.name)])
                missing = values.isnan().numpy()
                buckets = self.numbers.buckets(i.name, values).numpy()
                yield i, IdValues.of(None, buckets, missing if missing.any() else None)
        for i, found in self._reader.read(table, rows, counters):
            is_checked = self.settings[i.table].ids == "exact" and i.num_rows is None
            yield i, inside(i, self.settings[i.table], found, rows, counters) if is_checked else found


def _policy(settings: TableSettings) -> ids.Policy:
    if settings.ids == "hot_cold":
        return ids.HotColdIds(settings.hot, settings.cold, settings.cold_hashes)
    if settings.ids == "exact":
        return ids.ExactIds(settings.rows, clamp=settings.bad_ids == "clamp")
    return ids.HashedIds(settings.rows)
