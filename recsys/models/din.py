"""Deep Interest Network: the events of a history count by how much they have to do with the candidate.

"Deep Interest Network for Click-Through Rate Prediction", Zhou et al., KDD 2018, https://arxiv.org/abs/1706.06978

    k_j    = vectors of event j, side by side (item, category, ...);  q = those of the candidate
    w_j    = attention([q, k_j, q - k_j, q * k_j])
    pooled = sum over j of w_j k_j
    logit  = linear(tower([fields, candidate included; pooled of every history; dense numbers]))

Differs from the paper:
- The attention sees q - k and q * k where the paper draws an outer product; so does the authors' code
  (github.com/zhougr1993/DeepInterestNetwork).
- No softmax by default, as in the paper (section 4.3); `attention_normalization: softmax` is an option. The
  authors' code has a softmax of scores divided by sqrt(width); ours does not divide.
- Histories are jagged: nothing is padded, and Dice in the attention sees real events only. An empty history gives
  zeros.
- Batch normalisation before each activation of the tower (an option, on by default), which the paper does not have.
- Initial values: tables N(0, init_std^2) (0.01 unless the table says otherwise), linear layers Glorot uniform with
  bias 0, Dice's slope 0, PReLU's 0.25.
- `first_order: true` adds a weight per id of every field to the logit; the authors' code has one per candidate item.
- `interest_product: true` gives the tower q * pooled as well; the public code of DIEN's DIN baseline
  (github.com/mouna99/dien) has the like.
- Regularisation is a table's `l2`, which pulls on the rows of a batch only, as the paper's mini-batch aware kind
  does; the paper divides by how often an id occurs, ours does not.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from recsys.data.batch import Batch
from recsys.embedding import Embeddings
from recsys.errors import UserError
from recsys.layers.attention import LocalActivation
from recsys.layers.mlp import MLP, linear
from recsys.models.config import DINConfig
from recsys.schema import Inputs


class DIN(nn.Module):
    """Any number of histories, each with an attention of its own, over one tower.

    Args:
        inputs: Tables of any widths, at least one history.
        config: Settings; none means the defaults.
        table_device: Where the tables are allocated; "meta" allocates nothing, for a planner that will.
    """

    attends: ClassVar[bool] = DINConfig.attends

    def __init__(self, inputs: Inputs, config: DINConfig | None = None, *, table_device: str | None = None) -> None:
        super().__init__()
        config = config or DINConfig()
        if not inputs.histories:
            raise UserError(
                "DIN needs a history to attend to",
                received="inputs without histories",
                fix="declare a history, or choose a model without attention, such as deepfm",
            )
        self.inputs = inputs
        self.interests = _Interests(inputs, config)
        tower_dim = sum(inputs.table_of(name).dim for name in (*_fields(inputs), *inputs.history_columns))
        if config.interest_product:
            tower_dim += sum(inputs.table_of(column).dim for column in inputs.history_columns)
        tower_dim += len(inputs.dense)
        self.input_dropout = nn.Dropout(config.embedding_dropout)
        self.tower = MLP(
            tower_dim,
            config.hidden,
            activation=config.activation,
            batch_norm=config.batch_norm,
            dropout=config.dropout,
        )
        self.output = linear(self.tower.out_dim, 1)
        self.first_order = config.first_order
        self.embeddings = Embeddings(
            inputs, attends=self.attends, extra_columns=int(config.first_order), table_device=table_device
        )

    def forward(self, batch: Batch) -> Tensor:
        """Logits, (B,); B may be 0. A row whose histories are all empty is scored by its other inputs alone."""
        vectors, events, extras = self.embeddings(batch.pooled, batch.sequence, batch.weights)
        weights = [extras[name].squeeze(1) for name in _fields(self.inputs)] if self.first_order else []
        parts = [*(vectors[name] for name in _fields(self.inputs)), self.interests(vectors, events)]
        if self.inputs.dense:
            parts.append(batch.dense)
        logits = self.output(self.tower(self.input_dropout(torch.cat(parts, dim=1)))).squeeze(1)
        return sum(weights, logits)


class _Interests(nn.Module):
    """All histories of a batch, each attended to with the candidate's vectors.

    One module, so that TorchRec's tracer takes it as a whole.
    """

    def __init__(self, inputs: Inputs, config: DINConfig) -> None:
        super().__init__()
        self.histories, self.product = inputs.histories, config.interest_product
        self.attentions = nn.ModuleList(
            LocalActivation(
                sum(inputs.table_of(column).dim for column in history.of),
                config.attention_hidden,
                activation=config.attention_activation,
                normalization=config.attention_normalization,
            )
            for history in inputs.histories
        )

    def forward(self, vectors: dict[str, Tensor], events: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        """(B, D), D being the widths of all history columns together, twice that with products."""
        parts = []
        for history, attention in zip(self.histories, self.attentions, strict=True):
            values, lengths = zip(*(events[column] for column in history.of), strict=True)
            _require_in_step(tuple(history.of), values, lengths)
            candidate_BD = torch.cat([vectors[target] for target in history.of.values()], dim=1)
            pooled_BD = attention(candidate_BD, torch.cat(values, dim=1), lengths[0])
            parts += [pooled_BD, candidate_BD * pooled_BD] if self.product else [pooled_BD]
        return torch.cat(parts, dim=1)


def _require_in_step(columns: tuple[str, ...], values: tuple[Tensor, ...], lengths: tuple[Tensor, ...]) -> None:
    # Comparing lengths on a GPU would make the host wait for it; the sizes alone are free.
    compare_lengths = lengths[0].device.type == "cpu"
    for name, values_i, lengths_i in zip(columns[1:], values[1:], lengths[1:], strict=True):
        same_size = values_i.shape[0] == values[0].shape[0]
        if not same_size or (compare_lengths and not torch.equal(lengths_i, lengths[0])):
            raise UserError(
                f"History columns {columns[0]!r} and {name!r} have different lengths",
                received=f"{values[0].shape[0]} and {values_i.shape[0]} events in this batch",
                allowed="the same number of events in every row",
                fix="repair the data, or declare them as two histories",
            )


def _fields(inputs: Inputs) -> list[str]:
    return [field.name for field in inputs.fields]
