"""How rows of data become what a model reads, one Python value at a time: the independent reference of the tests.

Written from docs/ids.md, docs/text.md and the descriptions of a recipe's settings. Tokens alone come from
`recsys.text`, which has tests of its own.
"""

import collections
import dataclasses
import datetime
import decimal
import math
import random
from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from recsys.recipe import Recipe
from recsys.text import Tokenizer
from tests._reference_hash import WORD, fnv1a, splitmix64

MISSING, UNKNOWN, FIRST = 1, 2, 3
NULL_GROUP = -(2**63)
LARGEST = float(2**128 - 2**104)  # The largest float32.
SECOND_GAMMA = 0x9E3779B97F4A7C15
TIME_ROWS = {"hour": 24, "weekday": 7, "day": 32, "month": 13}
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}

Data = dict[str, list]
"""Column -> the Python value of each row; times are integers in the unit of their column."""


class RefusedError(Exception):
    """The data is wrong in a way that must be a `UserError`."""


@dataclasses.dataclass
class Known:
    """What training has learnt.

    Attributes:
        hot: Table -> key of a hot id (unsigned) -> its row.
        training: Number column -> its values in the training data, None or NaN where missing.
        units: Time column -> unit of its Arrow type, `D` for dates in days; integers are not named.
    """

    hot: dict[str, dict[int, int]] = dataclasses.field(default_factory=dict)
    training: dict[str, list] = dataclasses.field(default_factory=dict)
    units: dict[str, str] = dataclasses.field(default_factory=dict)


def id_key(value: int | str | bool) -> int:
    """The key of an id, unsigned."""
    return fnv1a(value.encode()) if isinstance(value, str) else int(value) % WORD


def cross_key(values: Iterable[int | str | bool]) -> int:
    """The key of a combination of ids, unsigned."""
    first, *others = values
    key = id_key(first)
    for value in others:
        key = splitmix64((splitmix64(key) + id_key(value)) % WORD)
    return key


def signed(key: int) -> int:
    """The int64 with the bits of an unsigned key."""
    return key - WORD if key >= WORD // 2 else key


def share(hashed: int, num_rows: int) -> int:
    """floor(z * rows / 2^64)."""
    return hashed * num_rows // WORD


def time_parts(value: int, unit: str, utc_offset_hours: float) -> dict[str, int]:
    """The parts of a point in time that is counted in a unit since 1970 UTC."""
    seconds = value * 86_400 if unit == "D" else value // PER_SECOND[unit]
    first, last = (
        (moment - datetime.datetime(1970, 1, 1)) // datetime.timedelta(seconds=1)
        for moment in (datetime.datetime(1, 1, 1), datetime.datetime(9999, 12, 31, 23, 59, 59))
    )
    if not first <= seconds <= last:
        raise RefusedError(f"{value} {unit} lies outside the years 1 to 9999")
    local = datetime.datetime(1970, 1, 1) + datetime.timedelta(seconds=seconds, hours=utc_offset_hours)
    return {"hour": local.hour, "weekday": local.weekday(), "day": local.day, "month": local.month}


def is_missing(number: object) -> bool:
    return number is None or math.isnan(number)


def log_of(x: float) -> float:
    """sign(x) log(1 + |x|)."""
    return math.copysign(math.log1p(abs(x)), x)


def scaled(x: float, transform: str, training: list) -> float:
    """A number as the model reads it."""
    if transform == "none":
        return x
    seen = [float(v) for v in training if not is_missing(v)]
    if transform == "min_max":
        low, high = min(seen), max(seen)
        return min(max((x - low) / ((high - low) or 1.0), 0.0), 1.0)
    if transform == "signed_log":
        x, seen = log_of(x), [log_of(v) for v in seen]
    mean = math.fsum(seen) / len(seen)
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in seen) / len(seen))
    return (x - mean) / (deviation if len(set(seen)) > 1 else 1.0)


def bucket(x: float, num_buckets: int, training: list) -> int:
    """How many of the limits are not above the number; a limit is the least number of a bucket of the training data."""
    seen = sorted(float(v) for v in training if not is_missing(v))
    assert len(seen) % num_buckets == 0, "buckets of equal size are the ones that the documents define"
    size = len(seen) // num_buckets
    return sum(seen[size * i] <= x for i in range(1, num_buckets))


class Reference:
    """Rows of a data set, encoded.

    Attributes:
        bags: Input -> for each row of data the rows of its table.
        weights: Weighted input -> for each row of data as many weights.
        dense: Input -> numbers.
        labels: 0 where it does not count.
        counted: 1, or 0 for rows that must not count.
        groups: Signed keys.
        counters: What was cut, filled, skipped and replaced.
        keys: Table -> unsigned keys that were looked up in it.
    """

    def __init__(self, recipe: Recipe, data: Data, known: Known | None = None) -> None:
        """Encode all columns. Raises: RefusedError."""
        self.recipe, self.data, self.known = recipe, data, known or Known()
        self.bags: dict[str, list[list[int]]] = {}
        self.weights: dict[str, list[list[float]]] = {}
        self.dense: dict[str, list[float]] = {}
        self.counters: collections.Counter[str] = collections.Counter()
        self.keys: dict[str, set[int]] = collections.defaultdict(set)
        self._read_label()
        for feature in recipe.features:
            getattr(self, f"_read_{feature.kind}")(feature)

    def _read_label(self) -> None:
        label, group = self.recipe.data.label, self.recipe.data.group
        legal = [v in (0, 1) for v in self.data[label]]
        if not all(legal) and self.recipe.data.bad_labels == "error":
            raise RefusedError("a label that is neither 0 nor 1")
        self.counters[f"skipped/{label}"] = legal.count(False)
        self.labels = [float(v) if good else 0.0 for v, good in zip(self.data[label], legal, strict=True)]
        self.counted = [float(good) for good in legal]
        groups = self.data[group] if group else [0] * len(legal)
        self.groups = [NULL_GROUP if v is None else signed(id_key(v)) for v in groups]

    # Kinds.

    def _read_id(self, feature) -> None:
        for column in feature.columns:
            table = feature.table or column
            self.bags[column] = [self._raw(column, table, value) for value in self.data[column]]

    def _read_id_list(self, feature) -> None:
        for column in feature.columns:
            self._read_list(column, feature.table or column, feature, feature.weights.get(column))

    def _read_history(self, feature) -> None:
        lengths = [[len(bag or []) for bag in self.data[column]] for column in feature.of]
        if any(other != lengths[0] for other in lengths):
            raise RefusedError("columns of a history are out of step")
        for column, target in feature.of.items():
            table = next(f.table for f in self.recipe.features if f.kind == "id" and target in f.columns) or target
            self._read_list(column, table, feature, None)

    def _read_list(self, column: str, table: str, feature, weights: str | None) -> None:
        bags = self.data[column]
        found = []
        for n, bag in enumerate(bags):
            bag = bag or []
            amounts = [1.0] * len(bag)
            if weights is not None:
                amounts = self.data[weights][n] or []
                if len(amounts) != len(bag):
                    raise RefusedError("ids without their weights")
                if any(a is None or not 0 <= a <= LARGEST for a in amounts):
                    raise RefusedError("a weight that is negative or no number")
            self.counters[f"cut/{column}"] += len(bag) > feature.max_length
            kept = slice(-feature.max_length, None) if feature.keep == "newest" else slice(feature.max_length)
            found.append(
                [(self._raw(column, table, v), float(a)) for v, a in zip(bag[kept], amounts[kept], strict=True)]
            )
        self.bags[column] = [[row for rows, _ in ids for row in rows] for ids in found]
        if weights is not None:
            self.weights[column] = [[amount for rows, amount in ids for _ in rows] for ids in found]

    def _read_number(self, feature) -> None:
        for column in feature.columns:
            missing = [is_missing(v) for v in self.data[column]]
            if any(missing) and feature.missing == "error":
                raise RefusedError("a missing number")
            if any(abs(v) > LARGEST for v, no in zip(self.data[column], missing, strict=True) if not no):
                raise RefusedError("a number that is infinite or too large")
            self.counters[f"filled/{column}"] += sum(missing)
            training = self.known.training.get(column, [])
            pairs = list(zip(self.data[column], missing, strict=True))
            if feature.transform == "quantile":
                self.bags[column] = [
                    [MISSING if no else FIRST + bucket(float(v), feature.buckets, training)] for v, no in pairs
                ]
                continue
            self.dense[column] = [
                scaled(feature.fill if no else float(v), feature.transform, training) for v, no in pairs
            ]
        if feature.transform != "quantile" and feature.missing == "fill":
            for column in feature.columns:
                self.dense[f"{column}_missing"] = [float(is_missing(v)) for v in self.data[column]]

    def _read_cross(self, feature) -> None:
        name = feature.name or "_x_".join(feature.of)
        table = feature.table or name
        combinations = zip(*(self.data[column] for column in feature.of), strict=True)
        self.bags[name] = [
            [MISSING] if None in values else self._hashed(table, cross_key(values)) for values in combinations
        ]

    def _read_timestamp(self, feature) -> None:
        for column in feature.columns:
            unit = self.known.units.get(column, feature.unit)
            parts = [None if v is None else time_parts(v, unit, feature.utc_offset_hours) for v in self.data[column]]
            for part in feature.parts:
                self.bags[f"{column}_{part}"] = [[MISSING if p is None else FIRST + p[part]] for p in parts]

    def _read_text(self, feature) -> None:
        tokenizer = Tokenizer(feature.tokens, segmenter=feature.segmenter, ngram=feature.ngram, max_length=10**6)
        for column in feature.columns:
            for part in feature.tokens:
                name, bags = f"{column}_{part}", []
                for text in self.data[column]:
                    tokens = tokenizer.tokens(text)[part] if text else []
                    self.counters[f"cut/{name}"] += len(tokens) > feature.max_length
                    keys = [fnv1a(f"{part}:{token}".encode()) for token in tokens[: feature.max_length]]
                    bags.append([row for key in keys for row in self._hashed(feature.table or column, key)])
                self.bags[name] = bags

    # Policies.

    def settings(self, table: str):
        return self.recipe.tables[table if table in self.recipe.tables else "default"]

    def _raw(self, name: str, table: str, value: int | str | bool | None) -> list[int]:
        """Rows of an id as it stands in the data."""
        settings = self.settings(table)
        if value is None:
            return [MISSING]
        if settings.ids != "exact":
            return self._hashed(table, id_key(value))
        if 0 <= value < settings.rows:
            return [FIRST + int(value)]
        if settings.bad_ids == "error":
            raise RefusedError("an id outside its table")
        self.counters[f"{'unknown' if settings.bad_ids == 'unknown' else 'clamped'}/{name}"] += 1
        return [UNKNOWN] if settings.bad_ids == "unknown" else [FIRST + min(max(value, 0), settings.rows - 1)]

    def _hashed(self, table: str, key: int) -> list[int]:
        """Rows of a key under the policies that know no range."""
        settings = self.settings(table)
        self.keys[table].add(key)
        if settings.ids == "hashed":
            return [FIRST + share(splitmix64(key), settings.rows)]
        assert settings.ids == "hot_cold", "exact tables take ids as they stand in the data"
        if key in self.known.hot.get(table, {}):
            return [self.known.hot[table][key]]
        if not settings.cold:
            return [UNKNOWN]
        first_cold = FIRST + settings.hot
        if settings.cold_hashes == 1:
            return [first_cold + share(splitmix64(key), settings.cold)]
        half = -(-settings.cold // 2)
        second = splitmix64((key + SECOND_GAMMA) % WORD)
        return [
            first_cold + share(splitmix64(key), half),
            first_cold + half + share(second, settings.cold - half),
        ]


# Python values -> Arrow arrays that hide other values behind nulls, slices and chunks.


def scalars(values: list, kind: pa.DataType, rng: random.Random) -> pa.Array:
    """An array whose buffers hold values behind its nulls as well."""
    if pa.types.is_dictionary(kind):
        distinct = list(dict.fromkeys([*values, *([None] if rng.random() < 0.5 else [])]))
        rng.shuffle(distinct)
        indices = [None if v is None and rng.random() < 0.5 else distinct.index(v) for v in values]
        return pa.DictionaryArray.from_arrays(
            scalars(indices, kind.index_type, rng), scalars(distinct, kind.value_type, rng)
        )
    if pa.types.is_temporal(kind):
        width = kind.bit_width
        return scalars(values, pa.int64() if width == 64 else pa.int32(), rng).view(kind)
    if pa.types.is_boolean(kind):
        values = [v if v is None else bool(v) for v in values]
    if None not in values or pa.types.is_null(kind) or kind == pa.string_view():
        return pa.array(values, kind)
    full = pa.array([hidden(kind) if v is None else v for v in values], kind)
    valid = pa.array([v is not None for v in values]).buffers()[1]
    return pa.Array.from_buffers(kind, len(values), [valid, *full.buffers()[1:]])


def hidden(kind: pa.DataType) -> object:
    """A value that would be illegal, or seen in the result, if it were read."""
    if pa.types.is_floating(kind):
        return math.inf
    if pa.types.is_decimal(kind):
        return decimal.Decimal("77.77")
    if pa.types.is_boolean(kind):
        return True
    return 2 ** (kind.bit_width - 2) if pa.types.is_integer(kind) else "hidden"


def array_of(values: list, kind: pa.DataType, rng: random.Random) -> pa.Array:
    """One array of single values or lists; null lists still span values."""
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return scalars(values, kind, rng)
    fixed = kind.list_size if pa.types.is_fixed_size_list(kind) else None
    inner = [element for bag in values for element in bag or []]
    spanned = [[rng.choice(inner) if inner else None] * (rng.randrange(3) if fixed is None else fixed) for _ in values]
    bags = [span if bag is None else bag for bag, span in zip(values, spanned, strict=True)]
    flat = scalars([element for bag in bags for element in bag], kind.value_type, rng)
    mask = pa.array([bag is None for bag in values], pa.bool_())
    if fixed is not None:
        return pa.FixedSizeListArray.from_arrays(flat, type=kind, mask=mask)
    offsets = pa.array(np.cumsum([0, *map(len, bags)]), pa.int32() if pa.types.is_list(kind) else pa.int64())
    make = pa.ListArray if pa.types.is_list(kind) else pa.LargeListArray
    return make.from_arrays(offsets, flat, type=kind, mask=mask)


def column_of(values: list, kind: pa.DataType, rng: random.Random) -> pa.ChunkedArray:
    """A column in up to three chunks, each a slice out of something longer."""
    cuts = sorted(rng.randint(0, len(values)) for _ in range(rng.choice([0, 0, 1, 2])))
    chunks = []
    for low, high in zip([0, *cuts], [*cuts, len(values)], strict=True):
        before, after = ([rng.choice(values)] * rng.randrange(3) if values else [] for _ in range(2))
        longer = array_of([*before, *values[low:high], *after], kind, rng)
        chunks.append(longer.slice(len(before), high - low))
    return pa.chunked_array(chunks, kind)
