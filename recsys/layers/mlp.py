"""Hidden layers: linear -> batch normalisation -> activation -> dropout, any number of times."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from recsys.layers.dice import Dice
from recsys.layers.norm import BatchNorm
from recsys.models.config import Activation


class MLP(nn.Module):
    """A stack of hidden layers; the output layer belongs to the model.

    Args:
        in_dim: Width of the input.
        hidden: Widths of the layers; none gives back the input.
        activation: "relu", "prelu" (slope 0.25 per unit at the start) or "dice".
        batch_norm: Whether each linear layer is followed by batch normalisation.
        dropout: Share of each layer's outputs that are zeroed in training.

    Attributes:
        out_dim: Width of the output.
    """

    def __init__(
        self,
        in_dim: int,
        hidden: Sequence[int],
        *,
        activation: Activation = "relu",
        batch_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.out_dim = [in_dim, *hidden][-1]
        layers: list[nn.Module] = []
        for width_in, width in zip([in_dim, *hidden], hidden, strict=False):
            layers += [_CancelledBias(width_in, width), BatchNorm(width)] if batch_norm else [linear(width_in, width)]
            layers.append(activation_layer(activation, width))
            layers += [nn.Dropout(dropout)] if dropout else []
        self.layers = nn.Sequential(*layers)

    def forward(self, x_BD: Tensor) -> Tensor:
        """(B, in_dim) -> (B, out_dim); B may be 0."""
        return self.layers(x_BD)


class _CancelledBias(nn.Linear):
    """A linear layer in front of batch normalisation, whose bias the normalisation takes away again.

    The bias is there because published parameter counts include it. Its gradient is exactly zero here: autograd's
    would be rounding noise, which Adam scales up to full steps, other ones on every number of ranks.
    """

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__(in_dim, out_dim)
        _initialize(self)

    def forward(self, x_BD: Tensor) -> Tensor:
        bias = self.bias.detach() + 0 * self.bias if self.training else self.bias
        return F.linear(x_BD, self.weight, bias)


def linear(in_dim: int, out_dim: int, *, bias: bool = True) -> nn.Linear:
    """A linear layer drawn from U(-a, a), a = sqrt(6 / (in + out)) (Glorot and Bengio 2010), with bias 0."""
    return _initialize(nn.Linear(in_dim, out_dim, bias=bias))


def _initialize(layer: nn.Linear) -> nn.Linear:
    nn.init.xavier_uniform_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def activation_layer(name: Activation, dim: int) -> nn.Module:
    """The activation of that name for `dim` units."""
    if name == "relu":
        return nn.ReLU()
    return nn.PReLU(dim) if name == "prelu" else Dice(dim)
