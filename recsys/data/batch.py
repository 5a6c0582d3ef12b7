"""The batch: what the encoder hands to a model, and what TorchRec's pipelines move between devices."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from recsys.errors import UserError
from recsys.schema import Layout


@dataclasses.dataclass
class Batch(Pipelineable):
    """B rows, ready for a model. Zero rows are legal.

    Attributes:
        dense: (B, N) float32, one column per dense input, already normalised.
        pooled: ids of the features that are pooled into one vector per row; keys as in `Layout.pooled`.
        sequence: ids of histories and their targets; keys as in `Layout.sequence`.
        labels: (B,) float32 in {0, 1}; zeros where the data has no label.
        groups: (B,) int64 group key for GAUC; zeros where the recipe names no group.
        rows: (B,) int64 position of each row in its data set.
        weights: (B,) float32 weight of each row in the loss, 1/B unless the trainer knows the global batch.
    """

    dense: Tensor
    pooled: KeyedJaggedTensor
    sequence: KeyedJaggedTensor
    labels: Tensor
    groups: Tensor
    rows: Tensor
    weights: Tensor

    def __len__(self) -> int:
        """Number of rows B."""
        return self.labels.shape[0]

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """The batch on another device."""
        return Batch(
            **{
                f.name: getattr(self, f.name).to(device=device, non_blocking=non_blocking)
                for f in dataclasses.fields(self)
            }
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that `stream` still reads this memory."""
        for field in dataclasses.fields(self):
            getattr(self, field.name).record_stream(stream)

    def pin_memory(self) -> "Batch":
        """The batch in page-locked memory, for copies that overlap with work."""
        return Batch(**{f.name: getattr(self, f.name).pin_memory() for f in dataclasses.fields(self)})

    def pad_bags(self, num_rows: int) -> None:
        """Give the id features empty bags up to `num_rows` rows; everything else keeps its B rows.

        Row-wise tables exchange equally many rows with every rank, so all ranks pad to the largest of them.
        """
        self.pooled = _with_empty_bags(self.pooled, num_rows - len(self))
        self.sequence = _with_empty_bags(self.sequence, num_rows - len(self))

    @classmethod
    def from_jagged(
        cls,
        layout: Layout,
        jagged: Mapping[str, tuple[Tensor, Tensor]],
        *,
        dense: Tensor | None = None,
        labels: Tensor | None = None,
        groups: Tensor | None = None,
        rows: Tensor | None = None,
        num_rows: int | None = None,
    ) -> "Batch":
        """Assemble a batch from (values, lengths) per id feature.

        Args:
            layout: Which feature goes into which KeyedJaggedTensor.
            jagged: feature -> (ids of all rows one after another, (B,) number of ids of each row).
            dense: (B, N); none means N = 0.
            labels: (B,); none means zeros.
            groups: (B,); none means zeros.
            rows: (B,); none means 0..B-1.
            num_rows: B, needed only when there is nothing else to tell it.
        """
        if num_rows is None:
            known = [t for t in (dense, labels, groups, rows) if t is not None]
            num_rows = known[0].shape[0] if known else next(iter(jagged.values()))[1].shape[0]
        for name in (*layout.pooled, *layout.sequence):
            if name not in jagged:
                raise UserError(
                    f"Feature {name!r} is missing from the batch",
                    received=sorted(jagged),
                    allowed=sorted({*layout.pooled, *layout.sequence}),
                    fix="give ids for every feature that the model reads",
                )
            values, lengths = jagged[name]
            if lengths.shape[0] != num_rows or int(lengths.sum()) != values.shape[0]:
                raise UserError(
                    f"The lengths of feature {name!r} do not fit its values",
                    received=f"{lengths.shape[0]} lengths that sum to {int(lengths.sum())}, {values.shape[0]} values",
                    allowed=f"{num_rows} lengths that sum to the number of values",
                )
        return cls(
            dense=torch.zeros(num_rows, 0) if dense is None else dense.float(),
            pooled=_keyed(layout.pooled, jagged),
            sequence=_keyed(layout.sequence, jagged),
            labels=torch.zeros(num_rows) if labels is None else labels.float(),
            groups=torch.zeros(num_rows, dtype=torch.int64) if groups is None else groups.long(),
            rows=torch.arange(num_rows) if rows is None else rows,
            weights=torch.full((num_rows,), 1 / max(num_rows, 1)),
        )

    @classmethod
    def from_lists(
        cls,
        layout: Layout,
        ids: Mapping[str, Sequence[int] | Sequence[Sequence[int]]],
        *,
        dense: Sequence[Sequence[float]] | None = None,
        labels: Sequence[float] | None = None,
    ) -> "Batch":
        """A batch from plain Python lists, for notebooks and tests: one id, or one list of ids, per row."""
        jagged = {}
        for name, rows in ids.items():
            bags = [row if isinstance(row, Sequence) else [row] for row in rows]
            jagged[name] = (
                torch.tensor([i for bag in bags for i in bag], dtype=torch.int64),
                torch.tensor([len(bag) for bag in bags], dtype=torch.int64),
            )
        return cls.from_jagged(
            layout,
            jagged,
            dense=None if dense is None else torch.tensor(dense, dtype=torch.float32),
            labels=None if labels is None else torch.tensor(labels, dtype=torch.float32),
        )


def _with_empty_bags(features: KeyedJaggedTensor, num_more: int) -> KeyedJaggedTensor:
    if num_more == 0 or not features.keys():
        return features
    lengths = features.lengths().view(len(features.keys()), -1)
    return keyed(
        features.keys(), features.values(), F.pad(lengths, (0, num_more)).flatten(), features.weights_or_none()
    )


def _keyed(names: Sequence[str], jagged: Mapping[str, tuple[Tensor, Tensor]]) -> KeyedJaggedTensor:
    empty = torch.zeros(0, dtype=torch.int64)
    values = torch.cat([jagged[name][0] for name in names]).long() if names else empty
    return keyed(names, values, torch.cat([jagged[name][1] for name in names]).long() if names else empty)


def keyed(names: Sequence[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> KeyedJaggedTensor:
    """A KeyedJaggedTensor of F features.

    Args:
        names: The features.
        values: Ids of the first feature in all rows, of the second, ...
        lengths: (F * B,) number of ids of the first feature in each row, of the second, ...; B may be 0.
        weights: As many as `values`, or None.
    """
    by_name = None
    if names and not len(lengths):
        # TorchRec's own split of zero rows into keys fails; given the result, it does not try.
        offsets = torch.zeros(1, dtype=torch.int64)
        by_name = {n: JaggedTensor(values=values, weights=weights, lengths=lengths, offsets=offsets) for n in names}
    return KeyedJaggedTensor(keys=list(names), values=values, weights=weights, lengths=lengths, jt_dict=by_name)
