"""MovieTweetings, 100K snapshot: ratings that people posted on Twitter, split at one moment for all users.

Dooms, De Pessemier and Martens, "MovieTweetings: a Movie Rating Dataset Collected From Twitter", CrowdRec 2013. New
users and new films keep arriving, so that a large share of the test rows is of ids that training has not seen.
Columns, counts and conventions are written down in data/movietweetings-100k/README.md.
"""

import dataclasses
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pydantic

from recsys.data.movielens import NoOptions
from recsys.errors import UserError

HOME = "https://github.com/sidooms/MovieTweetings, folder snapshots/100K"
SHA256 = {
    "ratings.dat": "c0dd868c2632d10002ebc928ddc5345f33adeaa59eca52c2941c26a2c5e36fd6",
    "movies.dat": "e63fb84bc734e3c574f135634a40d3cbafab22b8f94f5fc0b80f80d1d2076efc",
}

POSITIVE_RATING = 8
HISTORY_LENGTH = 50
_TITLE = re.compile(r".*\((\d{4})\)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Raw:
    """The two files.

    Attributes:
        ratings: (R, 4) int64 in the order of the file: user, item, rating 0 to 10, unix second.
        items: item -> (year, genres in the order of the file).
    """

    ratings: np.ndarray
    items: dict[int, tuple[int, tuple[str, ...]]]


class MovieTweetings100K:
    """The data set behind `recsys prepare movietweetings-100k --source PATH`."""

    Options: ClassVar[type[pydantic.BaseModel]] = NoOptions
    version: ClassVar[int] = 1
    history: ClassVar[str] = "history_item_id"
    row_group_rows: ClassVar[int] = 8192

    def __init__(self, options: NoOptions, source: Path | None = None) -> None:
        self._source = source
        self._facts: dict[str, float | None] = {}

    def tables(self) -> Iterator[tuple[str, pa.Table]]:
        """The rows of each split, from files that are checked first."""
        splits = split(read(verified(self._source)))
        self._facts = unseen_shares(splits)
        yield from splits.items()

    def facts(self) -> dict[str, float | None]:
        """Shares of test rows whose user or item is new; see `unseen_shares`."""
        return self._facts


def split(raw: Raw) -> dict[str, pa.Table]:
    """Rows of train, valid and test, each ordered by (timestamp, place in the file).

    In that order the last fifth of all rows (rounded down) is test, the last tenth of what is left valid. A history
    holds the items of the user's ratings of strictly earlier seconds, whatever the rating and the split; the newest 50
    stay, oldest first.
    """
    user, item, rating, second = raw.ratings[np.argsort(raw.ratings[:, 3], kind="stable")].T

    # One sorted key for (user, second): seconds fit in 32 bits until the year 2106.
    by_user = np.argsort(user, kind="stable")
    key = (user << 32) | second
    stop = np.searchsorted(key[by_user], key)
    start = np.maximum(np.searchsorted(key[by_user], user << 32), stop - HISTORY_LENGTH)
    offsets = np.concatenate([[0], np.cumsum(stop - start)])
    events = by_user[np.arange(offsets[-1]) + np.repeat(start - offsets[:-1], stop - start)]

    about = [raw.items[number] for number in item.tolist()]
    table = pa.table(
        {
            "user_id": user,
            "item_id": item,
            "genres": pa.array([genres for _, genres in about], pa.list_(pa.string())),
            "year": pa.array([year for year, _ in about], pa.int64()),
            "timestamp": second,
            "history_item_id": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(item[events])),
            "label": (rating >= POSITIVE_RATING).astype(np.int8),
        }
    )
    num_test = len(user) // 5
    num_valid = (len(user) - num_test) // 10
    num_train = len(user) - num_test - num_valid
    sizes = {"train": (0, num_train), "valid": (num_train, num_valid), "test": (num_train + num_valid, num_test)}
    return {name: table.slice(first, rows) for name, (first, rows) in sizes.items()}


def unseen_shares(splits: dict[str, pa.Table]) -> dict[str, float | None]:
    """Share of test rows whose user, or item, is in no row of train; and in none of train and valid."""
    test, shares = splits["test"], {}
    for when, names in (("train", ["train"]), ("train_and_valid", ["train", "valid"])):
        earlier = pa.concat_tables([splits[name] for name in names])
        for column in ("user_id", "item_id"):
            seen = pc.is_in(test[column], value_set=earlier[column])
            share = None if not test.num_rows else 1 - pc.mean(seen).as_py()
            shares[f"test_rows_with_{column}_not_in_{when}"] = share
    return shares


def verified(source: Path | None) -> Path:
    """The folder itself if it holds both files as published.

    Raises:
        UserError: No folder was named, or its files are absent or others.
    """
    expected = "a folder with " + " and ".join(f"{name} (sha256 {digest})" for name, digest in SHA256.items())
    fix = f"get both files from {HOME}, and give the path of their folder with --source"
    if source is None:
        raise UserError("MovieTweetings-100K is not downloaded", received="no --source", allowed=expected, fix=fix)
    try:
        received = {name: hashlib.sha256((source / name).read_bytes()).hexdigest() for name in SHA256}
    except OSError as error:
        raise UserError(f"{source} cannot be used", received=str(error), allowed=expected, fix=fix) from error
    if received != SHA256:
        others = ", ".join(f"{name} (sha256 {received[name]})" for name in SHA256 if received[name] != SHA256[name])
        raise UserError(f"{source} is not MovieTweetings-100K as published", received=others, allowed=expected, fix=fix)
    return source


def read(folder: Path) -> Raw:
    """The two files of a folder, `::` between their fields, in UTF-8.

    Raises:
        UserError: A line cannot be read, or a rated item is not described.
    """
    try:
        ratings = [line.split("::") for line in _lines(folder / "ratings.dat")]
        items = {}
        for number, title, genres in (line.split("::") for line in _lines(folder / "movies.dat")):
            year = _TITLE.fullmatch(title)
            if year is None:
                raise ValueError(f"no year at the end of {title!r}")
            items[int(number)] = (int(year[1]), tuple(genres.split("|")) if genres else ())
        raw = Raw(np.array(ratings, dtype=np.int64).reshape(-1, 4), items)
        if absent := set(raw.ratings[:, 1].tolist()) - set(items):
            raise ValueError(f"movies.dat lacks {len(absent)} rated items, among them {min(absent)}")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} holds a MovieTweetings file that cannot be read", received=str(error), fix="get a fresh copy"
        ) from error
    return raw


def _lines(path: Path) -> list[str]:
    # Not splitlines(): it would also cut at control characters that titles may hold.
    return [line for line in path.read_text(encoding="utf-8").split("\n") if line]
