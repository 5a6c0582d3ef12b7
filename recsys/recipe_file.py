"""YAML text and `key.path=value` overrides -> a `Recipe`, with every problem of the text in one error."""

import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import pydantic
import yaml

from recsys.errors import UserError, nearest
from recsys.models.config import ModelConfig
from recsys.recipe import HistoryFeature, IdFeature, IdListFeature, NumberFeature, Recipe, TableSettings


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
        problems = [line for e in error.errors() for line in _describe(e, raw)]
        raise UserError.collect(f"{source} has problems", problems) from None


class _Loader(yaml.SafeLoader):
    """YAML as people write it: `1e-3` is a number, a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


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
            node = node.setdefault(part, {})
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


def _describe(error: Any, raw: Any) -> list[str]:
    """Our sentences for one pydantic error: key, what is wrong, received, allowed."""
    location = [part for part in error["loc"] if part not in _UNION_TAGS]
    key = ".".join(str(part) for part in location)
    if error["type"] == "value_error" and not location:
        return str(error["ctx"]["error"]).splitlines()
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


_UNION_TAGS = {"deepfm", "din", "id", "id_list", "history", "number"}


def _allowed_keys(location: tuple[Any, ...]) -> list[str]:
    """Keys that may stand where an unknown one was found, by walking the models along its path."""
    node: Any = Recipe
    by_tag = {
        cls.model_fields["kind"].annotation.__args__[0]: cls
        for cls in (IdFeature, IdListFeature, HistoryFeature, NumberFeature)
    }
    by_tag |= {cls().name: cls for cls in ModelConfig.__args__[0].__args__}
    for part in location[:-1]:
        if part in by_tag:
            node = by_tag[part]
        elif isinstance(node, type) and part in node.model_fields:
            annotation = node.model_fields[part].annotation
            node = TableSettings if part == "tables" else annotation if isinstance(annotation, type) else node
    return list(node.model_fields) if isinstance(node, type) and issubclass(node, pydantic.BaseModel) else []
