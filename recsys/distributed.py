"""Who we are among the ranks: set-up without a launcher or under torchrun, and agreement between ranks."""

import contextlib
import dataclasses
import datetime
import functools
import itertools
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from recsys import network, strategy
from recsys.errors import UserError
from recsys.machine import keep_freed_memory, usable_cores
from recsys.presence import Presence, raise_terminated

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process among the others.

    Attributes:
        rank: 0..world_size-1.
        world_size: Number of processes.
        local_world_size: Processes on this host.
        device: Where this rank computes.
        presence: Tells the others where this rank stands; None where there are no others.
        hosts: Names of all hosts of the job, in the order of ranks.
        ranks_here: Ranks on this host.
        choice: Network interface through which the hosts reach each other; None for a single one.
    """

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    presence: Presence | None = None
    hosts: tuple[str, ...] = (socket.gethostname(),)
    ranks_here: int = 1
    choice: network.Choice | None = None

    def at(self, place: str) -> None:
        """Note where this rank stands, such as `step 37`, for the error that other ranks get without it."""
        if self.presence is not None:
            self.presence.at(place)

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of all ranks."""
        assert dist.group.WORLD is not None, "ranks exist only inside `process_group`"
        return dist.group.WORLD


@contextlib.contextmanager
def process_group(device: str = "auto", *, threads: int | None = None, timeout_s: float = 600.0) -> Iterator[Ranks]:
    """Join the other ranks, or be the only one when no launcher set the environment.

    Args:
        device: `auto` takes CUDA when there is any.
        threads: Threads of torch; None keeps OMP_NUM_THREADS where somebody set it, else shares the host's cores.
        timeout_s: A collective that waits longer ends the job.

    Raises:
        UserError: There are fewer GPUs than ranks, or none where `cuda` was asked for; hosts cannot reach each other;
            other ranks did not take part in a collective.
    """
    rank, world_size = _launched("RANK", 0), _launched("WORLD_SIZE", 1)
    local_rank, local_world_size = _launched("LOCAL_RANK", 0), _launched("LOCAL_WORLD_SIZE", world_size)
    own: dist.Store | None = None
    if "RANK" in os.environ:
        own = dist.PrefixStore(f"group_{next(_groups)}", store())
    kind, hosts, ranks_here, choice = _surroundings(device, local_world_size, own, rank, world_size)
    cuda = kind == "cuda"
    torch.set_num_threads(
        strategy.threads_of(
            threads,
            os.environ.get("OMP_NUM_THREADS"),
            among_launched=strategy.among_launched(local_world_size),
            cores=usable_cores(),
            ranks_here=ranks_here,
        )[0]
    )
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        # NCCL's own watchdog ends the process without a word: it comes second.
        timeout = datetime.timedelta(seconds=timeout_s + (_AFTER_PRESENCE_S if cuda else 0))
        backend = strategy.backend_of(kind)
        if cuda:
            torch.cuda.set_device(local_rank)
        if own is not None:
            dist.init_process_group(backend, store=own, rank=rank, world_size=world_size, timeout=timeout)
        else:
            dist.init_process_group(
                backend, init_method=f"file://{folder}/store", rank=0, world_size=1, timeout=timeout
            )
        stack.callback(dist.destroy_process_group)
        stack.callback(_forget_nodes)
        presence = stack.enter_context(_present(own, rank, world_size, timeout_s)) if own and world_size > 1 else None
        own_device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
        yield Ranks(rank, world_size, local_world_size, own_device, presence, hosts, ranks_here, choice)


_AFTER_PRESENCE_S = 60.0


def _surroundings(
    device: str, local_world_size: int, store: dist.Store | None, rank: int, world_size: int
) -> tuple[str, tuple[str, ...], int, network.Choice | None]:
    """Device, names of all hosts, ranks on this one, and the way to the others; told before there is a group.

    Launchers cannot tell whether two of them were started on one host, where loopback is right, or on two.
    """
    identity = network.identity()

    def look() -> tuple[str, tuple[str, ...], str | None]:
        kind = strategy.device_of(device, len(strategy.gpus()), local_world_size)
        network.require_named(nccl=kind == "cuda")
        head = network.toward(os.environ["MASTER_ADDR"]) if world_size > 1 else None
        return kind, identity, head.address if head and not head.is_loopback else None

    seen = _told("seen", look, store, rank, world_size)
    if len({kind for kind, _, _ in seen}) > 1:
        ranks_of = {kind: [number for number, one in enumerate(seen) if one[0] == kind] for kind, _, _ in seen}
        error = UserError(
            "Some ranks compute on GPUs and others do not",
            received="; ".join(f"{kind}: ranks {', '.join(map(str, some))}" for kind, some in ranks_of.items()),
            fix="give all nodes GPUs, or set train.device=cpu",
        )
        error.is_printed_here = rank == 0
        raise error
    identities = [one for _, one, _ in seen]
    choice = None
    if len(set(identities)) > 1:
        others = [address for _, one, address in seen if address is not None and one != identity]
        chosen = _told("way", lambda: network.choose(os.environ["MASTER_ADDR"], others), store, rank, world_size)
        choice = chosen[rank]
        network.use(choice)
    hosts = tuple(name for name, *_ in dict.fromkeys(identities))
    return seen[rank][0], hosts, identities.count(identity), choice


def _told(what: str, look: Callable[[], _T], store: dist.Store | None, rank: int, world_size: int) -> list[_T]:
    """What each rank finds, in rank order, on every rank, before there is a group; one's error is that of all."""
    if store is None:
        return [look()]
    try:
        found: Any = look()
    except UserError as error:
        found = error
    store.set(f"{what}/{rank}", pickle.dumps(found))  # type: ignore[arg-type]  # the stub knows of text alone
    absent = 0
    try:
        if rank == 0:
            everything = []
            for absent in range(world_size):
                everything.append(pickle.loads(store.get(f"{what}/{absent}")))
            store.set(what, pickle.dumps(everything))  # type: ignore[arg-type]
        else:
            everything = pickle.loads(store.get(what))
    except dist.DistError as error:
        raise _absent(str(absent), store) from error
    for other, one in enumerate(everything):
        if isinstance(one, UserError):
            shared = UserError(f"Rank {other} of {world_size}: {one}") if world_size > 1 else one
            shared.is_printed_here = rank == 0
            raise shared
    return everything


@contextlib.contextmanager
def _present(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> Iterator[Presence]:
    """Presence among the other ranks; when an exchange with them breaks, the error says whose fault it is."""
    presence = Presence(store, rank, world_size, timeout_s)
    handles = threading.current_thread() is threading.main_thread()
    former = signal.signal(signal.SIGTERM, raise_terminated) if handles else None
    try:
        yield presence
    except BaseException as error:
        if (explained := presence.explain(error)) is not None:
            handles = False  # the launcher's signal must not end us before the error is printed
            raise explained from None
        if handles and isinstance(error, UserError):
            handles = False
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    finally:
        presence.leave()
        if handles:
            signal.signal(signal.SIGTERM, former)


def _forget_nodes() -> None:
    """TorchRec keeps the groups of a node's ranks for good, though they end with the group of all ranks."""
    if comm := sys.modules.get("torchrec.distributed.comm"):
        comm._INTRA_PG = comm._CROSS_PG = None  # type: ignore[attr-defined]


_groups = itertools.count()
"""Numbers of the groups that this process has joined: each has keys of its own in the store."""


@functools.cache
def store() -> dist.Store:
    """Where launched ranks meet, once per process: it outlives the groups, of which there may be several in turn.

    It may outlive the ranks, too: a launcher that starts them again must not let them find what the last ones wrote.

    Raises:
        UserError: Some ranks have not come.
    """
    found, rank, world_size = next(iter(dist.rendezvous("env://")))
    # Two jobs that were given one port share a store.
    found = dist.PrefixStore(f"recsys/{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}", found)
    return dist.PrefixStore(_attempt(found, rank, world_size), found)


def _attempt(store: dist.Store, rank: int, world_size: int) -> str:
    """A name that the processes of one start have in common, and no others.

    Torchrun's count of restarts is no such name: each node has its own. So every process comes with a new name; rank 0
    tells its own to each of them, until all have confirmed. What processes of a former start left is never confirmed.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"here/{rank}", own)
        try:
            attempt = store.get(f"attempt_of/{own}").decode()
        except dist.DistError as error:
            raise _absent("0", store) from error
        store.set(f"{attempt}/confirmed/{rank}", "")
        return attempt
    absent, told, end_s = set(range(1, world_size)), set(), time.monotonic() + _timeout_s(store)
    while absent:
        for name in [store.get(f"here/{other}").decode() for other in absent if store.check([f"here/{other}"])]:
            if name not in told:
                store.set(f"attempt_of/{name}", own)
                told.add(name)
        absent = {other for other in absent if not store.check([f"{own}/confirmed/{other}"])}
        if absent and time.monotonic() > end_s:
            raise _absent(", ".join(map(str, sorted(absent))), store)
        time.sleep(_POLL_S if absent else 0)
    return own


_POLL_S = 0.02


def _timeout_s(store: dist.Store) -> float:
    return store.timeout.total_seconds()  # type: ignore[attr-defined]  # the stub lacks it


def _absent(who: str, store: dist.Store) -> UserError:
    error = UserError(
        "Ranks have not come to the rendezvous",
        received=f"nothing of {who} for {_timeout_s(store):g} s",
        fix="look for the cause in their logs, and try `recsys doctor --network` on their hosts",
    )
    error.is_worth_retrying = True
    return error


def _launched(name: str, alone: int) -> int:
    """A number that the launcher sets for each rank; `alone` where there is no launcher."""
    if "RANK" not in os.environ:
        return alone
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise UserError(
            f"The environment sets RANK, but {name} is no number",
            received=text or "not set",
            fix="unset RANK to run alone, or start with torchrun, which sets all of them",
        )
    return int(text)


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks, in rank order, on every rank; `group` is another one of all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast(value: Any) -> Any:
    """The value of rank 0, on every rank."""
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


@contextlib.contextmanager
def agreed(what: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a block on every rank; when it fails on any, all ranks raise.

    Without this, the ranks that did well would wait for the failed one in the next collective. A `UserError` is
    raised alike everywhere; another exception stays what it is where it happened.

    Args:
        what: What the block does, for messages.
        group: A group of all ranks that the block's thread has for itself; None: the one of the main thread.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    told = None
    if isinstance(error, UserError):
        told = str(error), error.is_worth_retrying
    elif error is not None:
        told = f"{type(error).__name__}: {error}", True
    failed = [(rank, *one) for rank, one in enumerate(gather(told, group)) if one is not None]
    if not failed:
        return
    if error is not None and not isinstance(error, UserError):
        raise error
    world_size = dist.get_world_size()
    whose = f", rank {failed[0][0]} of {world_size}" if world_size > 1 else ""
    shared = UserError(f"{what}{whose}: {failed[0][1]}")
    shared.is_printed_here = dist.get_rank() == 0
    shared.is_worth_retrying = all(worth for *_, worth in failed)
    raise shared from error


@contextlib.contextmanager
def alike_on_host() -> Iterator[None]:
    """Before the ranks have met: an error that all ranks of a host find is printed by the first of them."""
    try:
        yield
    except UserError as error:
        error.is_printed_here = os.environ.get("LOCAL_RANK", "0") == "0"
        raise
