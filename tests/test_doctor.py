import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from recsys import doctor, machine, stack

ROOT = Path(__file__).parent.parent
FACTS = {"load_s": 1.0, "cuda": None, "devices": [], "threads": 1}


@pytest.fixture
def fitting(monkeypatch):
    """A machine on which everything fits, without loading anything."""
    versions = {**dict.fromkeys(stack.supported("gpu")), **stack.supported("cpu")}
    monkeypatch.setattr(stack, "installed", lambda: versions)
    monkeypatch.setattr(doctor, "_load_apart", lambda: FACTS)
    monkeypatch.setattr(doctor.importlib.metadata, "distributions", lambda: [])
    return versions


def distributions(*names: str) -> list:
    return [types.SimpleNamespace(metadata={"Name": name}) for name in names]


def test_fitting_environment_shows_versions_and_no_install_line(fitting):
    text, ok = doctor.report()
    assert ok and "Everything fits." in text and "pip install" not in text
    for name, version in stack.supported("cpu").items():
        assert re.search(rf"^  {name} +{re.escape(version)} +supported: {re.escape(version)}$", text, re.MULTILINE)
    for row in ("python", "platform", "devices", "cores", "threads", "memory"):
        assert re.search(rf"^  {row} +\S", text, re.MULTILINE)


@pytest.mark.parametrize("found", [None, "1.7.0"])
def test_misfit_is_an_error_with_the_install_line(found, fitting):
    fitting["torchrec"] = found
    text, ok = doctor.report()
    wanted = stack.supported("cpu")["torchrec"]
    assert not ok and f"torchrec is {found or 'not installed'}, supported is {wanted}" in text
    assert text.splitlines()[-1].strip() == stack.install_line("cpu")


def test_both_fbgemm_builds_are_an_error(fitting):
    fitting["fbgemm-gpu"] = fitting["fbgemm-gpu-cpu"]
    text, ok = doctor.report()
    assert not ok and "overwrite each other's files" in text and "uninstall -y fbgemm-gpu-cpu fbgemm-gpu" in text


def test_nvidia_packages_on_a_cpu_set_up_are_a_warning_and_fail_a_fresh_set_up(fitting, monkeypatch):
    found = distributions("numpy", "nvidia-cublas-cu12", "nvidia-nccl-cu12")
    monkeypatch.setattr(doctor.importlib.metadata, "distributions", lambda: found)
    text, ok = doctor.report()
    assert (
        ok and "warning: packages for GPUs are installed" in text and ": nvidia-cublas-cu12, nvidia-nccl-cu12" in text
    )
    assert doctor.report(strict=True)[1] is False


def test_cuda_build_of_torch_on_a_cpu_set_up_is_a_warning(fitting, monkeypatch):
    monkeypatch.setattr(doctor, "_load_apart", lambda: {**FACTS, "cuda": "13.0"})
    text, ok = doctor.report()
    assert ok and "warning: torch is a CUDA 13.0 build" in text
    assert doctor.report(strict=True)[1] is False


def doctor_with(fakes: dict[str, str], folder: Path) -> subprocess.CompletedProcess:
    """The real doctor in a new process, where the given packages are replaced by files that hold the given code."""
    for name, code in fakes.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(code)
    code = "import sys; from recsys import doctor, machine; text, ok = doctor.report(); print(text); sys.exit(not ok)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    return subprocess.run([sys.executable, "-c", code], env=env, cwd=folder, capture_output=True, text=True)


def test_doctor_works_where_the_stack_cannot_be_imported(tmp_path):
    absent = "raise ModuleNotFoundError('No module named ' + repr(__name__))"
    done = doctor_with({"fbgemm_gpu": absent, "torchrec": absent}, tmp_path)
    assert done.returncode == 1 and done.stderr == ""
    assert "error: fbgemm_gpu cannot be imported: ModuleNotFoundError" in done.stdout
    assert done.stdout.splitlines()[-1].strip() == stack.install_line("cpu")


def test_loader_error_is_one_line_with_no_traceback(tmp_path):
    done = doctor_with({"fbgemm_gpu": "raise OSError('x.so: undefined symbol: _ZN3c10')"}, tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert "error: fbgemm_gpu cannot be imported: OSError: x.so: undefined symbol: _ZN3c10" in done.stdout


def test_library_that_kills_its_process_does_not_kill_the_doctor(tmp_path):
    done = doctor_with({"fbgemm_gpu": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"}, tmp_path)
    assert done.returncode == 1 and "ended with code -11" in done.stdout and "pip install" in done.stdout


@pytest.mark.parametrize("version", [1, 2])
def test_tightest_limit_of_all_control_groups_above_the_process_counts(version, tmp_path, monkeypatch):
    own = tmp_path / "cgroup"
    monkeypatch.setattr(machine, "_OWN_CGROUPS", own)
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
    if version == 1:
        own.write_text("4:memory:/job/task\n3:cpu,cpuacct:/job/task\n0::/\n")
        memory, cpu, file = tmp_path / "memory/job", tmp_path / "cpu/job", "memory.limit_in_bytes"
        limits, unlimited = {"cpu.cfs_quota_us": "150000", "cpu.cfs_period_us": "100000"}, str(2**63 - 4096)
    else:
        own.write_text("0::/job/task\n")
        memory, cpu, file = tmp_path / "job", tmp_path / "job", "memory.max"
        limits, unlimited = {"cpu.max": "150000 100000"}, "max"
    (memory / "task").mkdir(parents=True)
    (cpu / "task").mkdir(parents=True, exist_ok=True)
    (memory / file).write_text(f"{3 * 2**30}\n")
    (memory / "task" / file).write_text(f"{unlimited}\n")
    for name, text in limits.items():
        (cpu / name).write_text(f"{text}\n")
    assert machine.memory_limit_bytes() == 3 * 2**30
    assert machine.cpu_quotas() == [1.5]


def test_no_control_groups_mean_no_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_OWN_CGROUPS", tmp_path / "absent")
    assert machine.memory_limit_bytes() == float("inf") and machine.cpu_quotas() == []
