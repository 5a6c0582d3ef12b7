"""The second-order part of a factorization machine.

    sum over i < j of <v_i, v_j> = 1/2 * sum over d of ((sum_i v_id)^2 - sum_i v_id^2)

"Factorization Machines", Rendle 2010, https://doi.org/10.1109/ICDM.2010.127, lemma 3.1: the right side costs F D
instead of F^2 D.
"""

from torch import Tensor, nn


class FM(nn.Module):
    """Sum of the inner products of all pairs of vectors; no parameters."""

    def forward(self, vectors_BFD: Tensor) -> Tensor:
        """(B, F, D) -> (B,); a single vector, having no partner, gives 0."""
        return 0.5 * (vectors_BFD.sum(1).square() - vectors_BFD.square().sum(1)).sum(1)
