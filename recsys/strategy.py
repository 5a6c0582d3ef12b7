"""Every choice that a job makes by itself at its start: from what is there, and from what the recipe says.

`detect` looks at the machine and `choose` decides; the latter is pure, so that machines which nobody here owns can be
tried. docs/hardware.md has a table of the choices and of what overrides each.
"""

import ctypes
import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from recsys import machine, network
from recsys.cluster import RESERVED_SHARE, Cluster, cluster_here, format_bytes
from recsys.errors import UserError

if TYPE_CHECKING:
    from recsys.distributed import Ranks
    from recsys.recipe import Recipe, TrainSettings

GpuLink = Literal["NVLink", "PCIe", "PCIe through host memory"]


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU that this process sees."""

    name: str
    memory_bytes: int


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a rank finds before anything is chosen.

    Attributes:
        cores: That the ranks of this host may use together.
        memory_bytes: That they may use together.
        gpus: Of this host, as far as this process sees them.
        gpu_link: What connects the GPUs of a host; None for fewer than two.
        world_size: Number of ranks.
        local_world_size: Ranks of this launcher, which is a node to the planner.
        ranks_here: Ranks on this host: more than the launcher's where several launchers were started on it.
        hosts: Names of the hosts, in the order of ranks.
        among_launched: Torchrun started this process as one of several on its node.
        omp_threads: OMP_NUM_THREADS; None where it is not set.
        choice: Network interface between hosts; None on a single one.
        interface_bits: Bits per second of that interface; None where it is not known.
        infiniband_bits: Bits per second of all InfiniBand ports; 0 without any.
    """

    cores: int
    memory_bytes: int
    gpus: tuple[Gpu, ...] = ()
    gpu_link: GpuLink | None = None
    world_size: int = 1
    local_world_size: int = 1
    ranks_here: int = 1
    hosts: tuple[str, ...] = ("this host",)
    among_launched: bool = False
    omp_threads: str | None = None
    choice: network.Choice | None = None
    interface_bits: float | None = None
    infiniband_bits: float = 0.0


class Batches(NamedTuple):
    """How batches get to where the model is.

    Attributes:
        pinned: They wait in pinned host memory, from where the GPU fetches them beside a step.
        threads: Background threads that make them; each is one batch or more ahead.
        overlaps: The ids of the next batch are exchanged during a step.
    """

    pinned: bool
    threads: int
    overlaps: bool


@dataclasses.dataclass(frozen=True)
class Strategy:
    """What was chosen.

    Attributes:
        device: cuda or cpu.
        backend: Of torch.distributed.
        threads_per_rank: Of torch.
        ranks_that_fit: Ranks that this host could have: one for each GPU, or core.
        cluster: Ranks, memory and bandwidths that the planner counts on.
        kinds: Ways to split a table that the planner may choose from.
        host_cache: Tables may live on the host, with a cache on the GPU.
        batches: How batches get to the device.
        lines: The choices for people, in five lines.
    """

    facts: Facts
    device: str
    backend: str
    threads_per_rank: int
    ranks_that_fit: int
    cluster: Cluster
    kinds: tuple[str, ...]
    host_cache: bool
    batches: Batches
    lines: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data: the five lines first."""
        found = dataclasses.asdict(self)
        return {"lines": found.pop("lines"), **found, "batches": self.batches._asdict()}


def device_of(wanted: str, num_gpus: int, local_world_size: int) -> Literal["cuda", "cpu"]:
    """Where ranks compute.

    Args:
        wanted: `train.device`.
        num_gpus: That this process sees.
        local_world_size: Ranks that share them.

    Raises:
        UserError: There is no GPU, or there are fewer than ranks.
    """
    if wanted == "cuda" and not num_gpus:
        raise UserError(
            "train.device asks for CUDA", received="no CUDA device", allowed="auto, cpu", fix="set train.device=auto"
        )
    if wanted == "cpu" or not num_gpus:
        return "cpu"
    if local_world_size > num_gpus:
        raise UserError(
            "There are more ranks on this host than GPUs, and each needs one of its own",
            received=f"{local_world_size} ranks, {_count(num_gpus, 'GPU')}",
            fix=f"start with --nproc-per-node {num_gpus}, or set train.device=cpu",
        )
    return "cuda"


def among_launched(local_world_size: int) -> bool:
    """Whether torchrun started this process as one of several on its node."""
    return "TORCHELASTIC_RUN_ID" in os.environ and local_world_size > 1


def device_to_read_with(wanted: str, num_gpus: int) -> str:
    """`train.device` for a model that is only read: one that was trained on GPUs may be read where there are none."""
    return "auto" if wanted == "cuda" and not num_gpus else wanted


def backend_of(device: str) -> str:
    """Of torch.distributed: objects and metrics travel through gloo in any case."""
    return "cuda:nccl,cpu:gloo" if device == "cuda" else "gloo"


def threads_of(
    wanted: int | None, omp: str | None, *, among_launched: bool, cores: int, ranks_here: int
) -> tuple[int, str]:
    """Threads of torch in each rank, and what decided.

    Args:
        wanted: `train.threads_per_rank`.
        omp: OMP_NUM_THREADS. Torchrun sets it to 1 for several processes of a node where nobody has set a number, so
            that 1 means nothing there.
        among_launched: This process is one of these.
        cores: That the ranks of this host share.
        ranks_here: Their number.
    """
    if wanted is not None:
        return wanted, "train.threads_per_rank"
    first = (omp or "").split(",")[0].strip()
    if first.isdecimal() and int(first) and not (among_launched and omp == "1"):
        return int(first), "OMP_NUM_THREADS"
    return max(1, cores // ranks_here), f"{_count(cores, 'core')} over {_count(ranks_here, 'rank')}"


def batches_of(settings: "TrainSettings", device: str) -> Batches:
    """How batches get to the device; putting one together is quick next to a step on CPU, where one thread will do."""
    cuda = device == "cuda"
    overlaps = settings.pipeline == "sparse_dist" or (settings.pipeline == "auto" and cuda)
    return Batches(cuda and settings.pin_memory is not False, 2 if cuda else 1, overlaps)


def kinds_of(world_size: int, nodes: int) -> tuple[str, ...]:
    """Ways to split a table that the planner may choose from; a recipe may name others, and excludes some."""
    if world_size == 1:
        return ("table_wise",)  # nothing to split: a replica would only lose the fused kernel
    return ("data_parallel", "table_wise", "row_wise", *(["table_row_wise"] if nodes > 1 else []), "column_wise")


def cluster_of(facts: Facts, device: str, memory_per_rank: str | None, local_rank: int = 0) -> Cluster:
    """The ranks as the planner counts on them.

    Args:
        facts: What is there.
        device: Where ranks compute.
        memory_per_rank: `train.memory_per_rank`.
        local_rank: Whose GPU it is.
    """
    gpu = facts.gpus[local_rank] if device == "cuda" else None
    between = facts.infiniband_bits if device == "cuda" else 0.0
    between = between or facts.interface_bits or 0.0
    return cluster_here(
        facts.world_size,
        facts.local_world_size,
        gpu=None if gpu is None else (gpu.name, gpu.memory_bytes),
        memory=memory_per_rank,
        host_bytes=facts.memory_bytes,
        ranks_here=facts.ranks_here,
        has_nvlink=facts.gpu_link in (None, "NVLink"),
        inter_bandwidth=between / 8 / facts.ranks_here if facts.choice and between else None,
    )


def choose(facts: Facts, recipe: "Recipe") -> Strategy:
    """All choices for a recipe on a machine.

    Raises:
        UserError: The ranks have no GPU, or too few.
    """
    settings = recipe.train
    device = device_of(settings.device, len(facts.gpus), facts.local_world_size)
    threads, why = threads_of(
        settings.threads_per_rank,
        facts.omp_threads,
        among_launched=facts.among_launched,
        cores=facts.cores,
        ranks_here=facts.ranks_here,
    )
    cluster = cluster_of(facts, device, settings.memory_per_rank)
    tables = {table.name: recipe.table_settings(table.name) for table in recipe.inputs.tables}
    host_cache = device == "cuda" and any(table.placement != "device" for table in tables.values())
    kinds, batches = kinds_of(facts.world_size, cluster.nodes), batches_of(settings, device)
    found = Strategy(
        facts=facts,
        device=device,
        backend=backend_of(device),
        threads_per_rank=threads,
        ranks_that_fit=max(1, len(facts.gpus) if device == "cuda" else facts.cores),
        cluster=cluster,
        kinds=kinds,
        host_cache=host_cache,
        batches=batches,
        lines=(),
    )
    named = {name: kind for name, table in tables.items() if (kind := table.sharding) != "auto"}
    lines = (
        _machine_line(facts),
        _ranks_line(found, settings.device, why),
        _network_line(found),
        _tables_line(found, named, settings.memory_per_rank),
        _batches_line(found, settings),
    )
    return dataclasses.replace(found, lines=lines)


def _machine_line(facts: Facts) -> str:
    kinds = [f"{gpu.name} with {format_bytes(gpu.memory_bytes)}" for gpu in facts.gpus]
    gpus = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)) or "no GPU"
    link = f" connected by {facts.gpu_link}" if facts.gpu_link else ""
    hosts = ", ".join(facts.hosts[:4]) + (", ..." if len(facts.hosts) > 4 else "")
    return (
        f"Machine: {_count(len(facts.hosts), 'host')} ({hosts}); here {_count(facts.cores, 'core')}, "
        f"{format_bytes(facts.memory_bytes)} of memory, {gpus}{link}"
    )


def _ranks_line(found: Strategy, wanted: str, why: str) -> str:
    facts = found.facts
    spare = ""
    if found.device == "cuda" and facts.ranks_here < len(facts.gpus):
        spare = f"; {unused_gpus(len(facts.gpus), facts.ranks_here)}"
    elif facts.ranks_here > found.ranks_that_fit:
        spare = f"; more than its {_count(found.ranks_that_fit, 'core')}"
    return (
        f"Ranks: {facts.world_size} on {found.device} (train.device={wanted}) with {found.backend}, {facts.ranks_here} "
        f"on this host{spare}; {_count(found.threads_per_rank, 'thread')} each ({why})"
    )


def unused_gpus(num_gpus: int, ranks: int = 1) -> str:
    """What to say where GPUs are left idle: a job cannot change its number of ranks once it has started."""
    used = "one" if ranks == 1 else str(ranks)
    return f"{num_gpus} GPUs, {used} in use; start with torchrun --nproc-per-node {num_gpus}"


def _network_line(found: Strategy) -> str:
    facts, choice = found.facts, found.facts.choice
    if choice is None:
        return "Network: none" if facts.world_size == 1 else "Network: all ranks are on one host; no interface is set"
    speed = f", {facts.interface_bits / 1e9:g} Gb/s" if facts.interface_bits else ""
    infiniband = f"; InfiniBand {facts.infiniband_bits / 1e9:g} Gb/s" if facts.infiniband_bits else ""
    return f"Network: {choice.interface} {choice.address}{speed} ({choice.why}){infiniband}"


def _tables_line(found: Strategy, named: Mapping[str, str], memory: str | None) -> str:
    own = found.cluster.machine
    key = "train.memory_per_rank" if memory else "the GPU's" if found.device == "cuda" else "its share of the host's"
    host = f", and {format_bytes(own.host_memory_bytes)} of the host behind a cache" if found.host_cache else ""
    fixed = f"; by the recipe {', '.join(f'{name} {kind}' for name, kind in named.items())}" if named else ""
    return (
        f"Tables: up to {format_bytes(own.memory_bytes)} a rank ({key}), {RESERVED_SHARE:.0%} kept free{host}; "
        f"{', '.join(found.kinds)}{fixed}"
    )


def _batches_line(found: Strategy, settings: "TrainSettings") -> str:
    where = "in plain memory"
    if found.device == "cuda":
        where = "in pinned memory, copied beside a step" if found.batches.pinned else "in plain memory, then copied"
    key = f" (train.pin_memory={str(settings.pin_memory).lower()})" if settings.pin_memory is not None else ""
    none = " has no effect on CPU" if key and found.device == "cpu" else ""
    overlaps = "yes" if found.batches.overlaps else "no"
    return (
        f"Batches: {where}{key}{none}, {_count(found.batches.threads, 'thread')} ahead; ids of the next one exchanged "
        f"during a step: {overlaps} (train.pipeline={settings.pipeline})"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def detect(ranks: "Ranks") -> Facts:
    """What this rank finds."""
    found = gpus()
    return Facts(
        cores=machine.usable_cores(),
        memory_bytes=machine.usable_memory_bytes(),
        gpus=found,
        gpu_link=gpu_link(len(found)),
        world_size=ranks.world_size,
        local_world_size=ranks.local_world_size,
        ranks_here=ranks.ranks_here,
        hosts=ranks.hosts,
        among_launched=among_launched(ranks.local_world_size),
        omp_threads=os.environ.get("OMP_NUM_THREADS"),
        choice=ranks.choice,
        interface_bits=network.speed_bits(ranks.choice.interface) if ranks.choice else None,
        infiniband_bits=network.infiniband_bits(),
    )


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that this process sees; CUDA_VISIBLE_DEVICES hides others."""
    import torch

    if not torch.cuda.is_available():
        return ()
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return tuple(Gpu(one.name, one.total_memory) for one in found)


def gpu_link(num_gpus: int) -> GpuLink | None:
    """What connects the GPUs of this host; the first two speak for all."""
    if num_gpus < 2:
        return None
    import torch

    if not torch.cuda.can_device_access_peer(0, 1):
        return "PCIe through host memory"
    return "NVLink" if has_nvlink() else "PCIe"


_MAX_NVLINKS = 18  # nvml.h


def has_nvlink(library: str = "libnvidia-ml.so.1") -> bool:
    """Whether the first GPU has an NVLink that is up, as NVIDIA's driver tells; False where there is no driver."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return False
    gpu, state = ctypes.c_void_p(), ctypes.c_uint(0)
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(gpu)):
        return False
    found = (nvml.nvmlDeviceGetNvLinkState(gpu, link, ctypes.byref(state)) for link in range(_MAX_NVLINKS))
    return any(error == 0 and state.value == 1 for error in found)
