"""Read-only passes over data: scores of every row, and the metrics of them."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from recsys import metrics
from recsys.data import columns
from recsys.data.batch import Batch
from recsys.data.reader import Reader
from recsys.distributed import agreed
from recsys.encoder import Encoder
from recsys.frequencies import Frequencies
from recsys.job import Data
from recsys.recipe import Split
from recsys.slices import by_frequency
from recsys.usage import Traffic


class Scores(NamedTuple):
    """Arrays over all rows of a data set, in its order.

    Attributes:
        logits: float64.
        labels: float64.
        groups: int64.
        counted: bool, False for rows without a usable label.
    """

    logits: np.ndarray
    labels: np.ndarray
    groups: np.ndarray
    counted: np.ndarray


class Evaluation(NamedTuple):
    """What a data set tells about a model.

    Attributes:
        metrics: By name, None where undefined.
        calibration_curve: As `metrics.calibration_curve`.
        slices: Metrics by how often a row's item occurred in training, as `slices.by_frequency`; None: unknown.
        traffic: Table -> shares of hot, cold, unknown and missing ids.
        is_constant: Whether all rows, if there are several, have the same probability.
    """

    metrics: dict[str, float | None]
    calibration_curve: list[dict[str, float]]
    slices: list[dict[str, Any]] | None
    traffic: dict[str, dict[str, float | None]]
    is_constant: bool


def score(task: nn.Module, data: Data, reader: Reader, traffic: dict[str, Traffic] | None = None) -> Scores | None:
    """Score this rank's rows and bring all ranks' rows together on rank 0; None on other ranks.

    Args:
        task: A sharded `Task`; its training mode is restored afterwards.
        data: The data sets.
        reader: Which rows; must not shuffle, so that rows come out in the order of the data set.
        traffic: Lookups of each table, to which this rank's are added.
    """
    device = data.ranks.device
    parts: list[tuple[torch.Tensor, ...]] = []
    with _evaluating(task), torch.no_grad(), contextlib.closing(data.batches(reader)) as batches:
        for batch in batches:
            _count(traffic or {}, data.encoder, batch)
            _, (_, logits) = task(batch.to(device))
            parts.append((logits.double().cpu(), batch.labels.double(), batch.groups, batch.weights > 0))
    found = metrics.gather([torch.cat(column).numpy() for column in zip(*parts, strict=True)])
    return None if found is None else Scores(*found)


def evaluate(task: nn.Module, data: Data, split: Split, items: Frequencies | None = None) -> Evaluation | None:
    """Metrics of a data set, on rank 0; None on other ranks.

    Args:
        task: A sharded `Task`.
        data: The data sets.
        split: Which of them.
        items: How often each id of the item column occurred in training; None leaves the slices out.

    Raises:
        UserError: The model's scores are not finite; on all ranks.
    """
    traffic = {
        table: Traffic(s.own_rows, s.num_hashes)
        for table, s in data.encoder.settings.items()
        if table in data.encoder.id_tables
    }
    scores = score(task, data, data.reader(split), traffic)
    for lookups in traffic.values():
        lookups.merge_ranks()
    counts = None if items is None else metrics.gather([_item_counts(data, split, items)])
    found = None
    with agreed("metrics"):
        if scores is not None:
            kept = scores.counted.astype(bool)
            logits, labels = scores.logits[kept], scores.labels[kept]
            probs = probabilities(logits)
            groups = scores.groups[kept] if data.recipe.data.group else None
            found = Evaluation(
                metrics.compute(probs, labels, groups, logits),
                metrics.calibration_curve(probs, labels),
                None if counts is None else by_frequency(probs, labels, logits, counts[0][kept]),
                {table: lookups.shares() for table, lookups in traffic.items()},
                bool(len(probs) > 1 and probs.min() == probs.max()),
            )
    return found


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Sigmoid in float64, the one place where logits become probabilities."""
    return torch.sigmoid(torch.from_numpy(logits)).numpy()


def _count(traffic: dict[str, Traffic], encoder: Encoder, batch: Batch) -> None:
    """Add the lookups of a batch, which still lies on the host."""
    tables = {i.name: i.table for i in encoder.inputs}
    for features in (batch.pooled, batch.sequence) if traffic else ():
        ends = (
            features.lengths().view(len(features.keys()), -1).sum(dim=1).cumsum(0).tolist() if features.keys() else []
        )
        for name, start, end in zip(features.keys(), [0, *ends], ends, strict=False):
            if tables[name] in traffic:
                traffic[tables[name]].add(features.values()[start:end].numpy())


def _item_counts(data: Data, split: Split, items: Frequencies) -> np.ndarray:
    """(rows of this rank,) int64 occurrences of each row's item in training; 0 for nulls."""
    counts = [np.zeros(0, dtype=np.int64)]
    name = str(data.recipe.item)
    for table, _ in data.reader(split, columns=[name], batch_size=65_536).iterate(0):
        keys, missing = columns.id_keys(columns.single_array(table, name))
        found = items.of(keys)
        counts.append(found if missing is None else np.where(missing, 0, found))
    return np.concatenate(counts)


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)
