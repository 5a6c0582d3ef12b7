import collections
import contextlib
import dataclasses
import io
import itertools
import json
import math
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from recsys import vocabulary
from recsys.counting import IdCounts
from recsys.data import columns
from recsys.errors import UserError
from recsys.frequencies import Coverage, most_frequent
from recsys.vocabulary import Origin, Vocabulary
from tests._reference_hash import WORD, fnv1a, splitmix64

ORIGIN = Origin("item", "data-1", {"item": {}, "seen": {"max_length": 50, "keep": "newest"}})
GREATEST = 2**63 - 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    return tmp_path_factory.mktemp("vocabularies")


def counted(values: list, kind: pa.DataType | None = None, *, limit: int = 1000, block: int = 50) -> IdCounts:
    counts = IdCounts(limit=limit)
    for first in range(0, len(values), block):
        array = pa.array(values[first : first + block], kind or pa.int64())
        keys, missing = columns.id_keys(array)
        counts.add(keys, array, None if missing is None else ~missing)
    return counts


def choose(path: pathlib.Path, values: list, kind: pa.DataType | None = None, *, limit: int = 1000, **settings):
    with contextlib.closing(counted(values, kind, limit=limit)) as counts:
        return Vocabulary.choose(counts, path, ORIGIN, **settings)


def grow(old: Vocabulary, path: pathlib.Path, values: list, kind: pa.DataType | None = None, *, limit=1000, **settings):
    with contextlib.closing(counted(values, kind, limit=limit)) as counts:
        return old.grow(counts, path, ORIGIN, **settings)


def by_rule(values: list[int], hot: int, min_count: int) -> dict[int, int]:
    """Key -> row, by the rule as docs say it, in plain Python."""
    counter = collections.Counter(values)
    order = sorted((key for key, n in counter.items() if n >= min_count), key=lambda key: (-counter[key], key))
    return {key: 3 + i for i, key in enumerate(order[:hot])}


def rows_of(vocabulary: Vocabulary) -> dict[int, int]:
    """Key -> row of the hot ids, out of the file."""
    table = pq.read_table(vocabulary.path)
    return {k: r for k, r in zip(table["key"].to_pylist(), table["row"].to_pylist(), strict=True) if r is not None}


def rewrite(path: pathlib.Path, change) -> None:
    """The file with other columns under the metadata that it has."""
    table = pq.read_table(path)
    pq.write_table(change(table).replace_schema_metadata(table.schema.metadata), path)


ids_with_ties = st.lists(st.integers(-4, 4) | st.sampled_from([GREATEST, -GREATEST - 1]), max_size=80)


@settings(deadline=None, max_examples=50)
@given(values=ids_with_ties, hot=st.integers(0, 12), min_count=st.integers(1, 4), limit=st.sampled_from([2, 1000]))
def test_hot_ids_are_the_most_frequent_ties_by_signed_key(folder, values, hot, min_count, limit):
    found = choose(folder / "a.parquet", values, limit=limit, hot=hot, min_count=min_count)
    assert rows_of(found) == by_rule(values, hot, min_count)
    counter = collections.Counter(values)
    eligible = [n for n in counter.values() if n >= min_count]
    assert found.about.num_refused == max(0, len(eligible) - hot)
    assert found.num_cold == len(counter) - found.num_hot
    assert found.hot_occurrences == sum(counter[key] for key in rows_of(found))


def test_more_candidates_than_are_held_at_once_are_chosen_by_the_same_rule(monkeypatch):
    monkeypatch.setattr("recsys.frequencies._MANY", 8)
    frequent = (np.random.default_rng(0).zipf(1.3, 2000) % 500).tolist()
    tied = [*range(-200, 200)] * 2
    for values, hot in itertools.product((frequent, tied), (0, 1, 5, 30)):
        with contextlib.closing(counted(values, limit=10)) as counts:
            keys, num_refused = most_frequent(counts.parts(), hot, 2, np.array([3, 7]))
        rule = [key for key in by_rule(values, 1000, 2) if key not in (3, 7)]
        assert keys.tolist() == rule[:hot]
        assert num_refused == len(rule) - hot


@pytest.mark.parametrize("limit", [3, 1000], ids=["disk", "memory"])
@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.string(), ["", "a", "\U0001f642\U0001f680", "\u6f22", "a", "", "x" * 10_000]),
        (pa.uint64(), [0, 2**64 - 1, 2**63, 2**63 - 1, 2**64 - 1]),
        (pa.int64(), [0, -1, -(2**63), 2**63 - 1, -1]),
        (pa.int8(), [-128, 127, 127]),
    ],
    ids=["text", "uint64", "int64", "int8"],
)
def test_the_file_holds_every_raw_id_with_key_count_and_row(folder, kind, values, limit):
    found = choose(folder / "b.parquet", [*values, None], kind, limit=limit, hot=2, min_count=2)
    key_of = (lambda v: fnv1a(v.encode())) if kind == pa.string() else (lambda v: v % WORD)
    signed = {v: (key_of(v) + WORD // 2) % WORD - WORD // 2 for v in values}
    counter = collections.Counter(values)
    rows = by_rule([signed[v] for v in values], 2, 2)
    order = sorted(counter, key=lambda v: splitmix64(key_of(v)))
    assert pq.read_table(found.path).to_pylist() == [
        {"value": v, "key": signed[v], "count": counter[v], "row": rows.get(signed[v])} for v in order
    ]
    assert (found.occurrences, found.missing) == (len(values), 1)


def test_the_file_is_the_same_bit_for_bit_whatever_the_order_of_the_blocks(folder):
    values = (np.random.default_rng(0).zipf(1.2, 3000) % 700).tolist()
    texts = [f"id {v}" for v in values]
    files = [
        choose(folder / f"order{i}.parquet", data, pa.string(), hot=100, limit=limit).path.read_bytes()
        for i, (data, limit) in enumerate([(texts, 1000), (texts[::-1], 1000), (sorted(texts), 90)])
    ]
    assert files[0] == files[1] == files[2]


def test_a_long_file_is_read_back_whole(folder, monkeypatch):
    """Many row groups, and reads that do not begin with one."""
    monkeypatch.setattr(vocabulary, "_ROW_GROUP_ROWS", 100)
    monkeypatch.setattr(vocabulary, "_READ_ROWS", 64)
    values = [*range(1000), *range(500)]
    found = choose(folder / "long.parquet", values, limit=40, hot=1000)
    assert pq.read_metadata(found.path).num_row_groups > 5
    assert rows_of(found) == by_rule(values, 1000, 1)
    assert found.index()[0].tolist() == list(range(1000))


# Growing.


@pytest.mark.parametrize("turned", [False, True])
def test_one_more_id_takes_the_next_row_and_no_other_row_changes(folder, turned):
    blocks = [[1, 1, 1, 2, 2, 2, -5], [1, 2, 8, 8, 8, 8]]
    old = choose(folder / "old.parquet", [v for v in blocks[0] + blocks[1] if v != 8], hot=10)
    blocks = blocks[::-1] if turned else blocks
    new = grow(old, folder / "new.parquet", blocks[0] + blocks[1], hot=10)
    assert rows_of(old) == {1: 3, 2: 4, -5: 5}  # 1 and 2 occur 4 times each: the smaller key comes first
    assert rows_of(new) == {1: 3, 2: 4, -5: 5, 8: 6}  # 8 occurs 4 times, too, but the others keep their rows


@settings(deadline=None, max_examples=40)
@given(
    first=ids_with_ties,
    second=ids_with_ties,
    hot=st.integers(0, 6),
    more=st.integers(0, 6),
    min_count=st.integers(1, 3),
    limit=st.sampled_from([2, 1000]),
)
def test_old_ids_keep_their_rows_and_new_ones_follow_by_the_rule(folder, first, second, hot, more, min_count, limit):
    old = choose(folder / "old.parquet", first, hot=hot)
    new = grow(old, folder / "new.parquet", second, limit=limit, hot=hot + more, min_count=min_count)
    kept, found, counter = rows_of(old), rows_of(new), collections.Counter(second)
    assert {key: found[key] for key in kept} == kept
    candidates = [key for key in by_rule(second, 1000, min_count) if key not in kept]
    num_free = hot + more - len(kept)
    assert {k: r for k, r in found.items() if k not in kept} == {
        key: 3 + len(kept) + i for i, key in enumerate(candidates[:num_free])
    }
    assert new.about.num_refused == max(0, len(candidates) - num_free)
    table = pq.read_table(new.path)
    counts = dict(zip(table["key"].to_pylist(), table["count"].to_pylist(), strict=True))
    assert counts == {**dict.fromkeys(kept, 0), **counter}
    assert new.coverage.num_ids == len(counter) and new.occurrences == len(second)


def test_an_id_that_vanished_keeps_its_row_and_its_text_over_two_generations(folder):
    old = choose(folder / "g0.parquet", ["gone", "gone", "here"], pa.string(), hot=9)
    new = grow(old, folder / "g1.parquet", ["here", "new"], pa.string(), hot=9)
    last = grow(new, folder / "g2.parquet", ["last", "gone"], pa.string(), hot=9)
    rows = {row["value"]: (row["row"], row["count"]) for row in pq.read_table(last.path).to_pylist()}
    assert rows == {"gone": (3, 1), "here": (4, 0), "new": (5, 0), "last": (6, 1)}


def test_a_vocabulary_of_which_nothing_is_left_grows_on(folder):
    empty = grow(choose(folder / "g0.parquet", ["a"], pa.string(), hot=2), folder / "g1.parquet", [], hot=2)
    last = empty.grow(empty, folder / "g2.parquet", ORIGIN, hot=2)
    assert pq.read_table(last.path)["value"].to_pylist() == ["a"] and list(rows_of(last).values()) == [3]


def test_a_vocabulary_grows_in_place(folder):
    old = choose(folder / "place.parquet", [1, 1, 2], hot=2)
    new = grow(old, old.path, [3, 4], hot=3)
    assert rows_of(new) == {1: 3, 2: 4, 3: 5}
    assert new.about.num_refused == 1


def test_rows_behind_a_hole_are_used_and_the_hole_is_not(folder):
    """A table whose rows 3 and 4 were given away by other means: rows go up from the highest."""
    old = choose(folder / "hole.parquet", [1, 1, 2], hot=9)
    rewrite(old.path, lambda t: t.set_column(3, "row", pa.array([{1: 3, 2: 9}[k] for k in t["key"].to_pylist()])))
    new = grow(Vocabulary.load(old.path), folder / "new.parquet", [7, 8, 8], hot=9)
    assert rows_of(new) == {1: 3, 2: 9, 8: 10, 7: 11}


@pytest.mark.parametrize("first", [[], [None]])
def test_a_vocabulary_of_nothing_grows_by_ids_of_any_kind(folder, first):
    old = choose(folder / "nothing.parquet", first, pa.string(), hot=4)
    assert (old.num_hot, old.num_cold, old.kind) == (0, 0, None)
    assert rows_of(grow(old, folder / "new.parquet", [5], hot=4)) == {5: 3}
    assert rows_of(grow(choose(folder / "one.parquet", [5], hot=4), folder / "new.parquet", [], hot=4)) == {5: 3}


def test_growing_refuses_fewer_rows_than_are_taken_other_tables_and_other_kinds(folder):
    old = choose(folder / "old.parquet", [1, 2, 3], hot=5)
    with pytest.raises(UserError, match=r"fewer hot rows.*Received: 2.*at least 3"):
        grow(old, folder / "new.parquet", [1], hot=2)
    with pytest.raises(UserError, match="all integers, all text"):
        grow(old, folder / "new.parquet", ["a"], pa.string(), hot=5)
    with contextlib.closing(counted([1])) as counts, pytest.raises(UserError, match=r"own table.*user.*item"):
        old.grow(counts, folder / "new.parquet", dataclasses.replace(ORIGIN, table="user"), hot=5)


# Choosing again.


@settings(deadline=None, max_examples=30)
@given(values=ids_with_ties, hot=st.integers(0, 9), min_count=st.integers(1, 3))
def test_choosing_again_equals_choosing_from_the_data(folder, values, hot, min_count):
    fresh = choose(folder / "fresh.parquet", [*values, None], hot=hot, min_count=min_count)
    again = choose(folder / "again.parquet", [*values, None], hot=5).rechoose(hot=hot, min_count=min_count)
    assert again.path.name == "again.parquet"
    assert again.path.read_bytes() == fresh.path.read_bytes()


def test_choosing_again_can_leave_the_file_alone_and_forgets_ids_that_vanished(folder):
    old = choose(folder / "a.parquet", [1, 1, 2], hot=2)
    grown = grow(old, folder / "b.parquet", [5, 6, 6], hot=4)
    before = grown.path.read_bytes()
    again = grown.rechoose(hot=4, path=folder / "c.parquet")
    assert rows_of(again) == {6: 3, 5: 4}
    assert sorted(pq.read_table(again.path)["key"].to_pylist()) == [5, 6]
    assert grown.path.read_bytes() == before
    same = grown.grow(grown, folder / "d.parquet", ORIGIN, hot=9)
    assert rows_of(same) == rows_of(grown) == {1: 3, 2: 4, 6: 5, 5: 6}


# What the encoder looks ids up in.


def test_the_index_is_sorted_and_padded_behind_an_id_that_equals_the_padding(folder):
    found = choose(folder / "i.parquet", [GREATEST, -3, -3, 4], hot=5)
    keys, rows = found.index()
    assert keys.dtype == rows.dtype == np.int64
    assert keys.tolist() == [-3, 4, GREATEST, GREATEST, GREATEST]
    assert rows.tolist() == [3, 4, 5, -1, -1]
    assert rows[np.searchsorted(keys, [GREATEST])].tolist() == [5]


def test_an_index_of_nothing_is_padding_only(folder):
    keys, rows = choose(folder / "i.parquet", [], hot=2).index()
    assert (keys.tolist(), rows.tolist()) == ([GREATEST] * 2, [-1] * 2)


# What it is worth.


@settings(deadline=None, max_examples=100)
@given(
    counts=st.lists(st.integers(0, 9) | st.integers(1, 10**15), max_size=40), percent=st.sampled_from([1, 50, 99, 100])
)
def test_coverage_equals_adding_up_the_sorted_counts(counts, percent):
    found = Coverage(*(np.array(side, dtype=np.int64) for side in (counts, [1] * len(counts))))
    order = sorted((n for n in counts if n), reverse=True)
    sums = [sum(order[:k]) for k in range(len(order) + 1)]
    assert (found.num_ids, found.occurrences) == (len(order), sum(order))
    assert [found.of_most_frequent(k) for k in range(len(order) + 1)] == sums
    assert found.of_most_frequent(len(order) + 5) == sum(order)
    assert [found.num_with(least) for least in range(1, 12)] == [sum(n >= m for n in order) for m in range(1, 12)]
    assert found.num_covering(percent) == next(k for k, s in enumerate(sums) if s * 100 >= sum(order) * percent)


def test_facts_equal_plain_arithmetic(folder):
    values = [*[7] * 989, *[8] * 5, *[9] * 4, 1, 2, None, None]
    facts = choose(folder / "f.parquet", values, hot=4, min_count=2).as_dict(cold=10, dim=16)
    assert json.loads(json.dumps(facts)) == facts
    # 990 of 1000 are covered by 7 and 8; four bytes for each of 16 weights and for the optimizer's number
    assert facts["suggested_hot"] == 2
    assert facts["suggested_bytes"] == (2 + 10 + 3) * 17 * 4
    assert facts["bytes"] == (4 + 10 + 3) * 17 * 4
    told = ("distinct", "occurrences", "nulls", "hot", "hot_rows", "cold_distinct", "refused", "hot_share")
    assert [facts[name] for name in told] == [5, 1000, 2, 3, 4, 2, 0, 0.998]
    assert facts["coverage"] == [
        {"ids": 1, "share": 0.989},
        {"ids": 2, "share": 0.994},
        {"ids": 5, "share": 1.0},
    ]
    by_count = {step["min_count"]: (step["ids"], step["share"]) for step in facts["coverage_by_min_count"]}
    assert list(by_count) == [1, 2, 5, 10, 20, 50, 100, 200, 500]
    assert by_count[1] == (5, 1.0) and by_count[2] == (3, 0.998) and by_count[5] == (2, 0.994)
    assert by_count[500] == (1, 0.989)


def test_no_more_hot_ids_are_suggested_than_occur_often_enough(folder):
    found = choose(folder / "f.parquet", [*range(100), 5], hot=50, min_count=2)
    assert found.as_dict(cold=1, dim=1)["suggested_hot"] == 1


def test_facts_of_nothing_have_no_shares(folder):
    facts = choose(folder / "f.parquet", [None], hot=4).as_dict(cold=0, dim=1)
    assert (facts["hot_share"], facts["coverage"], facts["coverage_by_min_count"]) == (None, [], [])
    assert (facts["suggested_hot"], facts["distinct"], facts["nulls"]) == (0, 0, 1)


@pytest.mark.parametrize("values", [[7] * 75_000 + [1] * 25_000, []], ids=["some", "none"])
def test_the_report_prints_what_the_facts_tell(folder, values):
    found = choose(folder / "f.parquet", values, hot=1)
    console = Console(file=io.StringIO(), width=100)
    console.print(found.report(cold=1_000_000, dim=15))
    text = console.file.getvalue()
    assert "item" in text and f"{(1 + 1_000_000 + 3) * 64 / 2**20:.1f}" in text
    assert ("75.00%" in text and "100,000" in text) if values else "undefined" in text


def test_keys_without_raw_ids_have_null_values(folder):
    with contextlib.closing(IdCounts()) as counts:
        counts.add(np.array([5, 5, -5]))
        found = Vocabulary.choose(counts, folder / "x.parquet", ORIGIN, hot=1)
    table = pq.read_table(found.path)
    assert table["value"].null_count == 2
    assert rows_of(found) == {5: 3}
    assert rows_of(found.grow(found, folder / "y.parquet", ORIGIN, hot=2)) == {5: 3, -5: 4}
    assert math.isclose(found.as_dict(cold=1, dim=1)["hot_share"], 2 / 3)
