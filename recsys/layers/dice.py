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
        p_BD = torch.sigmoid(self.norm(x_BD))
        return x_BD * torch.addcmul(self.alpha, 1 - self.alpha, p_BD)
