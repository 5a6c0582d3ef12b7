import math

import pytest
import torch
from torch import nn

from recsys.layers.mlp import MLP, linear
from recsys.layers.norm import BatchNorm


def test_relu_layers_equal_plain_torch(rng):
    mlp = MLP(5, (4, 3))
    x = torch.randn(6, 5, generator=rng)
    first, second = (layer for layer in mlp.modules() if isinstance(layer, nn.Linear))
    expected = ((x @ first.weight.T + first.bias).clamp(min=0) @ second.weight.T + second.bias).clamp(min=0)
    torch.testing.assert_close(mlp(x), expected)


def test_batch_norm_comes_before_the_activation_and_dropout_after_it():
    mlp = MLP(5, (4,), activation="prelu", batch_norm=True, dropout=0.5)
    kinds = (nn.Linear, BatchNorm, nn.PReLU, nn.Dropout)
    assert [isinstance(layer, kind) for layer, kind in zip(mlp.layers, kinds, strict=True)] == [True] * 4


def test_a_bias_that_batch_norm_cancels_gets_a_gradient_of_exactly_zero(rng):
    mlp = MLP(5, (4,), batch_norm=True)
    mlp(torch.randn(64, 5, generator=rng)).square().sum().backward()
    assert mlp.layers[0].weight.grad.abs().min() > 0
    assert (mlp.layers[0].bias.grad == 0).all()


@pytest.mark.parametrize(("activation", "slopes"), [("relu", 0), ("prelu", 1), ("dice", 1)])
def test_parameters_per_unit(activation, slopes):
    mlp = MLP(5, (4, 3), activation=activation, batch_norm=True)
    expected = (5 * 4 + 4) + (4 * 3 + 3) + (4 + 3) * (2 + slopes)  # linear, linear, batch norm and slopes
    assert sum(p.numel() for p in mlp.parameters()) == expected


def test_no_hidden_layer_is_the_identity(rng):
    x = torch.randn(2, 5, generator=rng)
    mlp = MLP(5, ())
    assert mlp.out_dim == 5 and torch.equal(mlp(x), x)


def test_dropout_is_off_in_evaluation(rng):
    mlp = MLP(5, (400,), dropout=0.5).eval()
    x = torch.randn(2, 5, generator=rng)
    assert torch.equal(mlp(x), mlp(x))
    assert not torch.equal(mlp.train()(x), mlp(x))


@pytest.mark.parametrize("num_rows", [0, 1])
@pytest.mark.parametrize("activation", ["relu", "prelu", "dice"])
def test_tail_batches_train(activation, num_rows):
    mlp = MLP(5, (4, 3), activation=activation, batch_norm=True, dropout=0.1)
    out = mlp(torch.ones(num_rows, 5))
    out.sum().backward()
    assert out.shape == (num_rows, 3) and out.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in mlp.parameters())


def test_initial_values_are_within_the_documented_bound_and_fill_it():
    layer = linear(300, 200)
    bound = math.sqrt(6 / 500)
    assert layer.weight.abs().max() <= bound < 1.01 * layer.weight.abs().max()
    assert torch.equal(layer.bias, torch.zeros(200))
