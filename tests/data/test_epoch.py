"""Epochs that are left and gone on with: every row once, and with as many ranks as before the same steps."""

import dataclasses
import itertools
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.data.epoch import Epoch
from recsys.data.reader import ParquetData, Reader

NUM_ROWS = 203


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, first, last, size in (("a", 0, 70, 30), ("b", 70, 71, None), ("c", 71, NUM_ROWS, 17)):
        pq.write_table(pa.table({"row": np.arange(first, last)}), folder / f"{name}.parquet", row_group_size=size)
    return ParquetData(folder)


def readers(data, world_size, shuffle_rows=0, batch_size=7):
    options = {"batch_size": batch_size, "world_size": world_size, "shuffle_rows": shuffle_rows, "seed": 5}
    return [Reader(data, ["row"], rank=rank, **options) for rank in range(world_size)]


def rows_of_steps(reader, epoch):
    """Rows of each step, by the data and by the arithmetic that promises them."""
    steps = []
    for table, positions in reader.iterate(epoch):
        assert table["row"].to_pylist() == positions.tolist()
        steps.append(positions.tolist())
    promised = np.concatenate([*reader.order(epoch), np.zeros(0, dtype=np.int64)]).tolist()
    assert promised[len(promised) - sum(map(len, steps)) :] == [row for step in steps for row in step]
    return steps


@pytest.mark.parametrize("shuffle_rows", [0, 25, 1000])
@pytest.mark.parametrize(
    "history",
    [[(2, 5), (1, 4), (2, None)], [(3, 1), (5, 1), (4, 2), (1, None)], [(1, 28), (4, None)], [(2, 0), (3, None)]],
    ids=str,
)
def test_every_row_is_read_once_whatever_ranks_read_the_epoch(data, history, shuffle_rows):
    """`history`: numbers of ranks, and how many steps each of them takes; None takes the rest."""
    seen, position = [], None
    for world_size, num_steps in history:
        ranks = readers(data, world_size, shuffle_rows)
        plans = [rank.epoch(3, position) for rank in ranks]
        assert len(set(plans)) == 1, "all ranks agree"
        taken = [
            list(itertools.islice(rows_of_steps(rank, plan), num_steps))
            for rank, plan in zip(ranks, plans, strict=True)
        ]
        assert len({len(steps) for steps in taken}) == 1, "all ranks take the same number of steps"
        for number, step in enumerate(zip(*taken, strict=True), plans[0].start_step):
            assert [len(rows) for rows in step] == plans[0].rows_by_rank(number)
            assert max(len(rows) for rows in step) <= 7
        seen += [row for steps in taken for step in steps for row in step]
        position = json.loads(json.dumps(plans[0].position(plans[0].start_step + len(taken[0]))))
    assert sorted(seen) == list(range(NUM_ROWS))


@pytest.mark.parametrize("shuffle_rows", [0, 25])
@pytest.mark.parametrize("steps_done", [0, 1, 6, 15])
def test_as_many_ranks_as_before_go_on_as_if_nothing_had_happened(data, shuffle_rows, steps_done):
    for rank in readers(data, 2, shuffle_rows):
        whole = rank.epoch(1)
        rest = rank.epoch(1, whole.position(steps_done))
        assert rows_of_steps(rank, rest) == rows_of_steps(rank, whole)[steps_done:]


def test_an_epoch_that_was_shared_out_anew_can_be_left_and_gone_on_with_again(data):
    two, one = readers(data, 2, 25), readers(data, 1, 25)
    shared = one[0].epoch(1, two[0].epoch(1).position(4))
    rest = one[0].epoch(1, shared.position(3))
    assert rest == dataclasses.replace(shared, start_step=3)
    assert rows_of_steps(one[0], rest) == rows_of_steps(one[0], shared)[3:]


def test_ranks_that_go_on_read_different_rows(data):
    position = readers(data, 1, 25)[0].epoch(1).position(3)
    one, two = (np.concatenate(list(rank.order(rank.epoch(1, position)))).tolist() for rank in readers(data, 2, 25))
    assert not set(one) & set(two) and abs(len(one) - len(two)) <= 1


@given(
    st.integers(0, 400),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 40)), min_size=1, max_size=5),
    st.integers(1, 9),
)
@settings(max_examples=200, deadline=None)
def test_no_row_is_lost_or_doubled_by_the_arithmetic(num_rows, history, batch_size):
    """Against a list of the rows that are left, from which steps are taken one by one."""
    position, left = None, None
    for world_size, num_steps in history:
        epoch = (
            Epoch.whole(1, num_rows, world_size, batch_size)
            if position is None
            else Epoch.going_on(position, num_rows, world_size, batch_size)
        )
        names = [
            [(s.first, s.last, number) for s in share for number in range(s.begin, s.end)] for share in epoch.shares
        ]
        rest = [mine[epoch.before(share, epoch.start_step) :] for mine, share in zip(names, epoch.shares, strict=True)]
        flat = [row for mine in rest for row in mine]
        assert len(set(flat)) == len(flat)
        assert left is None or sorted(flat) == sorted(left)
        stop = min(epoch.start_step + num_steps, epoch.num_steps)
        for step in range(epoch.start_step, stop):
            rest = [mine[size:] for mine, size in zip(rest, epoch.rows_by_rank(step), strict=True)]
        left, position = [row for mine in rest for row in mine], epoch.position(stop)
        assert stop < epoch.num_steps or not left
