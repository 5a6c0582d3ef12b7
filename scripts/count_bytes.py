"""Counts what is really handed to the collectives of torch.distributed, also from C++, and what leaves a rank."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclasses.dataclass(frozen=True)
class Message:
    """One call of a collective.

    Attributes:
        phase: What the rank was doing.
        collective: torch's name of it.
        dtype: Of what is sent.
        num_bytes: Handed over by this rank.
        sent_bytes: What of it leaves the rank with gloo, headers not counted.
    """

    phase: str
    collective: str
    dtype: torch.dtype
    num_bytes: int
    sent_bytes: float


class Collectives(TorchDispatchMode):
    """While active, keeps a `Message` of each call in this thread.

    Attributes:
        phase: Set by whoever steps.
        messages: In the order of the calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.messages = "", list[Message]()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.name()
        if name.startswith("c10d::") and name in _SENT:
            boxed = next(a for a in args if isinstance(a, torch.ScriptObject))
            group = dist.ProcessGroup.unbox(boxed)
            tensors, share = _SENT[name](args, group.rank(), group.size())
            for tensor in tensors:
                whole = tensor.numel() * tensor.element_size()
                self.messages.append(Message(self.phase, name[6:], tensor.dtype, whole, whole * share))
        elif name.startswith("c10d::") and name not in _SILENT:
            raise NotImplementedError(f"nobody has said what {name} sends")
        return func(*args, **kwargs or {})


def _all_reduce(args: Sequence[Any], _: int, size: int) -> tuple[list[Tensor], float]:
    return list(args[0]), 2 * (size - 1) / size


def _reduce_scatter(args: Sequence[Any], _: int, size: int) -> tuple[list[Tensor], float]:
    # gloo adds up the whole input on every rank and keeps a part of it.
    return [args[1]], 2 * (size - 1) / size


def _all_gather(args: Sequence[Any], _: int, size: int) -> tuple[list[Tensor], float]:
    return [args[1]], size - 1


def _all_to_all(args: Sequence[Any], rank: int, size: int) -> tuple[list[Tensor], float]:
    tensor, splits = args[1], args[4]
    if not tensor.numel():
        return [tensor], 0.0
    return [tensor], 1 - (splits[rank] / sum(splits) if splits else 1 / size)


def _broadcast(args: Sequence[Any], rank: int, size: int) -> tuple[list[Tensor], float]:
    return list(args[0]), size - 1 if rank == args[2] else 0


_SENT: Mapping[str, Callable[[Sequence[Any], int, int], tuple[list[Tensor], float]]] = {
    "c10d::allreduce_": _all_reduce,
    "c10d::_reduce_scatter_base_": _reduce_scatter,
    "c10d::_allgather_base_": _all_gather,
    "c10d::alltoall_base_": _all_to_all,
    "c10d::broadcast_": _broadcast,
}
_SILENT = ("c10d::barrier",)


def by_direction(messages: Sequence[Message]) -> dict[str, float]:
    """Bytes that leave the rank, by what they are: ids, vectors, gradients, dense, other.

    Phases are `forward` and `backward`. What normalisation layers that share their statistics average on the way back
    counts as dense. Numbers and places of a top-k message travel as int32 in the backward pass,
    where no ids do.
    """
    found = dict.fromkeys(("ids", "vectors", "gradients", "dense", "other"), 0.0)
    for message in messages:
        found[_direction(message)] += message.sent_bytes
    return found


def _direction(message: Message) -> str:
    if message.phase == "backward":
        is_dense = message.collective == "allreduce_" or message.dtype == torch.int32
        return "dense" if is_dense else "gradients"
    if message.collective in ("allreduce_", "broadcast_"):
        return "other"  # statistics of normalisation layers; the order of gradients, once
    return "ids" if message.dtype in (torch.int32, torch.int64) else "vectors"


def loopback_bytes() -> int:
    """Bytes that the kernel has sent over this host's loopback device, by all processes, since it was started."""
    return next(found for name, found in _devices() if name == "lo")


def _devices() -> Iterator[tuple[str, int]]:
    with open("/proc/net/dev", encoding="utf-8") as file:
        for line in file.readlines()[2:]:
            name, _, counts = line.partition(":")
            yield name.strip(), int(counts.split()[8])
