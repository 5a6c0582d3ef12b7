"""MovieLens-100K: the split and histories against plain Python, both raw formats, and how the data is fetched."""

import hashlib
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from recsys.data import movielens
from recsys.data.movielens import GENRES, MovieLens100K, NoOptions, Raw
from recsys.data.prepare import prepare
from recsys.errors import UserError
from recsys.paths import data_home


@pytest.fixture
def raw() -> Raw:
    """30 users, 90 films, 61 seconds: ties abound."""
    rng = random.Random(7)
    ratings = []
    for user in range(1, 31):
        for item in rng.sample(range(1, 91), rng.randint(1, 90)):
            ratings.append((user, item, rng.randint(1, 5), 1_000_000 + rng.randint(0, 60)))
    rng.shuffle(ratings)
    items = {i: (f"Film {i} ({1900 + i})", tuple(rng.sample(GENRES[1:], 2))) for i in range(1, 91)}
    users = {u: (rng.randint(5, 80), rng.choice("MF"), "other") for u in range(1, 31)}
    return Raw(np.array(ratings), items, users, "")


def plain_rows(raw: Raw) -> dict[str, list[tuple]]:
    """(timestamp, user, item, label, history) of each split, by loops that look at every earlier rating."""
    ratings = [tuple(map(int, r)) for r in raw.ratings]
    splits: dict[str, list[tuple]] = {"train": [], "valid": [], "test": []}
    for user in {u for u, *_ in ratings}:
        own = sorted((t, i, r) for u, i, r, t in ratings if u == user)
        n = len(own)
        for position, (t, i, r) in enumerate(own):
            history = [j for s, j, q in own if s < t and q >= 4][-50:]
            name = "test" if position >= n - n // 5 else "valid" if position >= n - n // 5 - n // 10 else "train"
            splits[name].append((t, user, i, int(r >= 4), history))
    return {name: sorted(rows) for name, rows in splits.items()}


def rows_of(table) -> list[tuple]:
    names = ("timestamp", "user_id", "item_id", "label", "history_item_id")
    return list(zip(*(table[name].to_pylist() for name in names), strict=True))


def test_splits_labels_and_histories_equal_plain_loops(raw):
    tables, expected = movielens.split(raw), plain_rows(raw)
    assert {name: rows_of(table) for name, table in tables.items()} == expected
    lengths = [len(history) for rows in expected.values() for *_, history in rows]
    assert min(lengths) == 0


def test_history_keeps_the_newest_50_oldest_first_and_skips_the_same_second():
    liked = [(1, i, 5, 100 + i) for i in range(60)] + [(1, 60, 5, 300), (1, 61, 1, 300), (1, 62, 4, 301)]
    raw = Raw(np.array(liked), {i: ("x (1990)", ("Drama",)) for i in range(63)}, {1: (20, "F", "other")}, "")
    history = {item: h for t in movielens.split(raw).values() for _, _, item, _, h in rows_of(t)}
    assert history[60] == history[61] == list(range(10, 60))
    assert history[62] == list(range(11, 61))  # 61 was rated 1, so it is no event
    assert history[3] == [0, 1, 2]


def test_histories_of_genres_run_in_step_with_those_of_items(raw):
    for table in movielens.split(raw).values():
        for items, genres in zip(*(table[f"history_{c}"].to_pylist() for c in ("item_id", "first_genre")), strict=True):
            assert genres == [raw.items[item][1][0] for item in items]


def test_split_sizes_are_floors_for_every_user(raw):
    tables = movielens.split(raw)
    counts = {name: table["user_id"].to_pylist() for name, table in tables.items()}
    for user in raw.users:
        n = sum(int(u) == user for u, *_ in raw.ratings)
        valid, test = n * 10 // 100, n * 20 // 100
        assert [counts[name].count(user) for name in ("train", "valid", "test")] == [n - valid - test, valid, test]


AGES = {17: "<18", 18: "18-24", 24: "18-24", 25: "25-34", 34: "25-34", 35: "35-44", 44: "35-44", 45: "45-49"}
AGES |= {49: "45-49", 50: "50-55", 55: "50-55", 56: "56+", 99: "56+"}


@pytest.mark.parametrize(("age", "bucket"), AGES.items())
def test_age_buckets(age, bucket):
    raw = Raw(np.array([[1, 1, 4, 9]]), {1: ("x (1990)", ("Drama",))}, {1: (age, "F", "other")}, "")
    assert movielens.split(raw)["train"]["age"].to_pylist() == [bucket]


# ---- formats ----

# What u.item says; the recbole copy splits the title and its last bracket, misspells "unknown", and is UTF-8.
FILMS = [
    (1, "Toy Story (1995)", "Animation Children's Comedy"),
    (2, "Caf\xe9 au Lait (Metisse) (1993)", "Comedy"),
    (3, "Land Before Time III (1995) (V)", "Animation Children's"),
    (4, "unknown", "unknown"),
    (5, "2001: A Space Odyssey (2001) (1968)", "Drama Mystery Sci-Fi Thriller"),
]
RATINGS = [(1, 1, 5, 10), (1, 2, 3, 11), (2, 4, 4, 12), (2, 3, 2, 12), (2, 5, 4, 13)]
PEOPLE = [(1, 24, "M", "technician", "85711"), (2, 53, "F", "other", "05201")]


def write_grouplens(folder: Path) -> Path:
    folder.mkdir()
    body = "".join("\t".join(map(str, r)) + "\n" for r in RATINGS)
    (folder / "u.data").write_text(body)
    lines = []
    for number, title, genres in FILMS:
        flags = "|".join(str(int(g in genres.split(" "))) for g in GENRES)
        lines.append(f"{number}|{title}|01-Jan-1995||http://example.org|{flags}\n")
    (folder / "u.item").write_text("".join(lines), encoding="latin-1")
    (folder / "u.user").write_text("".join("|".join(map(str, p)) + "\n" for p in PEOPLE))
    return folder


def write_recbole(folder: Path) -> Path:
    folder.mkdir()
    head = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    (folder / "ml-100k.inter").write_text(head + "".join("\t".join(map(str, r)) + "\n" for r in RATINGS))
    lines = ["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"]
    for number, title, genres in FILMS:
        name, _, year = title.rpartition(" (") if "(" in title else ("unkonwn", "", "unkonwn)")
        lines.append(f"{number}\t{name}\t{year[:-1]}\t{genres}\n")
    (folder / "ml-100k.item").write_text("".join(lines), encoding="utf-8")
    head = "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
    (folder / "ml-100k.user").write_text(head + "".join("\t".join(map(str, p)) + "\n" for p in PEOPLE))
    return folder


def zipped(folder: Path, archive: Path, inside: str) -> Path:
    with zipfile.ZipFile(archive, "w") as file:
        for path in folder.iterdir():
            file.write(path, f"{inside}/{path.name}")
    return archive


def test_both_formats_in_folders_and_archives_give_the_same_rows(tmp_path):
    grouplens, recbole = write_grouplens(tmp_path / "ml-100k"), write_recbole(tmp_path / "recbole")
    places = [
        grouplens,
        recbole,
        zipped(grouplens, tmp_path / "ml-100k.zip", "ml-100k"),
        zipped(recbole, tmp_path / "recbole.whl", "recbole/dataset_example/ml-100k"),
    ]
    tables = [movielens.split(movielens.read(place)) for place in places]
    assert all(other == tables[0] for other in tables[1:])
    assert len({movielens.read(place).ratings_sha256 for place in places}) == 1


def test_year_ends_the_title_and_a_film_without_one_gets_the_median(tmp_path):
    tables = movielens.split(movielens.read(write_recbole(tmp_path / "r"))).values()
    years = {i: y for t in tables for i, y in zip(t["item_id"].to_pylist(), t["year"].to_pylist(), strict=True)}
    known = sorted([1995, 1993, 1995, 1968])
    assert years == {1: 1995, 2: 1993, 3: 1995, 4: known[2], 5: 1968}


def test_a_folder_above_the_files_is_found_too(tmp_path):
    write_grouplens(tmp_path / "ml-100k")
    assert len(movielens.read(tmp_path).ratings) == len(RATINGS)


def test_unusable_sources_are_one_clear_error_each(tmp_path):
    with pytest.raises(UserError, match="check the path"):
        movielens.read(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"holds no MovieLens.*u\.data"):
        movielens.read(tmp_path)
    folder = write_grouplens(tmp_path / "cut")
    (folder / "u.item").write_text("1|Toy Story (1995)|01-Ja", encoding="latin-1")
    with pytest.raises(UserError, match="cannot be read"):
        movielens.read(folder)
    archive = zipped(write_recbole(tmp_path / "r"), tmp_path / "bad.zip", "x")
    archive.write_bytes(archive.read_bytes().replace(b"Animation", b"Animatiom"))
    with pytest.raises(UserError, match="cannot be read"):
        movielens.read(archive)


def test_a_source_that_is_not_the_published_data_is_refused(tmp_path):
    with pytest.raises(UserError, match="not MovieLens-100K as published"):
        list(MovieLens100K(NoOptions(), write_grouplens(tmp_path / "mini")).tables())


# ---- fetching ----


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """An own cache, a zip "online" at a file address, and a pip that has nothing."""
    archive = zipped(write_grouplens(tmp_path / "mini"), tmp_path / "online.zip", "ml-100k")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    monkeypatch.setenv("RECSYS_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(movielens, "ZIP_URL", archive.as_uri())
    monkeypatch.setattr(movielens, "SHA256", {**movielens.SHA256, "ml-100k.zip": digest})

    def run(command, **_):
        assert command[:3] == [sys.executable, "-m", "pip"]
        raise subprocess.CalledProcessError(1, command, stderr="Looking\nERROR: no matching distribution\n")

    monkeypatch.setattr(subprocess, "run", run)
    return archive


def cached() -> list[str]:
    return sorted(p.name for p in movielens.cache_folder().iterdir())


def test_a_download_is_kept_and_the_network_is_not_asked_again(offline):
    assert len(movielens.read(movielens.fetch()).ratings) == len(RATINGS)
    offline.unlink()
    assert movielens.fetch() == movielens.cache_folder() / "ml-100k.zip"
    assert cached() == ["ml-100k.zip"]


def test_when_nothing_is_reachable_every_place_is_listed_with_its_reason(offline):
    offline.unlink()
    movielens.cache_folder().mkdir(parents=True)
    (movielens.cache_folder() / "ml-100k.zip").write_bytes(b"cut short")
    with pytest.raises(UserError) as error:
        movielens.fetch()
    text = str(error.value)
    assert "ml-100k.zip: wrong checksum" in text and offline.as_uri() in text and "No such file" in text
    assert "pip download recbole==1.2.1: ERROR: no matching distribution" in text and "--source" in text


def test_a_download_with_another_checksum_is_never_kept(offline):
    offline.write_bytes(offline.read_bytes() + b"x")
    with pytest.raises(UserError, match="what came is not ml-100k"):
        movielens.fetch()
    assert cached() == []


def test_an_interrupted_download_leaves_nothing_and_the_wheel_is_tried_next(offline, monkeypatch):
    def cut(folder):
        (folder / "ml-100k.zip").write_bytes(offline.read_bytes()[:100])
        raise TimeoutError("timed out")

    monkeypatch.setattr(movielens, "_download_zip", cut)
    with pytest.raises(UserError, match=r"timed out\n.*pip download"):
        movielens.fetch()
    assert cached() == []


def test_a_slow_download_is_given_up(offline, monkeypatch):
    monkeypatch.setattr(movielens, "_DEADLINE_S", -1.0)
    with pytest.raises(UserError, match="not finished after"):
        movielens.fetch()


def test_a_cache_that_cannot_be_written_names_the_variable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RECSYS_DATA", str(tmp_path / "file"))
    with pytest.raises(UserError, match="RECSYS_DATA"):
        movielens.fetch()


def test_the_cache_lies_in_the_data_home_and_a_home_that_is_not_known_names_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("RECSYS_DATA", str(tmp_path))
    assert movielens.cache_folder() == data_home() / "downloads" == tmp_path / "downloads"
    monkeypatch.setenv("RECSYS_DATA", "~nouser/x")
    with pytest.raises(UserError, match="RECSYS_DATA"):
        movielens.fetch()


# ---- the real data: skipped where neither cache, GroupLens nor pip has it ----


@pytest.fixture(scope="module")
def real() -> Raw:
    try:
        path = movielens.fetch()
    except UserError as error:
        pytest.skip(f"MovieLens-100K is not reachable: {error.what.splitlines()[0]}")
    return movielens.verified(movielens.read(path), path)


def test_real_counts_positives_and_histories_are_those_of_the_protocol(real):
    tables = movielens.split(real)
    expected = {"train": (70_771, 58.3, 27.7), "valid": (9_596, 49.9, 42.5), "test": (19_633, 47.6, 43.6)}
    for name, (rows, positive, history) in expected.items():
        labels, lists = tables[name]["label"].to_pylist(), tables[name]["history_item_id"].to_pylist()
        assert len(labels) == rows
        assert round(100 * sum(labels) / rows, 1) == positive
        assert round(sum(map(len, lists)) / rows, 1) == history


def test_real_rows_of_a_sample_of_users_equal_plain_loops(real):
    some = real.ratings[real.ratings[:, 0] % 40 == 1]
    expected = plain_rows(Raw(some, real.items, real.users, ""))
    for name, table in movielens.split(real).items():
        assert [row for row in rows_of(table) if row[1] % 40 == 1] == expected[name]


def test_real_data_in_grouplens_format_is_accepted_and_gives_the_same_rows(real, tmp_path):
    for name, separator, rows in (
        ("u.data", "\t", real.ratings.tolist()),
        ("u.user", "|", [(number, *person, "55105") for number, person in real.users.items()]),
        (
            "u.item",
            "|",
            [(i, title, "", "", "", *(int(g in genres) for g in GENRES)) for i, (title, genres) in real.items.items()],
        ),
    ):
        text = "".join(separator.join(map(str, row)) + "\n" for row in rows)
        (tmp_path / name).write_text(text, encoding="latin-1")
    assert dict(MovieLens100K(NoOptions(), tmp_path).tables()) == movielens.split(real)


def test_real_genres_are_never_empty_and_keep_the_order_of_the_flags(real):
    for _, genres in real.items.values():
        assert genres and list(genres) == [g for g in GENRES if g in genres]


def test_real_checksums_are_those_of_the_data_card(real, tmp_path):
    card = (Path(__file__).parents[2] / "data/movielens-100k/README.md").read_text()
    for split in prepare("movielens-100k", tmp_path / "out").splits.values():
        assert f"{split.rows:,} | {split.positive_share:.1%}".replace("%", " %") in card
        assert split.sha256 in card
    assert movielens.RATINGS_SHA256 in card
    assert all(f"{name} | {digest}" in card for name, digest in movielens.SHA256.items())
