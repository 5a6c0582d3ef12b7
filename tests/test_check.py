"""`recsys check`: every problem of a recipe and its data in one list."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from recsys.check import check


@pytest.fixture
def folder(tmp_path):
    """A recipe and three splits without a problem."""
    for split in ("train", "valid", "test"):
        write(tmp_path, split)
    recipe = {
        "model": {"name": "din"},
        "data": {split: str(tmp_path / f"{split}.parquet") for split in ("train", "valid", "test")},
        "features": [
            {"kind": "id", "columns": ["item", "user"]},
            {"kind": "history", "of": {"items": "item"}},
        ],
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


def write(folder, split, **changes):
    columns = {"item": [1, 2], "user": ["a", "b"], "items": [[1], [2, 3]], "label": [0, 1]} | changes
    pq.write_table(pa.table(columns), folder / f"{split}.parquet")


def problems(folder, *overrides):
    return check(str(folder / "recipe.yaml"), list(overrides))


def test_good_data_has_no_problems(folder):
    assert problems(folder) == []


def test_text_and_integer_ids_of_one_table_are_told_across_columns_and_splits(folder):
    write(folder, "test", user=[1, 2])
    write(folder, "valid", items=[["1"], ["2"]])
    found = "\n".join(problems(folder))
    assert "integers: 'item' in data.train, data.valid, data.test, 'items' in data.train, data.test" in found
    assert "text: 'items' in data.valid" in found
    assert "integers: 'user' in data.test; text: 'user' in data.train, data.valid" in found
    assert len(problems(folder)) == 2


def test_splits_without_rows_are_told(folder):
    empty = {"item": pa.array([], pa.int64()), "user": pa.array([], pa.string())}
    lists, labels = pa.array([], pa.list_(pa.int64())), pa.array([], pa.int8())
    for split in ("train", "test"):
        write(folder, split, **empty, items=lists, label=labels)
    found = problems(folder)
    assert ["data.train" in found[0], "data.test" in found[1]] == [True, True]
    assert len([p for p in found if "has no rows" in p]) == len(found) == 2


def test_problems_of_several_files_stand_in_one_list(folder):
    (folder / "train.parquet").unlink()
    write(folder, "valid", label=["0", "1"])
    found = problems(folder)
    assert "data.train: There is no such file" in found[0]
    assert "'label' has the type string" in found[1]


def test_paths_that_cannot_be_written_out_are_problems_and_not_exceptions(folder, monkeypatch):
    assert "local paths only" in problems(folder, "data.train=s3://bucket/train")[0]
    assert "~nouser/x" in problems(folder, "data.train=~nouser/x")[0]
    monkeypatch.setenv("RECSYS_DATA", "~nouser/x")
    assert "RECSYS_DATA" in problems(folder, "data.train=${RECSYS_DATA}/train")[0]
    assert problems(folder) == [], "a data home that is not used does not matter"
    assert "cannot be listed" in problems(folder, f"data.train={'x' * 5000}")[0]
