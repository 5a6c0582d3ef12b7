import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

from tests._plans import HARD_LIMIT_S, ROOT, SMALL, change, plan_of, tables_of, text_of

WORKER = pathlib.Path(__file__).parent / "_plan_ranks.py"


def launch(folder: pathlib.Path, text: str, plans: list, nodes: int = 1) -> list[subprocess.CompletedProcess]:
    """Two ranks that assemble the model; on two simulated nodes, each has a launcher of its own."""
    config = folder / "config.json"
    config.write_text(json.dumps({"recipe": text, "plans": [str(p) if p else None for p in plans]}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = []
    for node in range(nodes):
        options = ["--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", str(2 // nodes)]
        options += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        command = [sys.executable, "-m", "torch.distributed.run", *options, str(WORKER), str(config)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        running.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        )
    done = []
    for process in running:
        try:
            output, _ = process.communicate(timeout=HARD_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        done.append(subprocess.CompletedProcess(process.args, process.returncode, output))
    return done


PINNED = text_of(
    "din", one={"rows": 1}, cols={"sharding": "column_wise", "dim": 8}, item={"dim": 8}, default={"dim": 8}
)


@pytest.mark.dist
def test_ranks_that_hold_different_plans_stop_and_name_the_fingerprints(tmp_path):
    plan = plan_of(PINNED, **SMALL)
    other = change(plan, "one", shards=lambda s: [{**x, "rank": 1 - x["rank"]} for x in s])
    if tables_of(plan)["one"].kind == "data_parallel":
        other = plan_of(PINNED, "tables.one.sharding=table_wise", **SMALL)
    assert plan.fingerprint != other.fingerprint
    plan.write(tmp_path / "plan.json")
    other.write(tmp_path / "other.json")
    start_s = time.perf_counter()
    (done,) = launch(tmp_path, PINNED, [tmp_path / "plan.json", tmp_path / "other.json"])
    assert time.perf_counter() - start_s < 60, "30 s, and what two interpreters take to load on a busy machine"
    assert done.returncode != 0
    assert done.stdout.count("plan fingerprint differs") == 2
    assert plan.fingerprint in done.stdout and other.fingerprint in done.stdout
    assert not list(tmp_path.glob("rank_*.json"))


@pytest.mark.dist
@pytest.mark.parametrize("nodes", [1, 2], ids=["one node", "two simulated nodes"])
def test_ranks_hold_what_the_pinned_plan_says(tmp_path, nodes):
    """Also with both halves of a table on one rank, which no planner would choose."""
    where = {**SMALL, "nodes": nodes, "devices_per_node": 2 // nodes}
    plan = change(plan_of(PINNED, **where), "cols", shards=lambda s: [{**x, "rank": 1} for x in s])
    plan.write(tmp_path / "plan.json")
    for done in launch(tmp_path, PINNED, [tmp_path / "plan.json"] * 2, nodes):
        assert done.returncode == 0, done.stdout[-3000:]
    found = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2)]
    assert [f["world_size"] for f in found] == [2, 2]
    assert found[0]["plan"]["fingerprint"] == found[1]["plan"]["fingerprint"] == plan.fingerprint
    assert [r["node"] for r in found[0]["plan"]["ranks"]] == ([0, 0] if nodes == 1 else [0, 1])
    assert any(plan.fingerprint in line for line in found[0]["log"])
    for table in plan.tables:
        if table.kind == "data_parallel":
            continue
        parts = [
            (rank, row, rows, col, cols)
            for rank, f in enumerate(found)
            for row, col, rows, cols in f["held"].get(table.name, [])
            if rows
        ]
        assert sorted(parts) == sorted((s.rank, *s.area) for s in table.shards if s.rows)
        assert sum(rows * cols for _, _, rows, _, cols in parts) == table.rows * table.width
