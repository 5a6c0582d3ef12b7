"""torch, FBGEMM and TorchRec: which versions belong together, and whether the installed ones load and are whole.

Importing this module imports none of the three, so that `recsys doctor` can speak about an installation that is
broken. The versions themselves are written in requirements/ only and read here from the installed metadata.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from recsys.errors import UserError

Device = Literal["cpu", "gpu"]

DISTRIBUTION = "recsys-sharded"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own index of CPU wheels; the `torch` on PyPI is a CUDA build."""

OPERATORS = (
    # TorchRec's pipelines and sharded collections: lengths to offsets, keys to ranks, ids to row blocks and back.
    "asynchronous_complete_cumsum",
    "block_bucketize_sparse_features",
    "invert_permute",
    "permute_1D_sparse_data",
    "permute_2D_sparse_data",
    # Table kernels: checked ids, fused update by optimizer, and tables that are trained densely.
    "bounds_check_indices",
    "get_infos_metadata",
    "split_embedding_codegen_lookup_adagrad_function_pt2",
    "split_embedding_codegen_lookup_rowwise_adagrad_function_pt2",
    "split_embedding_codegen_lookup_sgd_function_pt2",
    "dense_embedding_codegen_lookup_function",
)
"""FBGEMM operators that a training step calls, found by recording the calls of sharded steps."""

_EXTRAS = {"cpu": "cpu-no-deps", "gpu": "gpu"}
_FBGEMM = ("fbgemm-gpu-cpu", "fbgemm-gpu")


def supported(device: Device) -> dict[str, str]:
    """Distribution -> the one version that we support, in installation order."""
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
        lines = [line for line in lines if re.search(rf"extra\s*==\s*['\"]{_EXTRAS[device]}['\"]", line)]
    except importlib.metadata.PackageNotFoundError:
        # A checkout that is on the path without being installed, as in a torchx workspace.
        pins = Path(__file__).parent.parent / "requirements" / f"{device}.txt"
        if not pins.exists():
            raise UserError(
                f"The supported versions are unknown, since {DISTRIBUTION} is not installed",
                fix=f"install it, or run from a checkout that has {pins}",
            ) from None
        lines = pins.read_text().splitlines()
    matches = (re.match(r"([\w.-]+)\s*==\s*([^\s;]+)", line) for line in lines)
    return {match[1]: match[2] for match in matches if match}


def installed() -> dict[str, str | None]:
    """Distribution -> installed version or None, for every distribution of both set-ups; imports none of them."""
    versions: dict[str, str | None] = {}
    for name in {**supported("cpu"), **supported("gpu")}:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def current_device() -> Device:
    """The set-up that this environment was made for: by its FBGEMM build, else by the presence of NVIDIA's driver."""
    cpu_build, gpu_build = (installed()[name] for name in _FBGEMM)
    if cpu_build:
        return "cpu"
    return "gpu" if gpu_build or Path("/proc/driver/nvidia/version").exists() else "cpu"


def misfits(device: Device) -> dict[str, str]:
    """Distribution -> supported version, for those that are absent or of another version."""
    found = installed()
    # The part after "+" names the build, as in 2.13.0+cpu.
    return {name: pin for name, pin in supported(device).items() if (found[name] or "").split("+")[0] != pin}


def install_line(device: Device) -> str:
    """The command that brings this interpreter's environment to the supported versions.

    Both FBGEMM builds live in one folder, so a build for the other device takes both with it. When the versions
    already fit and only the files are broken, the line installs them anew.
    """
    pip, found = f"{sys.executable} -m pip", installed()
    stray = any(found[name] for name in supported("gpu" if device == "cpu" else "cpu") if name not in supported(device))
    line = f"{pip} uninstall -y {' '.join(_FBGEMM)} && " if stray else ""
    flags = ["--force-reinstall"] if not stray and not misfits(device) else []
    if flags or device == "cpu":
        flags.append("--no-deps")
    if device == "cpu":
        flags += ["--extra-index-url", CPU_INDEX]
    pins = [f"{name}=={version}" for name, version in supported(device).items()]
    return line + " ".join([pip, "install", *flags, *pins])


def describe(versions: Mapping[str, str | None]) -> str:
    """Versions in one line."""
    return ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items())


@functools.cache
def require_stack() -> None:
    """Import torch, FBGEMM and TorchRec, or say in one message why they cannot be used and what mends it.

    Call it before the first import of torchrec. It costs one import (about 3 s) and nothing when called again.

    Raises:
        UserError: One of them is absent or does not load, or FBGEMM lacks an operator that training calls.
    """
    # TorchRec touches operators while it is imported, so that they are probed first to be named.
    problem = _import("torch", "fbgemm_gpu") or _missing_operators() or _import("torchrec")
    device = current_device()
    expected = supported(device)
    found = {name: installed()[name] for name in expected}
    if problem:
        raise UserError(
            problem, received=describe(found), allowed=describe(expected), fix=f"run `{install_line(device)}`"
        )
    if misfits(device):
        warnings.warn(
            f"these versions load, but are not the ones that recsys is tested with: {describe(misfits(device))}. "
            f"Installed: {describe(found)}. `recsys doctor` has the install line.",
            stacklevel=2,
        )
    _quiet()


def _import(*names: str) -> str | None:
    with _no_implicit_log_handler():
        for name in names:
            try:
                importlib.import_module(name)
            # A shared library that does not fit: OSError. Python files that do not fit each other: the other three.
            except (ImportError, OSError, AttributeError, RuntimeError) as error:
                return f"{name} cannot be imported: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return None


def _missing_operators() -> str | None:
    fbgemm = importlib.import_module("torch").ops.fbgemm
    missing = [name for name in OPERATORS if not hasattr(fbgemm, name)]
    return f"The installed FBGEMM lacks {', '.join(f'fbgemm::{name}' for name in missing)}" if missing else None


@contextlib.contextmanager
def _no_implicit_log_handler() -> Iterator[None]:
    """Keep FBGEMM's `logging.info` calls at import from configuring the root logger behind the user's back."""
    handler = logging.NullHandler()
    logging.root.addHandler(handler)
    try:
        yield
    finally:
        logging.root.removeHandler(handler)


def _quiet() -> None:
    """Drop single messages that TorchRec provokes in torch and that no user can act on."""
    # torch/fx/_symbolic_trace.py, at the first KeyedJaggedTensor.
    logging.getLogger("torch.fx._symbolic_trace").addFilter(
        lambda record: not str(record.msg).startswith("is_fx_tracing will return true")
    )
    # TorchRec 1.8 calls the names that torch 2.13 has deprecated; torch attributes the warning to its own wrapper.
    warnings.filterwarnings(
        "ignore",
        message=r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
        category=FutureWarning,
        module=r"torch\.distributed\.c10d_logger",
    )
    # Raised inside TorchRec where it wraps data-parallel tables.
    warnings.filterwarnings(
        "ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning, module=r"torchrec\."
    )
