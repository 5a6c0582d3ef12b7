"""Ranks that meet, part and meet again: in one process, as a script that trains and predicts does, or started anew."""

import concurrent.futures
import datetime
import re
import subprocess
import sys

import pytest
import torch.distributed as dist

from recsys.distributed import _attempt
from recsys.errors import UserError
from recsys.presence import Presence, Terminated

SCRIPT = """
import os
from recsys.distributed import gather, process_group

for turn in range(4):
    with process_group("cpu") as ranks:
        assert gather(10 * turn + ranks.rank) == [10 * turn, 10 * turn + 1]
os.write(1, f"rank {ranks.rank} is through\\n".encode())  # at once, for both share a pipe
"""


def test_ranks_can_meet_several_times_in_one_process(tmp_path):
    script = tmp_path / "meet.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {line for line in done.stdout.splitlines() if line} == {"rank 0 is through", "rank 1 is through"}


def started(store: dist.Store, ranks: list[int], world_size: int = 3) -> list[str]:
    """What ranks that start at once take for the name of their attempt, by connections of their own."""
    with concurrent.futures.ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(lambda rank: _attempt(store.clone(), rank, world_size), ranks))


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_ranks_that_start_together_and_no_others_share_a_name(order):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    attempts = []
    for number in range(3):
        if number == 2:
            store.set("here/1", "of a process that was killed while it waited for the others")
        attempts.append(started(store, order))
    assert [len(set(names)) for names in attempts] == [1, 1, 1]
    assert len({names[0] for names in attempts}) == 3


def test_ranks_that_do_not_come_are_named():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=1))
    with pytest.raises(UserError, match=r"nothing of 2 for 1 s"):
        started(store, [0, 1])
    with pytest.raises(UserError, match=r"nothing of 0 for 1 s"):
        _attempt(store, 2, 3)


def test_a_rank_that_ends_since_it_misses_another_is_not_blamed():
    """It is gone, too, by the time that others look: only the one that nobody heard of is the cause."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank in (1, 2):
        store.set(f"who/{rank}", f"on elsewhere, pid {rank}")
        store.set(f"beat/{rank}", "7 step 3")
    store.set("waits/2", "")
    error = Presence(store, 0, 3, timeout_s=5).explain(Terminated())
    assert error is not None and re.match(r"Rank 1 did not take part in the set-up", error.what)
    assert "rank 2" not in str(error)


def test_of_all_ranks_that_find_a_cause_one_prints_it():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("beat/1", "7 step 3")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        present = [Presence(store, rank, 3, timeout_s=5) for rank in (0, 2)]
        errors = list(pool.map(lambda one: one.explain(Terminated()), present))
    assert sorted(error.is_printed_here for error in errors) == [False, True]
    assert all(error.what.startswith("Rank 1 did") for error in errors)


LEAVES = """
import sys, time
import torch.distributed as dist
from recsys import presence

presence._PERIOD_S = 0.0  # always inside the store
present = presence.Presence(dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False), 0, 2, 5)
time.sleep(0.3)
present.leave()
"""


def test_a_rank_that_leaves_while_it_tells_where_it_is_ends_in_order():
    """Without waiting for its thread, nine in ten end by SIGABRT: "terminate called without an active exception"."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    jobs = [subprocess.Popen([sys.executable, "-c", LEAVES, str(store.port)]) for _ in range(3)]
    assert [job.wait(60) for job in jobs] == [0, 0, 0]


FAULT = """
import os, sys
from recsys.distributed import agreed, process_group
from recsys.errors import UserError

faults = [OSError(116, "Stale file handle"), UserError("wrong")]
with process_group("cpu") as ranks:
    for fault in faults:
        try:
            with agreed("the data"):
                if ranks.rank == 1:
                    raise fault
        except Exception as error:
            if ranks.rank == 0:
                os.write(1, f"{type(error).__name__} {error.is_worth_retrying}\\n".encode())
"""


@pytest.mark.dist
def test_a_fault_of_one_rank_is_worth_another_try_and_a_mistake_is_not(tmp_path):
    """What the other ranks raise for it decides whether the launcher's next attempt is given up at once."""
    (tmp_path / "fault.py").write_text(FAULT, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, str(tmp_path / "fault.py")], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n") == ["UserError True", "UserError False", ""], done.stderr[-2000:]
