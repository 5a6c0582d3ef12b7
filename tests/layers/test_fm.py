import itertools

import pytest
import torch

from recsys.layers.fm import FM


@pytest.mark.parametrize(("num_vectors", "dim"), [(2, 1), (3, 4), (7, 5)])
def test_fm_equals_the_sum_of_all_pairwise_inner_products(rng, num_vectors, dim):
    vectors = torch.randn(6, num_vectors, dim, generator=rng, dtype=torch.float64)
    pairs = sum((vectors[:, i] * vectors[:, j]).sum(1) for i, j in itertools.combinations(range(num_vectors), 2))
    torch.testing.assert_close(FM()(vectors), pairs)


def test_fm_of_one_vector_is_zero(rng):
    vectors = torch.randn(3, 1, 4, generator=rng)
    torch.testing.assert_close(FM()(vectors), torch.zeros(3))


def test_fm_by_hand():
    # <(1, 2), (3, -1)> + <(1, 2), (2, 2)> + <(3, -1), (2, 2)> = 1 + 6 + 4
    assert FM()(torch.tensor([[[1.0, 2.0], [3.0, -1.0], [2.0, 2.0]]])).tolist() == [11.0]
