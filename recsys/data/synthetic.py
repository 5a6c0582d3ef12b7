"""Synthetic clicks of any size, with a known truth: what a perfect model would score is known to the last digit.

    logit = bias + main * (effects of ids and numbers) + interaction * (sum over pairs of fields <v_i, v_j>)
            + match * (share of the history in the target's category)

Every effect and vector is a hash of (seed, field, id), so that memory does not grow with rows or with ids, and
every chunk of rows has a random stream of its own.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import pyarrow as pa
import pydantic

from recsys import metrics
from recsys.errors import UserError

LATENT_DIM = 4  # of the vectors v behind the interactions
FOLLOW_SHARE = 0.5  # of targets and history events that are drawn from the row's category of interest
START_S = 1_700_000_000  # timestamp of row 0; one row per second
CHUNK_ROWS = 65_536
_SPLITS = ("train", "valid", "test")

_MOST = 2**40  # ids and rows stay exact in float64, which draws them
_STRONGEST = 1e6  # keeps logits finite

Count = Annotated[int, pydantic.Field(ge=1, le=_MOST)]


class SyntheticOptions(pydantic.BaseModel):
    """What to make."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    rows: int = pydantic.Field(default=100_000, ge=10, le=_MOST)
    """Rows of all splits together: 80 % train, 10 % valid, 10 % test."""
    seed: int = pydantic.Field(default=1, ge=0, lt=2**63)
    """Decides everything; the same seed and options give the same bytes."""
    users: Count = 10_000
    """Distinct user ids."""
    items: Count = 5_000
    """Distinct item ids."""
    categories: Count = 50
    """Distinct categories; item i is of category (i - 1) mod categories + 1."""
    contexts: tuple[Count, ...] = pydantic.Field(default=(20, 1_000), max_length=1_000)
    """Distinct ids of each further column context_1, context_2, ...; on the command line contexts=20,1000."""
    numbers: int = pydantic.Field(default=3, ge=0, le=1_000)
    """Columns number_1, number_2, ...: normal with mean 10 and standard deviation 3."""
    zipf: float = pydantic.Field(default=1.1, gt=0, le=100)
    """Exponent s of id popularity: the k-th id has a share of about k ** -s."""
    mean_history: float = pydantic.Field(default=10.0, ge=0, le=1_000)
    """Mean length of a history, geometric from 0; 0 leaves all histories empty."""
    max_history: int = pydantic.Field(default=50, ge=1, le=10_000)
    """Longer histories are cut to this length."""
    click_share: float = pydantic.Field(default=0.25, gt=0, lt=1)
    """Share of positive labels to aim at, met within sampling error."""
    main: float = pydantic.Field(default=0.6, ge=0, le=_STRONGEST)
    """Standard deviation that main effects give to the logit, over ids drawn evenly."""
    interaction: float = pydantic.Field(default=0.8, ge=0, le=_STRONGEST)
    """Standard deviation that pairwise interactions give to the logit, over ids drawn evenly."""
    match: float = pydantic.Field(default=3.0, ge=0, le=_STRONGEST)
    """What the logit gains when the whole history is of the target's category."""

    @pydantic.field_validator("contexts", mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        return [part for part in value.split(",") if part] if isinstance(value, str) else value


class Synthetic:
    """The data set behind `recsys prepare synthetic`."""

    Options: ClassVar[type[pydantic.BaseModel]] = SyntheticOptions
    version: ClassVar[int] = 1
    history: ClassVar[str] = "history_item_id"
    row_group_rows: ClassVar[int] = 16_384

    def __init__(self, options: SyntheticOptions, source: Path | None = None) -> None:
        if source is not None:
            raise UserError("The synthetic data set is made, not read", received=str(source), fix="leave out --source")
        self.options = options
        fields = 3 + len(options.contexts)
        salts = np.random.default_rng(options.seed).integers(2**63, size=(fields, 1 + LATENT_DIM), dtype=np.uint64)
        self._salts = [[int(salt) for salt in row] for row in salts]
        self._bias = 0.0
        self._bias = _solve_bias(self.chunk(len(_SPLITS), 0, CHUNK_ROWS)[1], options.click_share)
        self._test: list[tuple[np.ndarray, np.ndarray]] = []

    def tables(self) -> Iterator[tuple[str, pa.Table]]:
        """Chunks of each split in order of time; at most one chunk is in memory."""
        self._test.clear()
        tenth = self.options.rows // 10
        sizes = (self.options.rows - 2 * tenth, tenth, tenth)
        for split, (name, size) in enumerate(zip(_SPLITS, sizes, strict=True)):
            for first in range(0, size, CHUNK_ROWS):
                columns, logits = self.chunk(split, first // CHUNK_ROWS, min(CHUNK_ROWS, size - first))
                columns["timestamp"] = START_S + sum(sizes[:split]) + first + np.arange(len(logits))
                if name == "test":
                    self._test.append((logits.astype(np.float32), columns["label"]))
                yield name, pa.table(columns)

    def facts(self) -> dict[str, float | None]:
        """What the true probabilities score on the test split: the ceiling for any model."""
        logits, labels = (np.concatenate(part) for part in zip(*self._test, strict=True))
        everyone = np.zeros(len(labels), dtype=np.int8)  # one group, so that no metric is undefined and warned of
        scored = metrics.compute(_sigmoid(logits), labels, everyone, logits)
        return {"bayes_auc": scored["auc"], "bayes_log_loss": scored["logloss"]}

    def chunk(self, split: int, index: int, rows: int) -> tuple[dict[str, np.ndarray | pa.ListArray], np.ndarray]:
        """Columns of one chunk (without timestamp) and the true logits of its rows, (rows,) float64."""
        o = self.options
        rng = np.random.default_rng([o.seed, split, index])
        interest = (rng.random(rows) * o.categories).astype(np.int64)
        user = zipf_ids(rng.random(rows), o.users, o.zipf)
        item = self._items(rng, interest)
        contexts = {f"context_{j}": zipf_ids(rng.random(rows), n, o.zipf) for j, n in enumerate(o.contexts, start=1)}
        normal = rng.standard_normal((o.numbers, rows), dtype=np.float32)
        lengths = _geometric(rng.random(rows), o.mean_history, o.max_history)
        owner = np.repeat(np.arange(rows), lengths)
        history = self._items(rng, interest[owner])
        category, history_category = ((ids - 1) % o.categories + 1 for ids in (item, history))

        fields = {"user_id": user, "item_id": item, "category_id": category, **contexts}
        same = np.bincount(owner, weights=history_category == category[owner], minlength=rows)
        share = same / np.maximum(lengths, 1)
        logits = self._bias + self._effects(fields, normal) + o.match * share
        labels = (rng.random(rows) < _sigmoid(logits)).astype(np.int8)

        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        columns = {
            **fields,
            **{f"number_{j}": 10 + 3 * values for j, values in enumerate(normal, start=1)},
            "history_item_id": pa.ListArray.from_arrays(offsets, pa.array(history)),
            "history_category_id": pa.ListArray.from_arrays(offsets, pa.array(history_category)),
            "label": labels,
        }
        return columns, logits

    def _items(self, rng: np.random.Generator, interest: np.ndarray) -> np.ndarray:
        """Zipf items; a share of them is swapped for the item of the wanted category that is about as popular."""
        items = zipf_ids(rng.random(len(interest)), self.options.items, self.options.zipf)
        wanted = items - (items - 1) % self.options.categories + interest
        follows = (rng.random(len(interest)) < FOLLOW_SHARE) & (wanted <= self.options.items)
        return np.where(follows, wanted, items)

    def _effects(self, fields: Mapping[str, np.ndarray], normal: np.ndarray) -> np.ndarray:
        """Main effects and interactions of each row, scaled to the standard deviations of the options."""
        total = normal.sum(axis=0, dtype=np.float64)
        sums = np.zeros((LATENT_DIM, len(total)))
        squares = np.zeros(len(total))
        for ids, (salt, *latent_salts) in zip(fields.values(), self._salts, strict=True):
            total += hashed_effect(ids, salt)
            for k, latent_salt in enumerate(latent_salts):
                vector = hashed_effect(ids, latent_salt)
                sums[k] += vector
                squares += vector * vector
        pairs = len(fields) * (len(fields) - 1) / 2
        interactions = ((sums * sums).sum(axis=0) - squares) / 2  # = sum over pairs of inner products
        main_scale = self.options.main / math.sqrt(len(fields) + len(normal))
        interaction_scale = self.options.interaction / math.sqrt(LATENT_DIM * pairs)
        return main_scale * total + interaction_scale * interactions


def zipf_ids(uniform: np.ndarray, count: int, exponent: float) -> np.ndarray:
    """Ids 1..count, drawn by inverting the density x ** -exponent on [1, count + 1): no table, any count."""
    if exponent == 1:
        position = np.exp(uniform * math.log(count + 1))
    else:
        power = 1 - exponent
        position = (1 + uniform * ((count + 1) ** power - 1)) ** (1 / power)
    return np.minimum(position.astype(np.int64), count)


def hashed_effect(ids: np.ndarray, salt: int) -> np.ndarray:
    """One number per id, evenly spread over [-sqrt 3, sqrt 3): mean 0, variance 1. Mixes as splitmix64 does."""
    z = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(salt)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * (2 * math.sqrt(3) / 2**53) - math.sqrt(3)


def _geometric(uniform: np.ndarray, mean: float, longest: int) -> np.ndarray:
    """Lengths 0, 1, 2, ... with P(length >= l) = (mean / (1 + mean)) ** l, cut at `longest`."""
    if mean == 0:
        return np.zeros(len(uniform), dtype=np.int64)
    return np.minimum(np.log1p(-uniform) / math.log(mean / (1 + mean)), longest).astype(np.int64)


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -logits))  # unlike 1 / (1 + exp(-x)), never overflows


def _solve_bias(logits: np.ndarray, share: float) -> float:
    """The constant that, added to these logits, makes their mean probability equal to `share`."""
    low, high = -50.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _sigmoid(logits + middle).mean() < share else (low, middle)
    return low
