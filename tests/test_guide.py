"""What the guide to clusters says can be done: each of its commands is run or dry-run, here or in test_cluster.py."""

import json
import os
import pathlib
import re
import subprocess
import sys
import time

import kubernetes_validate
import pytest
import yaml
from torchx.runner.config import load

from recsys import launch
from scripts.chaos import _differences, _prepare
from tests._guide import GUIDE, ON_SLURM, RECIPE, ROOT, commands, the, words
from tests._volcano import served

ON_KUBERNETES = ("torchx status kube", "torchx log kube", "torchx list -s kube", "torchx cancel kube")
LIMIT_S = 120


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "din").mkdir(parents=True)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> pathlib.Path:
    return _prepare(tmp_path_factory.mktemp("guide"), epochs=1)


def run(command: list[str], **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, **options)
    assert done.returncode == 0, f"{command}: {done.stdout[-1000:]} {done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.dist
@pytest.mark.parametrize("command", commands())
def test_each_command_is_run_or_dry_run_by_some_test(command, recipe):
    first, *rest = words(command, **{RECIPE: str(recipe)})
    if first == "torchx" and rest[0] == "run":
        assert "=== SCHEDULER REQUEST ===" in run([first, *_dry(rest)])
    elif first in ("recsys", "torchrun"):
        run([first, *rest])
    else:
        assert command.startswith(tuple([*ON_SLURM, *ON_KUBERNETES])), "no test runs it"


def test_files_that_the_guide_names_are_there():
    text = GUIDE.read_text()
    for name in re.findall(r"`((?:docs|scripts|tests)/[\w./]+)`|\]\((\w+\.md)\)", text):
        assert (ROOT / (name[0] or f"docs/{name[1]}")).exists(), name


def _dry(rest: list[str]) -> list[str]:
    rest = [word if not word.startswith("queue=") else f"{word},validate_spec=False" for word in rest]
    return [rest[0], "--dryrun", *rest[1:]]


@pytest.mark.dist
def test_kubernetes_commands_take_their_real_way_to_a_stand_in_for_the_server(recipe, tmp_path, monkeypatch):
    with served(tmp_path) as (cluster, config):
        monkeypatch.setenv("KUBECONFIG", str(config))
        places = {RECIPE: str(recipe), "-j 2x8": "-j 2x1", "--cpu 96": "--cpu 1"}
        command = the("torchx run", "kubernetes")
        handle = run(words(command, **places, **{"/shared": str(tmp_path)})).strip()
        assert re.fullmatch(r"kubernetes://torchx/team-ads:\S+", handle)
        place = {"kubernetes://torchx/team-ads:JOB": handle}
        end_s = time.monotonic() + LIMIT_S
        while "SUCCEEDED" not in (shown := run(words(the("torchx status kube"), **place))):
            assert time.monotonic() < end_s and "FAILED" not in shown, run(words(the("torchx log kube"), **place))
            time.sleep(1)
        assert "Best epoch 1" in run(words(the("torchx log kube"), **place))
        assert (tmp_path / "runs" / "din" / "metrics.json").exists()
        run(words(the("torchx list -s kube")))
        second = run([*words(command, **places, **{"/shared": str(tmp_path / "2")}), "train.epochs=5000"])
        run(words(the("torchx cancel kube"), **{"kubernetes://torchx/team-ads:JOB": second.strip()}))
        (pods,) = [cluster.pods_of("team-ads", job) for (_, name), job in cluster.jobs.items() if name in second]
        assert all(pod.wait(60) != 0 for pod in pods.values())


@pytest.mark.dist
def test_torchx_and_torchrun_train_the_same_model_and_two_jobs_on_one_host_do_not_meet(recipe, tmp_path):
    """The guide's own commands, both at once, from another folder."""
    torchx = [*words(the("torchx run -s local_cwd"), **{RECIPE: str(recipe)}), "--run_dir", str(tmp_path / "whole")]
    twin = [*words(the("torchrun"), **{RECIPE: str(recipe)}), "--run-dir", str(tmp_path / "cut")]
    jobs = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in (torchx, twin)
    ]
    said = [job.communicate(timeout=LIMIT_S)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], said
    assert _differences(tmp_path / "whole", tmp_path / "cut") == []
    logs = sorted((tmp_path / "whole" / "logs").rglob("stderr.log"))
    assert [log.parent.name for log in logs] == ["0", "1"]
    run(words(the("torchx run -s local_cwd recsys.evaluate"), **{"runs/din": str(tmp_path / "cut")}))
    trained = json.loads((tmp_path / "cut" / "metrics.json").read_text())["test"]
    evaluated = json.loads((tmp_path / "metrics.json").read_text())
    assert all(evaluated[name] == value for name, value in trained.items())
    assert f"Logs of each rank: {tmp_path / 'whole' / 'logs'}" in logs[0].read_text()


def test_the_example_of_defaults_names_options_that_there_are(monkeypatch):
    text = (ROOT / "docs" / "torchxconfig.example").read_text()
    pathlib.Path(".torchxconfig").write_text(text)
    for scheduler in ("slurm", "kubernetes", "local_cwd"):
        found: dict = {}
        with open(".torchxconfig") as file:
            load(scheduler, file, found)
        assert found, scheduler
    options = re.search(r"\[component:recsys.train\]\n(.*?)\n\n", text, re.DOTALL)[1]
    assert {line.split(" = ")[0] for line in options.splitlines()} <= set(launch.train.__annotations__)
    assert "=== SCHEDULER REQUEST ===" in run(
        ["torchx", "run", "--dryrun", "--", "--recipe", str(ROOT / RECIPE), "--check_data", "False"]
    )


def test_what_a_team_needs_on_kubernetes_is_valid():
    kinds = []
    for document in yaml.safe_load_all((ROOT / "docs" / "kubernetes_team.yaml").read_text()):
        kinds.append(document["kind"])
        if document["kind"] != "Queue":  # Volcano's has no published schema in a package
            kubernetes_validate.validate(document, "1.34", strict=True)
    assert sorted(set(kinds)) == sorted(kinds) and {"Namespace", "ResourceQuota", "LimitRange", "RoleBinding"} < set(
        kinds
    )


def test_a_job_s_workspace_has_code_and_neither_data_nor_runs_nor_history(tmp_path, monkeypatch):
    source, job = tmp_path / "source", tmp_path / "job"
    for name in (
        "recsys/a.py",
        "models/din/r.yaml",
        ".git/HEAD",
        "runs/r/log.txt",
        "data/d.bin",
        "x/y.parquet",
        ".venv/b",
    ):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("")
    (source / ".torchxignore").write_text((ROOT / ".torchxignore").read_text())
    monkeypatch.chdir(source)
    run(["torchx", "run", "--dryrun", "-s", "slurm", "-cfg", f"job_dir={job}", "utils.echo"])
    copied = sorted(str(path.relative_to(job)) for path in job.rglob("*") if path.is_file())
    assert [name for name in copied if name != ".torchxignore"] == ["models/din/r.yaml", "recsys/a.py"]
