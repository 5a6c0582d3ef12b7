"""Ranks that meet, part and meet again in one process, as a script that trains, evaluates and predicts does."""

import subprocess
import sys

SCRIPT = """
from recsys.distributed import gather, process_group

for turn in range(4):
    with process_group("cpu") as ranks:
        assert gather(10 * turn + ranks.rank) == [10 * turn, 10 * turn + 1]
print(f"rank {ranks.rank} is through")
"""


def test_ranks_can_meet_several_times_in_one_process(tmp_path):
    script = tmp_path / "meet.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {line for line in done.stdout.splitlines() if line} == {"rank 0 is through", "rank 1 is through"}
