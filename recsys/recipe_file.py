"""YAML text and `key.path=value` overrides -> a `Recipe`, with every problem of the text in one error."""

import os
import pathlib
from collections.abc import Sequence
from typing import Any, get_args

import pydantic
import yaml

from recsys.errors import UserError, nearest
from recsys.models.config import ModelConfig
from recsys.recipe import FLOAT, Feature, Recipe, TableSettings


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
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"The recipe {str(path)!r} cannot be read", received=str(error), fix="give the path of a YAML file"
        ) from error
    return parse(text, overrides, source=str(path))


def parse(text: str, overrides: Sequence[str] = (), source: str = "recipe") -> Recipe:
    """Read a recipe from YAML text; see `load`."""
    try:
        raw = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise UserError(f"{source} is not valid YAML", received=" ".join(str(error).split())) from error
    if not isinstance(raw, dict):
        raise UserError(
            f"{source} is not a recipe", received=type(raw).__name__, allowed="a mapping with the key `model`"
        )
    for override in overrides:
        _apply(raw, override)
    try:
        return Recipe.model_validate(raw)
    except pydantic.ValidationError as error:
        problems = [line for e in error.errors() for line in _describe(e)]
        raise UserError.collect(f"{source} has problems", problems) from None


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
            "An override has no value", received=override, allowed="key.path=value, for instance train.epochs=3"
        )
    try:
        parsed = yaml.load(value, _Loader)
    except yaml.YAMLError as error:
        raise UserError(f"The value of {key!r} is not valid YAML", received=value, fix="quote it") from error
    *parents, last = key.split(".")
    node: Any = raw
    for part in parents:
        if isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, dict):
            node[part] = {} if node.get(part) is None else node[part]
            node = node[part]
        else:
            node = None
        if node is None:
            break
    if isinstance(node, list) and last.isdigit() and int(last) < len(node):
        node[int(last)] = parsed
    elif isinstance(node, dict):
        node[last] = parsed
    else:
        raise UserError(
            f"The override {key!r} leads nowhere in this recipe", received=override, fix="check the key's path"
        )


def _describe(error: Any) -> list[str]:
    """Our sentences for one pydantic error: key, what is wrong, received, allowed."""
    tag_at = _TAG_AT.get(error["loc"][0]) if error["loc"] else None
    location = [part for index, part in enumerate(error["loc"]) if index != tag_at]
    key = ".".join(str(part) for part in location)
    if error["type"] == "value_error" and not location:
        return str(error["ctx"]["error"]).splitlines()
    if error["type"] == "value_error":
        return [f"{key}: {error['ctx']['error']}"]
    if error["type"] == "too_short" and error["input"]:
        return []  # Items were given, and each is reported by itself.
    if error["type"] == "extra_forbidden":
        allowed = _allowed_keys(error["loc"])
        return [f"{key}: unknown key. Allowed: {sorted(allowed)}.{nearest(str(location[-1]), allowed)}"]
    if error["type"] == "missing":
        return [f"{key}: this key is required and missing"]
    if error["type"] == "union_tag_invalid":
        names = error["ctx"]["expected_tags"].replace("'", "").split(", ")
        tag = str(error["ctx"]["tag"])
        kind = error["ctx"]["discriminator"].strip("'")
        return [f"{key}: unknown {kind} {tag!r}. Allowed: {names}.{nearest(tag, names)}"]
    shown = repr(error.get("input"))
    shown = shown if len(shown) < 80 else shown[:77] + "..."
    return [f"{key}: {error['msg'][0].lower()}{error['msg'][1:]}. Received: {shown}"]


_TAG_AT = {"model": 1, "features": 2}
"""Where pydantic puts the `name` or `kind` of the chosen class into an error's path, by the path's first part."""


def _allowed_keys(location: tuple[Any, ...]) -> list[str]:
    """Keys that may stand where an unknown one was found, by walking the models along its path."""
    classes = [*get_args(get_args(Feature)[0]), *get_args(get_args(ModelConfig)[0])]
    tags = [_annotation(cls, "kind") or _annotation(cls, "name") for cls in classes]
    by_tag = {get_args(tag)[0]: cls for tag, cls in zip(tags, classes, strict=True)}
    node: type[pydantic.BaseModel] = Recipe
    for index, part in enumerate(location[:-1]):
        if index == _TAG_AT.get(location[0]):
            node = by_tag[part]
        elif part == "tables":
            node = TableSettings
        elif isinstance(found := _annotation(node, part), type(pydantic.BaseModel)):
            node = found
    return list(node.model_fields)


def _annotation(model: type[pydantic.BaseModel], name: Any) -> Any:
    return model.model_fields[name].annotation if name in model.model_fields else None
