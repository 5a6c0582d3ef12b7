"""Which Arrow types columns may have, and in what words data is refused that does not fit."""

from collections.abc import Iterator, Mapping

import pyarrow as pa
import pyarrow.types as pt

from recsys.data import columns
from recsys.features import CrossFeature, IdInput, NumberFeature, TextFeature, TimestampFeature
from recsys.recipe import Recipe


def type_problems(recipe: Recipe, name: str, kind: pa.DataType) -> Iterator[str]:
    """What is wrong with a column of that name and type, to stand behind its name; nulls alone fit any id."""
    for i in recipe.id_inputs:
        if name in i.columns:
            yield from _id_problems(recipe, i, kind)
        elif name == i.weights and not (columns.is_list(kind) and columns.is_number(kind.value_type)):
            yield f"has the type {kind}, but the weights of {i.name!r} are lists of numbers. Do: store them as lists"
    if name in recipe.number_columns and not (columns.is_number(kind) or (pt.is_null(kind) and _fills(recipe, name))):
        yield f"has the type {kind}, but the recipe reads it as a number. Do: store it as an integer or float"
    if name == recipe.data.label and not columns.is_number(kind):
        yield f"has the type {kind}, but the label must be a number or boolean. Do: store it as 0 and 1"
    if name in (recipe.data.group, recipe.item) and not columns.is_id(kind):
        what = "groups are ids" if name == recipe.data.group else "the item is an id"
        yield f"has the type {kind}, but {what}. Do: store it as an integer or text"


def _fills(recipe: Recipe, name: str) -> bool:
    return any(isinstance(f, NumberFeature) and name in f.columns and f.missing == "fill" for f in recipe.features)


def _id_problems(recipe: Recipe, i: IdInput, kind: pa.DataType) -> Iterator[str]:
    if pt.is_null(kind) or isinstance(i.feature, NumberFeature):
        return
    if isinstance(i.feature, TimestampFeature):
        if not (pt.is_timestamp(kind) or pt.is_date(kind) or pt.is_integer(kind)):
            yield f"has the type {kind}, but the recipe reads a time. Do: store it as a timestamp or an integer"
        return
    if isinstance(i.feature, TextFeature):
        if not columns.is_text(kind):
            yield f"has the type {kind}, but the recipe reads it as text. Do: store it as text"
        return
    if i.max_length is None and columns.is_list(kind):
        cross = isinstance(i.feature, CrossFeature)
        do = "cross columns of one id each" if cross else "declare it with kind `id_list` or `history`"
        yield f"holds lists, but the recipe reads one id per row. Do: {do}"
        return
    if i.max_length is not None and not columns.is_list(kind):
        do = "store it as a list" if pt.is_nested(kind) else "declare it with kind `id`"
        yield f"holds one value per row ({kind}), but the recipe reads a list of ids. Do: {do}"
        return
    value = kind.value_type if columns.is_list(kind) else kind
    settings = recipe.table_settings(i.table)
    if pt.is_floating(value):
        yield (
            f"holds ids as floating-point numbers ({value}), in which large ids lose digits. "
            "Do: store them as integers (nullable ones where some are missing) or text"
        )
    elif not columns.is_id(value):
        yield f"has the type {value}, but ids are integers or text. Do: store it as one of them"
    elif settings.ids == "exact" and columns.is_text(value):
        yield (
            f"holds text, but table {i.table!r} takes exact ids 0..{settings.rows - 1}. "
            f"Do: set tables.{i.table}.ids to hashed or hot_cold, or number the ids"
        )


def id_places(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(place, column) for all raw ids: the columns of one place must store the same ids in the same way.

    Places are tables, single columns of crosses, and the item column.
    """
    for i in recipe.id_inputs:
        for column in i.columns if i.raw or isinstance(i.feature, CrossFeature) else ():
            yield f"table {i.table!r}" if i.raw else f"cross {i.name!r}, column {column!r}", column
    if recipe.item is not None:
        yield f"item column {recipe.item!r}", recipe.item


def id_kinds(recipe: Recipe, schema: pa.Schema) -> dict[str, dict[str, list[str]]]:
    """Place -> what its ids are stored as, `text` or `integers` -> the columns that do so."""
    kinds: dict[str, dict[str, list[str]]] = {}
    for place, column in id_places(recipe):
        for index in schema.get_all_field_indices(column):
            if (kind := columns.id_kind(schema.field(index).type)) is not None:
                kinds.setdefault(place, {}).setdefault(kind, []).append(column)
    return kinds


def mixed_places(
    recipe: Recipe, schemas: Mapping[str, pa.Schema], trained: Mapping[str, str] | None = None
) -> Iterator[str]:
    """A sentence for each place whose ids are text here and integers there.

    Text is hashed and integers are their own key, so that the same id would be two rows.

    Args:
        recipe: Names tables and columns; exact tables take no text.
        schemas: Schemas of data sets by the name that each has in a sentence.
        trained: What the ids of a place were when its model was trained, where that is known.
    """
    exact = {f"table {i.table!r}" for i in recipe.id_inputs if recipe.table_settings(i.table).ids == "exact"}
    found: dict[str, dict[str, dict[str, list[str]]]] = {}
    for data, schema in schemas.items():
        for place, kinds in id_kinds(recipe, schema).items():
            for kind, names in kinds.items():
                for name in names:
                    found.setdefault(place, {}).setdefault(kind, {}).setdefault(name, []).append(data)
    for place in sorted(found.keys() - exact):
        where = {
            kind: [f"{name!r} in {', '.join(dict.fromkeys(at))}" for name, at in names.items()]
            for kind, names in found[place].items()
        }
        if trained and place in trained:
            where.setdefault(trained[place], []).append("the training data")
        if len(where) > 1:
            received = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in sorted(where.items()))
            yield (
                f"{place}: an id stored as text and the same id stored as an integer never match. "
                f"Received: {received}. Do: store these ids in one way everywhere"
            )
