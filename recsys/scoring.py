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


class Scores(NamedTuple):
    """Arrays over all rows of a data set, in its order: logits and labels float64, groups int64."""

    logits: np.ndarray
    labels: np.ndarray
    groups: np.ndarray


class Evaluation(NamedTuple):
    """Metrics by name (None where undefined), and the calibration curve."""

    metrics: dict[str, float | None]
    calibration_curve: list[dict[str, float]]


def score(task: nn.Module, data: Data, reader: Reader) -> Scores | None:
    """Score this rank's rows and bring all ranks' rows together on rank 0; None on other ranks.

    Args:
        task: A sharded `Task`; its training mode is restored afterwards.
        data: The data sets.
        reader: Which rows; must not shuffle, so that rows come out in the order of the data set.
    """
    device = data.ranks.device
    parts: list[tuple[torch.Tensor, ...]] = []
    with _evaluating(task), torch.no_grad(), contextlib.closing(data.batches(reader)) as batches:
        for batch in batches:
            _, (_, logits) = task(batch.to(device))
            parts.append((logits.double().cpu(), batch.labels.double(), batch.groups))
    found = metrics.gather([torch.cat(column).numpy() for column in zip(*parts, strict=True)])
    return None if found is None else Scores(*found)


def evaluate(task: nn.Module, data: Data, reader: Reader) -> Evaluation | None:
    """Metrics of a data set, on rank 0; None on other ranks.

    Raises:
        UserError: The model's scores are not finite; on all ranks.
    """
    scores = score(task, data, reader)
    found = None
    with agreed("metrics"):
        if scores is not None:
            probs = probabilities(scores.logits)
            groups = scores.groups if data.recipe.data.group else None
            values = metrics.compute(probs, scores.labels, groups, scores.logits)
            found = Evaluation(values, metrics.calibration_curve(probs, scores.labels))
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
