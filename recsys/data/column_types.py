"""What a recipe expects of the Arrow types of id columns, and in what words data is refused that does not fit."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa

from recsys.data import columns
from recsys.recipe import HistoryFeature, IdFeature, NumberFeature, Recipe


@dataclasses.dataclass(frozen=True)
class IdColumn:
    """One column of ids, or of lists of ids, and the table that they are looked up in."""

    name: str
    table: str
    exact: bool
    num_rows: int
    max_length: int | None = None
    """None: one id per row, not a list."""
    newest: bool = True
    leader: str | None = None
    """First column of the history that this one runs in step with."""


def id_columns(recipe: Recipe) -> Iterator[IdColumn]:
    """The id columns of a recipe, in declaration order."""
    inputs = recipe.inputs
    for feature in recipe.features:
        if isinstance(feature, NumberFeature):
            continue
        names = tuple(feature.of) if isinstance(feature, HistoryFeature) else feature.columns
        for name in names:
            table = inputs.table_of(name).name
            settings = recipe.table_settings(table)
            column = IdColumn(name, table, settings.ids == "exact", settings.rows)
            if not isinstance(feature, IdFeature):
                leader = names[0] if isinstance(feature, HistoryFeature) else None
                column = dataclasses.replace(
                    column, max_length=feature.max_length, newest=feature.keep == "newest", leader=leader
                )
            yield column


def id_type_problems(column: IdColumn, kind: pa.DataType) -> Iterator[str]:
    """What is wrong with reading a column as ids, to stand behind its name; a column of nulls only fits anything."""
    if pa.types.is_null(kind):
        return
    if column.max_length is None and columns.is_list(kind):
        yield "holds lists, but the recipe reads one id per row. Do: declare it with kind `id_list` or `history`"
        return
    if column.max_length is not None and not columns.is_list(kind):
        yield f"holds one value per row ({kind}), but the recipe reads a list of ids. Do: declare it with kind `id`"
        return
    value = kind.value_type if columns.is_list(kind) else kind
    if pa.types.is_floating(value):
        yield (
            f"holds ids as floating-point numbers ({value}), in which large ids lose digits. "
            "Do: store them as integers (nullable ones where some are missing) or text"
        )
    elif not columns.is_id(value):
        yield f"has the type {value}, but ids are integers or text. Do: store it as one of them"
    elif column.exact and columns.is_text(value):
        yield (
            f"holds text, but table {column.table!r} takes exact ids 0..{column.num_rows - 1}. "
            f"Do: set tables.{column.table}.ids to hashed, or number the ids"
        )


def mixed_tables(id_columns: Sequence[IdColumn], schemas: Mapping[str, pa.Schema]) -> Iterator[str]:
    """A sentence for each hashed table whose ids are text in one place and integers in another.

    Text is hashed and integers are their own key, so that the same id would be two rows. Exact tables take no text.
    """
    for table in dict.fromkeys(column.table for column in id_columns if not column.exact):
        where: dict[str, list[str]] = {}
        for column in id_columns:
            places: dict[str, list[str]] = {}
            for place, schema in schemas.items() if column.table == table else ():
                for index in schema.get_all_field_indices(column.name):
                    if (kind := columns.id_kind(schema.field(index).type)) is not None:
                        places.setdefault(kind, []).append(place)
            for kind, names in places.items():
                where.setdefault(kind, []).append(f"{column.name!r} in {', '.join(dict.fromkeys(names))}")
        if len(where) > 1:
            received = "; ".join(f"{kind}: {', '.join(found)}" for kind, found in sorted(where.items()))
            yield (
                f"table {table!r}: an id stored as text and the same id stored as an integer never match. "
                f"Received: {received}. Do: store the ids of a table in one way everywhere"
            )
