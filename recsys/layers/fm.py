"""The second-order part of a factorization machine.

    sum over i < j of <v_i, v_j> = 1/2 * sum over d of ((sum_i v_id)^2 - sum_i v_id^2)

"Factorization Machines", Rendle 2010, https://doi.org/10.1109/ICDM.2010.127, lemma 3.1: the right side costs F D
instead of F^2 D.
"""

from typing import Any

import torch
from torch import Tensor, nn


class FM(nn.Module):
    """Sum of the inner products of all pairs of vectors; no parameters."""

    def forward(self, vectors_BFD: Tensor) -> Tensor:
        """(B, F, D) -> (B,); a single vector, having no partner, gives 0."""
        return _PairProducts.apply(vectors_BFD)


class _PairProducts(torch.autograd.Function):
    """The gradient towards v_i is the sum of the other vectors: one fresh tensor, where autograd makes four."""

    @staticmethod
    def forward(ctx: Any, vectors_BFD: Tensor) -> Tensor:
        sum_BD = vectors_BFD.sum(1)
        ctx.save_for_backward(vectors_BFD, sum_BD)
        return 0.5 * (sum_BD.square().sum(1) - vectors_BFD.square().sum((1, 2)))

    @staticmethod
    def backward(ctx: Any, grad_B: Tensor) -> Tensor:
        vectors_BFD, sum_BD = ctx.saved_tensors
        return torch.sub(sum_BD.unsqueeze(1), vectors_BFD).mul_(grad_B.view(-1, 1, 1))
