"""DeepFM: a factorization machine and a deep tower that read the same vectors.

"DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", Guo et al., IJCAI 2017,
https://arxiv.org/abs/1703.04247

    v_i   = vector of field i (a number x: x times a learnt vector);  w_i = its first-order weight (x times one)
    logit = bias + sum_i w_i + sum over i < j of <v_i, v_j> + linear(tower([v_1, ..., v_F]))

Differs from the paper:
- The first-order weight of an id is the last column of its table's row: one lookup serves both.
- A list of ids, a history included, is one field whose vector and weight are the sum or the mean of its ids'; an
  empty list gives zeros.
- Numbers are fields too; the paper leaves their treatment open.
- The tower's last layer has no bias of its own: the one bias is enough.
- Initial values: tables N(0, init_std^2) (0.01 unless the table says otherwise), first-order weights 0, linear layers
  Glorot uniform with bias 0. The paper gives none.
- No dropout unless asked for; the paper sets 0.5.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from recsys.data.batch import Batch
from recsys.embedding import Embeddings
from recsys.errors import UserError
from recsys.layers.fm import FM
from recsys.layers.mlp import MLP, linear
from recsys.models.config import DeepFMConfig
from recsys.schema import Inputs, Table


class DeepFM(nn.Module):
    """First order + factorization machine + deep tower.

    Args:
        inputs: At least one id feature; all tables that they use have one width.
        config: Settings; none means the defaults.
        table_device: Where the tables are allocated; "meta" allocates nothing, for a planner that will.
    """

    attends: ClassVar[bool] = DeepFMConfig.attends

    def __init__(self, inputs: Inputs, config: DeepFMConfig | None = None, *, table_device: str | None = None) -> None:
        super().__init__()
        config = config or DeepFMConfig()
        self.features = [*(field.name for field in inputs.fields), *inputs.history_columns]
        self.dim = _common_width(inputs, self.features)
        self.bias = nn.Parameter(torch.zeros(1))
        self.fm = FM()
        self.number_vectors = None
        if inputs.dense:
            # A row as in a table: the vector, then the first-order weight.
            self.number_vectors = nn.Parameter(torch.zeros(len(inputs.dense), self.dim + 1))
            nn.init.normal_(self.number_vectors.data[:, : self.dim], std=Table.init_std)
        self.tower = None
        if config.hidden:
            self.input_dropout = nn.Dropout(config.embedding_dropout)
            self.tower = MLP(
                (len(self.features) + len(inputs.dense)) * self.dim,
                config.hidden,
                activation=config.activation,
                batch_norm=config.batch_norm,
                dropout=config.dropout,
            )
            self.output = linear(self.tower.out_dim, 1, bias=False)
        self.embeddings = Embeddings(inputs, attends=self.attends, extra_columns=1, table_device=table_device)

    def forward(self, batch: Batch) -> Tensor:
        """Logits, (B,); B may be 0. An empty list of ids adds nothing."""
        vectors, _, extras = self.embeddings(batch.pooled, batch.sequence, batch.weights)
        fields = [vectors[name] for name in self.features]
        logits_B = self.bias + torch.cat([extras[name] for name in self.features], dim=1).sum(1)
        if self.number_vectors is not None:
            numbers_BFE = batch.dense.unsqueeze(2) * self.number_vectors
            fields.append(numbers_BFE[:, :, : self.dim].flatten(1))
            logits_B = logits_B + numbers_BFE[:, :, self.dim].sum(1)
        flat = torch.cat(fields, dim=1)  # one field after another: the tower's input as it stands
        logits_B = logits_B + self.fm(flat.unflatten(1, (-1, self.dim)))
        if self.tower is None:
            return logits_B
        return logits_B + self.output(self.tower(self.input_dropout(flat))).squeeze(1)


def _common_width(inputs: Inputs, features: list[str]) -> int:
    widths: dict[int, list[str]] = {}
    for feature in features:
        widths.setdefault(inputs.table_of(feature).dim, []).append(feature)
    if not widths:
        raise UserError(
            "DeepFM needs at least one id feature", received="inputs without fields", fix="declare an id feature"
        )
    if len(widths) > 1:
        raise UserError(
            "The factorization machine of DeepFM multiplies vectors of one width",
            received="; ".join(f"width {width}: {', '.join(names)}" for width, names in sorted(widths.items())),
            allowed="one `dim` for every table that the model uses",
            fix="give the tables of these features the same `dim`",
        )
    return next(iter(widths))
