"""DIN's local activation unit: how much each past event says about this candidate.

    w = MLP([q, k, q - k, q * k]),  pooled = sum over the events of a row of w * k

The events of all rows lie one after another, so there is no padding: none to work on, none to mask, and none in the
statistics of Dice. "Deep Interest Network for Click-Through Rate Prediction", https://arxiv.org/abs/1706.06978.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from recsys.layers.mlp import MLP, activation_layer, linear
from recsys.layers.segment import row_of_event, segment_sum
from recsys.models.config import Activation


class LocalActivation(nn.Module):
    """Weigh every event against its row's query and sum the events of each row.

    Args:
        dim: Width D of queries and keys.
        hidden: Widths of the unit's hidden layers.
        activation: Activation of the hidden layers.
        normalization: "none" keeps the scores as weights; "softmax" makes a row's weights sum to 1.
    """

    def __init__(
        self,
        dim: int,
        hidden: Sequence[int] = (80, 40),
        *,
        activation: Activation = "dice",
        normalization: Literal["none", "softmax"] = "none",
    ) -> None:
        super().__init__()
        self.normalization = normalization
        first = [*hidden, 1][0]
        self.first = linear(4 * dim, first)
        self.rest = nn.Sequential()
        if hidden:
            self.rest.append(activation_layer(activation, first))
            self.rest.append(MLP(first, hidden[1:], activation=activation))
            self.rest.append(linear(hidden[-1], 1))

    def forward(self, query_BD: Tensor, keys_ND: Tensor, lengths_B: Tensor) -> Tensor:
        """Pooled events, (B, D); a row without events gives zeros, with both normalisations. B and N may be 0.

        Args:
            query_BD: One query per row.
            keys_ND: Events of row 0, then of row 1, and so on.
            lengths_B: Number of events of each row.
        """
        row_N = row_of_event(lengths_B, keys_ND.shape[0])
        weight_N1 = self.rest(self._first_layer(query_BD, keys_ND, row_N)).float()  # summed below, too long for bf16
        if self.normalization == "softmax":
            weight_N1 = segment_softmax(weight_N1, row_N, lengths_B.shape[0])
        return segment_sum(weight_N1 * keys_ND, row_N, lengths_B.shape[0])

    def _first_layer(self, query_BD: Tensor, keys_ND: Tensor, row_N: Tensor) -> Tensor:
        """(N, H) = first([q, k, q - k, q * k]), the part that is linear in q being computed per row, not per event.

        Wq q + Wk k + Wd (q - k) + Wp (q * k) = (Wq + Wd) q + (Wk - Wd) k + Wp (q * k)
        """
        query_HD, key_HD, difference_HD, product_HD = self.first.weight.chunk(4, dim=1)
        row_part_BH = functional.linear(query_BD, query_HD + difference_HD, self.first.bias)
        product_ND = query_BD.index_select(0, row_N) * keys_ND
        event_part_NH = functional.linear(
            torch.cat([keys_ND, product_ND], dim=1), torch.cat([key_HD - difference_HD, product_HD], dim=1)
        )
        return event_part_NH + row_part_BH.index_select(0, row_N)


def segment_softmax(scores_N1: Tensor, row_N: Tensor, num_rows: int) -> Tensor:
    """(N, 1) softmax over the scores of each row; their largest is subtracted first, so that exp cannot overflow."""
    largest_B1 = scores_N1.new_full((num_rows, 1), -torch.inf)
    largest_B1 = largest_B1.scatter_reduce(0, row_N.unsqueeze(1), scores_N1.detach(), "amax")
    exponential_N1 = (scores_N1 - largest_B1.index_select(0, row_N)).exp()
    return exponential_N1 / segment_sum(exponential_N1, row_N, num_rows).index_select(0, row_N)
