"""Metrics of a whole data set, exact and in float64; the caller brings the rows of all ranks together first.

AUC, GAUC and calibration of a data set are not means over batches or ranks, so nothing here keeps a running state:
an evaluation collects scores, `gather` moves them to rank 0, `compute` reads them once. Cost on rank 0: 24 bytes a
row to hold (score, label, group), two sorts to compute.

Undefined values are None and are told in one line per call on the logger `recsys`. A logger, not `warnings.warn`:
that one shows a line only once per process, so a second evaluation would be silent, and it bypasses log.txt.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from recsys.errors import UserError

_LOGGER = logging.getLogger("recsys")

PROB_CLIP = float(np.finfo(np.float64).eps)
"""Log loss reads probabilities clipped to [2.2e-16, 1 - 2.2e-16], as scikit-learn does: one row costs 36.04 at most."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """What a metric means; `higher_is_better` is None where neither direction is (calibration, counts)."""

    meaning: str
    higher_is_better: bool | None


METRICS: Mapping[str, Metric] = {
    "auc": Metric("chance that a positive row scores above a negative one, ties count half", True),
    "gauc": Metric("AUC inside each group, weighted by the group's rows, over groups with both classes", True),
    "logloss": Metric("mean negative log likelihood of a row, nats", False),
    "normalized_entropy": Metric("log loss / entropy of the mean label; 1 is a constant guess", False),
    "calibration": Metric("mean predicted probability / mean label; 1 is unbiased", None),
    "rows": Metric("rows evaluated", None),
    "groups": Metric("groups with both classes, over which GAUC is taken", None),
}


def compute(
    probs: np.ndarray,
    labels: np.ndarray,
    groups: np.ndarray | None,
    logits: np.ndarray | None = None,
    *,
    warn: bool = True,
) -> dict[str, float | None]:
    """Every metric of `METRICS`, over all rows at once.

    Args:
        probs: (N,) predicted probabilities in [0, 1].
        labels: (N,) 0 or 1.
        groups: (N,) integer keys of GAUC's groups (hash text first); None where the data has no group.
        logits: (N,) scores before the sigmoid. Where given, they rank the rows and carry the log loss, so that
            probabilities that saturate at 0 or 1 neither tie nor meet the clip.
        warn: Tell in the log which values are undefined.

    Returns:
        One value per metric; None where it is undefined: everything without rows, `auc` and `normalized_entropy`
        with one class, `calibration` without a positive, `gauc` without a group that has both classes.

    Raises:
        UserError: lengths differ, a score is NaN or infinite, a probability is outside [0, 1], a label is neither
            0 nor 1, or a group key is no integer.
    """
    probs = _floats("probabilities", probs, low=0.0, high=1.0)
    labels = _labels(labels, len(probs))
    scores = probs if logits is None else _floats("logits", logits)
    _check_length("logits", scores, len(probs))
    if groups is not None:
        groups = _groups(groups, len(probs))
    values: dict[str, float | None] = dict.fromkeys(METRICS)
    values["rows"], values["groups"] = len(probs), 0
    if len(probs):
        order = np.argsort(scores, kind="stable")
        values["auc"] = _auc(scores[order], labels[order])
        if groups is not None:
            values["gauc"], values["groups"] = _gauc(groups[order], scores[order], labels[order])
        values["logloss"] = logloss = _logloss(probs, labels, logits=None if logits is None else scores)
        base_rate = float(labels.mean())
        if 0 < base_rate < 1:
            entropy = -(base_rate * np.log(base_rate) + (1 - base_rate) * np.log1p(-base_rate))
            values["normalized_entropy"] = logloss / float(entropy)
        if base_rate > 0:
            values["calibration"] = float(probs.mean()) / base_rate
    if warn:
        _warn_undefined(values, labels, has_groups=groups is not None)
    return values


def calibration_curve(probs: np.ndarray, labels: np.ndarray, bins: int = 20) -> list[dict[str, float]]:
    """Mean prediction against mean label in quantile bins, from the lowest to the highest prediction.

    Equal predictions never part, so the curve does not depend on row order; it may then have fewer than `bins` points.

    Returns:
        One {"mean_prob", "mean_label", "count"} per bin; empty when there are no rows.

    Raises:
        UserError: as in `compute`, or `bins` is below 1.
    """
    if bins < 1:
        raise UserError("A calibration curve needs bins", received=bins, allowed=">= 1")
    probs = _floats("probabilities", probs, low=0.0, high=1.0)
    labels = _labels(labels, len(probs))
    if not len(probs):
        return []
    order = np.argsort(probs, kind="stable")
    probs, labels = probs[order], labels[order]
    quantiles = probs[np.arange(bins) * len(probs) // bins]
    starts = np.unique(np.searchsorted(probs, quantiles, side="left"))
    counts = np.diff(starts, append=len(probs))
    mean_probs = np.add.reduceat(probs, starts) / counts
    mean_labels = np.add.reduceat(labels, starts) / counts
    return [
        {"mean_prob": float(prob), "mean_label": float(label), "count": int(count)}
        for prob, label, count in zip(mean_probs, mean_labels, counts, strict=True)
    ]


def gather(arrays: Sequence[np.ndarray]) -> list[np.ndarray] | None:
    """Each array of every rank, joined in rank order along axis 0, on rank 0; None on the other ranks.

    A collective: every rank must call it, with the same number of arrays. Lengths may differ, and be zero, by rank.
    Without an initialised process group the arrays come back as they are.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return list(arrays)
    received: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    # The object collective exchanges sizes first and pads, which is what keeps ranks of unequal length from hanging.
    dist.gather_object([np.asarray(array) for array in arrays], received)
    if received is None:
        return None
    return [_join(parts) for parts in zip(*received, strict=True)]


def _join(parts: Sequence[np.ndarray]) -> np.ndarray:
    # A rank without rows often holds float64 for want of a better type; it must not turn int64 keys into floats.
    return np.concatenate([part for part in parts if len(part)] or parts[:1])


def _auc(scores: np.ndarray, labels: np.ndarray) -> float | None:
    """AUC of rows sorted by score; None with one class."""
    wins, positives, negatives = _pairs(np.zeros(len(scores), dtype=np.int8), scores, labels)
    pairs = int(positives[0]) * int(negatives[0])
    return int(wins[0]) / (2 * pairs) if pairs else None


def _gauc(groups: np.ndarray, scores: np.ndarray, labels: np.ndarray) -> tuple[float | None, int]:
    """GAUC of rows sorted by score, and the number of groups in it."""
    # Stable, so that rows stay sorted by score inside their group: scores are sorted once for both metrics.
    order = np.argsort(groups, kind="stable")
    wins, positives, negatives = _pairs(groups[order], scores[order], labels[order])
    both = (positives > 0) & (negatives > 0)
    if not both.any():
        return None, 0
    wins, positives, negatives = wins[both], positives[both], negatives[both]
    aucs = wins / (2.0 * positives * negatives)
    return float(np.average(aucs, weights=positives + negatives)), len(aucs)


def _pairs(groups: np.ndarray, scores: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count, per group, the pairs that the positive row wins.

    Args:
        groups: (N,) sorted, N >= 1.
        scores: (N,) sorted inside each group.
        labels: (N,).

    Returns:
        (G,) twice the wins (a tie is half a win, hence one here), (G,) positives, (G,) negatives. All int64, hence
        exact up to 4e9 rows in a group.
    """
    new_group = np.append(True, groups[1:] != groups[:-1])
    starts = np.flatnonzero(np.append(True, scores[1:] != scores[:-1]) | new_group)  # runs of equal score
    positives = np.add.reduceat(labels.astype(np.int64), starts)
    negatives = np.diff(starts, append=len(scores)) - positives
    first_run = np.flatnonzero(new_group[starts])
    below = np.cumsum(negatives) - negatives
    below -= np.repeat(below[first_run], np.diff(first_run, append=len(starts)))
    twice_wins = positives * (2 * below + negatives)
    twice_wins, positives, negatives = (np.add.reduceat(n, first_run) for n in (twice_wins, positives, negatives))
    return twice_wins, positives, negatives


def _logloss(probs: np.ndarray, labels: np.ndarray, logits: np.ndarray | None) -> float:
    if logits is not None:
        return float((np.logaddexp(0, logits) - labels * logits).mean())
    likelihoods = np.where(labels == 1, probs, 1 - probs)
    return float(-np.log(np.clip(likelihoods, PROB_CLIP, 1 - PROB_CLIP)).mean())


def _warn_undefined(values: Mapping[str, float | None], labels: np.ndarray, *, has_groups: bool) -> None:
    undefined = [name for name, value in values.items() if value is None]
    if not undefined:
        return
    if not len(labels):
        reasons = ["there are no rows"]
    else:
        reasons = [f"all {len(labels)} labels are {labels[0]:.0f}"] if values["auc"] is None else []
        if not has_groups:
            reasons.append("no group key was given")
        elif values["auc"] is not None:
            reasons.append("no group has both classes")
    _LOGGER.warning("Undefined metrics, reported as null: %s (%s).", ", ".join(undefined), "; ".join(reasons))


def _floats(what: str, values: npt.ArrayLike, low: float = -np.inf, high: float = np.inf) -> np.ndarray:
    """(N,) float64, checked to be finite and inside [low, high]."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise UserError(f"Metrics read {what} as one value per row", received=f"shape {array.shape}", allowed="(N,)")
    bad = np.flatnonzero(~(np.isfinite(array) & (array >= low) & (array <= high)))
    if len(bad):
        raise UserError(
            f"{len(bad)} of {len(array)} {what} cannot be scored, the first at row {bad[0]}",
            received=float(array[bad[0]]),
            allowed="finite numbers" if np.isinf(high) else f"finite numbers from {low:g} to {high:g}",
            fix="look for a diverged training (learning rate) or bad input numbers; metrics never drop rows",
        )
    return array


def _labels(values: npt.ArrayLike, num_rows: int) -> np.ndarray:
    """(N,) float64, checked to be 0 or 1."""
    array = np.asarray(values, dtype=np.float64)
    _check_length("labels", array, num_rows)
    bad = np.flatnonzero((array != 0) & (array != 1))
    if len(bad):
        raise UserError(
            f"{len(bad)} of {num_rows} labels are not binary, the first at row {bad[0]}",
            received=float(array[bad[0]]),
            allowed="0 or 1",
            fix="make the label binary when preparing the data",
        )
    return array


def _groups(values: npt.ArrayLike, num_rows: int) -> np.ndarray:
    array = np.asarray(values)
    _check_length("group keys", array, num_rows)
    if num_rows and array.dtype.kind not in "iu":
        raise UserError(
            "Group keys of GAUC must be integers",
            received=f"dtype {array.dtype}",
            allowed="int64",
            fix="hash other keys to int64 first",
        )
    return array


def _check_length(what: str, array: np.ndarray, num_rows: int) -> None:
    if array.shape != (num_rows,):
        raise UserError(
            f"The {what} do not fit the probabilities", received=f"shape {array.shape}", allowed=f"shape ({num_rows},)"
        )
