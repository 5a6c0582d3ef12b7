"""Arbitrary small tables, arbitrarily sliced, against the plain-Python reference."""

import math

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.errors import UserError
from tests._encoder_data import MAX_LENGTH, ROWS, bags, fitted, recipe, reference_bags

integers = st.none() | st.integers(-(2**63), 2**63 - 1)
texts = st.none() | st.text(st.characters(codec="utf-8"), max_size=12)
exact = st.none() | st.integers(0, ROWS - 1) | st.sampled_from([0, 1, ROWS - 1, ROWS, -1])
floats = st.floats(allow_nan=True, allow_infinity=True, width=32) | st.integers(-5, 5).map(float)


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, list], pa.Table]:
    count = draw(st.integers(0, 6))

    def column(element: st.SearchStrategy) -> list:
        return draw(st.lists(element, min_size=count, max_size=count))

    mostly_good = draw(st.booleans())
    number = st.integers(-(10**6), 10**6).map(float) if mostly_good else floats
    shop = st.none() | st.integers(0, ROWS - 1) if mostly_good else exact
    history = column(st.none() | st.lists(st.tuples(integers, shop), max_size=6))
    values = {
        "price": column(number),
        "age": column(st.integers(0, 99)),
        "user": column(texts),
        "item": column(draw(st.sampled_from([integers, texts]))),
        "shop": column(shop),
        "tags": column(st.none() | st.lists(texts, max_size=5)),
        "items": [h if h is None else [event[0] for event in h] for h in history],
        "shops": [h if h is None else [event[1] for event in h] for h in history],
        "label": column(st.sampled_from([0, 1] if mostly_good else [0, 1, 2, None])),
    }
    is_text = any(isinstance(v, str) for v in values["item"])
    lists = draw(st.sampled_from([pa.list_, pa.large_list]))
    text = draw(st.sampled_from([pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]))
    types = {
        "price": draw(st.sampled_from([pa.float32(), pa.float64()])),
        "age": draw(st.sampled_from([pa.int8(), pa.float32()])),
        "user": text,
        "item": text if is_text else pa.int64(),
        "shop": draw(st.sampled_from([pa.int8(), pa.int64()])),
        "tags": lists(pa.large_string()),
        "items": lists(pa.int64()),
        "shops": lists(pa.int16()),
        "label": draw(st.sampled_from([pa.int8(), pa.float64()])),
    }
    before, after = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    padded = {name: [None] * before + part + [None] * after for name, part in values.items()}
    table = pa.table({name: pa.array(part, types[name]) for name, part in padded.items()})
    cut = draw(st.integers(0, table.num_rows))
    return values, pa.concat_tables([table.slice(0, cut), table.slice(cut)]).slice(before, count)


def is_legal(values: dict[str, list]) -> bool:
    shops = [*values["shop"], *(s for bag in values["shops"] for s in (bag or [])[-MAX_LENGTH:])]
    return (
        all(math.isfinite(v) for v in values["price"])
        and all(v is None or 0 <= v < ROWS for v in shops)
        and all(v in (0, 1) for v in values["label"])
    )


@settings(max_examples=150, deadline=None)
@given(cases())
def test_any_small_table_equals_the_reference_or_is_refused(case):
    values, table = case
    encoder, rows = fitted(recipe()), np.arange(table.num_rows)
    if not is_legal(values):
        for method in (encoder.check, encoder.encode):
            with pytest.raises(UserError):
                method(table, rows)
        return
    encoder.check(table, rows)
    batch = encoder.encode(table, rows)
    for name in ("user", "item", "shop", "tags", "items", "shops"):
        assert bags(batch, name) == reference_bags(values[name], name)
    assert batch.labels.tolist() == values["label"]
    expected = torch.tensor([(v - 3) / math.sqrt(10) for v in values["price"]], dtype=torch.float64)
    torch.testing.assert_close(batch.dense[:, 0].double(), expected, rtol=1e-6, atol=1e-6)
