"""The kinds of features that a recipe declares, and the inputs of the model that each becomes.

A feature names columns of the data. What the model reads of it are id inputs, each looked up in a table, and dense
inputs, which are numbers. Nothing here imports torch or Arrow: how a column is read stands in `recsys.data.id_values`
and `recsys.numbers`.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Annotated, Literal

import pydantic

from recsys.schema import Pooling

MAX_COUNT = 2**31 - 1
_RANGE = re.compile(r"(.*?)(\d+)\.\.(.*?)(\d+)")
_MAX_RANGE = 10_000


class Settings(pydantic.BaseModel):
    """Base of everything in a recipe: frozen, strict, no unknown keys."""

    model_config = pydantic.ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


def _expand_columns(value: object) -> object:
    """Write out ranges: `C1..C3` means C1, C2, C3; `C08..C10` keeps its zeros."""
    if not isinstance(value, list | tuple):
        return value
    columns: list[object] = []
    for item in value:
        if not isinstance(item, str) or ".." not in item:
            columns.append(item)
            continue
        match = _RANGE.fullmatch(item)
        if not match or match[1] != match[3] or not 0 <= int(match[4]) - int(match[2]) < _MAX_RANGE:
            allowed = f"one name counted upwards, such as C1..C26, over at most {_MAX_RANGE} columns"
            raise ValueError(f"{item!r} is no range of columns. Allowed: {allowed}")
        width = len(match[2]) if match[2].startswith("0") else 0
        columns += [f"{match[1]}{i:0{width}}" for i in range(int(match[2]), int(match[4]) + 1)]
    return tuple(columns)


Text = Annotated[str, pydantic.Field(min_length=1)]
Count = Annotated[int, pydantic.Field(ge=1, le=MAX_COUNT)]
Columns = Annotated[
    tuple[Text, ...], pydantic.BeforeValidator(_expand_columns), pydantic.Field(min_length=1, strict=False)
]
Name = Annotated[str, pydantic.Field(min_length=1, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Keep = Literal["newest", "oldest"]
Granularity = Literal["words", "characters", "word_ngrams", "pinyin"]
TimePart = Literal["hour", "weekday", "day", "month"]

TIME_ROWS: dict[TimePart, int] = {"hour": 24, "weekday": 7, "day": 32, "month": 13}
"""Rows of the tables of timestamp parts: hours 0..23, Monday 0 .. Sunday 6, days 1..31, months 1..12."""


@dataclasses.dataclass(frozen=True)
class IdInput:
    """One id input of a model.

    Attributes:
        name: What the model calls it.
        table: Where it is looked up.
        columns: What is read of the data; more than one for a cross.
        feature: How it was declared.
        pooling: How the vectors of several ids become one.
        max_length: Longest list; None means one id per row.
        newest: Which end of a list that is too long stays.
        leader: First column of the history that this one runs in step with.
        weights: Column with a weight for each id of the list.
        part: The part of a timestamp, or the granularity of a text.
        num_rows: Number of ids where the feature itself decides it; they are then 0 .. num_rows - 1.
    """

    name: str
    table: str
    columns: tuple[str, ...]
    feature: "Feature"
    pooling: Pooling = "sum"
    max_length: int | None = None
    newest: bool = True
    leader: str | None = None
    weights: str | None = None
    part: str | None = None
    num_rows: int | None = None

    @property
    def raw(self) -> bool:
        """Whether its ids stand in the data as they are, alone or in lists."""
        return isinstance(self.feature, IdFeature | IdListFeature | HistoryFeature)


class IdFeature(Settings):
    """Columns with one id (integer or string) per row."""

    kind: Literal["id"]
    columns: Columns
    """Column names; ranges such as `C1..C26` are written out."""
    table: Name | None = None
    """Table that all these columns share; None gives each column a table of its own name."""

    def id_inputs(self) -> Iterator[IdInput]:
        """One per column."""
        for column in self.columns:
            yield IdInput(column, self.table or column, (column,), self)


class IdListFeature(Settings):
    """Columns with a list of ids per row, pooled into one vector."""

    kind: Literal["id_list"]
    columns: Columns
    """Column names."""
    table: Name | None = None
    """Table that all these columns share; None gives each column a table of its own name."""
    pooling: Pooling = "mean"
    """How the vectors of one list become one vector; with weights, `mean` divides by their sum."""
    weights: dict[Text, Text] = pydantic.Field(default_factory=dict)
    """Column -> column with a list of as many weights, numbers >= 0, that the vectors are multiplied by."""
    max_length: Count = 100
    """Longest list; longer ones are cut and counted."""
    keep: Keep = "newest"
    """Which end of a list that is too long stays: newest is the end, oldest the beginning."""

    @pydantic.model_validator(mode="after")
    def _weights_belong_to_columns(self) -> "IdListFeature":
        if unknown := sorted(self.weights.keys() - set(self.columns)):
            raise ValueError(f"weights are given for {unknown}. Allowed: {list(self.columns)}")
        return self

    def id_inputs(self) -> Iterator[IdInput]:
        """One per column."""
        for column in self.columns:
            yield IdInput(
                column,
                self.table or column,
                (column,),
                self,
                self.pooling,
                self.max_length,
                self.keep == "newest",
                weights=self.weights.get(column),
            )


class HistoryFeature(Settings):
    """Lists of past events, oldest first, in step, each paired with a column of the candidate."""

    kind: Literal["history"]
    of: dict[Text, Text] = pydantic.Field(min_length=1)
    """History column -> id column it is compared with. Both share one table."""
    max_length: Count = 50
    """Longest history; longer ones are cut and counted."""
    keep: Keep = "newest"
    """Which end of a history that is too long stays: newest is the end, oldest the beginning."""

    def id_inputs(self) -> Iterator[IdInput]:
        """One per column; its table is called after the target, whose own table it shares (see `Recipe`)."""
        leader = next(iter(self.of))
        for column, target in self.of.items():
            yield IdInput(
                column, target, (column,), self, "mean", self.max_length, self.keep == "newest", leader=leader
            )


class NumberFeature(Settings):
    """Columns with one number per row. Infinity is an error, and so are NaN and null unless they are filled."""

    kind: Literal["number"]
    columns: Columns
    """Column names; ranges such as `I1..I13` are written out."""
    transform: Literal["standardize", "signed_log", "min_max", "quantile", "none"] = "standardize"
    """`standardize` subtracts the training data's mean and divides by its standard deviation; `signed_log` does so
    with sign(x) log(1 + |x|); `min_max` maps the training data's range to 0..1 and clips the rest; `quantile` looks
    up the number's bucket, each holding as many training rows as the others, in a table of the column's name."""
    buckets: Annotated[int, pydantic.Field(ge=2, le=4096)] = 16
    """Number of buckets (`quantile` only)."""
    missing: Literal["error", "fill"] = "error"
    """What NaN and null do. `fill` puts `fill` in their place and adds an input `COLUMN_missing` that is 1 there, 0
    elsewhere; under `quantile` they have a row of their own instead."""
    fill: Annotated[float, pydantic.Field(ge=-3.4e38, le=3.4e38)] = 0.0
    """Number that stands for a missing one, in the data's unit."""

    def id_inputs(self) -> Iterator[IdInput]:
        """One per column under `quantile`, else none."""
        if self.transform == "quantile":
            for column in self.columns:
                yield IdInput(column, column, (column,), self, num_rows=self.buckets)

    def dense_inputs(self) -> tuple[str, ...]:
        """Names of the numbers that the model reads: those of the columns, then those that tell which are missing."""
        if self.transform == "quantile":
            return ()
        return self.columns + (tuple(f"{c}_missing" for c in self.columns) if self.missing == "fill" else ())


class CrossFeature(Settings):
    """One id for each combination of the ids in two or three columns; a null in one of them makes it a null."""

    kind: Literal["cross"]
    of: Annotated[tuple[Text, ...], pydantic.Field(min_length=2, max_length=3, strict=False)]
    """Columns with one id per row each; they need not be features themselves."""
    name: Name | None = None
    """What it is called; None joins the columns' names with `_x_`."""
    table: Name | None = None
    """Table it is looked up in; None gives it one of its own name."""

    def id_inputs(self) -> Iterator[IdInput]:
        """One."""
        name = self.name or "_x_".join(self.of)
        yield IdInput(name, self.table or name, self.of, self)


class TimestampFeature(Settings):
    """Parts of a point in time, each an id `COLUMN_PART` with a table of its own."""

    kind: Literal["timestamp"]
    columns: Columns
    """Columns of Arrow timestamps or dates, or integers since 1970-01-01 UTC."""
    parts: Annotated[tuple[TimePart, ...], pydantic.Field(min_length=1, strict=False)] = ("hour", "weekday")
    """`hour` 0..23, `weekday` Monday 0 .. Sunday 6, `day` of the month, `month` of the year."""
    unit: Literal["s", "ms", "us", "ns"] = "s"
    """Unit of integer columns."""
    utc_offset_hours: Annotated[float, pydantic.Field(ge=-24, le=24)] = 0.0
    """Local time minus UTC; 8 for China."""

    def id_inputs(self) -> Iterator[IdInput]:
        """One per column and part."""
        for column in self.columns:
            for part in self.parts:
                name = f"{column}_{part}"
                yield IdInput(name, name, (column,), self, part=part, num_rows=TIME_ROWS[part])


class TextFeature(Settings):
    """Columns of text, cut into tokens of several granularities, each a list of ids `COLUMN_GRANULARITY`."""

    kind: Literal["text"]
    columns: Columns
    """Column names."""
    tokens: Annotated[tuple[Granularity, ...], pydantic.Field(min_length=1, strict=False)] = ("words",)
    """`words`, `characters`, `word_ngrams` (words side by side), `pinyin` (of words: homophones share a row)."""
    segmenter: Literal["unicode", "jieba"] = "unicode"
    """How words are found: `jieba` knows Chinese words and needs the extra `text`, as `pinyin` does."""
    ngram: Annotated[int, pydantic.Field(ge=2, le=5)] = 2
    """Words in one n-gram."""
    table: Name | None = None
    """Table that all granularities of these columns share; None gives each column one of its own name."""
    pooling: Pooling = "mean"
    """How the vectors of the tokens become one vector."""
    max_length: Count = 64
    """Most tokens of each granularity; further ones are cut and counted."""

    def id_inputs(self) -> Iterator[IdInput]:
        """One per column and granularity."""
        for column in self.columns:
            for part in self.tokens:
                yield IdInput(
                    f"{column}_{part}",
                    self.table or column,
                    (column,),
                    self,
                    self.pooling,
                    self.max_length,
                    newest=False,
                    part=part,
                )


Feature = Annotated[
    IdFeature | IdListFeature | HistoryFeature | NumberFeature | CrossFeature | TimestampFeature | TextFeature,
    pydantic.Field(discriminator="kind"),
]
