import pytest
import torch

from recsys.layers.dice import Dice


@pytest.fixture
def dice(rng):
    layer = Dice(3)
    with torch.no_grad():
        layer.alpha.copy_(torch.tensor([0.0, 0.5, -2.0]))
        layer.norm.running_mean.copy_(torch.randn(3, generator=rng))
        layer.norm.running_var.copy_(torch.rand(3, generator=rng) + 0.5)
    return layer


def by_formula(x, mean, variance, alpha):
    p = 1 / (1 + torch.exp(-(x - mean) / (variance + 1e-8).sqrt()))
    return p * x + (1 - p) * alpha * x


def test_training_uses_the_statistics_of_the_batch(dice, rng):
    x = torch.randn(20, 3, generator=rng)
    expected = by_formula(x, x.mean(0), x.var(0, correction=0), dice.alpha)
    torch.testing.assert_close(dice(x), expected)


def test_evaluation_uses_the_moving_averages(dice, rng):
    x = torch.randn(20, 3, generator=rng)
    expected = by_formula(x, dice.norm.running_mean, dice.norm.running_var, dice.alpha)
    torch.testing.assert_close(dice.eval()(x), expected)


def test_gradients_equal_those_of_the_formula(dice, rng):
    x = torch.randn(20, 3, generator=rng, requires_grad=True)
    weight = torch.randn(20, 3, generator=rng)
    expected = torch.autograd.grad(
        (by_formula(x, x.mean(0), x.var(0, correction=0), dice.alpha) * weight).sum(), (x, dice.alpha)
    )
    torch.testing.assert_close(torch.autograd.grad((dice(x) * weight).sum(), (x, dice.alpha)), expected)


def test_small_inputs_still_spread_over_the_sigmoid(rng):
    # Attention units see a standard deviation of about 0.001 at the start; the shape must not depend on the scale.
    x = torch.randn(500, 3, generator=rng)
    torch.testing.assert_close(Dice(3)(x * 1e-3) * 1e3, Dice(3)(x), rtol=0.02, atol=1e-3)


def test_a_constant_unit_is_halved_not_nan():
    # No spread: p = sigmoid(0) = 1/2, alpha = 0.
    torch.testing.assert_close(Dice(3)(torch.full((4, 3), 7.0)), torch.full((4, 3), 3.5))


@pytest.mark.parametrize("num_rows", [0, 1])
def test_tail_batches_use_the_moving_averages_in_training(dice, rng, num_rows):
    x = torch.randn(num_rows, 3, generator=rng)
    expected = by_formula(x, dice.norm.running_mean, dice.norm.running_var, dice.alpha)
    torch.testing.assert_close(dice.train()(x), expected)


def test_there_is_one_slope_per_unit_and_nothing_else_to_train():
    assert {name: p.shape for name, p in Dice(7).named_parameters()} == {"alpha": (7,)}
