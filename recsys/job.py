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

from recsys import communication, models, optim, sharding, strategy
from recsys.data.batch import Batch
from recsys.data.encoded import EncodedRows
from recsys.data.epoch import Epoch
from recsys.data.parquet import ParquetData
from recsys.data.reader import Prefetcher, Reader, Step
from recsys.distributed import Ranks, agreed
from recsys.embedding import Embeddings
from recsys.encoder import Encoder
from recsys.errors import UserError
from recsys.layers.norm import synchronize_statistics
from recsys.plan import Plan
from recsys.recipe import Recipe, Split


class Task(nn.Module):
    """A model and its loss in the form that TorchRec's pipelines run: batch -> (loss, (loss, logits)).

    The loss is the weighted sum of the rows' binary cross entropies. With weights of world_size / (rows of the
    global batch), averaging gradients over ranks gives those of the mean over the global batch.

    Args:
        model: batch -> (B,) logits.
        bf16_on: Kind of device on which the dense layers multiply in bf16 while they train; None: they do not.
    """

    def __init__(self, model: nn.Module, *, bf16_on: str | None = None) -> None:
        super().__init__()
        self.model, self.bf16_on = model, bf16_on

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The loss, a scalar, and detached: the same loss, and (B,) logits."""
        with torch.autocast(self.bf16_on or "cpu", torch.bfloat16, enabled=self.training and self.bf16_on is not None):
            logits = self.model(batch).float()
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
        self._placement = strategy.batches_of(recipe.train, ranks.device.type)
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

    def batches(self, reader: Reader, epochs: Iterable[int | Epoch] = (0,)) -> Prefetcher[Batch]:
        """Batches of some epochs, weighted for the mean over the global batch.

        One background thread reads and encodes, the next epoch while this one ends and the model is evaluated; where a
        GPU steps, a second thread puts batches together.
        """
        encode = functools.partial(self.encoder.encode_rows, labelled=self.labelled)
        plans = (reader.epoch(epoch) if isinstance(epoch, int) else epoch for epoch in epochs)
        steps = (
            (plan.rows_by_rank(step), rows)
            for plan in plans
            for step, rows in enumerate(reader.steps(plan, encode), plan.start_step)
        )
        batches = Prefetcher(steps, finish=functools.partial(self._batch, reader), depth=reader.depth)
        return Prefetcher(batches) if self._placement.threads > 1 else batches

    def _batch(self, reader: Reader, step: tuple[list[int], Step[EncodedRows]]) -> Batch:
        by_rank, rows = step[0], step[1].rows()
        batch = self.encoder.batch(rows)
        # Rows without a usable label are missing in the mean, too, as many as there are on average.
        num_rows = sum(by_rank) * (self.num_counted or 1) / (reader.data.num_rows if self.num_counted else 1)
        batch.weights = rows.counted * (self.ranks.world_size / num_rows)
        if self.ranks.world_size > 1:
            batch.pad_bags(max(by_rank))
        return batch.pin_memory() if self._placement.pinned else batch


@dataclasses.dataclass
class Job:
    """A sharded model with everything that trains it or reads from it.

    Attributes:
        task: The sharded `Task`.
        embeddings: The unsharded description of the tables, on the meta device.
        plan: Where each table lives, and what that costs.
        unsent: Gradients that this rank holds back, whose state a run that goes on needs; None where it holds none.
    """

    recipe: Recipe
    ranks: Ranks
    encoder: Encoder
    task: DistributedModelParallel
    embeddings: Embeddings
    plan: Plan
    unsent: communication.TopK | None = None

    def optimizer(self, total_steps: int | None = None) -> optim.ModelOptimizer:
        """The optimizer of the model; `total_steps` of the whole run are for a schedule that ends with it."""
        return optim.build(self.task, self.embeddings, self.recipe, total_steps)

    def describe_optimizers(self) -> dict[str, Any]:
        """Who updates what, as plain data."""
        return optim.describe(self.task, self.embeddings, self.recipe)

    def describe_communication(self) -> dict[str, Any]:
        """What is sent in which precision, as plain data."""
        return communication.describe(self.recipe, self.ranks.world_size)

    def describe_plan(self) -> dict[str, Any]:
        """The plan as plain data."""
        return self.plan.to_json()


def assemble(recipe: Recipe, ranks: Ranks, encoder: Encoder, *, trains: bool = True) -> Job:
    """Build, plan and shard the model of a recipe; the same seed gives the same start on any number of ranks.

    Args:
        recipe: Describes the model.
        ranks: Who we are.
        encoder: Kept with the model.
        trains: False for a model that is only read: its tables then need no optimizer, which may exist on GPUs only.
    """
    torch.manual_seed(recipe.train.seed)
    model = models.build(recipe.inputs, recipe.model, table_device="meta")
    # dropout must differ between ranks, initial values must not
    torch.manual_seed(np.random.SeedSequence([recipe.train.seed, ranks.rank]).generate_state(1, np.uint64)[0] >> 1)
    embeddings = model.embeddings
    assert isinstance(embeddings, Embeddings), "every model keeps its tables in `embeddings`"
    optim.fuse(embeddings, recipe, trains=trains)
    plain = Task(model, bf16_on=ranks.device.type if recipe.train.precision == "bf16" else None)
    plan = sharding.agreed_plan(plain, recipe, ranks, trains=trains)
    # Evaluation sends fp32; a model that is only read or on one rank has nothing to compress.
    compresses = trains and ranks.world_size > 1
    codecs = communication.registry(recipe, plan=plan, is_active=lambda: plain.training) if compresses else None
    task = sharding.shard(plain, plan, ranks, codecs)
    unsent = communication.compress_averages(task, recipe.train.communication) if compresses else None
    sharding.initialize_tables(task, embeddings, recipe.train.seed)
    if ranks.world_size > 1 and recipe.train.shared_batch_statistics:
        synchronize_statistics(task, ranks.group)
    return Job(recipe, ranks, encoder, task, embeddings, plan, unsent)
