import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.layers.attention import LocalActivation, segment_softmax
from recsys.layers.segment import row_of_event


def make_case(lengths, dim, seed):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(len(lengths), dim, generator=generator, requires_grad=True),
        torch.randn(sum(lengths), dim, generator=generator, requires_grad=True),
        torch.tensor(lengths, dtype=torch.int64),
        generator,
    )


def padded_reference(unit, query, keys, lengths, padding):
    """The plain form: pad to (B, L, D), build [q, k, q - k, q * k], mask afterwards."""
    num_rows, longest, dim = len(lengths), padding.shape[1], query.shape[1]
    mask = torch.arange(longest) < lengths[:, None]
    padded = torch.zeros(num_rows, longest, dim).masked_scatter(mask[..., None], keys) + padding * ~mask[..., None]
    queries = query[:, None].expand(-1, longest, -1)
    features = torch.cat([queries, padded, queries - padded, queries * padded], dim=2)
    scores = unit.rest(features.flatten(0, 1) @ unit.first.weight.T + unit.first.bias).view(num_rows, longest)
    if unit.normalization == "softmax":
        scores = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=1)
    weights = torch.where(mask, scores, 0.0)  # also clears the NaN of a softmax over nothing
    return (weights[..., None] * padded).sum(1)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    dim=st.sampled_from([1, 3, 4]),
    normalization=st.sampled_from(["none", "softmax"]),
    hidden=st.sampled_from([(), (5,), (6, 5)]),
    activation=st.sampled_from(["relu", "prelu"]),
    seed=st.integers(0, 2**31),
)
def test_jagged_equals_padded_whatever_the_padding_holds(lengths, dim, normalization, hidden, activation, seed):
    query, keys, lengths_B, generator = make_case(lengths, dim, seed)
    unit = LocalActivation(dim, hidden, activation=activation, normalization=normalization)
    padding = 10 * torch.randn(len(lengths), max(lengths) + 2, dim, generator=generator)
    expected = padded_reference(unit, query, keys, lengths_B, padding)
    pooled = unit(query, keys, lengths_B)
    torch.testing.assert_close(pooled, expected, rtol=1e-4, atol=1e-5)


def test_gradients_equal_those_of_the_padded_form():
    query, keys, lengths, generator = make_case([3, 0, 1, 5], 4, 1)
    unit = LocalActivation(4, (6, 5), activation="prelu", normalization="softmax")
    weight = torch.randn(4, 4, generator=generator)
    wanted = (query, keys, unit.first.weight, unit.first.bias)
    padding = torch.zeros(4, 5, 4)
    reference = (torch.nan_to_num(padded_reference(unit, query, keys, lengths, padding)) * weight)[[0, 2, 3]].sum()
    expected = torch.autograd.grad(reference, wanted)
    actual = torch.autograd.grad((unit(query, keys, lengths) * weight).sum(), wanted)
    # The padded softmax over the empty row 1 has NaN gradients; ours are those of a row that adds nothing.
    assert all(gradient.isfinite().all() for gradient in actual)
    torch.testing.assert_close(actual[1:2], expected[1:2], rtol=1e-4, atol=1e-5)
    rows = [0, 2, 3]
    torch.testing.assert_close(actual[0][rows], expected[0][rows], rtol=1e-4, atol=1e-5)


def test_dice_statistics_are_over_real_events_only():
    query, keys, lengths, _ = make_case([3, 0, 4], 4, 2)
    unit = LocalActivation(4, (6,), activation="dice")
    row = row_of_event(lengths, 7)
    hidden = unit.first(torch.cat([query[row], keys, query[row] - keys, query[row] * keys], dim=1))
    unit(query, keys, lengths)
    torch.testing.assert_close(unit.rest[0].norm.running_mean, 0.1 * hidden.mean(0))
    torch.testing.assert_close(unit.rest[0].norm.running_var, 0.9 + 0.1 * hidden.var(0))


@pytest.mark.parametrize("normalization", ["none", "softmax"])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [1], [0, 2, 0]])
@pytest.mark.parametrize("training", [True, False])
def test_empty_histories_give_zeros_and_finite_gradients(lengths, normalization, training):
    query, keys, lengths_B, _ = make_case(lengths, 3, 3)
    unit = LocalActivation(3, (4, 2), normalization=normalization).train(training)
    pooled = unit(query, keys, lengths_B)
    pooled.sum().backward()
    assert pooled.shape == (len(lengths), 3)
    assert torch.equal(pooled[lengths_B == 0], torch.zeros(lengths.count(0), 3))
    assert all(p.grad.isfinite().all() for p in [query, keys, *unit.parameters()])


def test_softmax_weights_of_each_row_sum_to_one_however_large_the_scores():
    row = torch.tensor([0, 0, 2, 2, 2])
    scores = torch.tensor([[1e4], [1e4], [-1e4], [0.0], [1e4]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights = segment_softmax(scores, row, 3)
    torch.testing.assert_close(weights, torch.tensor([[0.5], [0.5], [0.0], [0.0], [1.0]]))


def test_without_softmax_a_repeated_history_counts_twice():
    query, keys, _, _ = make_case([2], 4, 4)
    unit = LocalActivation(4, (6,), activation="relu")
    once, twice = (unit(query, keys.repeat(n, 1), torch.tensor([2 * n])) for n in (1, 2))
    torch.testing.assert_close(twice, 2 * once)


def test_parameters_are_those_of_the_plain_form():
    unit = LocalActivation(8, (16, 4))
    expected = (32 * 16 + 16 + 16) + (16 * 4 + 4 + 4) + (4 + 1)  # linear + bias + Dice slope, twice; output
    assert sum(p.numel() for p in unit.parameters()) == expected
