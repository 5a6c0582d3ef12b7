"""Machines and clusters to plan for, here or not here: memory, bandwidths, and what of it was assumed.

No torch: a recipe and the command line check sizes and names with it.
"""

import dataclasses
import re

from recsys.errors import UserError, nearest_name
from recsys.machine import usable_memory_bytes

RESERVED_SHARE = 0.1
"""Share of a rank's memory that no plan uses: the runtime itself, fragments, the reader's buffers."""

_UNITS = {"B": 1} | {
    f"{letter}{infix}B": base**power
    for power, letter in enumerate("KMGT", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}
_GB = 10**9


@dataclasses.dataclass(frozen=True)
class Machine:
    """One device and its share of the node that it sits in.

    Attributes:
        name: A key of `MACHINES`.
        device: cuda or cpu; one CPU "device" is one rank.
        memory_bytes: The device's own memory; on CPU the rank's share of the host's.
        host_memory_bytes: Share of the host's memory.
        memory_bandwidth: Bytes per second between the device and its own memory.
        host_bandwidth: Bytes per second from the host's memory to the device.
        intra_bandwidth: Bytes per second that a device sends to the others of its node.
        inter_bandwidth: Bytes per second that a device sends to other nodes.
        flops: fp32 operations per second of matrix products.
        source: Where the figures are from.
    """

    name: str
    device: str
    memory_bytes: int
    host_memory_bytes: int
    memory_bandwidth: float
    host_bandwidth: float
    intra_bandwidth: float
    inter_bandwidth: float
    flops: float
    source: str


def _gpu(
    name: str, memory: int, host: int, rates: tuple[float, float, float, float], tflops: float, source: str
) -> Machine:
    """A GPU in GB and, in one direction, GB/s: its memory, PCIe, NVLink (PCIe where there is none), network."""
    own, pcie, peers, network = (rate * _GB for rate in rates)
    return Machine(name, "cuda", memory * _GB, host * _GB, own, pcie, peers, network, tflops * 1e12, source)


_DGX_A100 = "data sheets of NVIDIA A100 SXM and of DGX A100, 8 x 200 Gb/s"
_HOPPER = "data sheets of NVIDIA {0} SXM and of DGX {0}, 2 TB, 8 x 400 Gb/s"
_DGX_1 = "data sheets of NVIDIA V100 SXM2 and of DGX-1, 512 GB, 4 x 100 Gb/s"

# NVLink and PCIe are half of what data sheets give, who add both directions. Host memory and network are a node's over
# its 8 GPUs, in the vendor's own server or in a cloud's instance.
MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        _gpu("a100-40gb", 40, 125, (1555, 32, 300, 25), 19.5, f"{_DGX_A100}, 1 TB"),
        _gpu("a100-80gb", 80, 250, (2039, 32, 300, 25), 19.5, f"{_DGX_A100}, 2 TB"),
        _gpu("h100-80gb", 80, 250, (3350, 64, 450, 50), 67, _HOPPER.format("H100")),
        _gpu("h200-141gb", 141, 250, (4800, 64, 450, 50), 67, _HOPPER.format("H200")),
        _gpu("l4-24gb", 24, 48, (300, 32, 32, 1.5), 30.3, "data sheet of NVIDIA L4; g2-standard-96, 384 GB, 100 Gb/s"),
        _gpu("t4-16gb", 16, 48, (320, 16, 16, 1.5), 8.1, "data sheet of NVIDIA T4; g4dn.metal, 384 GiB, 100 Gb/s"),
        _gpu("v100-16gb", 16, 64, (900, 16, 150, 6.25), 15.7, _DGX_1),
        _gpu("v100-32gb", 32, 64, (900, 16, 150, 6.25), 15.7, _DGX_1),
        # A channel of DDR4-3200 and two cores for each rank, gloo over loopback and over 10 Gb/s.
        Machine("cpu", "cpu", 8 * _GB, 8 * _GB, 25.6e9, 25.6e9, 2e9, 1.25e9, 100e9, "assumed for a rank on 2 cores"),
    )
}
_ASSUMED_GPU = "a100-80gb"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices, one rank each.

    Attributes:
        nodes: Number of nodes.
        devices_per_node: Ranks on each of them.
        machine: What one rank has.
        notes: Where the figures come from, and which were assumed.
    """

    nodes: int
    devices_per_node: int
    machine: Machine
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.devices_per_node

    def node_of(self, rank: int) -> int:
        """The node that a rank runs on."""
        return rank // self.devices_per_node

    @property
    def plannable_bytes(self) -> int:
        """What a plan may use of a device's memory."""
        return int(self.machine.memory_bytes * (1 - RESERVED_SHARE))

    @property
    def plannable_host_bytes(self) -> int:
        """What a plan may use of a rank's share of its host's memory."""
        return int(self.machine.host_memory_bytes * (1 - RESERVED_SHARE))

    def describe(self) -> str:
        """The cluster in one line."""
        kind = "CPU rank" if self.machine.device == "cpu" else self.machine.name
        return (
            f"{self.nodes} node{'s' * (self.nodes != 1)} x {self.devices_per_node} {kind}, "
            f"{format_bytes(self.machine.memory_bytes)} each, of which {RESERVED_SHARE:.0%} is kept free"
        )


def cluster_of(
    nodes: int = 1,
    devices_per_node: int = 1,
    device: str | None = None,
    machine: str | None = None,
    memory: str | None = None,
    host_memory: str | None = None,
    memory_bandwidth: str | None = None,
    intra_bandwidth: str | None = None,
    inter_bandwidth: str | None = None,
) -> Cluster:
    """The cluster that a user describes; sizes and rates are text such as `80GB` and `50GB/s`.

    Args:
        nodes: Number of nodes.
        devices_per_node: Ranks on each of them.
        device: cuda or cpu; None means that of the machine, or cpu.
        machine: A key of `MACHINES`; None means this host's memory on CPU, and an assumed GPU on cuda.
        memory: In place of the machine's.
        host_memory: In place of the machine's share of the host's memory.
        memory_bandwidth: In place of the machine's.
        intra_bandwidth: In place of the machine's.
        inter_bandwidth: In place of the machine's.

    Raises:
        UserError: A name, number or size is not one.
    """
    for option, number in (("--nodes", nodes), ("--devices-per-node", devices_per_node)):
        if number < 1:
            raise UserError(f"{option} must be 1 or more", received=number, fix="give a number of ranks that exist")
    device = _device_of(device, machine)
    found = MACHINES[machine or ("cpu" if device == "cpu" else _ASSUMED_GPU)]
    notes = [f"Figures of {found.name}: {found.source}"]
    if device == "cuda" and machine is None:
        # Tables are not planned into memory of a host that nobody has named.
        found = dataclasses.replace(found, host_memory_bytes=0)
        notes.append(f"{found.name} is assumed, without memory on the host, since no --machine is named")
    if device == "cpu" and memory is None and machine is None:
        share = usable_memory_bytes() // devices_per_node
        found = dataclasses.replace(found, memory_bytes=share, host_memory_bytes=share)
        notes.append(f"Memory is this host's {format_bytes(usable_memory_bytes())} over {devices_per_node} rank(s)")
    given = {
        "memory_bytes": parse_bytes(memory, "--memory") if memory else None,
        "host_memory_bytes": parse_bytes(host_memory, "--host-memory") if host_memory else None,
        "memory_bandwidth": parse_bytes(memory_bandwidth, "--memory-bandwidth") if memory_bandwidth else None,
        "intra_bandwidth": parse_bytes(intra_bandwidth, "--intra-bandwidth") if intra_bandwidth else None,
        "inter_bandwidth": parse_bytes(inter_bandwidth, "--inter-bandwidth") if inter_bandwidth else None,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    return Cluster(nodes, devices_per_node, dataclasses.replace(found, **changes), tuple(notes))  # type: ignore[arg-type]


def _device_of(device: str | None, machine: str | None) -> str:
    if machine is not None and machine not in MACHINES:
        near = nearest_name(machine, MACHINES)
        raise UserError(
            "There is no machine of that name",
            received=machine,
            allowed=", ".join(MACHINES),
            fix=f"did you mean {near!r}?" if near else "choose one, or give --memory and the bandwidths",
        )
    own = MACHINES[machine].device if machine else None
    device = device or own or "cpu"
    if device not in ("cpu", "cuda"):
        raise UserError("--device names no kind of device", received=device, allowed="cpu, cuda", fix="choose one")
    if own and own != device:
        raise UserError(f"--machine {machine} has no {device} devices", received=own, fix=f"drop --device {device}")
    return device


def cluster_here(
    world_size: int,
    local_world_size: int,
    *,
    gpu: tuple[str, int] | None = None,
    memory: str | None = None,
    host_bytes: int | None = None,
    ranks_here: int | None = None,
    has_nvlink: bool = True,
    inter_bandwidth: float | None = None,
) -> Cluster:
    """The cluster that this process is a rank of.

    Args:
        world_size: Number of ranks.
        local_world_size: Ranks of a node.
        gpu: Name and memory of this rank's GPU in bytes; None on CPU.
        memory: In place of what was found, as in `train.memory_per_rank`.
        host_bytes: Memory that the ranks of this host may use; None: what is found.
        ranks_here: Ranks that share this host, where they are more than those of a node.
        has_nvlink: False where PCIe connects the GPUs of a node.
        inter_bandwidth: In place of the assumed one.
    """
    whole, sharing = usable_memory_bytes() if host_bytes is None else host_bytes, ranks_here or local_world_size
    share = whole // sharing
    if gpu is None:
        machine = dataclasses.replace(MACHINES["cpu"], memory_bytes=share, host_memory_bytes=share)
        notes = [f"This host may use {format_bytes(whole)}, {format_bytes(share)} for each of {sharing} ranks"]
    else:
        name, total = gpu
        likely = [key for key in MACHINES if key.split("-")[0] in name.lower()]
        nearest = min(likely or [_ASSUMED_GPU], key=lambda key: abs(MACHINES[key].memory_bytes - total))
        machine = dataclasses.replace(MACHINES[nearest], memory_bytes=total, host_memory_bytes=share)
        notes = [f"{name} with {format_bytes(total)}; bandwidths {'' if likely else 'assumed '}as of {nearest}"]
        if not has_nvlink:
            machine = dataclasses.replace(machine, intra_bandwidth=machine.host_bandwidth)
    if inter_bandwidth is not None:
        machine = dataclasses.replace(machine, inter_bandwidth=inter_bandwidth)
    if memory is not None:
        machine = dataclasses.replace(machine, memory_bytes=parse_bytes(memory, "train.memory_per_rank"))
        notes.append(f"train.memory_per_rank allows {format_bytes(machine.memory_bytes)}")
    return Cluster(world_size // local_world_size, local_world_size, machine, tuple(notes))


def parse_bytes(text: str, what: str) -> int:
    """Bytes of `80GB` (10^9), `64MiB` (2^20) or `50GB/s`.

    Args:
        text: A number and a unit, upper and lower case alike.
        what: Option or key, for the message.

    Raises:
        UserError: It is no size.
    """
    by_lower = {unit.lower(): factor for unit, factor in _UNITS.items()}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)(?:/s)?\s*", text.lower())
    if match and match[2] in by_lower and (size := round(float(match[1]) * by_lower[match[2]])) > 0:
        return size
    near = nearest_name(match[2], _UNITS) if match and match[2] else None
    raise UserError(
        f"{what} is no size",
        received=text,
        allowed=f"a number above 0 and one of {', '.join(_UNITS)}, such as 80GB or 1.5TiB",
        fix=f"did you mean {match[1]}{near}?" if match and near else "write number and unit without anything else",
    )


def size_text(text: str) -> str:
    """The text of a size as it is, once it is known to be one.

    Raises:
        UserError: It is no size.
    """
    parse_bytes(text, "the value")
    return text


def format_bytes(size: float) -> str:
    """Bytes in the largest decimal unit of which there is at least one."""
    power = next((power for power in range(4, 0, -1) if abs(size) >= 1000**power), 0)
    return f"{size / 1000**power:,.{2 if power else 0}f} {'B KB MB GB TB'.split()[power]}"
