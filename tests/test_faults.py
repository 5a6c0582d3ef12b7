"""What happens to a run when it, or a rank of it, is stopped, killed or cannot go on; with real processes."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import torch

from recsys.data.prepare import prepare
from scripts.chaos import _differences, main

ROOT = pathlib.Path(__file__).parent.parent
LIMIT_S = 120


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> pathlib.Path:
    """A recipe of 8 epochs with 25 steps each on one rank."""
    folder = tmp_path_factory.mktemp("faults")
    prepare("synthetic", folder / "data", options={"rows": 2000, "users": 40, "items": 50, "seed": 5})
    splits = {split: str(folder / "data" / split) for split in ("train", "valid", "test")}
    text = {
        "model": {"name": "deepfm", "hidden": [16], "dropout": 0.1},
        "data": {**splits, "batch_size_per_rank": 64, "shuffle_rows": 500},
        "features": [{"kind": "id", "columns": ["user_id", "item_id"]}],
        "tables": {"default": {"dim": 4, "rows": 200, "sharding": "row_wise"}},
        "train": {"epochs": 8, "device": "cpu", "log_every_steps": 1},
        "checkpoint": {"every_steps": 10},
    }
    (folder / "recipe.yaml").write_text(json.dumps(text))
    return folder / "recipe.yaml"


def start(recipe: pathlib.Path, run: pathlib.Path, *words: str, ranks: int = 1, restarts: int = 0) -> subprocess.Popen:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    launcher += ["--max-restarts", str(restarts)]
    command = [sys.executable, *(launcher if ranks > 1 or restarts else []), "-m", "recsys", "train", str(recipe)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*command, "--run-dir", str(run), *words],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_steps(run: pathlib.Path, job: subprocess.Popen, steps: int) -> None:
    end_s = time.monotonic() + LIMIT_S
    curve = run / "train_loss.jsonl"
    while job.poll() is None and time.monotonic() < end_s:
        if curve.exists() and curve.read_bytes().count(b"\n") >= steps:
            return
        time.sleep(0.005)
    raise AssertionError(f"no {steps} steps: {job.communicate()[0][-2000:]}")


def newest(run: pathlib.Path) -> int:
    return max(int(path.parent.name[5:]) for path in run.glob("checkpoints/step_*/complete.json"))


def test_a_run_that_is_told_to_stop_saves_the_step_it_is_at_and_says_so(recipe, tmp_path):
    job = start(recipe, tmp_path / "run")
    wait_for_steps(tmp_path / "run", job, 3)
    job.terminate()
    output = job.communicate(timeout=20)[0]
    assert job.returncode == 75, output[-2000:]
    steps = (tmp_path / "run" / "train_loss.jsonl").read_text().count("\n")
    assert newest(tmp_path / "run") == steps
    assert f"Told to stop: saved after step {steps}" in output.splitlines()[-1]


@pytest.mark.dist
def test_killed_ranks_are_started_again_by_the_launcher_and_end_as_if_undisturbed(recipe, tmp_path):
    whole = start(recipe, tmp_path / "whole", ranks=2)
    output = whole.communicate(timeout=LIMIT_S)[0]
    assert whole.returncode == 0, output[-3000:]
    killed = start(recipe, tmp_path / "killed", ranks=2, restarts=2)
    wait_for_steps(tmp_path / "killed", killed, 15)
    children = pathlib.Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    output = killed.communicate(timeout=LIMIT_S)[0]
    assert killed.returncode == 0, output[-3000:]
    assert "Going on from" in (tmp_path / "killed" / "log.txt").read_text()
    assert _differences(tmp_path / "whole", tmp_path / "killed") == []
    curves = [(tmp_path / name / "train_loss.jsonl").read_text() for name in ("whole", "killed")]
    assert curves[0] == curves[1], "what was recorded after the checkpoint is recorded once"


@pytest.mark.dist
@pytest.mark.parametrize("wrong", ["train.epochs=0", "data.train=/nowhere"])
def test_mistakes_of_the_user_are_not_tried_again(recipe, tmp_path, wrong):
    job = start(recipe, tmp_path / "run", wrong, ranks=2, restarts=3)
    output = job.communicate(timeout=LIMIT_S)[0]
    assert job.returncode != 0
    said = [line.split(":")[0] for line in output.splitlines()]
    assert (said.count("Error"), said.count("Not tried again")) == (1, 3), output[-3000:]
    assert wrong.split("=")[1] in "".join(output.splitlines()[-20:])


def test_a_model_that_gives_the_same_score_to_all_is_no_success(recipe, tmp_path):
    job = start(recipe, tmp_path / "run", "optimizer.dense.learning_rate=1e6", "optimizer.sparse.learning_rate=1e6")
    output = job.communicate(timeout=LIMIT_S)[0]
    assert job.returncode == 2, output[-2000:]
    assert "diverged" in output or "not finite" in output or "same score" in output


@pytest.mark.dist
def test_training_survives_a_few_rounds_of_chaos(capsys):
    assert main(["--rounds", "3", "--seed", "2"]) == 0, capsys.readouterr().out


def test_the_comparison_of_chaos_sees_one_changed_bit(recipe, tmp_path):
    import torch.distributed.checkpoint as dcp

    for name, value in (("one", 1.0), ("two", 1.0000001)):
        folder = tmp_path / name / "checkpoints" / "step_00000001"
        dcp.save({"model/x": torch.tensor([value])}, checkpoint_id=folder)
        (folder / "complete.json").write_text("{}")
        (tmp_path / name / "metrics.json").write_text("{}")
    assert _differences(tmp_path / "one", tmp_path / "two") == ["model/x differs"]
