"""What this process may use of its host: cores and memory, with the limits of its control groups."""

import ctypes
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST_KEPT_BYTES = 2**25  # glibc allows no more: larger blocks always come from the kernel and go back to it
_KEPT_BYTES = 2**30  # as most, at the end of the heap; a step of Criteo's size frees 300 MB


def usable_cores() -> int:
    """Whole cores that this process may keep busy: its affinity, or a lower quota; at least 1."""
    return max(1, min([affine_cores(), *(int(quota) for quota in cpu_quotas())]))


def affine_cores() -> int:
    """Cores that the scheduler may put this process on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quotas() -> list[float]:
    """Cores that each control group above this process allows; groups without a quota ("max" or -1) left out."""
    pairs: list[Sequence[str]] = [text.split() for text in _cgroup_values("cpu", "cpu.max")]
    pairs += zip(_cgroup_values("cpu", "cpu.cfs_quota_us"), _cgroup_values("cpu", "cpu.cfs_period_us"), strict=True)
    return [int(quota) / int(period) for quota, period in pairs if quota.isdigit()]


def usable_memory_bytes() -> int:
    """Memory that this process may use: the host's, or a control group's lower limit."""
    return int(min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), memory_limit_bytes()))


def memory_limit_bytes() -> float:
    """The lowest limit of the control groups above this process; infinity where there is none."""
    texts = [*_cgroup_values("memory", "memory.max"), *_cgroup_values("memory", "memory.limit_in_bytes")]
    return min((int(text) for text in texts if text.isdigit()), default=float("inf"))


def memory_info_bytes(key: str) -> int:
    """A line of /proc/meminfo; 0 where there is no such file."""
    meminfo = Path("/proc/meminfo")
    match = re.search(rf"{key}:\s+(\d+) kB", meminfo.read_text()) if meminfo.exists() else None
    return int(match[1]) * 1024 if match else 0


def keep_freed_memory() -> bool:
    """Let malloc keep what tensors free instead of handing it back to the kernel, which hands it out page by page.

    A training step frees and asks for the same large blocks again and again: without this, page faults take up to a
    third of it. glibc only; elsewhere nothing happens.

    Returns:
        Whether it was done.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return bool(mallopt and mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))


def _cgroup_values(controller: str, name: str) -> list[str]:
    """Contents of a limit file in this process's control group and all its ancestors, since each of them binds."""
    values = []
    for line in _OWN_CGROUPS.read_text().splitlines() if _OWN_CGROUPS.exists() else []:
        number, controllers, path = line.split(":", 2)
        # Version 2 is entry 0 and has one tree; version 1 has a tree per controller.
        if number == "0" or controller in controllers.split(","):
            base, group = _CGROUPS / ("" if number == "0" else controller), Path(path.lstrip("/"))
            files = (base / folder / name for folder in (group, *group.parents))
            values += [file.read_text().strip() for file in dict.fromkeys(files) if file.is_file()]
    return values
