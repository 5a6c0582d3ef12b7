"""Which network interface ranks of several hosts talk through, and what the names of other hosts mean here.

Left alone, gloo takes the address that the host's own name resolves to. Debian and many images map that name to
127.0.1.1, where no other host can answer. Standard library only, and Linux: elsewhere no interfaces are found, and
the libraries choose for themselves.
"""

import array
import dataclasses
import ipaddress
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from recsys.errors import UserError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
RESOLVE_TIMEOUT_S = 5.0

_IOCTL_ADDRESSES, _IOCTL_FLAGS = 0x8912, 0x8913  # SIOCGIFCONF, SIOCGIFFLAGS
_UP, _LOOPBACK, _RUNNING = 0x1, 0x8, 0x40  # linux/if.h
_IFREQ_BYTES = 40  # of one answer, on 64-bit machines
_MAX_ADDRESSES = 1024
_NETWORK_FILES = Path("/proc/net")
_SYS = Path("/sys/class")

_set_here: dict[str, str] = {}


@dataclasses.dataclass(frozen=True)
class Interface:
    """One address of a network interface; an interface with several addresses comes several times.

    Attributes:
        name: Such as eth0.
        address: IPv4 or IPv6, without a scope.
        is_loopback: Nobody outside this host can answer there.
        is_up: It is switched on and has a carrier.
    """

    name: str
    address: str
    is_loopback: bool
    is_up: bool


@dataclasses.dataclass(frozen=True)
class Choice:
    """Where ranks of other hosts reach those of this one.

    Attributes:
        interface: Its name.
        address: Its address.
        why: What decided, for people.
    """

    interface: str
    address: str
    why: str


def interfaces() -> list[Interface]:
    """All addresses of this host: IPv4 first, then IPv6 beyond the link."""
    if sys.platform != "linux":
        return []
    import fcntl

    buffer = array.array("B", bytes(_MAX_ADDRESSES * _IFREQ_BYTES))
    found, flags = [], {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        (length,) = struct.unpack_from("i", fcntl.ioctl(any_socket.fileno(), _IOCTL_ADDRESSES, asked))
        for start in range(0, length, _IFREQ_BYTES):
            answer = buffer[start : start + _IFREQ_BYTES].tobytes()
            name = answer[:16].split(b"\0")[0].decode().split(":")[0]  # eth0:1 is a second address of eth0
            found.append((name, socket.inet_ntoa(answer[20:24])))
        if (file := _NETWORK_FILES / "if_inet6").exists():
            for line in file.read_text().splitlines():
                digits, *_, name = line.split()
                address = ipaddress.IPv6Address(int(digits, 16))
                found += [] if address.is_link_local else [(name, str(address))]
        for name in {name for name, _ in found}:
            answer = fcntl.ioctl(any_socket.fileno(), _IOCTL_FLAGS, struct.pack("16sh22x", name.encode()[:15], 0))
            (flags[name],) = struct.unpack_from("H", answer, 16)
    return [
        Interface(name, address, bool(flags[name] & _LOOPBACK), flags[name] & _UP != 0 and flags[name] & _RUNNING != 0)
        for name, address in found
    ]


def toward(host: str) -> Interface | None:
    """The interface that packets to a host leave through; None where none does, or its name has no address here."""
    (found,) = resolve([host])
    return _route(found.addresses)


def _route(addresses: Iterable[str]) -> Interface | None:
    """That of the first address with a route from an address of ours; None where there is none.

    Nothing is sent: connecting a datagram socket asks the routing table alone.
    """
    own = {found.address: found for found in reversed(interfaces())}
    for target in addresses:
        try:
            with socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                address = probe.getsockname()[0].split("%")[0]
        except OSError:
            continue
        if address in own:
            return own[address]
    return None


def default() -> Interface | None:
    """The interface of the default route, or the first one that is up and no loopback."""
    usable = [found for found in interfaces() if found.is_up and not found.is_loopback]
    routes = []
    if (file := _NETWORK_FILES / "route").exists():
        for line in file.read_text().splitlines()[1:]:
            name, destination, _, flags, _, _, metric, mask, *_ = line.split()
            if destination == mask == "00000000" and int(flags, 16) & 1:
                routes.append((int(metric), name))
    for _, name in sorted(routes):
        if found := next((one for one in usable if one.name == name), None):
            return found
    return usable[0] if usable else None


def choose(head: str, others: Sequence[str] = ()) -> Choice:
    """The interface through which this host and the others of a job reach each other.

    Args:
        head: Name or address of the host that ranks meet on, which may be this one.
        others: Addresses of other hosts of the job, asked for where the head's name leads nowhere but to loopback, as
            it often does on the head itself.

    Raises:
        UserError: There is none, or the one that the user has named is loopback.
    """
    if names := given(GLOO):
        own = interfaces()
        chosen = next((one for name in names.split(",") for one in own if one.name == name), None)
        if chosen is not None and not chosen.is_loopback:
            return Choice(chosen.name, chosen.address, GLOO)
        raise _unreachable(f"{GLOO}={names} on {socket.gethostname()}" + (", which is loopback" if chosen else ""))
    resolved = resolve([head, *others])
    for host in resolved:
        if (found := _route(host.addresses)) is not None and not found.is_loopback:
            return Choice(found.name, found.address, f"route to {host.name}")
    there = f"{head} is {', '.join(resolved[0].addresses) or f'unknown ({resolved[0].problem})'}"
    if (found := default()) is None:
        raise _unreachable(f"no interface but loopback on {socket.gethostname()}; {there}")
    return Choice(found.name, found.address, f"default route, since {there} here")


def _unreachable(received: str) -> UserError:
    return UserError(
        "Other hosts of this job cannot reach this one",
        received=received,
        allowed=_listed(one for one in interfaces() if not one.is_loopback) or "an interface that is up, with address",
        fix=f"set {GLOO} and {NCCL} to the interface that connects the hosts; `recsys doctor --network` shows them",
    )


def use(choice: Choice) -> None:
    """Make gloo and NCCL take an interface, where the user has not named one."""
    for variable, value in ((GLOO, choice.interface), (NCCL, f"={choice.interface}")):
        if given(variable) is None:
            os.environ[variable] = _set_here[variable] = value


def given(variable: str) -> str | None:
    """What the user has set a variable to; None where it is not set, or was set by `use`."""
    value = os.environ.get(variable) or None
    return None if value == _set_here.get(variable) else value


def require_named(*, nccl: bool) -> None:
    """Check the interfaces that the user has named; nothing happens where there are none.

    Raises:
        UserError: A variable names an interface that is not here, or has no address.
    """
    own = interfaces()
    for variable in (GLOO, *([NCCL] if nccl else [])):
        value = given(variable)
        if not own or value is None or value.startswith("^"):
            continue  # NCCL: all but these
        names = value.removeprefix("=").split(",")
        by_prefix = variable == NCCL and not value.startswith("=")
        known = [any(one.name.startswith(name) if by_prefix else one.name == name for one in own) for name in names]
        if not (any(known) if variable == NCCL else all(known)):
            raise UserError(
                f"{variable} names an interface that is not on {socket.gethostname()}, or has no address",
                received=value,
                allowed=_listed(own),
                fix=f"unset {variable} to have it chosen",
            )


def _listed(some: Iterable[Interface]) -> str:
    return ", ".join(f"{one.name} ({one.address})" for one in some)


def identity() -> tuple[str, str, str]:
    """Equal for processes that reach each other through loopback: name, boot, and network namespace of a host.

    Containers of one machine share the boot, and machines restored from one image may share their names.
    """
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    return (
        socket.gethostname(),
        boot.read_text().strip() if boot.exists() else "",
        os.readlink(namespace) if os.path.lexists(namespace) else "",
    )


def speed_bits(interface: str) -> float | None:
    """Bits per second of an interface as its driver tells; None where it does not."""
    folder = _SYS / "net" / interface
    try:
        # In a network namespace of its own, /sys may still show the interfaces of another.
        is_ours = int((folder / "ifindex").read_text()) == socket.if_nametoindex(interface)
        megabits = int((folder / "speed").read_text())
    except (OSError, ValueError):
        return None
    return megabits * 1e6 if is_ours and megabits > 0 else None


def infiniband_bits() -> float:
    """Bits per second of all InfiniBand ports that are active, together; 0 without any."""
    total = 0.0
    for port in sorted(_SYS.glob("infiniband/*/ports/*")):
        try:
            state, layer, rate = ((port / name).read_text() for name in ("state", "link_layer", "rate"))
        except OSError:
            continue
        if "ACTIVE" in state and layer.strip() == "InfiniBand":
            total += float(rate.split()[0]) * 1e9
    return total


@dataclasses.dataclass(frozen=True)
class Resolved:
    """What a name turned out to be.

    Attributes:
        name: The name.
        addresses: In the resolver's order; empty where there are none.
        problem: Why there are none.
        elapsed_s: Time that the resolver took.
    """

    name: str
    addresses: tuple[str, ...]
    problem: str | None
    elapsed_s: float


def resolve(names: Sequence[str], timeout_s: float = RESOLVE_TIMEOUT_S) -> list[Resolved]:
    """Ask the resolver for all names at once; one that does not answer in time is given up."""
    found: dict[str, Resolved] = {}

    def ask(name: str) -> None:
        start_s, problem = time.monotonic(), None
        addresses: tuple[str, ...] = ()
        try:
            answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            addresses = tuple(dict.fromkeys(str(answer[4][0]) for answer in answers))
        except (OSError, UnicodeError) as error:
            problem = str(getattr(error, "strerror", None) or error)
        found[name] = Resolved(name, addresses, problem, time.monotonic() - start_s)

    # Threads of an executor would be waited for at the end of the process.
    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    end_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
    silent = f"no answer in {timeout_s:g} s"
    return [found.get(name) or Resolved(name, (), silent, timeout_s) for name in names]


def job_hosts() -> list[str]:
    """Names of the hosts of the job that this process runs in, as Slurm, Volcano, TorchX or torchrun tell them."""
    lists = [os.environ[key] for key in sorted(os.environ) if key.startswith("SLURM_JOB_NODELIST")]
    names = [name for nodes in dict.fromkeys(lists) for name in _slurm_hosts(nodes)]
    names += [
        name
        for key in sorted(os.environ)
        if key.startswith("VC_") and key.endswith("_HOSTS")
        for name in os.environ[key].split(",")
    ]
    names += [os.environ.get(key, "") for key in ("TORCHX_RANK0_HOST", "MASTER_ADDR")]
    return [name for name in dict.fromkeys(map(str.strip, names)) if name]


def _slurm_hosts(nodes: str) -> list[str]:
    """Slurm's short form of many names, such as n[1-4], written out."""
    try:
        done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split() if done.returncode == 0 else []
