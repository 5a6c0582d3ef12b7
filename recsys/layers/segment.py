"""Sums over the rows of jagged values: what makes work follow the real history lengths."""

import torch
from torch import Tensor


def row_of_event(lengths_B: Tensor, num_events: int) -> Tensor:
    """(N,) row to which each of `num_events` values belongs, for values stored row after row."""
    rows_B = torch.arange(lengths_B.shape[0], device=lengths_B.device)
    return torch.repeat_interleave(rows_B, lengths_B, output_size=num_events)


def segment_sum(values_ND: Tensor, row_N: Tensor, num_rows: int) -> Tensor:
    """(B, D) sum of the values of each row; a row without values gives zeros."""
    return values_ND.new_zeros(num_rows, values_ND.shape[1]).index_add(0, row_N, values_ND)
