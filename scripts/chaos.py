"""Training that is killed again and again ends as training that is left alone.

    python -m scripts.chaos [--rounds 20] [--seed 1]

Two ranks train DIN on made-up data, once undisturbed. Then the same run is started `--rounds` times with `--resume
auto`, and each time, at a moment that the seed decides, one rank or both are killed (SIGKILL), or the launcher is told
to stop (SIGTERM): while the job starts, between two steps, or while a checkpoint is being written, synchronously or
not. Nothing is cleaned up between rounds. At last the run is left to end. All of its last checkpoint (weights,
optimizers, statistics, random states) must equal that of the undisturbed run to the last bit, and so must the metrics;
otherwise the exit code is 1. Takes about 15 s a round.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from scripts.contest import ROOT

_KINDS = ("kill one", "kill both", "tell to stop")
_MOMENTS = ("starting", "training", "saving")
_START_S = (0.5, 6.0)  # a kill while the job starts comes after some time between these
_LIMIT_S = 120.0
_POLL_S = 0.002
_SAVES_EVERY = 7
_RANKS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all rounds and compare; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        return run(pathlib.Path(name), options.rounds, options.seed)


def run(folder: pathlib.Path, rounds: int, seed: int) -> int:
    """All rounds, in a folder."""
    rng, recipe = random.Random(seed), _prepare(folder, epochs=rounds + 4)
    whole, cut = folder / "whole", folder / "cut"
    assert _ended(_start(recipe, whole, asynchronous=False)) == 0, "the undisturbed run failed"
    for number in range(1, rounds + 1):
        kind, moment = rng.choice(_KINDS), rng.choice(_MOMENTS)
        job = _start(recipe, cut, asynchronous=bool(rng.getrandbits(1)))
        found = _wait_for(moment, job, cut, rng)
        pids = _ranks_of(job)
        _strike(kind, job, pids, rng)
        code = _ended(job)
        alive = [pid for pid in pids if _is_alive(pid)]
        print(f"round {number}: {kind} while {found}: exit code {code}; step {_newest(cut)} is safe", flush=True)
        if alive:
            print(f"ranks {alive} outlived their job")
            return 1
        if (cut / "metrics.json").exists():
            break
    if not (cut / "metrics.json").exists():
        code = _ended(_start(recipe, cut, asynchronous=True))
        if code:
            print(f"the run could not be ended: exit code {code}\n{_log(cut)}")
            return 1
    differences = _differences(whole, cut)
    print("\n".join(differences) or "all entries of the last checkpoint and all metrics are equal")
    return 1 if differences else 0


def _prepare(folder: pathlib.Path, epochs: int) -> pathlib.Path:
    from recsys.data.prepare import prepare

    data = folder / "data"
    prepare("synthetic", data, options={"rows": 6000, "users": 60, "items": 80, "seed": 5})
    recipe = {
        "model": {"name": "din", "hidden": [32, 16], "attention_hidden": [8], "dropout": 0.1},
        "data": {split: str(data / split) for split in ("train", "valid", "test")}
        | {"batch_size_per_rank": 64, "shuffle_rows": 900},
        "features": [
            {"kind": "id", "columns": ["user_id", "item_id", "category_id"]},
            {"kind": "history", "of": {"history_item_id": "item_id", "history_category_id": "category_id"}},
        ],
        "tables": {
            "default": {"dim": 8, "ids": "hot_cold", "hot": 40, "cold": 20, "sharding": "row_wise"},
        },
        "train": {"epochs": epochs, "device": "cpu", "log_every_steps": 5},
        "checkpoint": {"every_steps": _SAVES_EVERY, "keep": 3},
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))  # JSON is YAML.
    return path


def _start(recipe: pathlib.Path, run: pathlib.Path, *, asynchronous: bool) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(_RANKS), "-m"]
    command += ["recsys", "train", str(recipe), f"checkpoint.asynchronous={str(asynchronous).lower()}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (run.parent / f"{run.name}.log").open("wb") as log:
        return subprocess.Popen(
            [*command, "--run-dir", str(run), "--resume", "auto"], env=environment, cwd=ROOT, stdout=log, stderr=log
        )


def _ended(job: "subprocess.Popen[bytes]") -> int:
    try:
        return job.wait(timeout=_LIMIT_S)
    finally:
        job.kill()


def _wait_for(moment: str, job: "subprocess.Popen[bytes]", run: pathlib.Path, rng: random.Random) -> str:
    """Return at a moment; what it was, since a job may end before."""
    if moment == "starting":
        wait_s = rng.uniform(*_START_S)
        time.sleep(wait_s)
        return f"starting for {wait_s:.1f} s"
    began, end_s = _lines(run), time.monotonic() + _LIMIT_S
    more = rng.randint(1, 6)
    while job.poll() is None and time.monotonic() < end_s:
        if _lines(run) >= began + more:
            if moment == "training":
                time.sleep(rng.uniform(0, 0.1))
                return f"training, {more} points of the loss curve later"
            if unfinished := _unfinished(run):
                return f"{unfinished} is being written"
        time.sleep(_POLL_S)
    return "ending"


def _lines(run: pathlib.Path) -> int:
    curve = run / "train_loss.jsonl"
    return curve.read_bytes().count(b"\n") if curve.exists() else 0


def _unfinished(run: pathlib.Path) -> str | None:
    newest = max((run / "checkpoints").glob("step_*"), default=None)
    return newest.name if newest is not None and not (newest / "complete.json").exists() else None


def _newest(run: pathlib.Path) -> str:
    return max((path.parent.name for path in run.glob("checkpoints/step_*/complete.json")), default="no")


def _strike(kind: str, job: "subprocess.Popen[bytes]", pids: list[int], rng: random.Random) -> None:
    if kind == "tell to stop":
        if job.poll() is None:
            job.terminate()
        return
    for pid in pids if kind == "kill both" else rng.sample(pids, min(1, len(pids))):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            print(f"rank {pid} had ended")


def _ranks_of(job: "subprocess.Popen[bytes]") -> list[int]:
    """Processes of the ranks, the launcher's children, as soon as there are any."""
    children = pathlib.Path(f"/proc/{job.pid}/task/{job.pid}/children")
    while job.poll() is None:
        with contextlib.suppress(OSError):
            found = [pid for pid in map(int, children.read_text().split()) if b"recsys" in _command(pid)]
            if len(found) == _RANKS:
                return found
        time.sleep(_POLL_S)
    return []


def _command(pid: int) -> bytes:
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _is_alive(pid: int) -> bool:
    return b"recsys" in _command(pid)


def _log(run: pathlib.Path) -> str:
    return (run.parent / f"{run.name}.log").read_text(errors="replace")[-3000:]


def _differences(one: pathlib.Path, two: pathlib.Path) -> list[str]:
    """Entries of the last checkpoints, and metrics, that are not the same."""
    import torch

    found = []
    if _newest(one) != _newest(two):
        return [f"the last checkpoints are {_newest(one)} and {_newest(two)}"]
    first, second = (_entries(run) for run in (one, two))
    found += [f"{name} is in one checkpoint only" for name in sorted(first.keys() ^ second.keys())]
    found += [f"{name} differs" for name in first.keys() & second.keys() if not torch.equal(first[name], second[name])]
    metrics = [json.loads((run / "metrics.json").read_text()) for run in (one, two)]
    speeds = ("rows_per_s", "reader_wait_share")
    found += [f"{key} differs" for key in metrics[0] if key not in speeds and metrics[0][key] != metrics[1].get(key)]
    return found


def _entries(run: pathlib.Path) -> dict[str, Any]:
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    plain = run.parent / f"{run.name}.pt"
    dcp_to_torch_save(run / "checkpoints" / _newest(run), plain)
    return torch.load(plain, weights_only=True)


if __name__ == "__main__":
    sys.exit(main())
