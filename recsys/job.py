"""The parts of a run, put together in order: data, encoder, model, plan, shards, optimizer."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan

from recsys import models, optim, sharding
from recsys.data.batch import Batch
from recsys.data.encoded import EncodedRows
from recsys.data.parquet import ParquetData
from recsys.data.reader import Prefetcher, Reader, Step
from recsys.distributed import Ranks, agreed
from recsys.embedding import Embeddings
from recsys.encoder import Encoder
from recsys.errors import UserError
from recsys.layers.norm import synchronize_statistics
from recsys.recipe import Recipe, Split


class Task(nn.Module):
    """A model and its loss in the form that TorchRec's pipelines run: batch -> (loss, (loss, logits)).

    The loss is the weighted sum of the rows' binary cross entropies. With weights of world_size / (rows of the
    global batch), averaging gradients over ranks gives those of the mean over the global batch.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The loss, a scalar, and detached: the same loss, and (B,) logits."""
        logits = self.model(batch)
        loss = F.binary_cross_entropy_with_logits(logits, batch.labels, weight=batch.weights, reduction="sum")
        return loss, (loss.detach(), logits.detach())


class Data:
    """The data sets of a recipe as seen by one rank, checked against what the recipe says of them.

    Attributes:
        sets: The data sets.
        num_counted: Rows of the training set with a usable label; None: not known, taken for all.

    Raises:
        UserError: A file cannot be read, or columns are missing or of a wrong type; all problems at once.
    """

    def __init__(
        self,
        recipe: Recipe,
        encoder: Encoder,
        ranks: Ranks,
        paths: Mapping[Split, str] | None = None,
        *,
        labelled: bool = True,
    ) -> None:
        """Open the data sets.

        Args:
            recipe: Names the data sets and describes their columns.
            encoder: Makes batches of them.
            ranks: Which share of the rows is ours.
            paths: Other data sets than the recipe's.
            labelled: Whether the label column is there and read.
        """
        self.recipe, self.encoder, self.ranks, self.labelled = recipe, encoder, ranks, labelled
        self.num_counted: int | None = None
        self.sets = {split: ParquetData(path) for split, path in (paths or recipe.paths).items()}
        problems = [
            p
            for data in self.sets.values()
            for p in encoder.schema_problems(data.schema, str(data.path), labelled=labelled)
        ]
        problems += [f"data.{split} {data.path} has no rows" for split, data in self.sets.items() if not data.num_rows]
        problems += encoder.kind_problems({f"data.{split}": data.schema for split, data in self.sets.items()})
        if problems:
            raise UserError.collect("The data does not fit the recipe", problems)

    @classmethod
    def open(
        cls,
        recipe: Recipe,
        encoder: Encoder,
        ranks: Ranks,
        paths: Mapping[Split, str] | None = None,
        *,
        labelled: bool = True,
    ) -> "Data":
        """Open the data sets on all ranks, or fail on all of them."""
        with agreed("data"):
            return cls(recipe, encoder, ranks, paths, labelled=labelled)

    def reader(
        self,
        split: Split,
        *,
        batch_size: int | None = None,
        shuffle_rows: int = 0,
        columns: Sequence[str] | None = None,
    ) -> Reader:
        """A reader of this rank's rows of a split; `columns` None means all that are encoded."""
        return Reader(
            self.sets[split],
            columns or (self.encoder.columns if self.labelled else self.encoder.feature_columns),
            batch_size=batch_size or self.recipe.data.batch_size_per_rank,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            shuffle_rows=shuffle_rows,
            seed=self.recipe.train.seed,
        )

    def batches(self, reader: Reader, epochs: Iterable[int] = (0,)) -> Prefetcher[Batch]:
        """Batches of some epochs, weighted for the mean over the global batch.

        One background thread reads and encodes, the next epoch while this one ends and the model is evaluated. Putting
        a batch together is quick next to a step on the CPU; where a GPU steps, a second thread does it.
        """
        encode = functools.partial(self.encoder.encode_rows, labelled=self.labelled)
        steps = ((step, rows) for epoch in epochs for step, rows in enumerate(reader.steps(epoch, encode)))
        batches = Prefetcher(steps, finish=functools.partial(self._batch, reader), depth=reader.depth)
        return Prefetcher(batches) if self.ranks.device.type == "cuda" else batches

    def _batch(self, reader: Reader, numbered: tuple[int, Step[EncodedRows]]) -> Batch:
        step, rows = numbered[0], numbered[1].rows()
        by_rank = reader.rows_by_rank(step)
        batch = self.encoder.batch(rows)
        # Rows without a usable label are missing in the mean, too, as many as there are on average.
        num_rows = sum(by_rank) * (self.num_counted or 1) / (reader.data.num_rows if self.num_counted else 1)
        batch.weights = rows.counted * (self.ranks.world_size / num_rows)
        if self.ranks.world_size > 1:
            batch.pad_bags(max(by_rank))
        return batch.pin_memory() if self.ranks.device.type == "cuda" else batch


@dataclasses.dataclass
class Job:
    """A sharded model with everything that trains it or reads from it.

    Attributes:
        task: The sharded `Task`.
        embeddings: The unsharded description of the tables, on the meta device.
        plan: Where each table lives.
        dense_bytes: Bytes of the replicated dense weights.
    """

    recipe: Recipe
    ranks: Ranks
    encoder: Encoder
    task: DistributedModelParallel
    embeddings: Embeddings
    plan: ShardingPlan
    dense_bytes: int

    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of what no fused kernel updates."""
        return optim.build(self.task, self.embeddings, self.recipe.optimizer)

    def describe_plan(self) -> dict[str, Any]:
        """The plan as plain data."""
        return sharding.describe(self.plan, self.embeddings, self.ranks.world_size, self.dense_bytes)


def assemble(recipe: Recipe, ranks: Ranks, encoder: Encoder) -> Job:
    """Build, plan and shard the model of a recipe; the same seed gives the same start on any number of ranks."""
    torch.manual_seed(recipe.train.seed)
    model = models.build(recipe.inputs, recipe.model, table_device="meta")
    # dropout must differ between ranks, initial values must not
    torch.manual_seed(np.random.SeedSequence([recipe.train.seed, ranks.rank]).generate_state(1, np.uint64)[0] >> 1)
    embeddings = model.embeddings
    assert isinstance(embeddings, Embeddings), "every model keeps its tables in `embeddings`"
    dense_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.device.type != "meta")
    optim.fuse(embeddings, recipe.optimizer.sparse)
    plain = Task(model)
    plan = sharding.agreed_plan(plain, recipe, ranks)
    task = sharding.shard(plain, plan, ranks)
    sharding.initialize_tables(task, embeddings, recipe.train.seed)
    if ranks.world_size > 1 and recipe.train.shared_batch_statistics:
        synchronize_statistics(task, ranks.group)
    return Job(recipe, ranks, encoder, task, embeddings, plan, dense_bytes)
