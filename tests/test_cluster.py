"""A real Slurm of two nodes on this machine, with real jobs: what it trains, and what it survives.

Runs with `-m cluster`; needs root, and on Debian `apt-get install slurm-wlm munge iproute2`.
"""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from torchx.runner import Runner, get_runner
from torchx.specs import AppState

from scripts.chaos import _differences, _prepare
from tests._guide import ON_SLURM, RECIPE, the, words

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        "CI" not in os.environ and (not shutil.which("slurmctld") or os.geteuid() != 0),
        reason="needs root and Debian's slurm-wlm, munge, iproute2",
    ),
]
ROOT = pathlib.Path(__file__).parent.parent
SCRIPTS = ROOT / "scripts" / "slurm"
LIMIT_S = 120


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The cluster, in the environment of this process; ended by the ids of its processes."""
    lab = pathlib.Path("/tmp", f"recsys-slurm-{os.getpid()}")
    own = {
        "SLURM_LAB": str(lab),
        "PATH": f"{SCRIPTS / 'shim'}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_CONF": str(lab / "slurm.conf"),
        "SQUEUE_STATES": "all",  # later versions of Slurm show ended jobs only then
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in own.items():
            patch.setenv(name, value)
        patch.chdir(tmp_path_factory.mktemp("submitted_from"))
        guide("scripts/slurm/cluster.sh start")
        try:
            assert f"export SLURM_CONF={own['SLURM_CONF']}" in guide("scripts/slurm/cluster.sh env")
            yield
        finally:
            guide("scripts/slurm/cluster.sh stop")
            alive = [pid for pid, _ in processes(SLURM_CONF=str(lab / "slurm.conf"), SLURM_JOB_ID=None)]
            shutil.rmtree(lab)
            assert alive == [], "processes outlived their cluster"


@pytest.fixture(scope="module")
def runner() -> Runner:
    with get_runner() as found:
        yield found


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> pathlib.Path:
    """A DIN with row-wise tables, and the run that none of the others is allowed to differ from."""
    found = _prepare(tmp_path_factory.mktemp("cluster"), epochs=4)
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", "-m", "recsys", "train", str(found)]
    own = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    own["PATH"] = f"{pathlib.Path(sys.executable).parent}:{own['PATH']}"
    command += ["--run-dir", str(found.parent / "whole")]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return found


def processes(**environment: str | None) -> list[tuple[int, dict[str, str]]]:
    """Processes, other than this one, in whose environment these variables stand; None: with any value."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            pairs = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        its = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        if all(name in its and value in (None, its[name]) for name, value in environment.items()):
            found.append((int(folder.name), its))
    return [(pid, its) for pid, its in found if pid != os.getpid()]


def submit(runner: Runner, recipe: pathlib.Path, run: str, *arguments: str) -> str:
    given = ["--recipe", str(recipe), "-j", "2x1", "--cpu", "2", "--run_dir", str(recipe.parent / run)]
    given += ["--env", "OMP_NUM_THREADS=1", *arguments]
    return runner.run_component("recsys.train", given, "slurm", {"partition": "debug", "time": "10"})


def ended(runner: Runner, handle: str) -> AppState:
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        status = runner.status(handle)
        # A job that is about to be requeued has failed for a moment.
        if status is not None and status.is_terminal() and not queued(handle):
            return status.state
        time.sleep(0.5)
    pytest.fail(f"{handle} has not ended: {outputs(handle)}")


def queued(handle: str) -> bool:
    time.sleep(1)
    command = ["squeue", "-h", "-t", "PENDING,RUNNING,COMPLETING,REQUEUED,CONFIGURING", "-o", "%A"]
    return number(handle) in subprocess.run(command, capture_output=True, text=True).stdout.split()


def number(handle: str) -> str:
    return handle.rsplit("/", 1)[1]


def outputs(handle: str) -> str:
    return "\n".join(file.read_text()[-3000:] for file in sorted(pathlib.Path().glob(f"slurm-{number(handle)}*")))


def wait_for_steps(run: pathlib.Path, steps: int) -> None:
    curve, end_s = run / "train_loss.jsonl", time.monotonic() + LIMIT_S
    while not (curve.exists() and curve.read_bytes().count(b"\n") >= steps):
        assert time.monotonic() < end_s
        time.sleep(0.02)


RAN: set[str] = set()


def guide(start: str, **places: str) -> str:
    """Run the command of the guide that starts so, with other values in the places that are named."""
    RAN.add(start)
    command = words(the(start), **places, **{"scripts/slurm/": f"{SCRIPTS}/"})
    # Daemons that a command starts keep its stderr.
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0, command
    return done.stdout


def test_two_nodes_train_what_two_ranks_of_one_host_do_and_torchx_shows_it(slurm, runner, recipe):
    places = {RECIPE: str(recipe), "partition=gpu": "partition=debug", "--gpu 8 --cpu 96": "--cpu 2", "2x8": "2x1"}
    command = f"{the('torchx run -s slurm')} --run_dir {recipe.parent / 'slurm'}"
    handle = subprocess.check_output(words(command, **places), text=True, timeout=60).strip()
    assert ended(runner, handle) == AppState.SUCCEEDED, outputs(handle)
    assert _differences(recipe.parent / "whole", recipe.parent / "slurm") == []
    logs = recipe.parent / "slurm" / "logs"
    assert sorted(folder.name for folder in logs.iterdir()) == ["tn1", "tn2"]
    facts = json.loads((recipe.parent / "slurm" / "environment.json").read_text())["strategy"]["facts"]
    assert facts["hosts"] == ["tn1", "tn2"] and facts["choice"]["interface"] == "eth0"
    job = {"slurm://torchx/JOB": handle}
    assert guide("torchx status slurm", **job).count("SUCCEEDED") == 3
    assert "Best epoch 4" in guide("torchx log --streams stdout slurm", **job)
    assert re.search(rf"{handle}\s+\S+\s+SUCCEEDED", guide("torchx list -s slurm"))


def test_a_job_that_is_cancelled_leaves_no_process(slurm, runner, recipe):
    handle = submit(runner, recipe, "cancelled", "train.epochs=10000")
    wait_for_steps(recipe.parent / "cancelled", 2)
    guide("torchx cancel slurm", **{"slurm://torchx/JOB": handle})
    assert ended(runner, handle) == AppState.CANCELLED
    end_s = time.monotonic() + 40
    while processes(SLURM_JOB_ID=number(handle)) and time.monotonic() < end_s:
        time.sleep(0.2)
    assert processes(SLURM_JOB_ID=number(handle)) == []


def test_a_killed_rank_makes_all_ranks_start_again_from_the_checkpoint_with_nothing_lost(slurm, runner, recipe):
    handle, run = submit(runner, recipe, "killed"), recipe.parent / "killed"
    wait_for_steps(run, 6)
    ((pid, _),) = processes(SLURM_JOB_ID=number(handle), RANK="1", LOCAL_RANK="0")
    os.kill(pid, signal.SIGKILL)
    assert ended(runner, handle) == AppState.SUCCEEDED, outputs(handle)
    assert "Going on from" in (run / "log.txt").read_text()
    assert _differences(recipe.parent / "whole", run) == []
    assert "Restarts=0" in subprocess.check_output(["scontrol", "show", "job", number(handle)], text=True)


def test_a_job_that_loses_a_launcher_is_run_again_by_slurm_with_nothing_lost(slurm, runner, recipe):
    handle, run = submit(runner, recipe, "requeued", "--max_retries", "1"), recipe.parent / "requeued"
    wait_for_steps(run, 6)
    ((_, its),) = processes(SLURM_JOB_ID=number(handle), RANK="1", LOCAL_RANK="0")
    launchers = [pid for pid, _ in processes(SLURM_JOB_ID=number(handle), SLURM_NODEID=its["SLURM_NODEID"])]
    (launcher,) = [pid for pid in launchers if b"torchrun" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(launcher, signal.SIGKILL)
    assert ended(runner, handle) == AppState.SUCCEEDED, outputs(handle)
    assert re.findall(r"Fresh start|Going on from", (run / "log.txt").read_text()) == ["Fresh start", "Going on from"]
    assert _differences(recipe.parent / "whole", run) == []


def test_the_batch_script_does_the_same_without_torchx(slurm, recipe):
    places = {RECIPE: str(recipe), "--cpus-per-task=96 --gpus-per-node=8": "--parsable --cpus-per-task=2", "=8": "=1"}
    first, second = (
        guide("sbatch", **places, **{"/shared/runs/din": str(recipe.parent / name)}).strip()
        for name in ("batch", "not")
    )
    assert second in guide("squeue")
    guide("scancel", JOB=second)
    end_s = time.monotonic() + LIMIT_S
    while queued(f"/{first}") and time.monotonic() < end_s:
        time.sleep(0.5)
    assert "JobState=COMPLETED" in subprocess.check_output(["scontrol", "show", "job", first], text=True), outputs(
        f"/{first}"
    )
    assert _differences(recipe.parent / "whole", recipe.parent / "batch") == []
    assert sorted(folder.name for folder in (recipe.parent / "batch" / "logs").iterdir()) == ["tn1", "tn2"]
    assert not (recipe.parent / "not" / "recipe.yaml").exists()


def test_a_running_job_that_is_queued_again_saves_first_and_goes_on_where_it_was(slurm, runner, recipe):
    """What preemption does, too: SIGTERM, and SIGKILL after KillWait."""
    handle, run = submit(runner, recipe, "preempted"), recipe.parent / "preempted"
    wait_for_steps(run, 6)
    subprocess.run(["scontrol", "requeue", number(handle)], check=True)
    assert ended(runner, handle) == AppState.SUCCEEDED, outputs(handle)
    log = (run / "log.txt").read_text()
    (stopped,) = re.findall(r"Told to stop: saved after step (\d+)", log)
    assert re.search(rf"Going on from \S+step_{int(stopped):08}", log)
    assert _differences(recipe.parent / "whole", run) == []


def test_what_the_guide_says_of_slurm_was_run(slurm):
    """The last test of this file; stopping comes after it."""
    assert set(ON_SLURM) - RAN == {"scripts/slurm/cluster.sh stop"}
