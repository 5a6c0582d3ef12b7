"""MovieLens-100K: find it, check it, split it by each user's time.

Harper and Konstan, "The MovieLens Datasets: History and Context", https://doi.org/10.1145/2827872. The data may
not be redistributed, so it is fetched: from a path of the user's, from GroupLens, or from the copy inside the
recbole 1.2.1 wheel. The protocol and the conventions are written down in data/movielens-100k/README.md.
"""

import bisect
import contextlib
import dataclasses
import functools
import hashlib
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pydantic

from recsys.errors import UserError
from recsys.paths import data_home

ZIP_URL = "https://files.grouplens.org/datasets/movielens/ml-100k.zip"
WHEEL = "recbole==1.2.1"

# File name in the cache -> sha256. GroupLens publishes only the md5 of its zip (0e33842e24a9c977be4e0107933c0723);
# the sha256 of that file is quoted alike by many public repositories. The wheel's is the one of its PyPI page.
SHA256 = {
    "ml-100k.zip": "50d2a982c66986937beb9ffb3aa76efe955bf3d5c6b761f4e3a7cd717c6a3229",
    "recbole-1.2.1-py3-none-any.whl": "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407",
}
# Of the 100,000 rating lines: u.data, and equally ml-100k.inter without its header line.
RATINGS_SHA256 = "06416e597f82b7342361e41163890c81036900f418ad91315590814211dca490"
NUM_ITEMS, NUM_USERS = 1682, 943

_FORMATS = {
    "grouplens": ("u.data", "u.item", "u.user"),
    "recbole": ("ml-100k.inter", "ml-100k.item", "ml-100k.user"),
}
# The order of the flag columns in u.item; it decides which genre is a film's first.
GENRES = tuple(
    "unknown Action Adventure Animation Children's Comedy Crime Documentary Drama Fantasy Film-Noir Horror Musical "
    "Mystery Romance Sci-Fi Thriller War Western".split()
)
_AGES = ((18, "<18"), (25, "18-24"), (35, "25-34"), (45, "35-44"), (50, "45-49"), (56, "50-55"), (1000, "56+"))

HISTORY_LENGTH = 50
_TIMEOUT_S = 10.0  # of one network operation
_DEADLINE_S = 120.0  # of one whole download; the zip has 4.9 MB, the wheel 2.1 MB


@dataclasses.dataclass(frozen=True)
class Raw:
    """The three tables of MovieLens, whichever format they came in.

    Attributes:
        ratings: (R, 4) int64: user, item, rating 1 to 5, unix second.
        items: item -> (title that ends in the year in brackets, genres in the order of `GENRES`).
        users: user -> (age in years, gender, occupation).
        ratings_sha256: Digest of the rating lines as they were read.
    """

    ratings: np.ndarray
    items: dict[int, tuple[str, tuple[str, ...]]]
    users: dict[int, tuple[int, str, str]]
    ratings_sha256: str


class NoOptions(pydantic.BaseModel):
    """Nothing to choose: the protocol is fixed, so that everybody's numbers can be compared."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


class MovieLens100K:
    """The data set behind `recsys prepare movielens-100k`."""

    Options: ClassVar[type[pydantic.BaseModel]] = NoOptions
    version: ClassVar[int] = 1
    history: ClassVar[str] = "history_item_id"
    row_group_rows: ClassVar[int] = 8192

    def __init__(self, options: NoOptions, source: Path | None = None) -> None:
        self._source = source

    def tables(self) -> Iterator[tuple[str, pa.Table]]:
        """The rows of each split; fetches the data first."""
        path = fetch() if self._source is None else self._source
        yield from split(verified(read(path), path)).items()

    def facts(self) -> dict[str, float | None]:
        """Nothing beyond the counts."""
        return {}


def split(raw: Raw) -> dict[str, pa.Table]:
    """Rows of train, valid and test, each ordered by (timestamp, user_id, item_id).

    Of a user's n ratings in order of (timestamp, item_id), the last floor(0.2 n) are test and the floor(0.1 n)
    before them valid. A history holds the user's ratings >= 4 of strictly earlier seconds, so that neither the
    row's own rating nor one given in the same second can be seen; the newest 50 stay, oldest first.
    """
    user, item, rating, second = raw.ratings[np.lexsort(raw.ratings.T[[1, 3, 0]])].T
    label = rating >= 4

    # One sorted key for (user, second): seconds fit in 32 bits until the year 2106.
    key = (user << 32) | second
    liked = np.flatnonzero(label)
    stop = np.searchsorted(key[liked], key)
    start = np.maximum(np.searchsorted(key[liked], user << 32), stop - HISTORY_LENGTH)
    offsets = np.concatenate([[0], np.cumsum(stop - start)])
    events = liked[np.arange(offsets[-1]) + np.repeat(start - offsets[:-1], stop - start)]

    first_genre = {number: genres[0] for number, (_, genres) in raw.items.items()}
    years = _years(raw)
    table = pa.table(
        {
            "user_id": user,
            "item_id": item,
            "genres": pa.array([raw.items[i][1] for i in item.tolist()], pa.list_(pa.string())),
            "first_genre": [first_genre[i] for i in item.tolist()],
            "age": [_age_bucket(raw.users[u][0]) for u in user.tolist()],
            "gender": [raw.users[u][1] for u in user.tolist()],
            "occupation": [raw.users[u][2] for u in user.tolist()],
            "year": pa.array([years[i] for i in item.tolist()], pa.int64()),
            "timestamp": second,
            "history_item_id": _lists(offsets, pa.array(item[events])),
            "history_first_genre": _lists(offsets, pa.array([first_genre[i] for i in item[events].tolist()])),
            "label": label.astype(np.int8),
        }
    )
    _, first, inverse, count = np.unique(user, return_index=True, return_inverse=True, return_counts=True)
    from_end = (first + count)[inverse] - np.arange(len(user))  # 1 for a user's newest rating
    is_test = from_end <= (count // 5)[inverse]
    is_valid = ~is_test & (from_end <= (count // 5 + count // 10)[inverse])
    by_time = np.argsort(second, kind="stable")  # users and items are in order already
    parts = {"train": ~is_test & ~is_valid, "valid": is_valid, "test": is_test}
    return {name: table.take(by_time[member[by_time]]) for name, member in parts.items()}


def _lists(offsets: np.ndarray, values: pa.Array) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)


def _age_bucket(age: int) -> str:
    return _AGES[bisect.bisect_right([limit for limit, _ in _AGES], age)][1]


def _years(raw: Raw) -> dict[int, int]:
    """Item -> year at the end of its title; a film without one gets the median year, as a number may not be missing."""
    found = {item: re.findall(r"\((\d{4})\)", title) for item, (title, _) in raw.items.items()}
    known = sorted(int(years[-1]) for years in found.values() if years)
    return {item: int(years[-1]) if years else known[len(known) // 2] for item, years in found.items()}


# ---- reading ----


def read(path: Path) -> Raw:
    """Read a folder, zip or wheel in either format. Unreadable files raise `UserError`; see `verified` for the rest."""
    files = _open_files(path)
    for form, names in _FORMATS.items():
        if all(name in files for name in names):
            try:
                return _parse(form, *(files[name]() for name in names))
            except (ValueError, IndexError, OSError, zipfile.BadZipFile) as error:
                raise UserError(
                    f"{path} holds a MovieLens file that cannot be read",
                    received=str(error),
                    fix="get a fresh, readable copy",
                ) from error
    raise UserError(
        f"{path} holds no MovieLens-100K",
        received=sorted(files)[:20],
        allowed=" or ".join(" + ".join(names) for names in _FORMATS.values()),
        fix="give the folder, the zip or the wheel that holds these files",
    )


def verified(raw: Raw, path: Path) -> Raw:
    """`raw` itself if it is the real, whole MovieLens-100K; `UserError` otherwise."""
    received = (raw.ratings_sha256, len(raw.items), len(raw.users))
    if received != (RATINGS_SHA256, NUM_ITEMS, NUM_USERS):
        raise UserError(
            f"{path} is not MovieLens-100K as published",
            received="ratings with sha256 {}, {} films, {} users".format(*received),
            allowed=f"ratings with sha256 {RATINGS_SHA256}, {NUM_ITEMS} films, {NUM_USERS} users",
            fix="get a fresh copy, unpacked without changing line ends",
        )
    return raw


def _open_files(path: Path) -> dict[str, Callable[[], bytes]]:
    """Base name -> reader of that file, in a folder (one level of subfolders included) or an archive."""
    if path.is_dir():
        return {p.name: p.read_bytes for p in (*path.glob("*/*"), *path.glob("*")) if p.is_file()}
    if not path.is_file() or not zipfile.is_zipfile(path):
        raise UserError(
            f"{path} cannot be opened", allowed="a folder, a zip or a wheel", fix="check the path of --source"
        )
    with zipfile.ZipFile(path) as archive:
        members = {Path(name).name: name for name in archive.namelist()}
    return {name: functools.partial(_member, path, member) for name, member in members.items()}


def _member(path: Path, name: str) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read(name)


def _parse(form: str, ratings: bytes, items: bytes, users: bytes) -> Raw:
    if (
        form == "recbole"
    ):  # tab separated UTF-8, one header line; title, year and genres (in the order of `GENRES`) stand apart
        ratings = ratings.partition(b"\n")[2]
        films = {
            int(number): (f"{title} ({year})", tuple(genres.split(" ")))
            for number, title, year, genres in _lines(items.partition(b"\n")[2].decode("utf-8"), "\t")
        }
        people = _lines(users.partition(b"\n")[2].decode("utf-8"), "\t")
    else:  # bar separated Latin-1, no header; the last 19 columns are genre flags
        films = {
            int(fields[0]): (fields[1], tuple(g for g, flag in zip(GENRES, fields[5:], strict=True) if flag == "1"))
            for fields in _lines(items.decode("latin-1"), "|")
        }
        people = _lines(users.decode("latin-1"), "|")
    return Raw(
        ratings=np.array(list(_lines(ratings.decode("ascii"), "\t")), dtype=np.int64).reshape(-1, 4),
        items=films,
        users={int(number): (int(age), gender, job) for number, age, gender, job, _ in people},
        ratings_sha256=hashlib.sha256(ratings).hexdigest(),
    )


def _lines(text: str, separator: str) -> Iterator[list[str]]:
    # Not splitlines(): it would also cut at control characters that Latin-1 titles may hold.
    return (line.split(separator) for line in text.split("\n") if line)


# ---- fetching ----


def cache_folder() -> Path:
    """Where downloads are kept: the folder `downloads` beside the prepared data."""
    return data_home() / "downloads"


def fetch() -> Path:
    """An archive with MovieLens-100K: a cached one, else GroupLens' zip, else the recbole wheel.

    A download is written aside, checked, then renamed, so that an interrupted one is never used. Ends within
    about four minutes whatever the network does.

    Raises:
        UserError: Nothing was reachable; lists each place with its reason.
    """
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (zip_name, wheel_name), tried = SHA256, []
        for name in SHA256:
            if (folder / name).exists():
                if _sha256(folder / name) == SHA256[name]:
                    return folder / name
                tried.append(f"{folder / name}: wrong checksum, not used")
        for name, place, download in (
            (zip_name, ZIP_URL, _download_zip),
            (wheel_name, f"pip download {WHEEL}", _download_wheel),
        ):
            with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as aside:
                try:
                    download(Path(aside))
                except (OSError, subprocess.SubprocessError) as error:
                    tried.append(f"{place}: {_reason(error)}")
                    continue
                found = sorted(p.name for p in Path(aside).iterdir())
                if found == [name] and _sha256(Path(aside) / name) == SHA256[name]:
                    return (Path(aside) / name).replace(folder / name)
                tried.append(f"{place}: what came is not {name} with sha256 {SHA256[name]}")
    except OSError as error:
        raise UserError(
            f"Downloads cannot be kept in {folder}", received=str(error), fix="set RECSYS_DATA to a writable folder"
        ) from error
    raise UserError.collect(
        "MovieLens-100K could not be fetched",
        tried,
        fix=f"download {ZIP_URL} on a machine that can, and give its path with --source",
    )


def _download_zip(folder: Path) -> None:
    deadline_s = time.monotonic() + _DEADLINE_S
    with (
        contextlib.closing(urllib.request.urlopen(ZIP_URL, timeout=_TIMEOUT_S)) as response,
        open(folder / "ml-100k.zip", "wb") as file,
    ):
        while data := response.read(1 << 16):
            file.write(data)
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not finished after {_DEADLINE_S:.0f} s")


def _download_wheel(folder: Path) -> None:
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    limits = ["--timeout", f"{_TIMEOUT_S:.0f}", "--retries", "1"]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, *limits, "--dest", str(folder), WHEEL],
        check=True,
        timeout=_DEADLINE_S,
        capture_output=True,
        text=True,
    )


def _reason(error: Exception) -> str:
    """The last line that says why: pip's own for a failed pip, the error's text otherwise."""
    said: Sequence[str] = str(getattr(error, "stderr", None) or "").strip().splitlines()
    return said[-1] if said else str(error) or type(error).__name__


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
