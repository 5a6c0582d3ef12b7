"""Arbitrary recipes and arbitrary Arrow tables: encoded as the plain-Python reference says, or refused by name."""

import collections
import dataclasses
import datetime
import itertools
import math
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recsys.data.batch import Batch
from recsys.data.encoded import EncodedRows
from recsys.encoder import Encoder
from recsys.errors import UserError
from recsys.features import TIME_ROWS
from recsys.recipe import Recipe
from tests._reference_features import PER_SECOND, Data, Known, Reference, RefusedError, column_of, signed

INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
TEXTS = [pa.string(), pa.large_string(), pa.string_view()]
FLOATS = [pa.float16(), pa.float32(), pa.float64()]
INT64_MAX = 2**63 - 1
KINDS = ["cross", "history", "id_list", "number", "text", "timestamp"]
FAULTS = {"history": ["step"], "id_list": ["weight", "weights"], "number": ["number"], "timestamp": ["time"]}
"""What may be wrong with the data of some kinds, one thing at a time: many would all be refused for the first."""

# A local time may leave the years 1 to 9999 by a day: what happens there is not promised.
FIRST_S, LAST_S = (
    int((datetime.datetime(*day) - datetime.datetime(1970, 1, 1)).total_seconds())
    for day in ((1, 1, 3), (9999, 12, 29))
)
texts = st.sampled_from(["", "a", "b", "1", "caf\u00e9", "\u63a8\u8350"]) | st.text(
    st.characters(codec="utf-8"), max_size=6
)
titles = st.lists(
    st.sampled_from(["red", "Shoe", "5g", "\u624b\u673a", "\u30e9\u30fc\u30e1", "!", "\U0001f525"]), max_size=6
).map(" ".join)
times_s = st.integers(-(10**10), 10**10) | st.integers(FIRST_S, LAST_S) | st.sampled_from([-1, 0, 951_782_400])


@dataclasses.dataclass
class Case:
    """A recipe, rows of data by column, and what training has learnt; `seed` slices and chunks the table."""

    recipe: Recipe
    data: Data
    types: dict[str, pa.DataType]
    known: Known
    seed: int

    @property
    def num_rows(self) -> int:
        return len(self.data["label"])

    def picked(self, order: list[int]) -> "Case":
        """The case with its rows in another order."""
        return dataclasses.replace(self, data={name: [v[i] for i in order] for name, v in self.data.items()})

    def table(self) -> pa.Table:
        rng = random.Random(self.seed)
        return pa.table({name: column_of(values, self.types[name], rng) for name, values in self.data.items()})

    def encoder(self) -> Encoder:
        """An encoder that knows what training has learnt."""
        encoder = Encoder(self.recipe)
        numbers = pa.table({name: pa.array(v, pa.float64()) for name, v in self.known.training.items()})
        rows = np.arange(numbers.num_rows)
        encoder.fit(encoder.numbers.measure(encoder.numbers.read(numbers, rows, collections.Counter()), rows))
        for table, hot in self.known.hot.items():
            index = sorted((signed(key), row) for key, row in hot.items())
            index += [(INT64_MAX, -1)] * (encoder.settings[table].hot - len(index))
            keys, rows = np.array(index, dtype=np.int64).reshape(-1, 2).T
            encoder.set_vocabulary(table, keys, rows)
        return encoder


def bounds(kind: pa.DataType) -> tuple[int, int]:
    """Least and greatest number that a type of integers, or of times, holds."""
    bits = kind.bit_width
    return (0, 2**bits - 1) if pa.types.is_unsigned_integer(kind) else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def integers_of(kind: pa.DataType, num_ids: int | None = None) -> st.SearchStrategy:
    """Integers or booleans of a type; `num_ids` keeps them inside an exact table."""
    if pa.types.is_boolean(kind):
        return st.booleans() if num_ids is None or num_ids > 1 else st.just(False)
    low, high = bounds(kind)
    if num_ids is not None:
        return st.integers(0, min(high, num_ids - 1))
    return st.integers(0, 5) | st.sampled_from([low, high, high // 2 + 1, 9, 10]) | st.integers(low, high)


class Builder:
    """Draws the parts of one case; `fault` is what may be wrong with its data, "" for nothing."""

    def __init__(self, draw: st.DrawFn, kinds: list[str]) -> None:
        self.draw = draw
        self.num_rows = self.choose(3, 2, 1, 0, 4, 5, 6)
        faults = ["exact", "label", *(fault for kind in kinds for fault in FAULTS.get(kind, []))]
        self.fault = self.choose(*[""] * len(faults), *faults)
        self.features: list[dict[str, Any]] = []
        self.tables: dict[str, dict[str, Any]] = {}
        self.is_text: dict[str, bool] = {}  # By table.
        self.data: Data = {}
        self.types: dict[str, pa.DataType] = {}
        self.known = Known()

    def choose(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def rows(self, element: st.SearchStrategy) -> list:
        return self.draw(st.lists(element, min_size=self.num_rows, max_size=self.num_rows))

    def policy(self, table: str, *, exact: bool) -> None:
        hashes, hot = self.choose(1, 2), self.choose(0, 1, 2, 4)
        least = 2 if hashes == 2 else 0 if hot else 1
        self.tables[table] = {
            "ids": self.choose("hashed", "hot_cold", *["exact"] * exact),
            "rows": self.choose(1, 2, 10, 1000, 2**31, 2**40),
            "hot": hot,
            "cold": self.choose(*(n for n in (0, 1, 2, 7, 2**40) if n >= least)),
            "cold_hashes": hashes,
            "bad_ids": self.choose("error", "unknown", "clamp"),
        }

    def id_type(self, table: str) -> tuple[pa.DataType, st.SearchStrategy]:
        """A type for a column of ids of a table, and ids of that type."""
        is_text, policy = self.is_text[table], self.tables.get(table, {"ids": "hashed"})
        kind = self.choose(*(TEXTS if is_text else [*INTEGERS, pa.bool_()]))
        inside = policy["ids"] == "exact" and policy["bad_ids"] == "error" and self.fault != "exact"
        values = texts if is_text else integers_of(kind, policy["rows"] if inside else None)
        if self.draw(st.booleans()):
            kind = pa.dictionary(self.choose(pa.int8(), pa.uint16(), pa.int64()), kind)
        return kind, st.none() | values

    def id_column(self, name: str) -> None:
        self.types[name], values = self.id_type(name)
        self.data[name] = self.rows(values)
        if all(v is None for v in self.data[name]):
            self.types[name] = self.choose(self.types[name], pa.null())

    def list_columns(self, **tables: str) -> dict[str, Any]:
        """Columns of lists in step, name=table; returns how they are cut."""
        size = self.choose(None, None, 0, 2, 3)
        lengths = self.rows(st.none() | (st.integers(0, 5) if size is None else st.just(size)))
        for name, table in tables.items():
            inner, values = self.id_type(table)
            self.data[name] = [n if n is None else self.draw(st.lists(values, min_size=n, max_size=n)) for n in lengths]
            fixed = [] if not size else [pa.list_(inner, size)]
            self.types[name] = self.choose(pa.list_(inner), pa.large_list(inner), *fixed)
        return {"max_length": self.draw(st.integers(1, 4)), "keep": self.choose("newest", "oldest")}

    def break_step(self, fault: str, name: str) -> None:
        """Give a list of one row another length, if that is what is wrong."""
        if self.fault == fault and self.num_rows:
            bag = [None if fault == "step" else 1] * self.draw(st.integers(0, 4))
            self.data[name][self.draw(st.integers(0, self.num_rows - 1))] = bag
            self.types[name] = pa.list_(self.types[name].value_type)

    # Kinds of features.

    def ids(self) -> None:
        for name in ("user", "item", "shop"):
            self.is_text[name] = self.draw(st.booleans())
            self.policy(name, exact=not self.is_text[name])
            self.id_column(name)
        self.features.append({"kind": "id", "columns": ["user", "item", "shop"]})

    def history(self) -> None:
        cut = self.list_columns(items="item", shops="shop")
        self.break_step("step", "shops")
        self.features.append({"kind": "history", "of": {"items": "item", "shops": "shop"}, **cut})

    def id_list(self) -> None:
        table = self.choose("tags", "user")
        if table == "tags":
            self.is_text[table] = self.draw(st.booleans())
            self.policy(table, exact=not self.is_text[table])
        cut, weights = self.list_columns(tags=table), {}
        if self.choose(True, True, False) or self.fault in FAULTS["id_list"]:
            weights = {"weights": {"tags": "tag_weights"}}
            self.tag_weights()
        pooling = self.choose("sum", "mean")
        self.features.append(
            {"kind": "id_list", "columns": ["tags"], "table": table, "pooling": pooling, **cut, **weights}
        )

    def tag_weights(self) -> None:
        kind = self.choose(*FLOATS, pa.int8(), pa.uint64())
        values = st.floats(0, 60_000, width=16) if kind in FLOATS else st.integers(0, 100)
        if self.fault == "weight" and kind != pa.uint64():
            large = [1e39] if kind == pa.float64() else []
            values |= st.sampled_from([-0.5, math.nan, math.inf, None, *large] if kind in FLOATS else [-1, None])
        self.data["tag_weights"] = [
            None if bag is None else self.draw(st.lists(values, min_size=len(bag), max_size=len(bag)))
            for bag in self.data["tags"]
        ]
        self.types["tag_weights"] = self.choose(pa.list_(kind), pa.large_list(kind))
        self.break_step("weights", "tag_weights")

    def number(self) -> None:
        transforms = st.sampled_from(["standardize", "signed_log", "min_max", "quantile", "none"])
        for transform in self.draw(st.lists(transforms, min_size=1, max_size=3, unique=True)):
            name, missing = f"x_{transform}", self.choose("error", "fill")
            kind = self.choose(*FLOATS, *INTEGERS, pa.bool_(), pa.decimal128(9, 2), pa.decimal256(9, 2))
            training = self.draw(st.lists(st.integers(-100, 100).map(float), min_size=8, max_size=8))
            if pa.types.is_decimal(kind):
                values = st.decimals(-(10**6), 10**6, places=2)
            elif kind in FLOATS:  # Far beyond the training data, but not so far that a quotient leaves float32.
                bits, limit = kind.bit_width, 60_000 if kind == pa.float16() else 2.0**100
                values = st.sampled_from(training) | st.floats(-limit, limit, width=bits)
            else:
                values = integers_of(kind)
            if missing == "fill" or self.fault == "number":
                values = st.none() | values | (st.just(math.nan) if kind in FLOATS else st.none())
            if self.fault == "number" and kind in FLOATS:
                values |= st.sampled_from([math.inf, -math.inf, *([1e39] if kind == pa.float64() else [])])
            self.types[name], self.data[name] = kind, self.rows(values)
            # Twice the same numbers have the same statistics and limits; columns of one table have one length.
            self.known.training[name] = training + ([None, math.nan] * 4 if missing == "fill" else training)
            sizes = {"buckets": self.choose(2, 4, 8), "missing": missing, "fill": self.choose(0.0, -2.5, 1000.0)}
            self.features.append({"kind": "number", "columns": [name], "transform": transform, **sizes})

    def cross(self) -> None:
        self.is_text["city"] = self.draw(st.booleans())
        self.id_column("city")
        of = self.draw(st.permutations(["user", "item", "shop", "city"]))[: self.choose(2, 3)]
        feature = {"kind": "cross", "of": of, **self.choose({}, {"name": "pair"}, {"table": "pairs"})}
        self.policy(feature.get("table") or feature.get("name") or "_x_".join(of), exact=False)
        self.features.append(feature)

    def timestamp(self) -> None:
        unit, zone = self.choose(*PER_SECOND), self.choose(None, "UTC", "Asia/Shanghai")
        small = [] if self.fault == "time" else INTEGERS
        kind = self.choose(pa.timestamp(unit, zone), pa.date32(), pa.date64(), pa.int64(), pa.uint64(), *small)
        per_second = PER_SECOND[unit]
        if pa.types.is_date(kind):
            self.known.units["when"] = "D" if kind == pa.date32() else "ms"
            values = times_s.map(lambda s: s // 86_400 * (1 if kind == pa.date32() else 86_400_000))
        else:
            self.known.units["when"] = unit
            values = st.tuples(times_s, st.integers(0, per_second - 1)).map(lambda t: t[0] * per_second + t[1])
        low, high = bounds(kind)
        values = values.map(lambda v: min(max(v, low), high))
        if self.fault == "time":
            values |= st.sampled_from([low, high])
        self.types["when"], self.data["when"] = kind, self.rows(st.none() | values)
        parts = self.draw(st.lists(st.sampled_from(list(TIME_ROWS)), min_size=1, unique=True))
        offset = {"unit": unit, "utc_offset_hours": self.draw(st.integers(-96, 96)) / 4}
        self.features.append({"kind": "timestamp", "columns": ["when"], "parts": parts, **offset})

    def text(self) -> None:
        kind = self.choose(*TEXTS, pa.dictionary(pa.int8(), pa.large_string()))
        self.types["title"], self.data["title"] = kind, self.rows(st.none() | titles)
        self.policy("title", exact=False)
        names = st.sampled_from(["words", "characters", "word_ngrams"])
        limits = {"ngram": self.choose(2, 3), "max_length": self.draw(st.integers(1, 6))}
        tokens = self.draw(st.lists(names, min_size=1, unique=True))
        self.features.append({"kind": "text", "columns": ["title"], "tokens": tokens, **limits})

    def label(self) -> dict[str, Any]:
        """The label's column; returns the settings of the data."""
        kind, bad_labels = self.choose(pa.int8(), pa.bool_(), pa.float32(), pa.float64()), self.choose("error", "skip")
        values = st.sampled_from([0, 1])
        if (bad_labels == "skip" or self.fault == "label") and kind != pa.bool_():
            values |= st.sampled_from([2, -1, None, *([0.5, math.nan] if kind in FLOATS else [])])
        self.types["label"], self.data["label"] = kind, self.rows(values)
        return {"train": "t", "group": self.choose(None, "user", "item"), "bad_labels": bad_labels}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kinds = sorted(draw(st.sets(st.sampled_from(KINDS))))
    built = Builder(draw, kinds)
    for kind in ["ids", *kinds]:
        getattr(built, kind)()
    model = draw(st.sampled_from(["din", "deepfm"])) if "history" in kinds else "deepfm"
    recipe = Recipe.model_validate(
        {"model": {"name": model}, "data": built.label(), "features": built.features, "tables": built.tables}
    )
    case = Case(recipe, built.data, built.types, built.known, draw(st.integers(0, 2**32)))
    try:
        keys = Reference(recipe, case.data, case.known).keys
    except RefusedError:
        return case
    rng = random.Random(case.seed)
    for table, policy in built.tables.items():
        if policy["ids"] == "hot_cold" and policy["hot"]:
            # The greatest key is the one that fills an index up.
            seen = [*sorted(keys[table]), *([INT64_MAX] if rng.random() < 0.3 else [])]
            hot = rng.sample(seen, min(len(seen), rng.randint(0, policy["hot"])))
            case.known.hot[table] = dict(zip(hot, rng.sample(range(3, 3 + policy["hot"]), len(hot)), strict=True))
    return case


def per_row(batch: Batch) -> dict[str, list[tuple[list[int], list[float]]]]:
    """Input -> rows of its table, and their weights, for each row of data."""
    found = {}
    for features in (batch.pooled, batch.sequence):
        values, weights = features.values(), features.weights_or_none()
        weights = torch.ones(len(values)) if weights is None else weights
        lengths = features.lengths().tolist()
        bags = [part.tolist() for part in values.split(lengths)] if lengths else []
        amounts = [part.tolist() for part in weights.split(lengths)] if lengths else []
        both = list(zip(bags, amounts, strict=True))
        for n, name in enumerate(features.keys()):
            found[name] = both[n * len(batch) : (n + 1) * len(batch)]
    return found


def as_lists(encoded: EncodedRows) -> list[tuple]:
    """Everything about each encoded row; dense numbers apart, since their last bit depends on their neighbours."""
    flat = [part.tolist() for part in (encoded.rows, encoded.labels, encoded.counted, encoded.groups, encoded.ids)]
    for lists in encoded.lists:
        ends = lists.offsets.tolist()
        for part in [lists.values] + ([] if lists.weights is None else [lists.weights]):
            flat.append([part[low:high].tolist() for low, high in itertools.pairwise(ends)])
    return list(zip(*flat, strict=True))


fuzz = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@settings(fuzz, max_examples=200)
@given(cases())
def test_any_table_equals_the_reference_or_is_refused_by_name(case):
    encoder, table = case.encoder(), case.table()
    rows = np.arange(100, 100 + case.num_rows)
    try:
        expected = Reference(case.recipe, case.data, case.known)
    except RefusedError:
        for method in (encoder.check, encoder.encode):
            with pytest.raises(UserError):
                method(table, rows)
        return
    encoder.check(table, rows)
    assert not encoder.counters
    batch = encoder.encode(table, rows)
    found = per_row(batch)
    assert found.keys() == expected.bags.keys()
    for i in encoder.inputs:
        bags, inside = expected.bags[i.name], range(1, encoder.settings[i.table].id_rows + 3)
        assert all(row in inside for bag, _ in found[i.name] for row in bag), f"{i.name} leaves its table"
        weights = expected.weights.get(i.name, [[1.0] * len(bag) for bag in bags])
        assert (i.name, found[i.name]) == (i.name, list(zip(bags, weights, strict=True)))
    for name, column in zip(case.recipe.dense_inputs, batch.dense.t().tolist(), strict=True):
        assert (name, column) == (name, pytest.approx(expected.dense[name], rel=1e-6, abs=1e-6))
    assert len(case.recipe.dense_inputs) == len(expected.dense)
    assert batch.labels.tolist() == expected.labels
    assert batch.weights.tolist() == pytest.approx([c / max(case.num_rows, 1) for c in expected.counted])
    assert (batch.groups.tolist(), batch.rows.tolist()) == (expected.groups, rows.tolist())
    assert encoder.counters == expected.counters


@settings(fuzz, max_examples=80)
@given(cases(), st.randoms(use_true_random=False))
def test_blocks_put_together_in_any_order_are_the_rows_of_one_piece(case, rng):
    encoder, table, num_rows = case.encoder(), case.table(), case.num_rows
    rows = np.arange(num_rows) * 3
    try:
        whole = encoder.encode_rows(table, rows)
    except UserError:
        return
    cuts = [0, *sorted(rng.randint(0, num_rows) for _ in range(3)), num_rows]
    blocks = [
        encoder.encode_rows(table.slice(low, high - low), rows[low:high]) for low, high in itertools.pairwise(cuts)
    ]
    order = [rng.randrange(num_rows) for _ in range(num_rows)]
    low = rng.randint(0, num_rows)
    taken = EncodedRows.concat(blocks).take(np.array(order, dtype=np.int64))
    for found, wanted in ((taken, order), (taken.slice(low, num_rows), order[low:])):
        assert as_lists(found) == [as_lists(whole)[i] for i in wanted]
        np.testing.assert_allclose(found.dense, whole.dense[wanted], rtol=1e-6, atol=1e-6)
        bags = per_row(encoder.batch(whole))
        assert per_row(encoder.batch(found)) == {name: [bags[name][i] for i in wanted] for name in bags}


@settings(fuzz, max_examples=80)
@given(cases(), st.randoms(use_true_random=False))
def test_rows_in_another_order_are_encoded_to_the_same_in_that_order(case, rng):
    order, rows = rng.sample(range(case.num_rows), case.num_rows), np.arange(case.num_rows)
    encoder, moved = case.encoder(), case.picked(order)
    try:
        whole = encoder.encode_rows(case.table(), rows)
    except UserError:
        with pytest.raises(UserError):
            encoder.encode_rows(moved.table(), rows[order])
        return
    found = encoder.encode_rows(moved.table(), rows[order])
    assert as_lists(found) == [as_lists(whole)[i] for i in order]
    np.testing.assert_allclose(found.dense, whole.dense[order], rtol=1e-6, atol=1e-6)
