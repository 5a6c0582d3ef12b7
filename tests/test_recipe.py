import subprocess
import sys

import pytest

from recsys import recipe_file
from recsys.errors import UserError
from recsys.recipe import RESERVED_ROWS, Recipe

TEXT = """
# A recipe that uses every kind of feature.
model: {name: din, hidden: [8, 4]}
data: {train: "${RECSYS_DATA}/train", valid: ~/valid, group: user}
features:
  - {kind: id, columns: [user, item, shop]}
  - {kind: id, columns: [C8..C10], table: shared}
  - {kind: id_list, columns: [tags], max_length: 7}
  - {kind: history, of: {clicked_item: item, clicked_shop: shop}, max_length: 20}
  - {kind: number, columns: [I1..I3]}
tables:
  default: {dim: 6, rows: 100}
  item: {rows: 1_000, ids: exact}
optimizer: {dense: {learning_rate: 1e-3}}
"""


def problems(change, *overrides):
    """The error's text for the recipe with one piece of text exchanged."""
    old, new = change
    assert old in TEXT
    with pytest.raises(UserError) as caught:
        recipe_file.parse(TEXT.replace(old, new), overrides)
    return str(caught.value)


def test_the_example_means_what_it_says():
    recipe = recipe_file.parse(TEXT)
    assert list(recipe.id_columns) == ["user", "item", "shop", "C8", "C9", "C10", "tags"]
    assert {recipe.id_columns[name] for name in ("C8", "C9", "C10")} == {"shared"}
    assert recipe.dense_columns == ("I1", "I2", "I3")
    tables = {table.name: (table.rows, table.dim) for table in recipe.inputs.tables}
    small, large = (100 + RESERVED_ROWS, 6), (1000 + RESERVED_ROWS, 6)
    assert tables == {"user": small, "item": large, "shop": small, "shared": small, "tags": small}
    assert recipe.table_settings("item").ids == "exact"
    assert recipe.table_settings("user").ids == "hashed"
    assert recipe.optimizer.dense.learning_rate == 0.001
    assert recipe.inputs.table_of("clicked_item").name == "item"
    assert set(recipe.layout.sequence) == {"item", "shop", "clicked_item", "clicked_shop"}


def test_a_resolved_recipe_reads_back_as_itself(tmp_path):
    recipe = recipe_file.parse(TEXT, ["train.epochs=3"])
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    assert recipe_file.load(tmp_path / "recipe.yaml") == recipe
    assert Recipe.model_validate(recipe.model_dump()) == recipe


def test_paths_write_out_the_data_home_and_the_users_home(monkeypatch):
    monkeypatch.setenv("RECSYS_DATA", "/big/disk")
    monkeypatch.setenv("HOME", "/home/me")
    assert recipe_file.parse(TEXT).paths == {"train": "/big/disk/train", "valid": "/home/me/valid"}


def test_ranges_keep_leading_zeros_and_work_from_python():
    recipe = recipe_file.parse(TEXT.replace("I1..I3", "I08..I10"))
    assert recipe.dense_columns == ("I08", "I09", "I10")
    raw = recipe.model_dump()
    raw["features"][-1]["columns"] = ("I1..I2", "x")
    assert Recipe.model_validate(raw).dense_columns == ("I1", "I2", "x")


def test_overrides_replace_add_and_reach_into_lists_in_order():
    overrides = ["train.epochs=2", "train.epochs=3", "features.2.max_length=9", "tables.user.dim=4", "data.valid="]
    recipe = recipe_file.parse(TEXT, overrides)
    assert recipe.train.epochs == 3
    assert recipe.features[2].max_length == 9
    assert recipe.table_settings("user").dim == 4
    assert recipe.table_settings("user").rows == 100
    assert recipe.data.valid is None


def test_overrides_fill_an_empty_section():
    assert recipe_file.parse(TEXT + "train:\n", ["train.epochs=4"]).train.epochs == 4


def test_yaml_anchors_merge():
    text = TEXT.replace(
        "default: {dim: 6, rows: 100}", "default: &base {dim: 6, rows: 100}\n  user: {<<: *base, rows: 9}"
    )
    assert recipe_file.parse(text).table_settings("user").rows == 9


BAD = {
    "unknown key": (("group: user", "gruop: user"), ["data.gruop: unknown key", "mean 'group'"]),
    "unknown key of a feature": (("max_length: 7", "max_lenght: 7"), ["features.2.max_lenght", "mean 'max_length'"]),
    "unknown key of a model": (("hidden: [8, 4]", "hiden: [8]"), ["model.hiden: unknown key", "mean 'hidden'"]),
    "unknown model": (("name: din", "name: dni"), ["unknown name 'dni'", "mean 'din'"]),
    "unknown kind": (("kind: number", "kind: numbr"), ["features.4: unknown kind 'numbr'", "mean 'number'"]),
    "wrong type": (("rows: 100}", "rows: many}"), ["tables.default.rows", "Received: 'many'"]),
    "out of range": (("rows: 1_000", "rows: 0"), ["tables.item.rows", "greater than or equal to 1", "Received: 0"]),
    "infinite": (("1e-3", ".inf"), ["optimizer.dense.learning_rate", "finite"]),
    "missing": (("train: ", "test: "), ["data.train: this key is required"]),
    "declared twice in one": (("[tags]", "[tags, tags]"), ["'tags' is declared 2 times"]),
    "declared twice in two": (("[tags]", "[tags, user]"), ["'user' is declared 2 times"]),
    "number and id": (("I1..I3", "I1..I3, user"), ["'user' is declared 2 times"]),
    "downward range": (("I1..I3", "I3..I1"), ["features.4.columns", "'I3..I1' is no range"]),
    "range of two names": (("I1..I3", "I1..J3"), ["'I1..J3' is no range"]),
    "history of nothing": (("clicked_item: item", "clicked_item: itm"), ["'itm', which no `id`", "mean 'item'"]),
    "history of a list": (("clicked_item: item", "clicked_item: tags"), ["'tags', which no `id` feature declares"]),
    "label as a feature": (("[tags]", "[tags, label]"), ["the label 'label' must not be a feature"]),
    "unused table": (("item: {rows", "itme: {rows"), ["tables.itme: no feature uses", "mean 'item'"]),
    "impossible table name": (("[tags]", "[tags.all]"), ["no table can be called 'tags.all'"]),
    "table called default": (("[tags]", "[default]"), ["no table can be called 'default'"]),
    "key twice": (("optimizer:", "model: {name: din}\noptimizer:"), ["not valid YAML", "'model' stands twice"]),
    "no YAML": (("[tags]", "[tags"), ["not valid YAML"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_named_with_its_key_and_the_near_right_one(case):
    change, expected = BAD[case]
    text = problems(change)
    assert all(part in text for part in expected), text
    assert "1 problem" in text or "YAML" in text


def test_a_table_named_like_a_kind_or_model_is_described_as_a_table():
    text = TEXT.replace("[user, item, shop]", "[user, item, shop, id, din, dim]")
    with pytest.raises(UserError) as caught:
        recipe_file.parse(text.replace("tables:\n", "tables:\n  id: {dmi: 3}\n  din: {dim: x}\n  dim: {row: 1}\n"))
    assert "tables.id.dmi: unknown key" in str(caught.value)
    assert "mean 'dim'" in str(caught.value)
    assert "tables.din.dim: " in str(caught.value)
    assert "tables.dim.row: unknown key" in str(caught.value)


def test_all_mistakes_are_told_at_once_and_nothing_else():
    text = problems(("name: din", "name: dni"), "tables.item.dim=0", "trian.epochs=1", "data.batch_size_per_rank=x")
    assert "(4 problems)" in text
    for part in ("'dni'", "tables.item.dim", "trian", "data.batch_size_per_rank"):
        assert part in text


def test_settings_that_do_not_fit_together_are_told_together():
    change = ("  - {kind: history, of: {clicked_item: item, clicked_shop: shop}, max_length: 20}\n", "")
    text = problems(change, "train.patience=2", "data.valid=")
    assert "din needs at least one feature of kind `history`" in text
    assert "early stopping needs `data.valid`" in text


def test_deepfm_refuses_tables_of_different_widths():
    text = problems(("name: din, hidden: [8, 4]", "name: deepfm"), "tables.item.dim=3")
    assert "all need one `dim`" in text
    assert "'item': 3" in text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.epochs", "has no value"),
        ("=3", "has no value"),
        ("features.9.kind=id", "leads nowhere"),
        ("data.train.x=1", "leads nowhere"),
        ("train.epochs=[1", "not valid YAML"),
        ("train.epoch=1", "mean 'epochs'"),
    ],
)
def test_a_bad_override_is_named(override, expected):
    assert expected in problems(("# A", "#"), override)


@pytest.mark.parametrize("text", ["", "[1, 2]", "text"])
def test_text_that_is_no_mapping_is_no_recipe(text):
    with pytest.raises(UserError, match="is not a recipe"):
        recipe_file.parse(text)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name in ("absent.yaml", "binary.yaml"):
        with pytest.raises(UserError, match=name):
            recipe_file.load(tmp_path / name)


def test_reading_a_recipe_does_not_import_torch():
    code = "import sys, recsys.recipe_file; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
