import collections
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys import ids
from recsys.usage import RANGES, TableUsage, Traffic

NUM_ROWS = 23  # 20 rows for ids: few enough that keys meet
lookup = st.tuples(
    st.integers(ids.MISSING, NUM_ROWS - 1), st.sampled_from([0, 1, -1, 7, 2**63 - 1, -(2**63)]), st.integers(1, 9)
)
blocks = st.lists(st.lists(lookup, max_size=12), max_size=6)


class Reference:
    """The same results from a dictionary of sets, which remembers every id of every row."""

    def __init__(self, num_rows=NUM_ROWS, hot=0, cold_hashes=1):
        self.num_rows, self.hot, self.cold_hashes = num_rows, hot, cold_hashes
        self.ids_of_row = collections.defaultdict(set)
        self.lookups_of_row = collections.Counter()

    def add(self, lookups):
        for row, key, count in lookups:
            self.ids_of_row[row].add(key)
            self.lookups_of_row[row] += count
        return self

    def weight(self, row):
        """Ids that looked this row up, where each of several rows of a cold id stands for a part of it."""
        return self.lookups_of_row[row] / (self.cold_hashes if row >= 3 + self.hot else 1)

    def results(self):
        occupied = [row for row in self.ids_of_row if row >= 3]
        shared = [row for row in occupied if len(self.ids_of_row[row]) >= 2]
        kinds = {"missing": {1}, "unknown": {2}, "hot": set(range(3, 3 + self.hot))}
        kinds["cold"] = set(range(3 + self.hot, self.num_rows))
        total = sum(map(self.weight, self.ids_of_row))
        traffic = {name: sum(map(self.weight, self.ids_of_row.keys() & rows)) for name, rows in kinds.items()}
        return {
            "occupancy": len(occupied) / (self.num_rows - 3),
            "collision_rate": len(shared) / len(occupied) if occupied else None,
            "shared_traffic": sum(map(self.weight, shared)) / sum(map(self.weight, occupied)) if occupied else None,
            **{name: lookups / total if total else None for name, lookups in traffic.items()},
        }


def flat(usage):
    found = usage.as_dict()
    return {name: found[name] for name in ("occupancy", "collision_rate", "shared_traffic")} | found["traffic"]


def assert_same(found, expected):
    assert {n for n, value in found.items() if value is None} == {n for n, value in expected.items() if value is None}
    defined = [name for name, value in expected.items() if value is not None]
    assert [found[name] for name in defined] == pytest.approx([expected[name] for name in defined], rel=1e-12)


def add(usage, lookups):
    rows, keys, counts = np.array(lookups, dtype=np.int64).reshape(-1, 3).T
    usage.add(rows, keys, counts)
    return usage


def hashed(keys, num_id_rows):
    return ids.hashed_rows(torch.from_numpy(keys), num_id_rows).numpy()


@given(blocks, st.integers(0, 20), st.integers(1, 2))
@settings(max_examples=300, deadline=None)
def test_results_equal_those_of_a_dictionary_of_sets(blocks, hot, cold_hashes):
    usage, reference = TableUsage(NUM_ROWS, hot=hot, cold_hashes=cold_hashes), Reference(NUM_ROWS, hot, cold_hashes)
    for block in blocks:
        add(usage, block)
        reference.add(block)
    assert_same(flat(usage), reference.results())
    assert usage.as_dict()["estimated_from_one_row_in"] == 1


@given(blocks, st.randoms(use_true_random=False), st.integers(4, 25))
@settings(max_examples=200, deadline=None)
def test_merging_in_any_order_equals_one_pass(blocks, random, max_tracked_rows):
    def new():
        return TableUsage(NUM_ROWS, hot=5, max_tracked_rows=max_tracked_rows)

    whole = new()
    for block in blocks:
        add(whole, block)
    parts = [add(new(), block) for block in blocks] + [new()]
    while len(parts) > 1:
        random.shuffle(parts)
        parts[0].merge(parts.pop())
    assert flat(parts[0]) == flat(whole)
    assert parts[0].as_dict() == whole.as_dict()


@given(st.lists(lookup, max_size=20))
def test_counts_equal_repeated_rows(lookups):
    repeated = [(row, key) for row, key, count in lookups for _ in range(count)]
    rows, keys = np.array(repeated, dtype=np.int64).reshape(-1, 2).T
    usage = TableUsage(NUM_ROWS, hot=5)
    usage.add(rows, keys)
    assert usage.as_dict() == add(TableUsage(NUM_ROWS, hot=5), lookups).as_dict()


@pytest.mark.parametrize("max_tracked_rows", [7, 20])
def test_rows_of_a_smaller_integer_type_count_alike(max_tracked_rows):
    rows, keys = np.arange(1, NUM_ROWS), np.arange(1, NUM_ROWS) * 10**12
    usages = [TableUsage(NUM_ROWS, max_tracked_rows=max_tracked_rows) for _ in range(2)]
    for usage, dtype in zip(usages, (np.int32, np.int64), strict=True):
        usage.add(rows.astype(dtype), keys)
    assert usages[0].as_dict() == usages[1].as_dict()


def test_one_id_that_comes_often_collides_with_nobody():
    usage = TableUsage(NUM_ROWS)
    for _ in range(3):
        usage.add(np.full(50, 7), np.full(50, 123))
    assert (usage.collision_rate, usage.shared_traffic) == (0, 0)
    usage.add(np.full(50, 7), np.append(np.full(49, 123), 124))  # the other one is a duplicate row's last writer
    assert (usage.collision_rate, usage.shared_traffic) == (1, 1)


def test_ten_times_more_ids_than_rows_stay_exact_in_the_same_memory():
    num_id_rows = 1000
    keys = np.arange(10 * num_id_rows) * 1_000_003 - 2**40
    rows = hashed(keys, num_id_rows)
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(len(keys)), 1 + np.arange(len(keys)) % 5))
    usage, reference = TableUsage(num_id_rows + 3), Reference(num_id_rows + 3)
    size = len(pickle.dumps(usage))
    for block in np.array_split(order, 37):
        usage.add(rows[block], keys[block])
        reference.add(zip(rows[block].tolist(), keys[block].tolist(), [1] * len(block), strict=True))
    assert_same(flat(usage), reference.results())
    # arrays cannot grow; what is left are integers, which pickle longer when they are larger
    assert len(pickle.dumps(usage)) <= size + 64


def test_two_rows_of_a_cold_id_count_as_one_lookup():
    # 3 lookups of a hot id, 1 of a cold id that reads the rows 8 and 15
    usage = add(TableUsage(NUM_ROWS, hot=5, cold_hashes=2), [(3, 1, 3), (8, 2, 1), (15, 2, 1)])
    assert usage.traffic.shares() == {"hot": 0.75, "cold": 0.25, "unknown": 0, "missing": 0}
    add(usage, [(8, 9, 1), (16, 9, 1)])  # row 8 now serves two ids, half of what either reads
    assert usage.shared_traffic == pytest.approx((2 / 2) / 5)


def tracked_rows(num_rows, max_tracked_rows):
    """Rows whose lookups change the estimates."""
    found = []
    for row in range(3, num_rows):
        usage = TableUsage(num_rows, max_tracked_rows=max_tracked_rows)
        usage.add(np.array([row]), np.array([0]))
        found += [row] * (usage.occupancy > 0)
    return found


@pytest.mark.parametrize("max_tracked_rows", [1, 7, 19, 20, 21, 99, 100])
def test_one_row_of_each_group_is_tracked_in_the_smallest_groups_that_fit(max_tracked_rows):
    num_rows = 103
    usage = TableUsage(num_rows, max_tracked_rows=max_tracked_rows)
    size = next(k for k in range(1, 101) if len(range(0, 100, k)) <= max_tracked_rows)
    assert usage.as_dict()["estimated_from_one_row_in"] == size
    groups = [(row - 3) // size for row in tracked_rows(num_rows, max_tracked_rows)]
    whole_groups = range(100 // size)  # the rest behind them is too short to be sure of its row
    assert [group for group in groups if group in whole_groups] == list(whole_groups)
    assert len(groups) <= max_tracked_rows


@given(st.lists(lookup, max_size=40), st.sampled_from([3, 7, 11]), st.integers(0, 20))
@settings(max_examples=100, deadline=None)
def test_estimates_are_the_results_of_the_tracked_rows(lookups, max_tracked_rows, hot):
    usage = add(TableUsage(NUM_ROWS, hot=hot, max_tracked_rows=max_tracked_rows), lookups)
    rows = set(TRACKED[max_tracked_rows])
    everything = Reference(hot=hot).add(lookups)
    sample = Reference(hot=hot).add(one for one in lookups if one[0] in rows)
    exact = {name: everything.results()[name] for name in RANGES}
    estimated = {"occupancy": len(sample.ids_of_row) / len(rows), "collision_rate": sample.results()["collision_rate"]}
    assert_same({name: flat(usage)[name] for name in exact | estimated}, exact | estimated)
    shared, total = 0.0, 0
    for kind in (range(3, 3 + hot), range(3 + hot, NUM_ROWS)):  # each kind's share, weighed with its exact lookups
        weight = sum(everything.lookups_of_row[row] for row in kind)
        tracked = sum(sample.lookups_of_row[row] for row in kind)
        met = sum(sample.lookups_of_row[row] for row in kind if len(sample.ids_of_row[row]) >= 2)
        if weight:
            shared += weight * met / tracked if tracked else np.nan
        total += weight
    expected = shared / total if total else np.nan
    assert usage.shared_traffic is None if np.isnan(expected) else usage.shared_traffic == pytest.approx(expected)


TRACKED = {max_tracked_rows: tracked_rows(NUM_ROWS, max_tracked_rows) for max_tracked_rows in (3, 7, 11)}


def test_estimates_of_a_big_table_are_unbiased():
    num_id_rows, max_tracked_rows = 200_000, 8192  # one row in 25
    errors = collections.defaultdict(list)
    for seed in range(12):
        keys = np.random.default_rng(seed).integers(0, 2**40, 200_000)
        rows = hashed(keys, num_id_rows)
        estimated, exact = TableUsage(num_id_rows + 3, max_tracked_rows=max_tracked_rows), TableUsage(num_id_rows + 3)
        for usage in (estimated, exact):
            usage.add(rows, keys)
        assert estimated.one_row_in == 25
        for name in ("occupancy", "collision_rate", "shared_traffic"):
            errors[name].append(getattr(estimated, name) / getattr(exact, name) - 1)
    for name, found in errors.items():
        assert abs(np.mean(found)) < 3 * np.std(found, ddof=1) / np.sqrt(len(found)), name
        assert 0 < np.abs(found).max() < 0.08, name  # 8,000 tracked rows, of which a fifth is shared


def test_ids_in_step_with_the_sample_do_not_fool_it():
    num_id_rows, step = 100_000, 10
    usage = TableUsage(num_id_rows + 3, hot=num_id_rows, max_tracked_rows=num_id_rows // step)
    assert usage.one_row_in == step
    keys = np.arange(0, num_id_rows, step)
    usage.add(keys + 3, keys)
    assert usage.occupancy == pytest.approx(1 / step, rel=0.1)  # a sample of every 10th row would say 0 or 1


def test_a_table_without_lookups_has_no_shares():
    usage = add(TableUsage(NUM_ROWS), [])
    assert (usage.occupancy, usage.collision_rate, usage.shared_traffic) == (0, None, None)
    assert usage.traffic.shares() == dict.fromkeys(RANGES)
    assert add(usage, [(ids.MISSING, 0, 2), (ids.UNKNOWN, 5, 2)]).shared_traffic is None
    assert usage.traffic.shares() == {"hot": 0, "cold": 0, "unknown": 0.5, "missing": 0.5}


def test_rows_outside_the_table_and_settings_that_differ_are_bugs():
    usage = TableUsage(NUM_ROWS)
    for row in (ids.PADDING, -1, NUM_ROWS):
        with pytest.raises(AssertionError, match="leave a table"):
            usage.add(np.array([row]), np.array([0]))
    with pytest.raises(AssertionError, match="not looked up"):
        usage.add(np.array([3]), np.array([0]), np.array([0]))
    with pytest.raises(AssertionError, match="do not fit"):
        TableUsage(NUM_ROWS, hot=21)
    with pytest.raises(AssertionError, match="different tables"):
        usage.merge(TableUsage(NUM_ROWS + 1))
    with pytest.raises(AssertionError, match="different tables"):
        usage.merge(TableUsage(NUM_ROWS, hot=3))
    with pytest.raises(AssertionError, match="different tables"):
        Traffic(3).merge(Traffic(3, cold_hashes=2))


@pytest.mark.dist
def test_ranks_bring_their_usage_together_as_one_pass_would(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(
        textwrap.dedent("""
        import json, sys
        import numpy as np
        import torch.distributed as dist
        from recsys.usage import TableUsage

        rank, folder = int(sys.argv[1]), sys.argv[2]
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        rng = np.random.default_rng(0)
        rows, keys = rng.integers(1, 23, (40, 2)), rng.integers(-3, 3, (40, 2))
        merged, whole = TableUsage(23, hot=5), TableUsage(23, hot=5)
        merged.add(rows[rank * 10 :: 2 - rank, rank].copy(), keys[rank * 10 :: 2 - rank, rank].copy())
        for other in range(2):
            whole.add(rows[other * 10 :: 2 - other, other].copy(), keys[other * 10 :: 2 - other, other].copy())
        merged.merge_ranks()
        assert merged.as_dict() == whole.as_dict(), (merged.as_dict(), whole.as_dict())
        assert 0 < merged.collision_rate < 1 and merged.one_row_in == 1
        dist.destroy_process_group()
        """)
    )
    root = Path(__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(tmp_path)], env=environment) for rank in (0, 1)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
