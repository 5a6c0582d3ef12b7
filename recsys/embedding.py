"""Tables -> vectors by feature name, on TorchRec's two collections.

Pooled features go through one EmbeddingBagCollection, histories and everything that shares their tables through
EmbeddingCollections. Three limits of the kernels end here and are never seen outside:

- FBGEMM wants widths in multiples of 4: tables are padded and the padding is cut off on the way out.
- An EmbeddingCollection holds tables of one width: there is one per width.
- A bag's mean is taken over the part that a rank holds in some shardings: bags are summed by the kernel and
  divided here by their full length.
"""

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recsys.errors import UserError
from recsys.layers.segment import row_of_event, segment_sum
from recsys.schema import Inputs, Table

_WIDTH_UNIT = 4  # FBGEMM's table kernels refuse other row widths
_PREFIX = "table_"  # TorchRec keeps tables in a ModuleDict, which refuses names such as `type` or `items`
_DTYPES = {"fp32": DataType.FP32, "fp16": DataType.FP16}
_INIT_BLOCK_ROWS = 1024  # rows drawn from one generator; part of what a seed means, so never change it


class LookedUp(NamedTuple):
    """The vectors of a batch of B rows.

    Attributes:
        vectors: For every field, and every history that is pooled, (B, dim); an empty bag gives zeros.
        events: For every history column that is not, ((N, dim), (B,) lengths), the N events row after row.
        extras: The extra columns behind `vectors`, (B, extra_columns); empty where tables have none.
    """

    vectors: dict[str, Tensor]
    events: dict[str, tuple[Tensor, Tensor]]
    extras: dict[str, Tensor]


class Embeddings(nn.Module):
    """Look up every id feature of a batch.

    Args:
        inputs: Tables and features.
        attends: Whether histories stay unpooled (see `Inputs.layout`).
        extra_columns: Numbers that ride behind each vector, zero at the start (DeepFM's first-order weights).
        table_device: Where the tables are allocated; "meta" allocates nothing, for a planner that will.
    """

    def __init__(
        self, inputs: Inputs, *, attends: bool, extra_columns: int = 0, table_device: str | None = None
    ) -> None:
        super().__init__()
        self.inputs, self.extra_columns = inputs, extra_columns
        self.layout = inputs.layout(attends=attends)
        self._means = {f.name for f in inputs.fields if f.pooling == "mean"} | set(inputs.history_columns)
        self._histories = frozenset(inputs.history_columns)
        names = [*(f.name for f in inputs.fields), *inputs.history_columns]
        self._second_rows = {n: row for n in names if (row := inputs.table_of(n).second_row) is not None}
        self._weighted = {f.name for f in inputs.fields if f.weighted}
        if lost := self._weighted & set(self.layout.sequence):
            raise UserError(
                "Weights are read where ids are pooled, and the model reads the vectors of these one by one",
                received=sorted(lost),
                fix="give these fields a table that no history shares",
            )
        self.divisors, self.id_vectors = _Divisors(), _IdVectors()
        self.columns = _Columns({n: (inputs.table_of(n).dim, extra_columns) for n in self.layout.pooled})
        device = torch.device(table_device or "cpu")
        pooled, sequence = self._by_table(self.layout.pooled), self._by_table(self.layout.sequence)
        self.pooled = (
            EmbeddingBagCollection(
                tables=[
                    self._config(EmbeddingBagConfig, name, features, pooling=PoolingType.SUM)
                    for name, features in pooled.items()
                ],
                is_weighted=bool(self._weighted),
                device=device,
            )
            if pooled
            else None
        )
        widths = sorted({self.padded_width(name) for name in sequence})
        groups = [{t: f for t, f in sequence.items() if self.padded_width(t) == width} for width in widths]
        self._names_by_collection = [[name for names in group.values() for name in names] for group in groups]
        self.sequence = nn.ModuleList(
            EmbeddingCollection(
                tables=[self._config(EmbeddingConfig, name, features) for name, features in group.items()],
                device=device,
            )
            for group in groups
        )
        self.l2 = _L2()
        if device.type != "meta":
            self.reset(int(torch.randint(2**62, ())))

    def _by_table(self, features: tuple[str, ...]) -> dict[str, list[str]]:
        grouped: dict[str, list[str]] = {}
        for feature in features:
            grouped.setdefault(self.inputs.table_of(feature).name, []).append(feature)
        return grouped

    def _config(self, kind: type, name: str, features: list[str], **settings: Any) -> Any:
        table = self.inputs.table(name)
        return kind(
            name=stored_name(name),
            embedding_dim=self.padded_width(name),
            num_embeddings=table.rows,
            feature_names=features,
            data_type=_DTYPES[table.dtype],
            **settings,
        )

    def padded_width(self, table: str) -> int:
        """Width of a table's stored rows."""
        wanted = self.inputs.table(table).dim + self.extra_columns
        return -(-wanted // _WIDTH_UNIT) * _WIDTH_UNIT

    def forward(self, pooled: KeyedJaggedTensor, sequence: KeyedJaggedTensor, weights: Tensor) -> "LookedUp":
        """Vectors of every feature, padding removed.

        Args:
            pooled: ids of `layout.pooled`.
            sequence: ids of `layout.sequence`.
            weights: (B,) loss weights of the rows; they scale `l2`, and tell B where the ids were padded with empty
                bags (`Batch.pad_bags`).
        """
        num_rows = weights.shape[0]
        found = LookedUp({}, {}, {})
        if self.pooled is not None:
            looked_up = self.columns(self.pooled(pooled), num_rows)
            lengths = pooled.lengths().view(len(self.layout.pooled), -1)[:, :num_rows]
            for index, name in enumerate(self.layout.pooled):
                vector, extra = looked_up[name]
                if name in self._means:
                    divisor = lengths[index].clamp(min=1)
                    if name in self._weighted or name in self._second_rows:
                        second_row = self._second_rows.get(name)
                        divisor = self.divisors(pooled, index, second_row, name in self._weighted)[:num_rows]
                    vector, extra = vector / divisor.unsqueeze(1), extra / divisor.unsqueeze(1)
                self._add(found, name, vector, extra, weights)
        for collection, names in zip(self.sequence, self._names_by_collection, strict=True):
            jagged = collection(sequence)
            for name in names:
                values, lengths = jagged[name].values(), jagged[name].lengths()[:num_rows]
                if name in self._second_rows:
                    place = self.layout.sequence.index(name)
                    values, lengths = self.id_vectors(values, lengths, sequence, place, self._second_rows[name])
                dim = self.inputs.table_of(name).dim
                if name in self._histories:
                    found.events[name] = (self._with_l2(name, values[:, :dim], weights, lengths), lengths)
                else:
                    vector = self._pool(name, values, lengths)
                    self._add(found, name, vector[:, :dim], vector[:, dim : dim + self.extra_columns], weights)
        return found

    def _add(self, found: "LookedUp", name: str, vector: Tensor, extra: Tensor, weights: Tensor) -> None:
        found.vectors[name] = self._with_l2(name, vector, weights)
        if self.extra_columns:
            found.extras[name] = self._with_l2(name, extra, weights)

    def _with_l2(self, name: str, vectors: Tensor, weights: Tensor, lengths: Tensor | None = None) -> Tensor:
        strength = self.inputs.table_of(name).l2
        return self.l2(strength, vectors, weights, lengths) if strength else vectors

    def _pool(self, name: str, values: Tensor, lengths: Tensor) -> Tensor:
        total = segment_sum(values, row_of_event(lengths, values.shape[0]), lengths.shape[0])
        return total / lengths.clamp(min=1).unsqueeze(1) if name in self._means else total

    def reset(self, seed: int) -> None:
        """Fill unsharded tables with the initial values of `seed` (sharded ones: `recsys.sharding`)."""
        for name, weight in self.table_weights():
            table = self.inputs.table(name)
            with torch.no_grad():
                weight.copy_(initial_rows(table, seed, 0, table.rows, weight.shape[1]))

    def unpadded_share(self, table: str) -> float:
        """Share of a table's stored columns that is not padding."""
        return (self.inputs.table(table).dim + self.extra_columns) / self.padded_width(table)

    def table_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(table, weight) of every unsharded table, padding included."""
        collections = [(self.pooled, "embedding_bags")] if self.pooled is not None else []
        for collection, attribute in [*collections, *((c, "embeddings") for c in self.sequence)]:
            for name, module in getattr(collection, attribute).items():
                yield name.removeprefix(_PREFIX), module.weight


def _ids_of(features: KeyedJaggedTensor, place: int) -> tuple[slice, Tensor]:
    """Where the ids of one feature lie among all values, and their (B,) lengths."""
    lengths = features.lengths().view(len(features.keys()), -1)
    start = int(lengths[:place].sum())
    return slice(start, start + int(lengths[place].sum())), lengths[place]


class _Columns(nn.Module):
    """Cuts the vectors of all features apart, and each from its extra columns and its padding.

    All at once: autograd then puts the gradients together in one copy. Cut out one by one, every feature would have a
    gradient as large as all of them, zero but for its own columns, and these would be summed.

    A module, so that TorchRec's tracer takes it as a whole; so are the next ones.
    """

    def __init__(self, widths: dict[str, tuple[int, int]]) -> None:
        """Args: feature -> columns of its vector, and extra ones."""
        super().__init__()
        self._widths = widths

    def forward(self, looked_up: KeyedTensor, num_rows: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Feature -> (num_rows, dim) and (num_rows, extra columns)."""
        values, names = looked_up.values(), looked_up.keys()
        if values.shape[0] != num_rows:
            values = values[:num_rows]
        sizes = [
            size
            for name, stored in zip(names, looked_up.length_per_key(), strict=True)
            for size in (*self._widths[name], stored - sum(self._widths[name]))
        ]
        parts = values.split(sizes, dim=1)
        return dict(zip(names, zip(parts[::3], parts[1::3], strict=True), strict=True))


class _Divisors(nn.Module):
    """What the sum of the vectors of a list is divided by for their mean: the number of its ids, or their weight."""

    def forward(self, features: KeyedJaggedTensor, place: int, second_row: int | None, weighted: bool) -> Tensor:
        """(B,) for the feature at a place, 1 where there is nothing to divide; second rows do not count."""
        inside, lengths = _ids_of(features, place)
        rows = features.values()[inside]
        amounts = features.weights()[inside] if weighted else torch.ones_like(rows, dtype=torch.float32)
        if second_row is not None:
            amounts = amounts * (rows < second_row)
        total = segment_sum(amounts.unsqueeze(1), row_of_event(lengths, len(rows)), len(lengths)).squeeze(1)
        return total.masked_fill(total == 0, 1)


class _IdVectors(nn.Module):
    """Vectors of rows -> vectors of ids: a second row is added to the row in front of it."""

    def forward(
        self, values: Tensor, lengths: Tensor, features: KeyedJaggedTensor, place: int, second_row: int
    ) -> tuple[Tensor, Tensor]:
        """(M, width) vectors and (B,) lengths of the feature at a place -> (N, width), (B,)."""
        inside, _ = _ids_of(features, place)
        is_first = features.values()[inside] < second_row
        id_of_row = is_first.cumsum(0) - 1
        num_ids = int(is_first.sum())
        counts = segment_sum(is_first.float().unsqueeze(1), row_of_event(lengths, len(is_first)), len(lengths))
        return segment_sum(values, id_of_row, num_ids), counts.squeeze(1).long()


class _L2(nn.Module):
    """Leaves vectors as they are and adds the gradient of their L2 penalty on the way back.

    A term of the loss would have to leave the model beside the logits; the gradient is all that training needs. A
    module, so that TorchRec's tracer takes it as a whole.
    """

    def forward(self, strength: float, vectors: Tensor, weights: Tensor, lengths: Tensor | None) -> Tensor:
        """(B, width) vectors of the rows, or (N, width) of their events, `lengths` (B,) telling whose."""
        if lengths is not None:
            weights = weights[row_of_event(lengths, vectors.shape[0])]
        return _AddToGradient.apply(vectors, strength * weights)


class _AddToGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vectors: Tensor, strengths: Tensor) -> Tensor:
        ctx.save_for_backward(vectors, strengths)
        return vectors.view_as(vectors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        vectors, strengths = ctx.saved_tensors
        return torch.addcmul(gradient, vectors, strengths.unsqueeze(1)), None


def initial_rows(table: Table, seed: int, start: int, stop: int, width: int) -> Tensor:
    """Initial values of rows [start, stop) of a table, (stop - start, width) float32 on the CPU.

    They depend on (seed, table name, row) alone: every plan, every number of ranks and every device starts from
    the same table. Columns behind `table.dim` (extra columns, padding) are zero.
    """
    values = torch.zeros(stop - start, width)
    for block in range(start // _INIT_BLOCK_ROWS, -(-stop // _INIT_BLOCK_ROWS)):
        first = block * _INIT_BLOCK_ROWS
        digest = hashlib.blake2b(f"{seed}/{table.name}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        drawn = torch.empty(_INIT_BLOCK_ROWS, table.dim).normal_(0.0, table.init_std, generator=generator)
        low, high = max(start, first), min(stop, first + _INIT_BLOCK_ROWS)
        values[low - start : high - start, : table.dim] = drawn[low - first : high - first]
    return values


def table_of_parameter(name: str) -> str | None:
    """The table behind a parameter's name, sharded or not; None for dense parameters."""
    *_, collection, table, leaf = ["", "", *name.split(".")]
    if leaf != "weight" or collection not in ("embedding_bags", "embeddings"):
        return None
    return table.removeprefix(_PREFIX)


def stored_name(table: str) -> str:
    """The name under which TorchRec, its plans and its checkpoints know a table."""
    return _PREFIX + table


def num_parameters(model: nn.Module) -> int:
    """Trainable parameters of an unsharded model, as a paper counts them: padding of widths left out."""
    total = sum(p.numel() for p in model.parameters() if p.requires_grad)
    for module in model.modules():
        if isinstance(module, Embeddings):
            for name, weight in module.table_weights():
                table = module.inputs.table(name)
                total -= table.rows * (weight.shape[1] - table.dim - module.extra_columns)
    return total
