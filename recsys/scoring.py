"""Read-only passes over data: scores of every row, and the metrics of them."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from recsys import metrics
from recsys.data.reader import Reader
from recsys.distributed import agreed
from recsys.job import Data


class Evaluation(NamedTuple):
    """Metrics by name (None where undefined), and the calibration curve."""

    metrics: dict[str, float | None]
    calibration_curve: list[dict[str, float]]


def score(task: nn.Module, data: Data, reader: Reader) -> list[np.ndarray] | None:
    """Score this rank's rows and bring all ranks' rows together.

    Args:
        task: A sharded `Task`; its training mode is restored afterwards.
        data: The data sets.
        reader: Which rows; must not shuffle, so that rows come out in the order of the data set.

    Returns:
        On rank 0 four arrays over all rows, in the order of the data set: logits (float64), labels (float64),
        groups (int64) and row positions (int64). None on other ranks.
    """
    device = data.ranks.device
    parts: list[tuple[torch.Tensor, ...]] = []
    with _evaluating(task), torch.no_grad(), contextlib.closing(data.batches(reader)) as batches:
        for batch in batches:
            _, (_, logits) = task(batch.to(device))
            parts.append((logits.double().cpu(), batch.labels.double(), batch.groups, batch.rows))
    return metrics.gather([torch.cat(column).numpy() for column in zip(*parts, strict=True)])


def evaluate(task: nn.Module, data: Data, reader: Reader) -> Evaluation | None:
    """Metrics of a data set, on rank 0; None on other ranks.

    Raises:
        UserError: The model's scores are not finite; on all ranks.
    """
    scores = score(task, data, reader)
    found = None
    with agreed("metrics"):
        if scores is not None:
            logits, labels, groups, _ = scores
            probs = probabilities(logits)
            values = metrics.compute(probs, labels, groups if data.recipe.data.group else None, logits)
            found = Evaluation(values, metrics.calibration_curve(probs, labels))
    return found


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Sigmoid in float64, the one place where logits become probabilities."""
    return torch.sigmoid(torch.from_numpy(logits)).numpy()


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)
