"""Dice, the data adaptive activation of DIN: a PReLU whose turning point follows the distribution of its input.

    p = sigmoid((x - mean) / sqrt(variance + eps))
    out = p * x + (1 - p) * alpha * x

From "Deep Interest Network for Click-Through Rate Prediction", https://arxiv.org/abs/1706.06978, section 5.2.

Differs from the paper: nothing in the formula. The paper leaves open
- the initial alpha: 0, as in the authors' code (github.com/zhougr1993/DeepInterestNetwork, din/Dice.py). That code also
  learns a factor inside the sigmoid; the paper has none, nor have we.
- the moving average that evaluation uses: momentum 0.1, as torch.nn.BatchNorm1d.
- a batch of fewer than two rows: the moving averages are used (`recsys.layers.norm`).
"""

from typing import Any

import torch
from torch import Tensor, nn

from recsys.layers.norm import BatchNorm


class Dice(nn.Module):
    """One learnt slope per unit, and batch statistics without affine parameters.

    Args:
        dim: Number of units D.
        eps: Added to the variance; the paper's value. The usual 1e-5 is no smaller than the variance that freshly
            drawn embeddings give an attention unit, and would flatten p.
    """

    def __init__(self, dim: int, *, eps: float = 1e-8) -> None:
        super().__init__()
        self.norm = BatchNorm(dim, affine=False, eps=eps)
        self.alpha = nn.Parameter(torch.zeros(dim))

    def forward(self, x_BD: Tensor) -> Tensor:
        """(B, D) -> (B, D); the statistics are over the B rows given, so give none that are padding. B may be 0."""
        return _Gate.apply(x_BD, self.norm(x_BD), self.alpha)


class _Gate(torch.autograd.Function):
    """x * (alpha + (1 - alpha) p), p = sigmoid(z), with three fresh tensors on the way back where autograd makes nine.

    Events are many and units few: the time goes into memory, not arithmetic.
    """

    @staticmethod
    def forward(ctx: Any, x_BD: Tensor, z_BD: Tensor, alpha_D: Tensor) -> Tensor:
        p_BD = torch.sigmoid(z_BD)
        ctx.save_for_backward(x_BD, p_BD, alpha_D)
        return _slope(p_BD, alpha_D).mul_(x_BD)

    @staticmethod
    def backward(ctx: Any, grad_BD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_BD, p_BD, alpha_D = ctx.saved_tensors
        negative_BD = grad_BD * x_BD
        negative_BD.addcmul_(negative_BD, p_BD, value=-1)  # grad * x * (1 - p), what alpha multiplies
        grad_alpha_D = negative_BD.sum(0, dtype=alpha_D.dtype)
        grad_z_BD = negative_BD.mul_(p_BD).mul_((1 - alpha_D).to(p_BD.dtype))
        return _slope(p_BD, alpha_D).mul_(grad_BD), grad_z_BD, grad_alpha_D


def _slope(p_BD: Tensor, alpha_D: Tensor) -> Tensor:
    return torch.addcmul(alpha_D.to(p_BD.dtype), (1 - alpha_D).to(p_BD.dtype), p_BD)
