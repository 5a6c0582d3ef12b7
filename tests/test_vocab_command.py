"""`recsys vocab`: what it writes, and what it never writes over."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys import recipe_file
from recsys.errors import UserError
from recsys.survey import vocabularies
from recsys.vocabulary import Vocabulary


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("RECSYS_DATA", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    table = {"label": [0, 1, 0, 1], "u": [5, 5, 5, 7], "shop": [0, 1, 1, 9], "w": ["a", "b", "b", "b"]}
    pq.write_table(pa.table(table), tmp_path / "data" / "u.parquet")
    return recipe_file.parse(
        f"{{model: {{name: deepfm}}, data: {{train: {tmp_path}/data}}, "
        "features: [{kind: id, columns: [u, shop, w]}], "
        "tables: {u: {ids: hot_cold, hot: 10, min_count: 1}, shop: {ids: exact, rows: 3, bad_ids: unknown}}}"
    )


def test_tables_are_counted_unless_their_ids_have_a_range(recipe, tmp_path):
    facts = {found["table"]: found for found in vocabularies(recipe, output=str(tmp_path / "new"))}
    assert facts.keys() == {"u", "w"}
    assert (facts["u"]["distinct"], facts["w"]["distinct"]) == (2, 2)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["u.parquet", "w.parquet"]


def test_neither_data_nor_a_vocabulary_of_the_user_is_ever_replaced(recipe, tmp_path):
    before = (tmp_path / "data" / "u.parquet").read_bytes()
    with pytest.raises(UserError, match="training data lies there"):
        vocabularies(recipe, output=str(tmp_path / "data"))
    assert (tmp_path / "data" / "u.parquet").read_bytes() == before
    vocabularies(recipe, output=str(tmp_path / "old"))
    before = (tmp_path / "old" / "u.parquet").read_bytes()
    for grow in (None, str(tmp_path / "old")):
        with pytest.raises(UserError, match="is there already"):
            vocabularies(recipe, output=str(tmp_path / "old"), grow=grow)
    assert (tmp_path / "old" / "u.parquet").read_bytes() == before


def test_growing_keeps_rows_and_starts_tables_that_are_new(recipe, tmp_path):
    vocabularies(recipe, output=str(tmp_path / "old"))
    (tmp_path / "old" / "w.parquet").unlink()
    vocabularies(recipe, output=str(tmp_path / "new"), grow=str(tmp_path / "old"))
    old, new = (Vocabulary.load(tmp_path / name / "u.parquet") for name in ("old", "new"))
    assert [part.tolist() for part in old.index()] == [part.tolist() for part in new.index()]
    with pytest.raises(UserError, match="no folder of vocabularies"):
        vocabularies(recipe, output=str(tmp_path / "third"), grow=str(tmp_path / "nowhere"))


def test_a_table_of_any_name_gets_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("RECSYS_DATA", str(tmp_path / "cache"))
    name = "\u63a8\u8350" * 40 + "[/b]"
    pq.write_table(pa.table({"label": [0, 1], name: [1, 2]}), tmp_path / "d.parquet")
    feature = f"{{kind: id, columns: ['{name}']}}"
    text = f"{{model: {{name: deepfm}}, data: {{train: {tmp_path}/d.parquet}}, features: [{feature}]}}"
    (found,) = vocabularies(recipe_file.parse(text))
    assert found["distinct"] == 2
