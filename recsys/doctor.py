"""What is installed here, what is supported, what the machine offers, and the one line that mends a misfit.

Works without torch, FBGEMM and TorchRec: they are tried in a process of their own, since a build that does not fit
may end its process instead of raising.
"""

import importlib.metadata
import ipaddress
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import recsys
from recsys import machine, network, stack, strategy
from recsys.errors import UserError

_LOAD_TIMEOUT_S = 300


def report(device: stack.Device | None = None, *, strict: bool = False) -> tuple[str, bool]:
    """Look at this environment.

    Args:
        device: The set-up to compare with; none means the one that this environment was made for.
        strict: Count warnings as misfits, as a fresh set-up should.

    Returns:
        The text to print, and whether everything fits.
    """
    device = device or stack.current_device()
    facts = _load_apart()
    errors = [str(facts["error"])] if "error" in facts else []
    supported, found = stack.supported(device), stack.installed()
    for name in stack.misfits(device):
        errors.append(f"{name} is {found[name] or 'not installed'}, supported is {supported[name]}")
    if found["fbgemm-gpu"] and found["fbgemm-gpu-cpu"]:
        errors.append("fbgemm-gpu and fbgemm-gpu-cpu are both installed and overwrite each other's files")
    warnings = _cuda_on_cpu(facts) if device == "cpu" else []
    ok = not errors and not (strict and warnings)

    lines = [f"recsys {recsys.__version__}, {device} set-up", *_software(device, facts), *_machine(facts), ""]
    lines += [f"error: {error}" for error in errors] + [f"warning: {warning}" for warning in warnings]
    if errors:
        lines += ["Everything is put right by:", f"  {stack.install_line(device)}"]
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            lines.append("Tested on Linux x86_64; elsewhere FBGEMM may have no wheel. `recsys check` needs none.")
    elif not warnings:
        lines.append("Everything fits.")
    return "\n".join(lines), ok


def network_report(hosts: Sequence[str] = ()) -> tuple[str, bool]:
    """Look at how ranks of several hosts would reach each other from here; a resolver that hangs takes 5 s twice.

    Args:
        hosts: Names or addresses of the job's hosts, the first one being where ranks meet; none: those of the job that
            this process runs in.

    Returns:
        The text to print, and whether all names resolve and there is an interface.
    """
    names, own = list(hosts) or network.job_hosts(), socket.gethostname()
    lines = [f"network of {own}"]
    lines += [
        _row(one.name, one.address) + ", loopback" * one.is_loopback + ", down" * (not one.is_up)
        for one in network.interfaces()
    ]
    lines += [_row(name, os.environ.get(name, "not set")) for name in (network.GLOO, network.NCCL)]
    errors: list[str] = []
    warnings: list[str] = []
    resolved = network.resolve(list(dict.fromkeys([own, *names])))
    known = [found.name for found in resolved if found.addresses and found.name in names] or [own]
    must = True
    try:
        network.require_named(nccl=True)
        must = len(names) > 1
        choice = network.choose(known[0], known[1:])
        speed = network.speed_bits(choice.interface)
        rate = f", {speed / 1e9:g} Gb/s" if speed else ""
        lines.append(_row("between hosts", f"{choice.interface} {choice.address}{rate} ({choice.why})"))
    except UserError as error:
        lines.append(_row("between hosts", "none"))
        (errors if must else warnings).append(str(error))
    if infiniband := network.infiniband_bits():
        lines.append(_row("InfiniBand", f"{infiniband / 1e9:g} Gb/s"))
    for found in resolved:
        time_ms = f"in {1000 * found.elapsed_s:.1f} ms"
        lines.append(_row(found.name, f"{', '.join(found.addresses)} {time_ms}" if found.addresses else "no address"))
        if found.problem and found.name in names:
            errors.append(f"{found.name} does not resolve: {found.problem}")
        elif _all_loopback(found.addresses) and found.name == own:
            warnings.append(f"{own} is loopback here, which gloo would take by itself; recsys names an interface to it")
        elif _all_loopback(found.addresses) and len(names) > 1:
            warnings.append(f"{found.name} is loopback here, so that nobody elsewhere answers to that name")
    if not names:
        lines.append("Other hosts are not known here: recsys doctor --network HOST HOST ..., the first node first")
    lines += [f"error: {error}" for error in errors] + [f"warning: {warning}" for warning in warnings]
    return "\n".join(lines), not errors


def _all_loopback(addresses: Sequence[str]) -> bool:
    return bool(addresses) and all(ipaddress.ip_address(one.split("%")[0]).is_loopback for one in addresses)


def _software(device: stack.Device, facts: dict) -> list[str]:
    python_requires = _python_requires()
    rows = [
        _row("python", f"{platform.python_version()} ({sys.executable})", python_requires),
        _row("platform", f"{platform.platform()}"),
    ]
    found = stack.installed()
    rows += [_row(name, found[name] or "not installed", pin) for name, pin in stack.supported(device).items()]
    loads = f"in {facts['load_s']:.1f} s, operators complete" if "load_s" in facts else "no"
    return [*rows, _row("loads", loads)]


def _machine(facts: dict) -> list[str]:
    cores = machine.affine_cores()
    quota, limit_gib = min(machine.cpu_quotas(), default=None), machine.memory_limit_bytes() / 2**30
    total_gib, available_gib = (machine.memory_info_bytes(key) / 2**30 for key in ("MemTotal", "MemAvailable"))
    memory = f"{available_gib:.1f} of {total_gib:.1f} GiB available" if total_gib else "unknown"
    # Version 1 of control groups writes "no limit" as a number near 2**63, so only a limit below the total counts.
    limited = f", limit {limit_gib:.1f} GiB" if limit_gib < total_gib else ""
    omp = os.environ.get("OMP_NUM_THREADS", "not set")
    devices = facts.get("devices", [])
    several = [_row("", strategy.unused_gpus(len(devices)))] if len(devices) > 1 and "RANK" not in os.environ else []
    return [
        _row("devices", ", ".join(devices) or "no GPU"),
        *several,
        _row("cores", f"{cores} usable of {os.cpu_count()}" + (f", quota {quota:g}" if quota else "")),
        _row("threads", f"torch {facts.get('threads', '?')}, OMP_NUM_THREADS {omp}"),
        _row("memory", memory + limited),
    ]


def _row(name: str, value: str, supported: str | None = None) -> str:
    return f"  {name:<15} {value:<32} {f'supported: {supported}' if supported else ''}".rstrip()


def _python_requires() -> str | None:
    try:
        return importlib.metadata.metadata(stack.DISTRIBUTION)["Requires-Python"]
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_on_cpu(facts: dict) -> list[str]:
    """Signs that a machine without GPU was handed CUDA builds."""
    names = (dist.metadata["Name"] or "" for dist in importlib.metadata.distributions())
    nvidia = sorted({name for name in names if name.lower().startswith("nvidia-")})
    problems = []
    if facts.get("cuda"):
        problems.append(f"torch is a CUDA {facts['cuda']} build; the CPU build is at {stack.CPU_INDEX}")
    if nvidia:
        problems.append(f"packages for GPUs are installed; a new environment has none of them: {', '.join(nvidia)}")
    return problems


def _load_apart() -> dict:
    """Load the stack in a new process: {"load_s", "cuda", "devices", "threads"} or {"error"}."""
    root = str(Path(recsys.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), root]))
    command = [sys.executable, "-c", "from recsys import doctor; doctor._print_facts()"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LOAD_TIMEOUT_S, env={**os.environ, "PYTHONPATH": path}
        )
    except subprocess.TimeoutExpired:
        return {"error": f"loading torch, FBGEMM and TorchRec took more than {_LOAD_TIMEOUT_S} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": f"loading torch, FBGEMM and TorchRec ended with code {done.returncode}: {last}"}
    return json.loads(done.stdout.splitlines()[-1])


def _print_facts() -> None:
    start_s = time.perf_counter()
    try:
        stack.require_stack()
    except UserError as error:
        print(json.dumps({"error": error.what}))
        return
    import torch

    cuda = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    facts = {
        "load_s": time.perf_counter() - start_s,
        "cuda": torch.version.cuda,
        "devices": [f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for gpu in cuda],
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(facts))
