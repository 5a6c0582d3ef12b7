"""What ranks send each other, in fewer bits: codecs for the exchanges of vectors, hooks for averaged gradients.

TorchRec's own codecs are not used. On CPU ranks its registry replaces bf16 by fp16, though gloo carries bf16; FBGEMM's
codec takes its loss scale back in fp16, where what the scale has saved is lost again; its int8 turns zeros into
small numbers, which would train the padding of tables, and needs messages that are multiples of 32 numbers. The
codecs here follow TorchRec's protocol.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.types import CommOp, QuantizedCommCodecs

from recsys.communication_settings import CommunicationSettings, Precision
from recsys.plan import Plan
from recsys.recipe import Recipe

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.uint8}
_MAX_FP16 = 65_504.0
_MAX_BLOCK = 64  # int8 numbers with one scale: of 4 bytes, so that 64 cost 6 % more, and 4 as much as fp16
_SCALE_BYTES = 4

# fp16 holds 6e-8 at the least, and in full precision from 6e-5 to 65,504. Powers of two change no digit. A gradient
# of a vector is one of a row's loss over the rows of a rank's batch: times that number it does not depend on it, and
# 256 more leaves room for gradients up to 255 above and 2e-10 below.
_ROW_GRADIENT_HEADROOM = 256
# Gradients of dense weights are means over the batch already.
_DENSE_SCALE = 1024.0


class Codec:
    """Numbers as they are sent, after TorchRec's protocol of the same methods.

    Args:
        precision: What they are sent in.
        is_active: Asked at each use; where it says no, fp32 is sent.
        scale: A power of two that numbers are multiplied with before they are rounded.
        block: Numbers with one scale of their own (int8); it must divide every message.
    """

    def __init__(
        self, precision: Precision, is_active: Callable[[], bool], *, scale: float = 1.0, block: int = _MAX_BLOCK
    ) -> None:
        self.precision, self.scale, self.block, self._is_active = precision, scale, block, is_active

    def encode(self, input_tensor: Tensor, ctx: None = None) -> Tensor:
        """Any shape in fp32 -> the same shape in `quantized_dtype`; int8 becomes flat, with the scales inside."""
        if not self._is_active() or self.precision == "fp32":
            return input_tensor
        if self.precision == "int8":
            return _to_int8(input_tensor.reshape(-1, self.block))
        return _to_half(input_tensor, _DTYPES[self.precision], self.scale)

    def decode(self, input_tensor: Tensor, ctx: None = None) -> Tensor:
        """What `encode` made, back in fp32."""
        if not self._is_active() or self.precision == "fp32":
            return input_tensor
        if self.precision == "int8":
            return _from_int8(input_tensor.view(-1, self.block + _SCALE_BYTES)).view(-1)
        # In fp32 before the scale is taken back: fp16 would round the result once more, small numbers to zero.
        return input_tensor.float() / self.scale

    @property
    def quantized_dtype(self) -> torch.dtype:
        """Of the encoded numbers while training, by which TorchRec's planner estimates exchanges."""
        return _DTYPES[self.precision]

    def calc_quantized_size(self, input_len: int, ctx: None = None) -> int:
        """Elements that a number of numbers is encoded as."""
        if not self._is_active() or self.precision != "int8":
            return input_len
        assert input_len % self.block == 0, f"{input_len} numbers are no whole blocks of {self.block}"
        return input_len // self.block * (self.block + _SCALE_BYTES)

    def create_context(self) -> None:
        """Nothing is carried from encoder to decoder."""

    def padded_size(self, input_tensor: Tensor, dim_per_rank: list[int], my_rank: int, ctx: None) -> tuple[int, int]:
        """(columns, columns of padding): messages are whole blocks as they are."""
        return input_tensor.shape[-1], 0


def _to_half(numbers: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Scaled and rounded to nearest; beyond fp16's range its largest number. NaN stays NaN."""
    if dtype == torch.bfloat16:
        return numbers.to(dtype) if scale == 1.0 else (numbers * scale).to(dtype)
    return (numbers * scale).clamp_(-_MAX_FP16, _MAX_FP16).to(dtype)


def _to_int8(blocks: Tensor) -> Tensor:
    """(M, block) fp32 -> flat bytes: per block its int8 numbers, then its scale as fp32. Zero stays zero."""
    largest = blocks.abs().amax(dim=1, keepdim=True)
    scales = (largest / 127).clamp_(min=torch.finfo(torch.float32).tiny)
    rounded = (blocks / scales).round_().to(torch.int8)
    # Flat before the view: an empty tensor of two dimensions may have strides that cannot be seen as bytes.
    scale_bytes = scales.view(-1).view(torch.uint8).view(-1, _SCALE_BYTES)
    return torch.cat([rounded.view(torch.uint8), scale_bytes], dim=1).view(-1)


def _from_int8(encoded: Tensor) -> Tensor:
    """(M, block + 4) bytes -> (M, block) fp32."""
    # A copy in any case: bytes are seen as fp32 only where they lie at multiples of 4.
    scales = encoded[:, -_SCALE_BYTES:].flatten().clone().view(torch.float32).unsqueeze(1)
    return encoded[:, :-_SCALE_BYTES].view(torch.int8).float() * scales


Registry = Mapping[str, QuantizedCommCodecs]


def gradient_scale(batch_size_per_rank: int) -> float:
    """What gradients of vectors are multiplied with on their way in fp16; a power of two."""
    return float(_ROW_GRADIENT_HEADROOM * 2 ** round(math.log2(batch_size_per_rank)))


def registry(recipe: Recipe, *, plan: Plan | None = None, is_active: Callable[[], bool] = lambda: True) -> Registry:
    """TorchRec's name of each exchange -> what encodes its messages; empty where all is fp32.

    Args:
        recipe: Says in which precision.
        plan: The widths that are sent, which int8 needs; None: codecs that a planner only asks for their dtype.
        is_active: Whether to compress now.
    """
    settings = recipe.train.communication
    if not settings.compresses_embeddings:
        return {}
    scale = gradient_scale(recipe.data.batch_size_per_rank) if settings.gradients == "fp16" else 1.0

    def codecs(block: int) -> QuantizedCommCodecs:
        return QuantizedCommCodecs(
            Codec(settings.embeddings, is_active, block=block),
            Codec(settings.gradients, is_active, block=block, scale=scale),
        )

    pooled, sequence = (_block(plan, recipe, attended) for attended in (False, True))
    return {
        CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name: codecs(pooled),
        CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name: codecs(pooled),
        CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name: codecs(sequence),
    }


def _block(plan: Plan | None, recipe: Recipe, attended: bool) -> int:
    """The largest block, up to a limit, that divides the width of each part of the tables of one kind of lookup.

    A message is some rows of all parts on a rank, or of one of them, side by side: what divides the widths divides it.
    """
    if plan is None:
        return _MAX_BLOCK
    widths = [s.cols for t in plan.tables if (t.name in recipe.attended) == attended for s in t.shards]
    common = math.gcd(*widths) or _MAX_BLOCK
    return max(n for n in range(1, _MAX_BLOCK + 1) if common % n == 0)


def compress_averages(model: nn.Module, settings: CommunicationSettings) -> "TopK | None":
    """Send averaged gradients as the settings say; call it once, before the first backward pass.

    Args:
        model: A sharded model. Its dense layers are wrapped by DistributedDataParallel, and each group of replicated
            tables by one of its own.
        settings: fp16 and bf16 hold for all of these, top_k for the dense layers.

    Returns:
        What holds back gradients, whose state belongs to the training's; None where nothing does.
    """
    if settings.dense == "fp32":
        return None
    layers = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    if settings.dense == "top_k":
        top_k = TopK(settings.top_k_share, {n: p for m in layers for n, p in _averaged(m)})
        for module in layers:
            module.register_comm_hook(None, top_k.hook)
        return top_k
    hook = _fp16_hook if settings.dense == "fp16" else _bf16_hook
    for module in [*layers, *_replicas(model)]:
        module.register_comm_hook(None, hook)
    return None


def _replicas(model: nn.Module) -> Iterator[DistributedDataParallel]:
    """Lookups of replicated tables, which TorchRec keeps in plain lists that `modules` does not walk."""
    for module in model.modules():
        for lookup in getattr(module, "_lookups", ()):
            if isinstance(lookup, DistributedDataParallel):
                yield lookup


def _averaged(module: DistributedDataParallel) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of what a wrapper averages: not the tables inside, which it was told to leave alone."""
    ignored = module.parameters_to_ignore
    yield from ((name, p) for name, p in module.module.named_parameters() if name not in ignored and p.requires_grad)


def _fp16_hook(_: None, bucket: dist.GradBucket) -> Future[Tensor]:
    return _half_all_reduce(bucket.buffer(), torch.float16, _DENSE_SCALE)


def _bf16_hook(_: None, bucket: dist.GradBucket) -> Future[Tensor]:
    return _half_all_reduce(bucket.buffer(), torch.bfloat16, 1.0)


def _half_all_reduce(gradients: Tensor, dtype: torch.dtype, scale: float) -> Future[Tensor]:
    """The mean over ranks, sent and added up in 16 bits; each rank's share is rounded before."""
    sent = _to_half(gradients / dist.get_world_size(), dtype, scale)

    def finish(done: Future[list[Tensor]]) -> Tensor:
        return gradients.copy_(done.value()[0]).div_(scale)

    return dist.all_reduce(sent, async_op=True).get_future().then(finish)


class TopK:
    """Sends the largest gradients of each bucket and keeps the rest for the next step: error feedback.

    Every rank sends numbers and places of its own choice; all add up what all have sent, in the order of ranks, so
    that ranks stay equal to the last bit. What a rank has not sent is added to its own next gradient.

    Attributes:
        residuals: Parameter's name -> what this rank has not sent yet, in the parameter's shape. Each rank has its own.
    """

    def __init__(self, share: float, parameters: Mapping[str, nn.Parameter]) -> None:
        """Args are the share of a bucket's numbers that is sent, at least one, and what is trained."""
        self.share = share
        self.residuals = {name: torch.zeros_like(p, requires_grad=False) for name, p in parameters.items()}
        self._names = {id(p): name for name, p in parameters.items()}  # buckets change after the first step

    def hook(self, _: None, bucket: dist.GradBucket) -> Future[Tensor]:
        """Average one bucket's gradients, as DistributedDataParallel asks for it."""
        gradients, world_size = bucket.buffer(), dist.get_world_size()
        parts = list(zip(bucket.gradients(), (self._names[id(p)] for p in bucket.parameters()), strict=True))
        for gradient, name in parts:  # views of the buffer
            gradient.add_(self.residuals[name].view_as(gradient))
        num_sent = max(1, round(self.share * gradients.numel()))
        places = gradients.abs().topk(num_sent, sorted=False).indices
        # One message: places and numbers, 4 bytes each.
        message = torch.cat([places.int(), gradients[places].view(torch.int32)])
        gradients[places] = 0
        for gradient, name in parts:
            self.residuals[name].copy_(gradient.view_as(self.residuals[name]))
        received = message.new_empty(world_size * message.numel())

        def finish(_: Future[Any]) -> Tensor:
            gradients.zero_()
            for places, numbers in received.view(world_size, 2, num_sent):
                gradients.index_add_(0, places, numbers.view(torch.float32))
            return gradients.div_(world_size)

        return dist.all_gather_into_tensor(received, message, async_op=True).get_future().then(finish)


def describe(recipe: Recipe, world_size: int) -> dict[str, Any]:
    """What is sent how, as plain data; `None` values where one rank has nobody to send to."""
    settings = recipe.train.communication
    found: dict[str, Any] = {
        "embeddings": settings.embeddings,
        "embedding_gradients": settings.gradients,
        "dense": settings.dense,
    }
    if settings.gradients == "fp16":
        found["embedding_gradients_scale"] = gradient_scale(recipe.data.batch_size_per_rank)
    if settings.dense == "fp16":
        found["dense_scale"] = _DENSE_SCALE
    if settings.dense == "top_k":
        found["top_k_share"] = settings.top_k_share
    return found if world_size > 1 else dict.fromkeys(found)


def sentence(recipe: Recipe, world_size: int) -> str | None:
    """For a log: what is compressed; None where nothing is asked for."""
    if recipe.train.communication.is_plain:
        return None
    if world_size == 1:
        return "train.communication does nothing on one rank: nothing is sent"
    found = describe(recipe, world_size)
    return "Sent while training: " + ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in found.items())
