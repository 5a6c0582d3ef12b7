import configparser
import importlib
import importlib.metadata
import logging
import re
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path

import pytest

from recsys import stack
from recsys.errors import UserError

ROOT = Path(__file__).parent.parent
PIN = re.compile(r"^([\w.-]+)==(\S+)$", re.MULTILINE)


@pytest.fixture
def require():
    """require_stack without what it remembers from earlier calls, and with its filters taken back."""
    before, log = list(warnings.filters), logging.getLogger("torch.fx._symbolic_trace")
    filters = list(log.filters)
    yield stack.require_stack.__wrapped__
    warnings.filters[:], log.filters[:] = before, filters


def pins(name: str) -> dict[str, str]:
    return dict(PIN.findall((ROOT / "requirements" / f"{name}.txt").read_text()))


def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_supported_versions_are_those_of_the_requirements_file(device):
    assert stack.supported(device) == pins(device)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_supported_versions_come_from_metadata_when_the_package_is_installed(device, monkeypatch):
    lines = [
        "numpy>=1.26",
        'torch==9.8.7; extra == "cpu-no-deps"',
        'torch==6.5.4; extra == "gpu"',
        'ruff==1; extra == "dev"',
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines if name == "recsys-sharded" else None)
    assert stack.supported(device) == {"torch": {"cpu": "9.8.7", "gpu": "6.5.4"}[device]}


def test_both_set_ups_differ_in_the_fbgemm_build_only():
    cpu, gpu = pins("cpu"), pins("gpu")
    assert cpu.pop("fbgemm-gpu-cpu") == gpu.pop("fbgemm-gpu")
    assert cpu == gpu


def test_setup_cfg_takes_the_pins_from_the_requirements_files():
    extras = setup_cfg()["options.extras_require"]
    assert extras["cpu-no-deps"] == "file: requirements/cpu.txt"
    assert extras["gpu"] == "file: requirements/gpu.txt"
    assert setup_cfg()["metadata"]["name"] == stack.DISTRIBUTION


def test_no_file_outside_requirements_writes_a_pin_and_every_mentioned_version_agrees():
    known = {**pins("cpu"), **pins("gpu")}
    names = "|".join(sorted(known, key=len, reverse=True))
    mention = re.compile(rf"(?<![\w-])({names})(==| )v?(\d+\.\d+\.\d+)", re.IGNORECASE)
    code = [
        ROOT / "Makefile",
        ROOT / "setup.cfg",
        ROOT / "pyproject.toml",
        ROOT / ".ci/run",
        *ROOT.glob("recsys/**/*.py"),
    ]
    prose = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("models/**/*.md")]
    for path in [*code, *prose]:
        for name, sign, version in mention.findall(path.read_text()):
            assert version == known[name.lower()], f"{path} names {name} {version}"
            assert path in prose or sign != "==", f"{path} pins {name}; pins belong to requirements/"


def test_readme_installs_through_make_or_the_requirements_files():
    text = (ROOT / "README.md").read_text()
    assert re.search(r"^\s*make (demo|setup)", text, re.MULTILINE)
    assert not re.search(r"pip install[^\n]*\btorchrec\b", text), "a plain install of torchrec pulls the CUDA fbgemm"


def test_makefile_and_install_line_use_the_same_index():
    assert f"CPU_INDEX := {stack.CPU_INDEX}\n" in (ROOT / "Makefile").read_text()


def test_python_bounds_are_closed_above():
    assert re.fullmatch(r">=3\.10, <3\.\d+", setup_cfg()["options"]["python_requires"])


def test_cpu_install_line_keeps_torchrecs_cuda_dependency_out(monkeypatch):
    monkeypatch.setattr(stack, "installed", lambda: dict.fromkeys(pins("cpu") | pins("gpu")))
    line = stack.install_line("cpu")
    assert "--no-deps" in line and f"--extra-index-url {stack.CPU_INDEX}" in line and "uninstall" not in line
    assert line.split()[-len(pins("cpu")) :] == [f"{name}=={version}" for name, version in pins("cpu").items()]


def test_install_line_removes_both_builds_when_the_other_one_is_present(monkeypatch):
    monkeypatch.setattr(stack, "installed", lambda: pins("cpu") | pins("gpu"))
    for device in ("cpu", "gpu"):
        assert "uninstall -y fbgemm-gpu-cpu fbgemm-gpu && " in stack.install_line(device)


def test_install_line_replaces_files_when_the_versions_fit_already(monkeypatch):
    fits = {**dict.fromkeys(pins("gpu")), **pins("cpu")}
    monkeypatch.setattr(stack, "installed", lambda: fits)
    assert "--force-reinstall --no-deps" in stack.install_line("cpu")
    monkeypatch.setattr(stack, "installed", lambda: {**fits, "torch": "2.0.0"})
    assert "--force-reinstall" not in stack.install_line("cpu")


def test_build_suffix_is_no_misfit_and_another_version_is(monkeypatch):
    fits = {**dict.fromkeys(pins("gpu")), **pins("cpu")}
    monkeypatch.setattr(stack, "installed", lambda: {**fits, "torch": f"{fits['torch']}+cpu"})
    assert stack.misfits("cpu") == {}
    monkeypatch.setattr(stack, "installed", lambda: {**fits, "torch": "2.12.0+cpu", "torchrec": None})
    assert stack.misfits("cpu") == {name: pins("cpu")[name] for name in ("torch", "torchrec")}


@pytest.mark.parametrize(
    "error",
    [
        OSError("libfoo.so: undefined symbol: _ZN2at4_ops"),
        ImportError("no such module"),
        AttributeError("no attribute"),
    ],
)
def test_library_that_does_not_load_gives_one_message_with_versions_and_install_line(error, require, monkeypatch):
    real = importlib.import_module

    def broken(name, *args):
        if name == "fbgemm_gpu":
            raise error
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(UserError) as caught:
        require()
    text = str(caught.value)
    assert "fbgemm_gpu cannot be imported" in text and str(error) in text
    assert f"torchrec {importlib.metadata.version('torchrec')}" in text
    assert stack.describe(stack.supported("cpu")) in text and f"`{stack.install_line('cpu')}`" in text
    # A notebook must not show the loader's traceback above ours.
    assert caught.value.__cause__ is None and caught.value.__suppress_context__ == (
        caught.value.__context__ is not None
    )


@pytest.mark.parametrize("operator", stack.OPERATORS)
def test_missing_operator_is_named(operator, require, monkeypatch):
    import torch

    names = set(stack.OPERATORS) - {operator}
    monkeypatch.setattr(torch.ops, "fbgemm", types.SimpleNamespace(**dict.fromkeys(names)))
    start_s = time.perf_counter()
    with pytest.raises(UserError, match=rf"lacks fbgemm::{operator}\.") as caught:
        require()
    assert time.perf_counter() - start_s < 5
    assert "pip install" in str(caught.value)


def test_every_probed_operator_exists_in_the_installed_fbgemm(require):
    require()
    import torch

    for name in stack.OPERATORS:
        assert torch._C._jit_get_schemas_for_operator(f"fbgemm::{name}"), name


def test_operators_that_our_code_calls_are_probed():
    called = {
        name
        for path in ROOT.glob("recsys/**/*.py")
        for name in re.findall(r"torch\.ops\.fbgemm\.(\w+)", path.read_text())
    }
    assert called <= set(stack.OPERATORS)


def test_versions_that_load_but_are_not_the_supported_ones_give_a_warning(require, monkeypatch):
    real = stack.supported
    monkeypatch.setattr(stack, "supported", lambda device: {**real(device), "torch": "0.1.0"})
    with pytest.warns(UserWarning, match=r"not the ones that recsys is tested with: torch 0\.1\.0\."):
        require()


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "default", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )


def test_loading_the_stack_is_silent_and_leaves_logging_and_the_users_warnings_alone():
    done = run("""
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
from recsys.stack import require_stack
require_stack()
import logging, torch
from torchrec import KeyedJaggedTensor
KeyedJaggedTensor(keys=["a"], values=torch.tensor([1]), lengths=torch.tensor([1]))
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_gather_into_tensor(torch.empty(1), torch.ones(1))
dist.destroy_process_group()
assert not logging.root.handlers, logging.root.handlers
warnings.warn("mine", FutureWarning)
""")
    assert "FutureWarning: mine" in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.strip()]) == 1, done.stderr


def test_checking_modules_import_neither_torch_nor_the_stack():
    run("""
import sys
for name in ("torch", "fbgemm_gpu", "torchrec"):
    sys.modules[name] = None
import recsys.stack, recsys.doctor, recsys.schema, recsys.errors, recsys.models.config
""")


def test_cpu_set_up_holds_no_cuda_build():
    if stack.current_device() != "cpu":
        pytest.skip("a GPU set-up")
    import torch

    assert torch.version.cuda is None
    names = [(dist.metadata["Name"] or "").lower() for dist in importlib.metadata.distributions()]
    assert [name for name in names if name.startswith("nvidia-") or name == "fbgemm-gpu"] == []
