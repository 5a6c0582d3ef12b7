"""MovieTweetings-100K: split, labels, histories and shares of new ids against plain Python; sources; the real files.

The real files are read where the environment variable RECSYS_MOVIETWEETINGS names their folder.
"""

import hashlib
import os
import random
from pathlib import Path

import numpy as np
import pytest

from recsys.data import movietweetings
from recsys.data.movietweetings import MovieTweetings100K, Raw
from recsys.data.prepare import DATASETS, prepare
from recsys.errors import UserError

NAME = "movietweetings-100k"


@pytest.fixture
def raw() -> Raw:
    """400 ratings in 120 seconds, so that ties abound; one user rates much, and new users and items keep coming."""
    rng = random.Random(11)
    ratings = []
    for _ in range(400):
        second = rng.randrange(120)
        user = 0 if rng.random() < 0.3 else 20 + second // 4 if rng.random() < 0.3 else rng.randrange(1, 20)
        item = 30 + (second - rng.randrange(20)) // 2 if rng.random() < 0.3 else rng.randrange(20)
        ratings.append((user, item, rng.randrange(11), 1_000_000 + second))
    items = {i: (1900 + i, tuple(rng.sample(["Drama", "News", "War"], rng.randrange(4)))) for i in range(90)}
    return Raw(np.array(ratings), items)


def plain_rows(raw: Raw) -> dict[str, list[dict]]:
    """Rows of each split, by loops that look at every other rating."""
    ratings = sorted((second, place, *rest) for place, (*rest, second) in enumerate(raw.ratings.tolist()))
    rows = []
    for second, _, user, item, rating in ratings:
        history = [i for s, _, u, i, _ in ratings if u == user and s < second]
        year, genres = raw.items[item]
        row = {"user_id": user, "item_id": item, "genres": list(genres), "year": year, "timestamp": second}
        rows.append({**row, "history_item_id": history[-50:], "label": 1 if rating >= 8 else 0})
    earlier, test = rows[: len(rows) - len(rows) // 5], rows[len(rows) - len(rows) // 5 :]
    cut = len(earlier) - len(earlier) // 10
    return {"train": earlier[:cut], "valid": earlier[cut:], "test": test}


def rows_of(tables: dict) -> dict[str, list[dict]]:
    return {name: table.to_pylist() for name, table in tables.items()}


def test_splits_labels_and_histories_equal_plain_loops(raw):
    expected = plain_rows(raw)
    assert rows_of(movietweetings.split(raw)) == expected
    lengths = [len(row["history_item_id"]) for rows in expected.values() for row in rows]
    assert (min(lengths), max(lengths)) == (0, 50)


@pytest.mark.parametrize(("rows", "sizes"), [(100, [72, 8, 20]), (99, [72, 8, 19]), (7, [6, 0, 1]), (3, [3, 0, 0])])
def test_the_last_fifth_is_test_and_the_last_tenth_of_the_rest_valid(rows, sizes):
    raw = Raw(np.array([(1, 1, 5, second) for second in range(rows)]), {1: (1990, ())})
    assert [table.num_rows for table in movietweetings.split(raw).values()] == sizes


def test_ties_of_time_keep_the_order_of_the_file_and_are_no_history_of_each_other():
    raw = Raw(np.array([(1, item, 8, 50) for item in (9, 3, 7)]), {i: (1990, ()) for i in (3, 7, 9)})
    rows = movietweetings.split(raw)["train"].to_pylist()
    assert [(row["item_id"], row["history_item_id"]) for row in rows] == [(9, []), (3, []), (7, [])]


def test_shares_of_new_ids_equal_counting_with_sets(raw):
    splits = movietweetings.split(raw)
    found, rows = movietweetings.unseen_shares(splits), plain_rows(raw)
    expected = {}
    for when, earlier in (("train", rows["train"]), ("train_and_valid", rows["train"] + rows["valid"])):
        for column in ("user_id", "item_id"):
            seen = {row[column] for row in earlier}
            new = sum(row[column] not in seen for row in rows["test"])
            expected[f"test_rows_with_{column}_not_in_{when}"] = new / len(rows["test"])
    assert found == pytest.approx(expected)
    assert 0 < min(found.values()) and len(set(found.values())) > 2


def test_without_test_rows_the_shares_are_undefined():
    raw = Raw(np.array([(1, 1, 5, 9)]), {1: (1990, ())})
    assert set(movietweetings.unseen_shares(movietweetings.split(raw)).values()) == {None}


# ---- files ----

RATINGS = ["5::0000012::10::300", "6::0000013::0::200", "5::0000013::7::100"]
MOVIES = ["0000012::Fant\xf4mas: a\x85b (1 of 5) (1913)::Crime|Drama", "0000013::2001 (1968)::"]


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "ratings.dat").write_text("\n".join(RATINGS) + "\n", encoding="utf-8")
    (tmp_path / "movies.dat").write_text("\n".join(MOVIES) + "\n", encoding="utf-8")
    return tmp_path


def publish(folder: Path, monkeypatch) -> None:
    """Let what is in the folder count as the published files."""
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in movietweetings.SHA256}
    monkeypatch.setattr(movietweetings, "SHA256", digests)


def test_fields_ids_years_and_genres_are_read_from_the_lines(folder):
    raw = movietweetings.read(folder)
    assert raw.ratings.tolist() == [[5, 12, 10, 300], [6, 13, 0, 200], [5, 13, 7, 100]]
    assert raw.items == {12: (1913, ("Crime", "Drama")), 13: (1968, ())}


def test_a_prepared_folder_holds_the_rows_and_the_facts(folder, tmp_path, monkeypatch):
    lines = [f"{user}::12::{user % 10}::{100 - user}" for user in range(20)]
    (folder / "ratings.dat").write_text("\n".join(lines) + "\n", encoding="utf-8")
    publish(folder, monkeypatch)
    summary = prepare(NAME, tmp_path / "out", source=folder)
    # By time, users come as 19, 18, ..., 0: 4 to 19 before test, of which 4 is valid. 8, 9, 18 and 19 are positive.
    found = {name: (split.rows, split.positive_share) for name, split in summary.splits.items()}
    assert found == {"train": (15, 4 / 15), "valid": (1, 0.0), "test": (4, 0.0)}
    assert summary.facts["test_rows_with_user_id_not_in_train"] == 1
    assert summary.facts["test_rows_with_item_id_not_in_train"] == 0


@pytest.mark.parametrize(
    ("name", "line", "reason"),
    [
        ("ratings.dat", "5::12::10", "inhomogeneous"),
        ("ratings.dat", "5::12::ten::300", "ten"),
        ("ratings.dat", "5::14::9::300", "lacks 1 rated items, among them 14"),
        ("movies.dat", "14::Untitled::Drama", "no year at the end of 'Untitled'"),
        ("movies.dat", "14::Serial (1990) (V)::Drama", "no year at the end"),
        ("movies.dat", "14::Title (1990)", "not enough values"),
    ],
)
def test_a_line_that_cannot_be_read_is_one_clear_error(folder, name, line, reason):
    with (folder / name).open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=rf"(?s)cannot be read.*{reason}"):
        movietweetings.read(folder)


def test_without_a_source_the_error_tells_where_the_data_is_and_what_is_expected(tmp_path):
    with pytest.raises(UserError) as error:
        prepare(NAME, tmp_path / "out")
    text = str(error.value)
    assert "github.com/sidooms/MovieTweetings, folder snapshots/100K" in text and "--source" in text
    assert all(f"{name} (sha256 {digest})" in text for name, digest in movietweetings.SHA256.items())
    assert not (tmp_path / "out").exists()


def test_a_source_without_the_files_or_with_other_files_is_refused(folder, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"is not MovieTweetings-100K as published. Received: ratings.dat.*movies.dat"):
        movietweetings.verified(folder)
    publish(folder, monkeypatch)
    assert movietweetings.verified(folder) == folder
    with (folder / "movies.dat").open("ab") as file:
        file.write(b"\n")
    with pytest.raises(UserError, match=r"as published. Received: movies.dat \(sha256 \w+\). Allowed"):
        movietweetings.verified(folder)
    with pytest.raises(UserError, match=r"nowhere cannot be used.*snapshots/100K"):
        movietweetings.verified(tmp_path / "nowhere")


# ---- the real files ----


@pytest.fixture(scope="module")
def real() -> Path:
    folder = os.environ.get("RECSYS_MOVIETWEETINGS")
    if not folder:
        pytest.skip("RECSYS_MOVIETWEETINGS names no folder with MovieTweetings-100K")
    return Path(folder)


def test_real_rows_of_a_sample_of_users_equal_plain_loops(real):
    splits = movietweetings.split(movietweetings.read(real))
    lines = (real / "ratings.dat").read_text().split("\n")[:-1]
    ratings = [tuple(map(int, line.split("::"))) for line in lines]
    rows = [row for table in splits.values() for row in table.to_pylist()]
    assert [row["timestamp"] for row in rows] == sorted(second for *_, second in ratings)
    for user in range(1, 16_554, 500):
        own = sorted((s, i, r) for u, i, r, s in ratings if u == user)
        expected = [(s, i, int(r >= 8), [j for q, j, _ in own if q < s][-50:]) for s, i, r in own]
        keys = ("timestamp", "item_id", "label", "history_item_id")
        assert sorted(tuple(row[key] for key in keys) for row in rows if row["user_id"] == user) == expected


def test_real_counts_shares_and_checksums_are_those_of_the_data_card(real, tmp_path):
    card = (Path(__file__).parents[2] / f"data/{NAME}/README.md").read_text(encoding="utf-8")
    summary = prepare(NAME, tmp_path / "out", source=real)
    for name, split in summary.splits.items():
        counts = f"{name} | {split.rows:,} | {split.positive_share:.1%} | {split.mean_history:.1f}"
        assert f"{counts.replace('%', ' %')} | {split.sha256}" in card
    for name, share in summary.facts.items():
        assert f"| `{name}` | {100 * share:.1f} % |" in card
    assert all(f"{name} | {digest}" in card for name, digest in movietweetings.SHA256.items())


def test_real_shares_of_new_ids_equal_counting_with_sets(real):
    facts = movietweetings.unseen_shares(movietweetings.split(movietweetings.read(real)))
    lines = (real / "ratings.dat").read_text().split("\n")[:-1]
    by_time = sorted((line.split("::") for line in lines), key=lambda fields: int(fields[3]))
    for index, column in enumerate(("user_id", "item_id")):
        ids = [fields[index] for fields in by_time]
        for when, num_earlier in (("train", 72_000), ("train_and_valid", 80_000)):
            seen = set(ids[:num_earlier])
            new = sum(number not in seen for number in ids[80_000:])
            assert facts[f"test_rows_with_{column}_not_in_{when}"] == pytest.approx(new / 20_000)


def test_the_data_set_is_registered():
    assert DATASETS[NAME] is MovieTweetings100K
