"""Metrics by how often a row's target id occurred in training: what a model knows of frequent, rare and new ids."""

from typing import Any

import numpy as np
import numpy.typing as npt

from recsys import metrics

SLICE_STARTS = (0, 1, 3, 10, 100)
"""Lowest number of training occurrences of each slice; the last one has no upper end."""


def slice_names() -> list[str]:
    """`0`, `1-2`, ..., `100+`: the slices from the rarest to the most frequent ids."""
    ends = [start - 1 for start in SLICE_STARTS[1:]]
    closed = [f"{start}" if start == end else f"{start}-{end}" for start, end in zip(SLICE_STARTS, ends, strict=False)]
    return [*closed, f"{SLICE_STARTS[-1]}+"]


def by_frequency(
    probs: np.ndarray, labels: np.ndarray, logits: np.ndarray | None, counts: npt.NDArray[np.int64]
) -> list[dict[str, Any]]:
    """Metrics of the rows of each slice; every row is in one of them.

    Args:
        probs: (N,) as in `metrics.compute`.
        labels: (N,) 0 or 1.
        logits: (N,) or None, as in `metrics.compute`.
        counts: (N,) occurrences of the row's target id in the training data; 0 for one that never occurred.

    Returns:
        For each slice, in the order of `slice_names`: slice, rows, positives, and auc, logloss, calibration. These
        are None where they are undefined: all of them without rows, auc with one class, calibration without a
        positive. Small slices often are, so the log is spared the line that `metrics.compute` writes.

    Raises:
        UserError: As in `metrics.compute`.
    """
    assert counts.shape == probs.shape, f"{counts.shape} occurrences for {probs.shape} probabilities"
    assert not len(counts) or counts.min() >= 0, f"an id occurred {counts.min()} times"
    positions = np.digitize(counts, SLICE_STARTS) - 1
    found = []
    for position, name in enumerate(slice_names()):
        inside = positions == position
        values = metrics.compute(
            probs[inside], labels[inside], None, None if logits is None else logits[inside], warn=False
        )
        shown = {metric: values[metric] for metric in ("auc", "logloss", "calibration")}
        found.append({"slice": name, "rows": values["rows"], "positives": int(labels[inside].sum()), **shown})
    return found
