"""What the encoder refuses: values, columns, and ids that could never match."""

import math

import numpy as np
import pyarrow as pa
import pytest

from recsys.encoder import Encoder
from recsys.errors import UserError
from recsys.recipe import Recipe
from tests._encoder_data import encode, fitted, good_columns, recipe, table_of

BAD = {
    "below": ({"shop": [0, 1, -1, 2]}, {}, ["'shop'", "row 102", "Received: -1", "0..9"]),
    "above": ({"shop": [0, 1, 2, 10]}, {}, ["'shop'", "row 103", "Received: 10", "0..9"]),
    "uint64": ({"shop": [0, 2**64 - 1, 2, 1]}, {"shop": pa.uint64()}, ["'shop'", "row 101", str(2**64 - 1), "0..9"]),
    "list": ({"shops": [[0, 1], [], [None], [1, 2, 3, 77]]}, {}, ["'shops'", "row 103", "Received: 77", "0..9"]),
    "nan": ({"price": [1.0, 2.0, 3.0, math.nan]}, {}, ["'price'", "row 103", "nan"]),
    "inf": ({"price": [1.0, -math.inf, 3.0, 1.0]}, {}, ["'price'", "row 101", "-inf"]),
    "null": ({"age": [30, 40, None, 60]}, {}, ["'age'", "row 102", "null"]),
    "too large for float32": ({"price": [1, 2, 1e39, 1]}, {"price": pa.float64()}, ["'price'", "row 102", "1e+39"]),
    "label 2": ({"label": [0, 1, 2, 1]}, {}, ["'label'", "row 102", "Received: 2", "0 or 1"]),
    "label null": ({"label": [0, None, 1, 1]}, {}, ["'label'", "row 101", "null"]),
    "label nan": ({"label": [0, 1, 1, math.nan]}, {}, ["'label'", "row 103", "nan"]),
    "step": ({"shops": [[0, 1], [], [None], [1, 2]]}, {}, ["'items'", "'shops'", "row 103", "4 and 2"]),
    "step null": ({"shops": [None, [], [None], [1] * 4]}, {}, ["'items'", "'shops'", "row 100", "2 and 0"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_value_is_an_error_that_names_feature_row_value_and_limit(case):
    change, types, expected = BAD[case]
    encoder, table = fitted(recipe()), table_of(good_columns() | change, **types)
    for method in (encoder.encode, encoder.check):
        with pytest.raises(UserError) as caught:
            method(table, np.arange(100, 104))
        assert all(part in str(caught.value) for part in expected), str(caught.value)


def test_all_problems_of_a_schema_are_told_at_once():
    types = {
        "prise": pa.float32(),
        "age": pa.string(),
        "user": pa.float64(),
        "shop": pa.string(),
        "tags": pa.int64(),
        "items": pa.list_(pa.float32()),
        "shops": pa.list_(pa.timestamp("s")),
        "label": pa.string(),
    }
    problems = Encoder(recipe()).schema_problems(
        pa.schema([*types.items(), ("item", pa.int8()), ("item", pa.int8())]), "P"
    )
    text = "\n".join(problems)
    assert len(problems) == len({*types, "item"})
    assert all(problem.startswith("P: column '") for problem in problems)
    for part in (
        "'price' is missing",
        "mean 'prise'",
        "reads it as a number",
        "stands 2 times",
        "lose digits",
        "exact ids 0..9",
        "one value per row",
    ):
        assert part in text
    assert len(Encoder(recipe()).schema_problems(pa.schema(list(types.items())), "P", labelled=False)) == len(types)


def test_lists_where_one_id_is_read_and_unsuitable_groups_are_schema_problems():
    used = recipe().model_dump()
    used["data"]["group"] = "session"
    table = table_of(good_columns() | {"item": [[1]] * 4, "session": [1.5] * 4})
    found = Encoder(Recipe.model_validate(used)).schema_problems(table.schema, "P")
    assert [("holds lists" in p, "groups are ids" in p) for p in found] == [(True, False), (False, True)]


def test_encoding_data_that_does_not_fit_raises_all_schema_problems():
    table = table_of(good_columns()).drop_columns(["item", "age"])
    with pytest.raises(UserError, match=r"(?s)'item' is missing.*|'age' is missing"):
        encode(table)


def kinds(**columns: pa.DataType) -> pa.Schema:
    """The schema of good data with some columns of other types."""
    fields = dict(zip(table_of(good_columns()).schema.names, table_of(good_columns()).schema.types, strict=True))
    return pa.schema(list({**fields, **columns}.items()))


TEXTS = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
INTEGERS = [pa.int8(), pa.uint64(), pa.bool_(), pa.dictionary(pa.int8(), pa.int64())]


@pytest.mark.parametrize("text", TEXTS, ids=str)
@pytest.mark.parametrize("integer", INTEGERS, ids=str)
def test_text_in_one_column_and_integers_in_another_of_a_table_are_a_problem(text, integer):
    (problem,) = Encoder(recipe()).kind_problems({"data.train": kinds(item=integer, items=pa.list_(text))})
    for part in ("table 'item'", "integers: 'item' in data.train", "text: 'items' in data.train", "Do: "):
        assert part in problem


def test_text_in_one_split_and_integers_in_another_are_a_problem_per_table():
    splits = {
        "data.train": kinds(tags=pa.list_(pa.string())),
        "data.valid": kinds(user=pa.int64(), tags=pa.large_list(pa.int8())),
        "data.test": kinds(),
    }
    user, tags = sorted(Encoder(recipe()).kind_problems(splits), reverse=True)
    assert "integers: 'user' in data.valid; text: 'user' in data.train, data.test" in user
    assert "integers: 'tags' in data.valid; text: 'tags' in data.train, data.test" in tags


def test_ids_of_one_kind_and_columns_of_nulls_are_no_problem():
    encoder = Encoder(recipe())
    null = pa.null()
    assert (
        encoder.kind_problems({"a": kinds(), "b": kinds(user=null, item=null, items=null, tags=pa.list_(null))}) == []
    )
    assert encoder.kind_problems({"a": kinds(item=pa.int8(), items=pa.large_list(pa.uint64()))}) == []
    # Tables of their own may differ; an exact table refuses text by itself; what is missing is told elsewhere.
    assert encoder.kind_problems({"a": kinds(user=pa.int8(), shop=pa.string()), "b": pa.schema([])}) == []
