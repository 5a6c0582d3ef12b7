"""What a model reads: tables, fields, histories, dense columns. Plain Python, so that checking needs no torch.

A recipe resolves to one `Inputs`; a notebook writes one by hand. Models, the encoder and the planner all read
it, and nothing is ever inferred from the prefix of a name.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from recsys.errors import UserError

Pooling = Literal["sum", "mean"]


@dataclasses.dataclass(frozen=True)
class Table:
    """An embedding table: `rows` vectors of width `dim` (any width, 1 included), drawn from N(0, init_std^2).

    `l2` adds l2 / 2 * |vector|^2 to the loss of a row for every vector that the row looks up: rows of the table that
    a batch does not touch are not pulled either. Of a list it is the pooled vector that counts.

    `second_row`: ids may read two rows, the sum of which is their vector. Rows from this one on are second rows: where
    one stands in a list of rows, it belongs to the id of the row in front of it. None: every row is an id.

    `dtype` is what the weights are stored as; vectors come out as fp32.
    """

    name: str
    rows: int
    dim: int
    init_std: float = 0.01
    l2: float = 0.0
    second_row: int | None = None
    dtype: Literal["fp32", "fp16"] = "fp32"


@dataclasses.dataclass(frozen=True)
class Field:
    """An id or a list of ids in one row of data, looked up in `table` and pooled into one vector.

    `weighted`: the ids of the list come with weights; `mean` then divides by their sum.
    """

    name: str
    table: str
    pooling: Pooling = "sum"
    weighted: bool = False


@dataclasses.dataclass(frozen=True)
class History:
    """Columns of past events that run in step, each paired with the field of the candidate it is compared with.

    `of` maps history column -> target field, for instance `{"history_item_id": "item_id"}`; a history shares its
    target's table.
    """

    of: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which id features travel in which KeyedJaggedTensor of a batch, in key order."""

    pooled: tuple[str, ...]
    sequence: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Everything that a model reads from a batch, by name."""

    tables: Sequence[Table]
    fields: Sequence[Field] = ()
    histories: Sequence[History] = ()
    dense: Sequence[str] = ()

    def __post_init__(self) -> None:
        problems = []
        names = [*(f.name for f in self.fields), *(h for history in self.histories for h in history.of), *self.dense]
        for name in sorted({n for n in names if names.count(n) > 1}):
            problems.append(f"feature {name!r} is declared {names.count(name)} times; each name may stand once")
        tables = {t.name for t in self.tables}
        if len(tables) != len(self.tables):
            problems.append("two tables share one name")
        fields = {f.name for f in self.fields}
        for table in self.tables:
            if table.rows < 1 or table.dim < 1:
                problems.append(
                    f"table {table.name!r} needs rows >= 1 and dim >= 1, received {table.rows} x {table.dim}"
                )
        for field in self.fields:
            if field.table not in tables:
                problems.append(f"field {field.name!r} names table {field.table!r}; tables: {sorted(tables)}")
        for history in self.histories:
            for column, target in history.of.items():
                if target not in fields:
                    problems.append(f"history {column!r} names target {target!r}, which is no field: {sorted(fields)}")
        if problems:
            raise UserError.collect("The inputs do not fit together", problems)

    def table(self, name: str) -> Table:
        """The table of that name."""
        return next(t for t in self.tables if t.name == name)

    def table_of(self, feature: str) -> Table:
        """The table in which a field or a history column is looked up."""
        for history in self.histories:
            feature = history.of.get(feature, feature)
        return self.table(next(f.table for f in self.fields if f.name == feature))

    @property
    def history_columns(self) -> tuple[str, ...]:
        """All history columns, in declaration order."""
        return tuple(column for history in self.histories for column in history.of)

    def layout(self, *, attends: bool) -> Layout:
        """Split the id features into pooled and sequence ones.

        Args:
            attends: True for models that look at every event of a history (DIN): histories, their targets and
                every other field of the same tables then stay unpooled, since one table has one collection.
                False: histories are averaged like any other list.
        """
        features = [f.name for f in self.fields] + list(self.history_columns)
        if not attends:
            return Layout(pooled=tuple(features), sequence=())
        shared = {self.table_of(column).name for column in self.history_columns}
        sequence = tuple(f for f in features if self.table_of(f).name in shared)
        return Layout(pooled=tuple(f for f in features if f not in sequence), sequence=sequence)
