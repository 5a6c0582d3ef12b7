import contextlib
import dataclasses
import pathlib
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys import ids, vocabulary
from recsys.errors import UserError
from recsys.vocabulary import Vocabulary
from tests.test_vocabulary import ORIGIN, choose, counted, rewrite


def test_a_loaded_vocabulary_is_the_one_that_was_written(tmp_path):
    made = choose(tmp_path / "l.parquet", [3, 3, -1, None], hot=2, min_count=2)
    found = Vocabulary.load(str(made.path), ORIGIN)
    assert found.about == made.about
    assert (found.about.hash, found.about.hot, found.about.min_count) == (ids.HASH, 2, 2)
    assert [array.tolist() for array in found.index()] == [array.tolist() for array in made.index()]
    assert found.as_dict(cold=1, dim=2) == made.as_dict(cold=1, dim=2)


def damaged(folder: pathlib.Path, name: str) -> pathlib.Path:
    path = choose(folder / "d.parquet", [5, 6, 6, 7, 7, 7], hot=2).path
    if name == "missing":
        path.unlink()
    elif name == "folder":
        path.unlink()
        path.mkdir()
    elif name == "text":
        path.write_text("key,row\n")
    elif name == "empty":
        path.write_bytes(b"")
    elif name == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    elif name == "foreign":
        pq.write_table(pa.table({"value": [1], "key": [1], "count": [1], "row": [3]}), path)
    elif name == "columns":
        rewrite(path, lambda t: t.drop_columns(["count"]))
    elif name == "type":
        rewrite(path, lambda t: t.set_column(1, "key", t["key"].cast(pa.int32())))
    elif name == "twice":
        rewrite(path, lambda t: t.take([0, 0, 1, 2]).set_column(2, "count", pa.array([0, *t["count"].to_pylist()])))
    elif name == "order":
        rewrite(path, lambda t: t.take([1, 0, 2]))
    elif name == "lost row":
        rewrite(path, lambda t: t.slice(1))
    elif name == "negative":
        rewrite(path, lambda t: t.set_column(2, "count", pa.array([-1, 3, 4])))
    elif name == "null":
        rewrite(path, lambda t: t.set_column(2, "count", pa.array([None, 3, 3])))
    else:
        rows = {"shared row": [3, 3, None], "row too high": [3, 5, None], "reserved row": [2, 3, None]}[name]
        rewrite(path, lambda t: t.set_column(3, "row", pa.array(rows)))
    return path


@pytest.mark.parametrize(
    "name",
    "missing|folder|text|empty|cut|foreign|columns|type|twice|order|lost row|negative|null|shared row|row too high"
    "|reserved row".split("|"),
)
def test_a_damaged_or_foreign_file_is_refused(tmp_path, name, monkeypatch):
    path = damaged(tmp_path, name)
    for read_rows in (1, 1000):
        monkeypatch.setattr(vocabulary, "_READ_ROWS", read_rows)
        with pytest.raises(UserError, match=r"is no vocabulary, or is damaged.*counted again"):
            Vocabulary.load(path)


def test_any_byte_that_changes_is_noticed_or_changes_nothing(tmp_path):
    """The statistics of the columns, and some words of Parquet's own, are not read: those may change."""
    made = choose(tmp_path / "d.parquet", [f"text {n}" for n in range(60)] * 2 + ["often"], pa.string(), hot=20)
    whole, table = made.path.read_bytes(), pq.read_table(made.path)
    num_refused = 0
    for position in np.random.default_rng(0).permutation(len(whole))[:1500].tolist():
        broken = bytearray(whole)
        broken[position] ^= 1 << (position % 8)
        made.path.write_bytes(broken)
        try:
            found = Vocabulary.load(made.path, ORIGIN)
        except UserError:
            num_refused += 1
            continue
        assert found.about == made.about, position
        assert pa.concat_arrays([run.texts for run in found.parts()]).equals(table["value"].combine_chunks()), position
        assert [array.tolist() for array in found.index()] == [array.tolist() for array in made.index()], position
        assert found.as_dict(cold=1, dim=1) == made.as_dict(cold=1, dim=1), position
    assert num_refused > 500


def test_a_vocabulary_of_another_hash_is_refused(tmp_path, monkeypatch):
    path = choose(tmp_path / "h.parquet", [1], hot=2).path
    made = ids.HASH
    monkeypatch.setattr(ids, "HASH", "fnv1a64+other/1")
    with pytest.raises(UserError, match=rf"another version.*{re.escape(made)}.*fnv1a64\+other/1"):
        Vocabulary.load(path)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (
            dataclasses.replace(ORIGIN, fingerprint="data-2"),
            r"Received: fingerprint data-1\. Allowed: fingerprint data-2",
        ),
        (dataclasses.replace(ORIGIN, table="user"), r"table item\. Allowed: table user"),
        (dataclasses.replace(ORIGIN, columns={"item": {}}), r"Received: columns .*seen"),
    ],
)
def test_a_vocabulary_of_another_origin_is_refused_and_the_difference_told(tmp_path, other, told):
    path = choose(tmp_path / "o.parquet", [1], hot=2).path
    with pytest.raises(UserError, match=told):
        Vocabulary.load(path, other)


def test_the_digest_is_of_data_columns_and_hash_and_not_of_the_order_of_columns(monkeypatch):
    turned = dataclasses.replace(ORIGIN, columns=dict(reversed(ORIGIN.columns.items())))
    assert turned.digest == ORIGIN.digest
    others = [
        dataclasses.replace(ORIGIN, fingerprint="data-2"),
        dataclasses.replace(ORIGIN, table="user"),
        dataclasses.replace(ORIGIN, columns={"item": {}, "seen": {"max_length": 49, "keep": "newest"}}),
    ]
    digests = {origin.digest for origin in (ORIGIN, *others)}
    monkeypatch.setattr(ids, "HASH", "other/1")
    assert len({*digests, ORIGIN.digest}) == 5


def test_a_vocabulary_stands_in_its_digests_folder_or_in_the_one_that_was_named(tmp_path):
    assert ORIGIN.path(tmp_path) == tmp_path / ORIGIN.digest / "item.parquet"
    assert ORIGIN.path(tmp_path, tmp_path / "mine") == tmp_path / "mine" / "item.parquet"
    odd = dataclasses.replace(ORIGIN, table="../a b/\u6f22").path(tmp_path, tmp_path)
    assert odd.parent == tmp_path


class Interrupted:
    """Counts that cannot be read to their end."""

    occurrences, missing, kind = 4, 0, pa.int64()

    def __init__(self, num_good_passes: int) -> None:
        self.left = num_good_passes

    def parts(self):
        with contextlib.closing(counted([1, 1, 2, 2])) as counts:
            yield from counts.parts()
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("num_good_passes", [0, 1])
def test_a_write_that_is_interrupted_leaves_what_was_there_and_nothing_else(tmp_path, num_good_passes):
    path = choose(tmp_path / "w.parquet", [9], hot=2).path
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        Vocabulary.choose(Interrupted(num_good_passes), path, ORIGIN, hot=2)
    assert [p.name for p in tmp_path.iterdir()] == ["w.parquet"]
    assert path.read_bytes() == before


def test_a_file_that_is_replaced_is_whole_for_those_who_read_it(tmp_path):
    path = choose(tmp_path / "w.parquet", [9], hot=2).path
    before = path.read_bytes()
    with path.open("rb") as file:
        choose(path, [8, 8], hot=2)
        assert file.read() == before != path.read_bytes()


def test_a_place_that_cannot_be_written_is_the_users_to_mend(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        choose(tmp_path / "file" / "w.parquet", [1], hot=1)
