"""YAML text and `key.path=value` overrides -> a `Recipe`, with every problem of the text in one error."""

import os
import pathlib
import re
import reprlib
from collections.abc import Sequence
from typing import Any, get_args

import pydantic
import yaml

from recsys import communication_settings
from recsys.errors import UserError, nearest
from recsys.features import Feature
from recsys.models.config import ModelConfig
from recsys.optimizer_settings import refused_key, refused_value
from recsys.recipe import FLOAT, Recipe, TableSettings


def load(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        path: YAML file.
        overrides: `key.path=value` in the order given; values are read as YAML, list items by their number.

    Raises:
        UserError: The file cannot be read, or the recipe has problems; all of them are listed.
    """
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # no text, or a path that no file system knows
        raise UserError(
            f"The recipe {str(path)!r} cannot be read", received=str(error), fix="give the path of a YAML file"
        ) from error
    return parse(text, overrides, source=str(path))


def parse(text: str, overrides: Sequence[str] = (), source: str = "recipe") -> Recipe:
    """Read a recipe from YAML text; see `load`."""
    raw = _read(text, f"{source} is not valid YAML", fix="correct the text at that place")
    if not isinstance(raw, dict):
        required = [name for name, field in Recipe.model_fields.items() if field.is_required()]
        raise UserError(
            f"{source} is not a recipe",
            received="nothing" if raw is None else _SHOWN.repr(raw),
            allowed=f"a mapping with the keys {', '.join(required)}, and optional ones",
            fix="begin with a copy of a recipe under models/",
        )
    for override in overrides:
        _apply(raw, override)
    try:
        return Recipe.model_validate(raw)
    except pydantic.ValidationError as error:
        problems = [line for e in error.errors() for line in _describe(e)]
        raise UserError.collect(f"{source} has problems", problems) from None


def _read(text: str, problem: str, fix: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError, TypeError) as error:
        # PyYAML leaves a scalar that does not suit its tag (`2020-99-99`, `!!bool x`) to Python's own errors.
        deep = isinstance(error, RecursionError)
        received = "brackets nested too deeply" if deep else " ".join(str(error).split())
        raise UserError(problem, received=received, fix=fix) from None if deep else error


class _Loader(yaml.SafeLoader):
    """YAML as people write it: `1e-3` is a number, a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        merge = "tag:yaml.org,2002:merge"  # `<<: *anchor` is no key of its own.
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != merge]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789"))


def _apply(raw: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UserError(
            "An override has no value",
            received=override,
            allowed="key.path=value, for instance train.epochs=3",
            fix="write key and value with = between them",
        )
    parsed = _read(value, f"The value of {key!r} is not valid YAML", fix="quote the value, or close its brackets")
    *parents, last = key.split(".")
    node: Any = raw
    for part in parents:
        if (place := _place(node, part)) is not None:
            node = node[place]
        elif isinstance(node, dict):
            node[part] = {} if node.get(part) is None else node[part]
            node = node[part]
        else:
            node = None
        if node is None:
            break
    if (place := _place(node, last)) is not None:
        node[place] = parsed
    elif isinstance(node, dict):
        node[last] = parsed
    else:
        raise UserError(
            f"The override {key!r} leads nowhere in this recipe",
            received=override,
            allowed="keys of the recipe, and numbers of list items that are there, counted from 0",
            fix="check the key's path",
        )


def _place(node: Any, part: str) -> int | None:
    """The index that a part of a path means in a list; None where it means none."""
    if not isinstance(node, list) or not part.isdecimal():
        return None
    return next((place for place in range(len(node)) if str(place) == part), None)


_SHOWN = reprlib.Repr()
"""Cuts values short before they are written out: an alias of an alias of an alias can be as long as it likes."""
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 80
_SHOWN.maxlevel = 2
_SHOWN.maxlist = _SHOWN.maxdict = 4


_MUST_BE = {
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "string_type": "text. Do: quote it",
    "string_too_short": "text that is not empty",
    "string_pattern_mismatch": "letters, digits and _, without a digit at the beginning",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
}
"""pydantic's kinds of errors -> what the value must be; its own words serve for limits."""

_ITEMS = {"columns": "name", "features": "feature", "of": "pair of a history column and an id column"}
"""What the lists and mappings that may not be empty hold."""


def _describe(error: Any) -> list[str]:
    """Our sentences for one pydantic error: key, what is wrong, received, allowed."""
    kind, full, given = error["type"], error["loc"], error.get("input")
    tag_at = _TAG_AT.get(full[0]) if full else None
    location = [part for index, part in enumerate(full) if index != tag_at and part != "[key]"]
    key = ".".join(str(part) for part in location)
    last = location[-1] if location else ""
    if kind == "value_error":
        return [f"{key}: {error['ctx']['error']}"] if location else str(error["ctx"]["error"]).splitlines()
    if kind == "too_short":  # Where items were given, each is reported by itself.
        return [] if given else [f"{key}: there must be at least one {_ITEMS.get(last, 'item')}. Do: add one"]
    if kind == "invalid_key" or full[-1:] == ("[key]",):
        return [f"{key}: a key must be text. Received: {_SHOWN.repr(given)}. Do: quote it"]
    if kind == "extra_forbidden":
        if (reason := refused_key(location) or communication_settings.REFUSED_KEYS.get(str(last))) is not None:
            return [f"{key}: {reason}"]
        allowed = list(_class_at(full).model_fields)
        return [f"{key}: unknown key. Allowed: {sorted(allowed)}.{nearest(str(last), allowed)}"]
    if kind == "missing":
        meaning = (_class_at(full).model_fields[last].description or "").partition(".")[0]
        return [f"{key}: this key is required and missing. Do: add it; it means: {meaning}"]
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        tag = error["ctx"]["discriminator"].strip("'")
        union = ModelConfig if location == ["model"] else Feature
        names = [get_args(cls.model_fields[tag].annotation)[0] for cls in get_args(get_args(union)[0])]
        if kind == "union_tag_not_found":
            return [f"{key}: the key `{tag}` is required and missing. Allowed: {names}. Do: add `{tag}: {names[0]}`"]
        found = str(error["ctx"]["tag"])
        return [f"{key}: unknown {tag} {_SHOWN.repr(found)}. Allowed: {names}.{nearest(found, names)}"]
    if kind == "literal_error":
        refused = communication_settings.REFUSED_VALUES.get((str(last), str(given)))
        if (reason := refused_value(location, given) or refused) is not None:
            return [f"{key}: {reason}"]
        names = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        return [f"{key}: unknown value {_SHOWN.repr(given)}. Allowed: {names}.{nearest(str(given), names)}"]
    must_be = _MUST_BE.get(kind) or error["msg"].removeprefix("Input should be ")
    if kind == "tuple_type":
        must_be = f"a list of {_ITEMS.get(last, 'whole number')}s"
    what, do, fix = must_be.partition(". Do: ")
    return [f"{key}: must be {what}. Received: {_SHOWN.repr(given)}{do}{fix}"]


_TAG_AT = {"model": 1, "features": 2}
"""Where pydantic puts the `name` or `kind` of the chosen class into an error's path, by the path's first part."""


def _class_at(location: tuple[Any, ...]) -> type[pydantic.BaseModel]:
    """The settings in which the last key of a path was looked for, by walking the models along the path."""
    classes = [*get_args(get_args(Feature)[0]), *get_args(get_args(ModelConfig)[0])]
    tags = [_annotation(cls, "kind") or _annotation(cls, "name") for cls in classes]
    by_tag = {get_args(tag)[0]: cls for tag, cls in zip(tags, classes, strict=True)}
    node: type[pydantic.BaseModel] = Recipe
    for index, part in enumerate(location[:-1]):
        if index == _TAG_AT.get(location[0]):
            node = by_tag[part]
        elif location[0] == "tables" and index < 2:  # the table's name is no key of any settings
            node = TableSettings
        elif (found := _settings_in(_annotation(node, part))) is not None:
            node = found
    return node


def _settings_in(annotation: Any) -> type[pydantic.BaseModel] | None:
    """The settings that a field holds, or may hold."""
    candidates = [annotation, *get_args(annotation)]
    return next((c for c in candidates if isinstance(c, type(pydantic.BaseModel))), None)


def _annotation(model: type[pydantic.BaseModel], name: Any) -> Any:
    return model.model_fields[name].annotation if name in model.model_fields else None
