"""Batch normalisation that survives tail batches and can share its statistics over ranks.

torch.nn.BatchNorm1d stops on a batch of one row, and torch.nn.SyncBatchNorm refuses the CPU. This layer does
neither: in training, a batch of fewer than two rows (counted over all ranks that share statistics) is normalised with
the running statistics, which it leaves unchanged, and zero rows are legal. Everything else, the names of the states
included, is as in BatchNorm1d.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional


class BatchNorm(nn.Module):
    """Normalise each unit over all rows: (x - mean) / sqrt(variance + eps), then x weight + bias if affine.

    Args:
        dim: Number of units D.
        affine: Whether a weight (initially 1) and a bias (initially 0) per unit follow.
        eps: Added to the variance.
        momentum: Share of the newest batch in the running mean and the (unbiased) running variance.

    Attributes:
        process_group: Ranks whose rows count as one batch in training; None means this process alone. Set it with
            `synchronize_statistics`.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, dim: int, *, affine: bool = True, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.process_group: dist.ProcessGroup | None = None
        self.weight = nn.Parameter(torch.ones(dim)) if affine else None
        self.bias = nn.Parameter(torch.zeros(dim)) if affine else None
        self.register_buffer("running_mean", torch.zeros(dim))
        self.register_buffer("running_var", torch.ones(dim))

    def forward(self, x_BD: Tensor) -> Tensor:
        """(B, D) -> (B, D); B may be 0 or 1, in training too.

        With a process group, training costs one all_reduce of 2 D + 1 float64 here and one of 2 D float32 in the
        backward pass; every rank must take part in both, one with zero rows as well.
        """
        if self.training and self.process_group is not None:
            return self._forward_over_ranks(x_BD, self.process_group)
        use_batch = self.training and x_BD.shape[0] >= 2
        return functional.batch_norm(
            x_BD, self.running_mean, self.running_var, self.weight, self.bias, use_batch, self.momentum, self.eps
        )

    def _forward_over_ranks(self, x_BD: Tensor, group: dist.ProcessGroup) -> Tensor:
        out_BD, mean_D, variance_D, count = _NormalizeOverRanks.apply(
            x_BD, self.running_mean, self.running_var, self.eps, group
        )
        with torch.no_grad():
            # The count stays on the device: a Python `if` here would make a GPU wait at every layer.
            share = torch.where(count >= 2, self.momentum, 0.0).to(mean_D.dtype)
            unbiased_D = variance_D * (count / (count - 1).clamp(min=1)).to(mean_D.dtype)
            self.running_mean.lerp_(mean_D, share)
            self.running_var.lerp_(unbiased_D, share)
        return out_BD if self.weight is None or self.bias is None else torch.addcmul(self.bias, out_BD, self.weight)


class _NormalizeOverRanks(torch.autograd.Function):
    """Normalise with the mean and the variance over the rows of every rank; gradients are summed over ranks."""

    @staticmethod
    def forward(
        ctx: Any, x_BD: Tensor, running_mean_D: Tensor, running_var_D: Tensor, eps: float, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        num_rows = x_BD.shape[0]
        local_mean_D = x_BD.sum(0, dtype=torch.float32) / max(num_rows, 1)
        local_squares_D = (x_BD - local_mean_D).square().sum(0, dtype=torch.float32)
        # Centred here, and raw moments in float64 only on the wire: no cancellation, at D numbers' cost.
        mean_D = local_mean_D.double()
        packed = torch.cat(
            [mean_D.new_tensor([num_rows]), num_rows * mean_D, local_squares_D.double() + num_rows * mean_D.square()]
        )
        dist.all_reduce(packed, group=group)
        count, (mean_D, square_D) = packed[0], (packed[1:] / packed[0].clamp(min=1)).chunk(2)
        variance_D = (square_D - mean_D.square()).clamp(min=0)
        enough = count >= 2
        mean_D = torch.where(enough, mean_D, running_mean_D).float()
        variance_D = torch.where(enough, variance_D, running_var_D).float()
        inverse_std_D = torch.rsqrt(variance_D + eps)
        out_BD = (x_BD - mean_D).mul_(inverse_std_D).to(x_BD.dtype)
        ctx.group = group
        ctx.save_for_backward(out_BD, inverse_std_D, count)
        ctx.mark_non_differentiable(mean_D, variance_D, count)
        return out_BD, mean_D, variance_D, count

    @staticmethod
    def backward(ctx: Any, grad_BD: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        out_BD, inverse_std_D, count = ctx.saved_tensors
        sums_2D = torch.stack([grad_BD.sum(0, dtype=torch.float32), (grad_BD * out_BD).sum(0, dtype=torch.float32)])
        dist.all_reduce(sums_2D, group=ctx.group)
        # Running statistics do not depend on the rows: then nothing flows back through them.
        through_mean_D, through_variance_D = torch.where(count >= 2, sums_2D / count.clamp(min=1).float(), 0.0)
        grad_in_BD = (grad_BD - through_mean_D - out_BD * through_variance_D) * inverse_std_D
        return grad_in_BD.to(grad_BD.dtype), None, None, None, None


@torch.no_grad()
def average_statistics(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Give all ranks the mean of their running statistics, where each has gathered its own."""
    for module in model.modules():
        if isinstance(module, BatchNorm) and module.process_group is None:
            for statistic in (module.running_mean, module.running_var):
                dist.all_reduce(statistic, group=group)
                statistic /= dist.get_world_size(group)


def synchronize_statistics(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Let every BatchNorm of `model` take its training statistics over the rows of all ranks of `group`.

    Then N ranks train as one process does on the rows of all of them. None, or a group of one rank, undoes it.
    """
    if group is not None and group.size() == 1:
        group = None
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.process_group = group
