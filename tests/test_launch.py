"""The TorchX components: what they hand to each scheduler, what they refuse before it is queued, and a real start."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import warnings

import kubernetes_validate
import pytest
import yaml
from torchx.runner import get_runner
from torchx.specs import AppDryRunInfo
from torchx.specs.finder import ComponentValidationException

from recsys import launch
from scripts.chaos import _prepare

ROOT = pathlib.Path(__file__).parent.parent
GOLDEN = pathlib.Path(__file__).parent / "golden"
RECIPE = "models/din/movielens-100k.yaml"
KUBERNETES = "1.34"
HOSTILE = [
    'data.label=name with space and a="b c"',
    "data.user=$HOME ${HOME} $(HOME) $$ `id` \\ ' \" ; & | * ? ~ # !",
    "data.item=${app_id} ${replica_id} $app_id $$app_id --",
    "model.name=a,b:c\nsecond line\t中文 é",
]


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.fixture
def hostile(monkeypatch):
    """Overrides that no recipe takes: what is tested is the way to the process."""
    monkeypatch.setattr(launch, "load", lambda *_: None)
    return HOSTILE


def dry_run(scheduler: str, *arguments: str, **options: object) -> AppDryRunInfo:
    given = ["--recipe", RECIPE, "--check_data", "False", "--run_dir", "/shared/run", "--rdzv_port", "20001"]
    if scheduler == "kubernetes":
        options = {
            "queue": "ads",
            "namespace": "team-a",
            "service_account": "trainer",
            "validate_spec": False,
            **options,
        }
        given += ["--image", "registry.example/recsys:1", "--mounts", "type=volume,src=shared,dst=/shared"]
    with get_runner() as runner, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about sinfo, which is not here, and Volcano's retries
        return runner.dryrun_component("recsys.launch.train", [*given, *arguments], scheduler, options)


def sbatch_of(*arguments: str, **options: object) -> str:
    return repr(dry_run("slurm", *arguments, **options).request)


def job_of(*arguments: str, **options: object) -> dict:
    text = str(dry_run("kubernetes", *arguments, **options).request)
    return yaml.safe_load(text)


def pods_of(job: dict) -> list[dict]:
    return [task["template"] for task in job["spec"]["tasks"]]


def environment_of(pod: dict) -> dict[str, str]:
    return {one["name"]: one["value"] for one in pod["spec"]["containers"][0]["env"]}


def without_chance(text: str) -> str:
    """Ids that TorchX draws, and its version, replaced."""
    text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "SESSION", text)
    text = re.sub(r"din-movielens-100k-[a-z0-9]{10,16}", "din-movielens-100k-UNIQUE", text)
    return re.sub(r"TorchX [\d.a-z]+|(torchx.pytorch.org/version: )\S+", r"\1VERSION", text)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("slurm.sh", lambda: sbatch_of("-j", "2x8", "--gpu", "8", "--cpu", "96", "--max_retries", "2", **SLURM)),
        ("slurm_memory.sh", lambda: sbatch_of("-j", "2x2", "--memMB", "64000", "--interface", "ib0", **SLURM)),
        ("slurm_one_node.sh", lambda: sbatch_of("-j", "1x4", "train.epochs=2", **SLURM)),
        (
            "kubernetes.yaml",
            lambda: yaml.safe_dump(job_of("-j", "2x8", "--gpu", "8", "--cpu", "96", "--max_retries", "2")),
        ),
    ],
)
def test_schedulers_are_asked_for_what_the_golden_files_say(name, make):
    """After a change that is meant: RECSYS_GOLDEN=write pytest tests/test_launch.py, and read the difference."""
    found, file = without_chance(make()), GOLDEN / name
    if os.environ.get("RECSYS_GOLDEN") == "write":
        file.write_text(found, encoding="utf-8")
    assert found == file.read_text(encoding="utf-8")


SLURM = {"partition": "gpu", "account": "ads", "qos": "high", "time": "12:00:00"}


def test_memory_is_asked_for_where_it_is_given_and_only_there():
    assert "--mem=" not in sbatch_of("-j", "2x2") and "--mem=64000" in sbatch_of("-j", "2x2", "--memMB", "64000")
    (small, large) = (pods_of(job_of(*arguments))[0] for arguments in ([], ["--memMB", "64000"]))
    assert "memory" not in small["spec"]["containers"][0]["resources"]["requests"]
    assert large["spec"]["containers"][0]["resources"]["limits"]["memory"] == "64000M"


def test_pods_are_what_kubernetes_takes_and_a_misspelt_key_would_be_seen():
    job = job_of("-j", "2x8", "--gpu", "8", "--cpu", "96", "--memMB", "512000")
    assert (job["apiVersion"], job["kind"]) == ("batch.volcano.sh/v1alpha1", "Job")
    assert job["spec"]["queue"] == "ads"
    for number, template in enumerate(pods_of(job)):
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        pod["metadata"]["name"] = f"{job['metadata']['name']}-{job['spec']['tasks'][number]['name']}-0"
        assert len(pod["metadata"]["name"]) <= 63
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        (container,) = pod["spec"]["containers"]
        assert pod["spec"]["serviceAccountName"] == "trainer"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
        assert {"name": "dshm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        assert any(mount["mountPath"] == "/shared" for mount in container["volumeMounts"])
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(
                {**pod, "spec": {**pod["spec"], "restartPolicyy": "Never"}}, KUBERNETES, strict=True
            )


def test_pods_wait_for_the_name_of_the_first_one_and_are_tried_again():
    job = job_of("-j", "2x1", "--max_retries", "2")
    first, second = (pod["spec"]["containers"][0]["command"][-1] for pod in pods_of(job))
    assert "${VC_DINMOVIELENS100K_0_HOSTS:?" in second and "${TORCHX_RANK0_HOST:?" in first
    assert (job["spec"]["maxRetry"], job["spec"]["tasks"][0]["maxRetry"]) == (2, 2)
    waits_s = dict(re.findall(r"(\w+_timeout)=(\d+)", second))
    assert int(waits_s["join_timeout"]) >= 300 and int(waits_s["read_timeout"]) >= 300


def test_several_nodes_never_meet_at_localhost_unless_the_scheduler_itself_says_so():
    assert "localhost" not in sbatch_of("-j", "2x1")
    first, second = pods_of(job_of("-j", "2x1"))
    assert "localhost" not in json.dumps(second)
    # The first pod meets itself there: its own name may not be known yet. That is TorchX's choice, and right.
    assert json.dumps(first).count("localhost") == 1 and environment_of(first)["TORCHX_RANK0_HOST"] == "localhost"


def run_command(command: list[str], folder: pathlib.Path, **environment: str) -> subprocess.CompletedProcess:
    """Run what a node runs, with a torchrun that tells its arguments and environment instead of starting ranks."""
    (folder / "bin").mkdir(exist_ok=True)
    teller = folder / "bin" / "torchrun"
    teller.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"json.dump({{'argv': sys.argv[1:], 'env': dict(os.environ)}}, open({str(folder / 'told')!r}, 'w'))\n"
    )
    teller.chmod(0o755)
    own = {**os.environ, "PATH": f"{folder / 'bin'}:/usr/bin:/bin", **environment}
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=30)


def told(folder: pathlib.Path) -> tuple[list[str], dict[str, str]]:
    found = json.loads((folder / "told").read_text())
    return found["argv"][found["argv"].index("recsys") - 1 :], found["env"]


EXPECTED = ["-m", "recsys", "train", RECIPE, *HOSTILE, "--run-dir", "/shared/run", "--resume", "auto"]
VALUES = {"LIST": "mlx5_0,mlx5_1", "WORDS": "a 'b' c", "DOLLAR": "$HOME $(LIST) ${app_id}"}
ENVIRONMENT = ["--env", ",".join(f"{name}={value}" for name, value in VALUES.items())]


def as_kubernetes_does(word: str, known: dict[str, str]) -> str:
    """Variables in place of $(NAME), where there are such, and one $ in place of two."""
    return re.sub(r"\$\$|\$\(([\w.-]+)\)", lambda m: "$" if m[0] == "$$" else known.get(m[1], m[0]), word)


def test_a_pod_gets_arguments_and_environment_unchanged(hostile, tmp_path):
    for number, pod in enumerate(pods_of(job_of(*ENVIRONMENT, "-j", "2x1", *hostile))):
        known = environment_of(pod)
        command = [as_kubernetes_does(word, known) for word in pod["spec"]["containers"][0]["command"]]
        head = {"VC_DINMOVIELENS100K_0_HOSTS": "first.of.job"} if number else {}
        done = run_command(command, tmp_path, **known, **head)
        assert done.returncode == 0, done.stderr
        argv, environment = told(tmp_path)
        assert argv == EXPECTED
        assert {name: environment[name] for name in VALUES} == VALUES


def test_a_slurm_job_gets_arguments_and_environment_unchanged(hostile, tmp_path):
    """The script runs with an srun that treats options and --export as Slurm's does, and starts the first group."""
    (tmp_path / "bin").mkdir()
    srun = tmp_path / "bin" / "srun"
    srun.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        "words = sys.argv[1:]\nwords = words[: words.index(':')]\n"
        "while words[0].startswith('--'):\n"
        "    if words[0].startswith('--export=ALL,'):\n"
        "        os.environ |= dict(pair.split('=', 1) for pair in words[0][13:].split(','))\n"
        "    words.pop(0)\n"
        "os.execvp(words[0], words)\n"
    )
    srun.chmod(0o755)
    script = dry_run("slurm", *ENVIRONMENT, "-j", "2x1", *hostile).request.materialize()
    done = run_command(
        ["bash", "-c", script],
        tmp_path,
        SLURM_JOB_ID="77",
        SLURM_JOB_NODELIST_HET_GROUP_0="tn1",
        SLURM_RESTART_COUNT="0",
    )
    assert done.returncode == 0, done.stderr
    argv, environment = told(tmp_path)
    assert argv == EXPECTED
    assert {name: environment[name] for name in VALUES} == VALUES
    assert environment["PET_LOG_DIR"] == f"/shared/run/logs/{os.uname().nodename}"
    all_words = json.loads((tmp_path / "told").read_text())["argv"]
    assert all_words[all_words.index("--rdzv_endpoint") + 1] == "tn1:20001"
    assert all_words[all_words.index("--rdzv_id") + 1] == "77"


def test_an_interface_and_a_log_level_reach_all_nodes():
    for pod in pods_of(job_of("-j", "3x1", "--interface", "ib0", "--log_level", "INFO")):
        environment = environment_of(pod)
        assert {environment[f"{library}_SOCKET_IFNAME"] for library in ("GLOO", "NCCL")} == {"ib0"}
        assert (environment["LOGLEVEL"], environment["PYTHONUNBUFFERED"]) == ("INFO", "1")


def test_a_job_whose_scheduler_names_no_first_node_ends_at_once_and_says_which_variable_is_missing(tmp_path):
    command = pods_of(job_of("-j", "2x1"))[1]["spec"]["containers"][0]["command"]
    done = run_command(command, tmp_path)
    assert done.returncode != 0 and not (tmp_path / "told").exists()
    assert "VC_DINMOVIELENS100K_0_HOSTS: is not set" in done.stderr


def test_a_name_is_that_of_the_job_and_of_its_tasks():
    assert "#SBATCH --job-name=myads2-1 " in sbatch_of("-j", "2x1", "--name", "my-ads-2")
    job = job_of("--name", "my-ads-2")
    assert job["metadata"]["name"].startswith("my-ads-2-") and job["spec"]["tasks"][0]["name"] == "myads2-0"
    longest = job_of("--name", "a" * 20, "-j", "120x1")
    assert len(f"{longest['metadata']['name']}-{longest['spec']['tasks'][-1]['name']}-0") <= 63


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--recipe", "models/din/no.yaml"], "models/din/no.yaml"),
        (["train.epoch=3"], "epoch"),
        (["train.epochs=no"], r"train\.epochs"),
        (["--", "--flag"], "--flag"),
        (["-j", "4"], "NODESxPROCESSES"),
        (["-j", "1:2x1"], "NODESxPROCESSES"),
        (["-j", "2x8", "--gpu", "4"], "More processes on a node than GPUs"),
        (["-j", "1x9", "-h", "aws_p4d.24xlarge"], "More processes on a node than GPUs"),
        (["--max_restarts", "-1"], "max_restarts cannot be"),
        (["--max_retries", "-2"], "max_retries cannot be"),
        (["--name", "My_Job"], "small letters"),
        (["--env", "A B=1"], "env names a variable"),
    ],
)
def test_mistakes_are_refused_before_a_job_is_queued(arguments, expected):
    with pytest.raises(ComponentValidationException, match=expected) as refused:
        dry_run("slurm", *arguments)
    assert str(refused.value).startswith("Error: ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["data.train=/nowhere"], "/nowhere"),
        (["--run_dir", f"{__file__}/run"], "run folder cannot be made"),
        (["--image", "recsys:1"], "container has no default"),
        (["--mounts", "type=volume,src=a,dst=/shared"], "container has no default"),
        (["--rdzv_port", "99999999"], "rdzv_port cannot be"),
    ],
)
def test_what_only_this_machine_can_tell_is_refused_too(recipe, arguments, expected):
    with get_runner() as runner, pytest.raises(ComponentValidationException, match=expected):
        runner.dryrun_component("recsys.train", ["--recipe", str(recipe), *arguments], "local_cwd")


def test_what_the_user_puts_into_the_environment_comes_last():
    environment = environment_of(pods_of(job_of("--env", "PET_MAX_RESTARTS=9,PYTHONUNBUFFERED=0"))[0])
    assert (environment["PET_MAX_RESTARTS"], environment["PYTHONUNBUFFERED"]) == ("9", "0")


def test_an_evaluation_is_refused_where_there_is_no_run_and_names_it_as_the_nodes_see_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "din").mkdir(parents=True)
    with get_runner() as runner:
        with pytest.raises(ComponentValidationException, match=r"no such file or folder.*nothing"):
            runner.dryrun_component("recsys.evaluate", ["--run", "runs/nothing"], "local_cwd")
        with pytest.raises(ComponentValidationException, match=r"no such file or folder.*nowhere"):
            runner.dryrun_component("recsys.evaluate", ["--run", "runs/din", "--data", "/nowhere"], "local_cwd")
    assert f" -m recsys evaluate {tmp_path}/runs/din" in launch.evaluate(run="runs/din").roles[0].args[1]


def test_srun_is_told_the_cores_that_sbatch_was_asked_for(monkeypatch):
    monkeypatch.delenv("SRUN_CPUS_PER_TASK", raising=False)
    assert "--cpus-per-task=48" in sbatch_of("-j", "2x1", "--cpu", "48")
    assert os.environ["SRUN_CPUS_PER_TASK"] == "48"


def test_the_command_line_refuses_in_one_message():
    done = subprocess.run(
        ["torchx", "run", "--dryrun", "-s", "local_cwd", "recsys.train", "--recipe", "no.yaml"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and "Error: " in done.stderr and "no.yaml" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> pathlib.Path:
    return _prepare(tmp_path_factory.mktemp("launch"), epochs=2)


@pytest.mark.dist
def test_a_failing_job_ends_with_the_cause_keeps_its_logs_and_passes_the_failure_on(recipe, tmp_path):
    """The mistake is one that only ranks see; the scheduler's second start, with the same id, does not repeat it."""
    own = {**os.environ, "RECSYS_LOGS": str(tmp_path / "run" / "logs"), "PET_LOG_DIR": str(tmp_path / "run" / "logs")}
    command = ["torchrun", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += ["--rdzv-id", "77", "--tee", "3", "-m", "recsys", "train", str(recipe)]
    command += ["train.warm_start=/nowhere", "--run-dir", str(tmp_path / "run"), "--resume", "auto"]
    for said in ("Error: ", "Not tried again: "):
        done = subprocess.run(
            command, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
        )
        assert done.returncode == 1
        assert "/nowhere" in "\n".join(done.stdout.splitlines()[-20:]), done.stdout
        assert len(re.findall(rf"^\[\S+\]:{said}", done.stdout, re.MULTILINE)) == 1, done.stdout
    logs = [log.read_text() for log in sorted((tmp_path / "run" / "logs").rglob("stderr.log"))]
    assert any("/nowhere" in log for log in logs)
    shutil.rmtree(tmp_path / "run" / "logs" / "mistake-77")
    done = subprocess.run(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    assert "Error: " in done.stdout
