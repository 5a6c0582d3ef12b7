"""What each kind of feature promises, one claim at a time, on data that a reader can follow."""

import datetime
import functools
import itertools
import math
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from recsys import models, recipe_file
from recsys.data.batch import Batch
from recsys.encoder import Encoder
from recsys.errors import UserError
from recsys.job import Task
from recsys.numbers import Statistics
from recsys.predict import evaluate
from recsys.recipe import Recipe
from recsys.stack import require_stack
from recsys.train import train
from tests._encoder_data import bags, scan
from tests._reference_features import FIRST, MISSING, UNKNOWN, Reference, bucket, scaled
from tests._reference_hash import splitmix64

require_stack()

USER = {"kind": "id", "columns": ["user"]}
LARGE = 3.4e38  # Nearly the largest float32.


def recipe(*features: dict, tables: dict | None = None, **data: Any) -> Recipe:
    """A recipe with the id `user` and other features."""
    return Recipe.model_validate(
        {
            "model": {"name": "deepfm", "hidden": [4]},
            "data": {"train": "t"} | data,
            "features": [USER, *features],
            "tables": {"default": {"rows": 1000, "dim": 4}, **(tables or {})},
        }
    )


def table_of(columns: dict[str, Any]) -> pa.Table:
    """Columns, with `user` and `label` where they do not matter."""
    num_rows = len(next(iter(columns.values())))
    return pa.table({"user": ["u"] * num_rows, "label": [0, 1] * (num_rows // 2) + [0] * (num_rows % 2)} | columns)


def encoded(used: Recipe, columns: dict[str, Any], training: dict[str, Any] | None = None) -> tuple[Encoder, Batch]:
    """The encoder, fitted to `training` or to the data itself, and the batch of all rows."""
    encoder, table = Encoder(used), table_of(columns)
    fitted_to = table if training is None else table_of(training)
    encoder.fit(scan(encoder, fitted_to, np.arange(fitted_to.num_rows)))
    return encoder, encoder.encode(table, np.arange(table.num_rows))


def number(transform: str, column: str = "x", **settings: Any) -> dict:
    return {"kind": "number", "columns": [column], "transform": transform, **settings}


# Numbers.

DENSE = ["standardize", "signed_log", "min_max", "none"]


def test_signed_log_is_finite_and_monotone_and_the_same_in_an_exported_module():
    values = [-1e9, -3.0, -1.0, 0.0, 1e9]
    encoder, batch = encoded(recipe(number("signed_log")), {"x": values})
    found = batch.dense[:, 0]
    assert found.isfinite().all()
    assert (found.diff() > 0).all()
    assert found.tolist() == pytest.approx([scaled(v, "signed_log", values) for v in values], rel=1e-6)
    raw = torch.tensor(values, dtype=torch.float64).unsqueeze(1)
    assert torch.equal(torch.export.export(encoder.numbers, (raw,)).module()(raw), batch.dense)


@pytest.mark.parametrize("transform", DENSE)
def test_a_missing_number_reads_as_its_fill_with_a_one_beside_it(transform):
    columns = {"x": [5.0, math.nan, None, 2.0, 7.5], "y": [1.0, 2.0, 3.0, 4.0, 5.0]}
    used = recipe(number(transform, missing="fill", fill=2.0), number("none", "y"))
    encoder, batch = encoded(used, columns)
    assert used.dense_inputs == ("x", "x_missing", "y")
    assert batch.dense.isfinite().all()
    assert batch.dense[1, 0] == batch.dense[2, 0] == batch.dense[3, 0]
    assert batch.dense[:, 1].tolist() == [0, 1, 1, 0, 0]
    assert batch.dense[:, 2].tolist() == columns["y"]
    assert dict(encoder.counters) == {"filled/x": 2}
    raw = torch.tensor([[math.nan if v is None else v for v in column] for column in columns.values()]).double().t()
    assert torch.equal(torch.export.export(encoder.numbers, (raw,)).module()(raw), batch.dense)


def test_filled_numbers_have_no_part_in_the_scale():
    there = {"x": [1.0, 5.0]}
    _, expected = encoded(recipe(number("standardize", missing="fill", fill=100.0)), there)
    _, found = encoded(
        recipe(number("standardize", missing="fill", fill=100.0)), there, {"x": [1.0, None, math.nan, 5.0]}
    )
    assert torch.equal(found.dense, expected.dense)
    assert found.dense[:, 0].tolist() == [-1, 1]  # Mean 3, deviation 2.


@pytest.mark.parametrize("missing", ["error", "fill"])
@pytest.mark.parametrize("transform", [*DENSE, "quantile"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, 1e39])
def test_infinity_and_what_float32_cannot_hold_are_always_refused(transform, missing, bad):
    with pytest.raises(UserError, match=r"'x' has an illegal value in row 1.*finite"):
        encoded(recipe(number(transform, missing=missing)), {"x": [1.0, bad]})


@pytest.mark.parametrize("transform", [*DENSE, "quantile"])
@pytest.mark.parametrize("gap", [math.nan, None])
def test_a_missing_number_that_nobody_fills_is_refused_with_the_way_out(transform, gap):
    with pytest.raises(UserError, match=r"'x' has an illegal value in row 1.*missing: fill"):
        encoded(recipe(number(transform)), {"x": [1.0, gap]})


@pytest.mark.parametrize("transform", DENSE)
@pytest.mark.parametrize("fill", [0.0, LARGE, 1e300])
def test_no_legal_number_and_no_fill_becomes_infinite(transform, fill):
    try:
        used = recipe(number(transform, missing="fill", fill=fill))
    except ValueError:  # Refused where it is set.
        assert fill > LARGE
        return
    _, batch = encoded(used, {"x": [LARGE, -LARGE, None]}, {"x": [0.0, 1e-6, 2e-6, 1.5e-6]})
    assert batch.dense.isfinite().all()


def test_min_max_maps_the_training_range_to_0_and_1_and_clips_the_rest():
    _, batch = encoded(recipe(number("min_max")), {"x": [-10.0, -2.0, 0.0, 6.0, 7.0, LARGE]}, {"x": [-2.0, 6.0, 1.0]})
    assert batch.dense[:, 0].tolist() == [0, 0, 0.25, 1, 1, 1]


@pytest.mark.parametrize("transform", DENSE[:3])
@pytest.mark.parametrize("training", [[7.0, 7.0], [None, None]])
def test_a_column_that_taught_nothing_is_finite(transform, training):
    columns = {"x": pa.array(training, pa.float64())}
    _, batch = encoded(recipe(number(transform, missing="fill")), {"x": [7.0, None, -3.0]}, columns)
    assert batch.dense.isfinite().all()


@pytest.mark.parametrize(("num_rows", "buckets"), [(1000, 8), (1000, 7), (65_536, 16), (17, 16)])
def test_buckets_hold_equal_shares_of_the_training_rows(num_rows, buckets):
    values = np.random.default_rng(1).permutation(num_rows) ** 3 / 7 - 5
    _, batch = encoded(recipe(number("quantile", buckets=buckets)), {"x": values})
    rows = np.array(bags(batch, "x")).flatten()
    counts = np.bincount(rows - FIRST, minlength=buckets)
    assert len(counts) == buckets
    assert counts.max() - counts.min() <= 1
    assert (np.diff(rows[np.argsort(values)]) >= 0).all(), "larger numbers have higher buckets"


def test_more_rows_than_the_sample_give_shares_within_half_a_percent():
    encoder = Encoder(recipe(number("quantile", buckets=16)))
    values = np.random.default_rng(2).lognormal(size=(1, 300_000))
    encoder.fit(encoder.numbers.measure(values, np.arange(300_000)))
    counts = np.bincount(encoder.numbers.buckets("x", torch.from_numpy(values[0])).numpy(), minlength=16)
    assert np.abs(counts / 300_000 - 1 / 16).max() < 0.005


def test_bucket_limits_do_not_depend_on_how_the_data_was_divided():
    values = np.random.default_rng(3).normal(size=(1, 200_000))
    values[0, ::7] = np.nan
    rows = np.arange(200_000)
    whole, divided = (Encoder(recipe(number("quantile", missing="fill"))) for _ in range(2))
    whole.fit(whole.numbers.measure(values, rows))
    cuts = [0, 1, 70_000, 70_000, 140_001, 200_000]
    parts = [divided.numbers.measure(values[:, a:b], rows[a:b]) for a, b in itertools.pairwise(cuts)]
    random.Random(0).shuffle(parts)
    divided.fit(functools.reduce(Statistics.merge, parts))
    assert torch.equal(whole.numbers.edges_0, divided.numbers.edges_0)


def test_missing_numbers_have_a_row_beside_the_buckets_and_no_part_in_the_limits():
    training = [3.0, 1.0, None, 4.0, 2.0, math.nan]
    values = [0.0, 1.0, 1.9, 2.0, 3.0, 4.0, 99.0, None, math.nan]
    encoder, batch = encoded(recipe(number("quantile", buckets=2, missing="fill")), {"x": values}, {"x": training})
    expected = [FIRST + bucket(v, 2, training) for v in values[:-2]]
    assert expected == [3, 3, 3, 3, 4, 4, 4], "the limit is 3: the least number of the upper half"
    assert bags(batch, "x") == [[row] for row in [*expected, MISSING, MISSING]]
    assert dict(encoder.counters) == {"filled/x": 2}
    assert batch.dense.shape == (9, 0)


# Crosses.


def cross(*of: str, name: str = "pair") -> dict:
    return {"kind": "cross", "of": list(of), "name": name}


DOCUMENTED = {(1, 2): 0xBCD9DBB49673066B, (2, 1): 0xE06DD043328BD285, ("a", 1): 0xC0687947BF535696}


@pytest.mark.parametrize(("values", "key"), [*DOCUMENTED.items(), ((1, 2, 3), 0x970864D014D5E8EF)])
def test_a_cross_has_the_key_of_the_documents(values, key):
    columns = {name: [value] for name, value in zip("pqr", values, strict=False)}
    _, batch = encoded(recipe(cross(*columns), tables={"pair": {"rows": 2**40}}), columns)
    assert bags(batch, "pair") == [[FIRST + (splitmix64(key) >> 24)]]


def test_a_cross_depends_on_the_order_of_its_columns_and_on_no_other_feature():
    columns = {"p": [1, 2, None, 5], "q": ["a", None, None, "b"], "other": [9, 8, 7, 6]}

    def rows(*features: dict) -> list[list[int]]:
        return bags(encoded(recipe(*features, tables={"pair": {"rows": 2**40}}), columns)[1], "pair")

    alone, swapped = rows(cross("p", "q")), rows(cross("q", "p"))
    among = rows({"kind": "id", "columns": ["q", "other", "p"]}, cross("q", "other", name="another"), cross("p", "q"))
    assert alone == among
    assert [one == other for one, other in zip(alone, swapped, strict=True)] == [False, True, True, False]
    assert alone[1:3] == [[MISSING], [MISSING]]


# Times.


def when(**settings: Any) -> dict:
    return {"kind": "timestamp", "columns": ["t"], "parts": ["hour", "weekday", "day", "month"], **settings}


def parts(batch: Batch) -> list[tuple[int, ...]]:
    """Hour, weekday, day and month of each row; None where missing."""
    columns = [bags(batch, f"t_{part}") for part in ("hour", "weekday", "day", "month")]
    return [tuple(row - FIRST for (row,) in found) for found in zip(*columns, strict=True)]


def test_parts_of_dates_that_a_calendar_shows():
    days = [datetime.date(*d) for d in ((1969, 12, 31), (1970, 1, 1), (2000, 2, 29), (2026, 11, 30), (1900, 3, 1))]
    monday, tuesday, wednesday, thursday = range(4)
    expected = [(0, wednesday, 31, 12), (0, thursday, 1, 1), (0, tuesday, 29, 2), (0, monday, 30, 11)]
    expected += [(0, thursday, 1, 3)]  # 1900 was no leap year.
    for kind in (pa.date32(), pa.date64(), pa.timestamp("s"), pa.timestamp("ms", "Asia/Shanghai")):
        _, batch = encoded(recipe(when()), {"t": pa.array(days).cast(pa.timestamp("s")).cast(kind)})
        assert parts(batch) == expected, kind


def test_a_moment_before_1970_belongs_to_the_second_it_lies_in_and_to_the_local_day():
    _, batch = encoded(recipe(when(unit="ms")), {"t": [-1, 0, 999]})
    assert parts(batch) == [(23, 2, 31, 12), (0, 3, 1, 1), (0, 3, 1, 1)]
    _, batch = encoded(recipe(when(utc_offset_hours=8)), {"t": [-1, 57_600, 57_599]})
    assert parts(batch) == [(7, 3, 1, 1), (0, 4, 2, 1), (23, 3, 1, 1)]
    _, batch = encoded(recipe(when(utc_offset_hours=-5.5)), {"t": [0, 5 * 3600 + 1800]})
    assert parts(batch) == [(18, 2, 31, 12), (0, 3, 1, 1)]


OUT_OF_RANGE = [
    pa.array([1_700_000_000_000]),  # A moment of 2023 in milliseconds.
    pa.array([2**64 - 1], pa.uint64()),
    pa.array([2**50]).cast(pa.timestamp("s")),
    pa.array([-(2**60)]).cast(pa.timestamp("ms", "UTC")),
    pa.array([2**31 - 1], pa.int32()).cast(pa.date32()),
]


@pytest.mark.parametrize("times", OUT_OF_RANGE, ids=lambda times: str(times.type))
def test_a_time_outside_the_calendar_is_refused_with_its_row_and_the_unit(times):
    with pytest.raises(UserError, match=r"'t' is out of range in row 1.*unit 's'"):
        encoded(recipe(when()), {"t": pa.concat_arrays([pa.array([None], times.type), times])})


# Weights, ids of exact tables, text.

TAGS = {"kind": "id_list", "columns": ["tags"], "pooling": "sum", "weights": {"tags": "amounts"}}


@pytest.mark.parametrize(
    ("amounts", "expected"),
    [
        ([[1.0], [1.0, 2.0]], "'tags' and its weights 'amounts' are out of step in row 1.*3 ids and 2 weights"),
        ([[1.0], [1.0, None, 2.0]], "'amounts' hold an illegal value in row 1"),
        ([[-1.0], [1.0, 1.0, 1.0]], "'amounts' hold an illegal value in row 0.*-1.0"),
        ([[1.0], [1.0, 1.0, math.inf]], "'amounts' hold an illegal value in row 1.*inf"),
        (None, "'amounts' is missing"),
    ],
)
def test_ids_without_usable_weights_are_refused_by_name(amounts, expected):
    columns: dict[str, Any] = {"tags": [["a"], ["a", "b", "c"]]} | ({} if amounts is None else {"amounts": amounts})
    with pytest.raises(UserError, match=f"(?s){expected}"):
        encoded(recipe(TAGS), columns)


@pytest.mark.parametrize(("policy", "row"), [("unknown", UNKNOWN), ("clamp", FIRST + 9)])
def test_one_id_outside_its_exact_table_is_replaced_and_counted_once(policy, row):
    used = recipe({"kind": "id", "columns": ["shop"]}, tables={"shop": {"ids": "exact", "rows": 10, "bad_ids": policy}})
    encoder, batch = encoded(used, {"shop": pa.array([0, 2**64 - 1, None, 9], pa.uint64())})
    assert bags(batch, "shop") == [[FIRST], [row], [MISSING], [FIRST + 9]]
    assert dict(encoder.counters) == {f"{'unknown' if policy == 'unknown' else 'clamped'}/shop": 1}


def test_texts_are_read_as_the_settings_of_each_of_their_features_say():
    titles = ["Red shoe red", None, "", "\u624b\u673a 5G", "one two three four"]
    columns = {"title": titles, "user": ["u"] * 5, "label": [0] * 5}
    used = recipe(
        {"kind": "text", "columns": ["title"], "tokens": ["words", "word_ngrams"], "ngram": 3, "max_length": 2},
        {"kind": "text", "columns": ["title"], "tokens": ["characters"], "max_length": 5, "table": "letters"},
    )
    encoder, batch = encoded(used, columns)
    expected = Reference(used, columns)
    assert {name: bags(batch, name) for name in expected.bags} == expected.bags
    assert encoder.counters == expected.counters


# Labels that do not count.


def test_rows_with_a_bad_label_are_counted_and_have_no_part_in_the_gradients():
    used = recipe(number("none"), bad_labels="skip")
    model = models.build(used.inputs, used.model)
    gradients = []
    for x, user in ((0.5, "a"), (-300.0, "somebody else")):
        columns = {"x": [1.0, x, 2.0, x], "user": ["a", user, "b", user], "label": [0.0, math.nan, 1.0, 2.0]}
        encoder, batch = encoded(used, columns)
        assert dict(encoder.counters) == {"skipped/label": 2}
        assert (batch.weights > 0).tolist() == [True, False, True, False]
        model.zero_grad()
        loss, _ = Task(model)(batch)
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_rows_with_a_bad_label_have_no_part_in_the_metrics(tmp_path):
    rng = np.random.default_rng(0)
    users, labels = rng.integers(0, 20, 400), rng.integers(0, 2, 400).astype(float)
    good = pa.table({"user": users, "x": rng.normal(size=400), "label": labels})
    bad = pa.table({"user": users[:90], "x": rng.normal(size=90) + 50, "label": [math.nan, 2.0, -1.0] * 30})
    mixed = pa.concat_tables([good, bad]).take(rng.permutation(490))
    pq.write_table(good, tmp_path / "good.parquet")
    pq.write_table(mixed, tmp_path / "mixed.parquet")
    settings = {"train": str(tmp_path / "good.parquet"), "bad_labels": "skip", "group": "user"}
    used = recipe(number("standardize"), **settings)
    run = train(used, run=str(tmp_path / "run")).run
    found, expected = (evaluate(str(run), data_path=str(tmp_path / f"{n}.parquet")) for n in ("mixed", "good"))
    for metric in ("rows", "auc", "gauc", "logloss", "calibration"):
        assert found[metric] == pytest.approx(expected[metric], rel=1e-6), metric


# What recipes and columns are refused for.

TITLE = {"kind": "text", "columns": ["title"]}
HOT = {"ids": "hot_cold", "hot": 5, "cold": 5}
WRONG_RECIPES: dict[str, tuple[list[dict], dict, str]] = {
    "cross in an exact table": ([cross("p", "q")], {"pair": {"ids": "exact"}}, "tables.pair.ids.*cross have no range"),
    "text in an exact table": ([TITLE], {"title": {"ids": "exact"}}, "tables.title.ids.*text have no range"),
    "one cold row for two hashes": ([], {"user": HOT | {"cold": 1, "cold_hashes": 2}}, "tables.user.cold.*Received: 1"),
    "no rows at all": ([], {"user": HOT | {"hot": 0, "cold": 0}}, "tables.user: hot and cold are both 0"),
    "weights of an unknown column": ([TAGS | {"weights": {"tag": "amounts"}}], {}, r"weights are given for \['tag'\]"),
    "weights in an attended table": (
        [{"kind": "history", "of": {"seen": "user"}}, TAGS | {"table": "user"}],
        {},
        "'tags' has weights and shares its table with a history",
    ),
    "one name twice": ([cross("p", "q"), cross("q", "r")], {}, "'pair' is declared 2 times"),
    "an indicator's name": (
        [number("none", missing="fill"), number("none", "x_missing")],
        {},
        "'x_missing' is declared 2",
    ),
    "the label in a cross": ([cross("p", "label")], {}, "the label 'label' must not be a feature"),
    "the label as a time": ([when(columns=["label"])], {}, "the label 'label' must not be a feature"),
}


@pytest.mark.parametrize("case", WRONG_RECIPES)
def test_a_recipe_that_cannot_be_meant_is_refused_by_name(case):
    features, tables, expected = WRONG_RECIPES[case]
    model = {"name": "din" if any(f["kind"] == "history" for f in features) else "deepfm"}
    raw = {"model": model, "data": {"train": "t"}, "features": [USER, *features], "tables": tables}
    with pytest.raises(UserError, match=f"(?s){expected}"):
        recipe_file.parse(yaml.safe_dump(raw))


LIST, STRUCT = pa.list_(pa.int64()), pa.struct([("a", pa.int8())])
WRONG_TYPES = {
    "user": [pa.float32(), LIST, pa.binary(), pa.timestamp("s"), pa.decimal128(5), STRUCT, pa.duration("s")],
    "tags": [pa.int64(), pa.string(), pa.list_(pa.float64()), pa.list_(LIST), pa.list_view(pa.int64()), STRUCT],
    "amounts": [pa.float32(), pa.null(), pa.list_(pa.string()), pa.list_(pa.list_(pa.float32()))],
    "x": [pa.string(), pa.null(), pa.list_(pa.float32()), pa.timestamp("s"), pa.dictionary(pa.int8(), pa.float32())],
    "p": [pa.float64(), LIST, pa.binary(), pa.date32()],
    "t": [pa.float64(), pa.string(), pa.bool_(), pa.time32("s"), pa.duration("s"), pa.list_(pa.timestamp("s"))],
    "title": [pa.int64(), pa.bool_(), pa.binary(), pa.list_(pa.string()), pa.dictionary(pa.int8(), pa.int64())],
    "label": [pa.string(), pa.null(), pa.list_(pa.int8()), pa.timestamp("s")],
}


@pytest.mark.parametrize(("column", "kind"), [(c, kind) for c, kinds in WRONG_TYPES.items() for kind in kinds], ids=str)
def test_a_column_of_a_wrong_type_is_refused_by_name(column, kind):
    used = recipe(TAGS, number("none"), cross("p", "user"), when(), TITLE)
    good = {"tags": [["a"]], "amounts": [[1.0]], "x": [1.0], "p": [1], "t": [0], "title": ["a"]}
    encoded(used, good)
    with pytest.raises(UserError, match=f"column '{column}' "):
        encoded(used, good | {column: pa.nulls(1, kind)})
