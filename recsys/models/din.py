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
- No mini-batch aware regularisation.
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
from recsys.schema import History, Inputs


class DIN(nn.Module):
    """Any number of histories, each with an attention of its own, over one tower.

    Args:
        inputs: Tables of any widths, at least one history.
        config: Settings; none means the defaults.
        table_device: Where the tables are allocated; "meta" allocates nothing, for a planner that will.
    """

    attends: ClassVar[bool] = True

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
        self.interests = nn.ModuleList(_Interest(inputs, history, config) for history in inputs.histories)
        tower_dim = sum(inputs.table_of(name).dim for name in (*_fields(inputs), *inputs.history_columns))
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
        self.embeddings = Embeddings(inputs, attends=self.attends, table_device=table_device)

    def forward(self, batch: Batch) -> Tensor:
        """Logits, (B,); B may be 0. A row whose histories are all empty is scored by its other inputs alone."""
        vectors, events = self.embeddings(batch.pooled, batch.sequence, batch.labels)
        parts = [vectors[name] for name in _fields(self.inputs)]
        for history, interest in zip(self.inputs.histories, self.interests, strict=True):
            columns = [events[column] for column in history.of]
            parts.append(interest([vectors[target] for target in history.of.values()], columns))
        if self.inputs.dense:
            parts.append(batch.dense)
        return self.output(self.tower(self.input_dropout(torch.cat(parts, dim=1)))).squeeze(1)


class _Interest(nn.Module):
    """One history: its columns, which run in step, attended to with their targets."""

    def __init__(self, inputs: Inputs, history: History, config: DINConfig) -> None:
        super().__init__()
        self.columns = tuple(history.of)
        self.attention = LocalActivation(
            sum(inputs.table_of(column).dim for column in self.columns),
            config.attention_hidden,
            activation=config.attention_activation,
            normalization=config.attention_normalization,
        )

    def forward(self, targets: list[Tensor], columns: list[tuple[Tensor, Tensor]]) -> Tensor:
        """(B, D) from targets (B, D_i) and columns ((N, D_i), (B,) lengths), D being the sum of the D_i."""
        values, lengths = zip(*columns, strict=True)
        # Comparing lengths on a GPU would make the host wait for it; the sizes alone are free.
        compare_lengths = lengths[0].device.type == "cpu"
        for name, values_i, lengths_i in zip(self.columns[1:], values[1:], lengths[1:], strict=True):
            same_size = values_i.shape[0] == values[0].shape[0]
            if not same_size or (compare_lengths and not torch.equal(lengths_i, lengths[0])):
                raise UserError(
                    f"History columns {self.columns[0]!r} and {name!r} have different lengths",
                    received=f"{values[0].shape[0]} and {values_i.shape[0]} events in this batch",
                    allowed="the same number of events in every row",
                    fix="repair the data, or declare them as two histories",
                )
        return self.attention(torch.cat(targets, dim=1), torch.cat(values, dim=1), lengths[0])


def _fields(inputs: Inputs) -> list[str]:
    return [field.name for field in inputs.fields]
