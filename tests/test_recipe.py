import subprocess
import sys

import pytest

from recsys import recipe_file
from recsys.errors import UserError
from recsys.paths import data_home
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
    assert [i.name for i in recipe.id_inputs if not i.leader] == ["user", "item", "shop", "C8", "C9", "C10", "tags"]
    assert {i.table for i in recipe.id_inputs if i.name in ("C8", "C9", "C10")} == {"shared"}
    assert recipe.dense_inputs == ("I1", "I2", "I3")
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


def test_a_home_that_is_not_known_is_an_error_that_names_the_variable(monkeypatch):
    monkeypatch.setenv("RECSYS_DATA", "~nouser/x")
    with pytest.raises(UserError, match=r"Received: ~nouser/x\. Do: set RECSYS_DATA"):
        data_home()
    with pytest.raises(UserError, match="RECSYS_DATA"):
        recipe_file.parse(TEXT).paths  # noqa: B018
    monkeypatch.delenv("RECSYS_DATA")

    def unknown(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.expanduser", unknown)
    with pytest.raises(UserError, match="RECSYS_DATA"):
        data_home()


def test_ranges_keep_leading_zeros_and_work_from_python():
    recipe = recipe_file.parse(TEXT.replace("I1..I3", "I08..I10"))
    assert recipe.dense_inputs == ("I08", "I09", "I10")
    raw = recipe.model_dump()
    raw["features"][-1]["columns"] = ("I1..I2", "x")
    assert Recipe.model_validate(raw).dense_inputs == ("I1", "I2", "x")


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
    "too deep YAML": (("[tags]", "[" * 3000), ["not valid YAML", "nested too deeply", "Do: "]),
    "a tag that does not suit": (("[tags]", "!!bool tags"), ["not valid YAML", "Do: "]),
    "no such day": (("[tags]", "2020-99-99"), ["not valid YAML", "month"]),
    "endless number": (("max_length: 7", "max_length: " + "9" * 5000), ["not valid YAML"]),
    "group without a name": (("group: user", "group: ''"), ["data.group: must be text that is not empty"]),
    "label without a name": (("group: user", "label: ''"), ["data.label: must be text that is not empty"]),
    "column without a name": (("[tags]", "['']"), ["features.2.columns.0: must be text that is not empty"]),
    "label as the group": (("group: user", "group: label"), ["data.group: 'label' is the label"]),
    "group called probability": (("group: user", "group: probability"), ["data.group: 'probability'", "rename"]),
    "id called probability": (("shop]", "shop, probability]"), ["features: 'probability'", "rename"]),
    "too many rows": (("rows: 1_000", f"rows: {2**40 + 1}"), ["tables.item.rows", f"{2**40}. Received: {2**40 + 1}"]),
    "too wide": (("ids: exact", "dim: 65537"), ["tables.item.dim", "65536. Received: 65537"]),
    "too wide layer": (("[8, 4]", "[8, 65537]"), ["model.hidden", "Received: 65537. Allowed: 1..65536"]),
    "too long list": (("max_length: 7", f"max_length: {2**31}"), ["features.2.max_length", str(2**31 - 1)]),
    "too long history": (("max_length: 20", f"max_length: {2**31}"), ["features.3.max_length", str(2**31 - 1)]),
    "too many columns": (("C8..C10", "C1..C99999999999"), ["features.1.columns", "at most 10000 columns"]),
    "one name for a list": (("[tags]", "tags"), ["features.2.columns: must be a list of names. Received: 'tags'"]),
    "no column": (("[tags]", "[]"), ["features.2.columns: there must be at least one name. Do: "]),
    "no history": (("{clicked_item: item, clicked_shop: shop}", "{}"), ["features.3.of", "at least one pair"]),
    "one width for a list": (("[8, 4]", "8"), ["model.hidden: must be a list of whole numbers. Received: 8"]),
    "no model name": (("{name: din, hidden: [8, 4]}", "{}"), ["model: the key `name`", "['deepfm', 'din']", "Do: "]),
    "a name for the model": (("{name: din, hidden: [8, 4]}", "din"), ["model: must be a mapping. Received: 'din'"]),
    "no kind": (("kind: number, ", ""), ["features.4: the key `kind`", "'number'", "Do: "]),
    "a table that is no mapping": (("{rows: 1_000, ids: exact}", "5"), ["tables.item: must be a mapping. Received: 5"]),
    "upper case model": (("name: din", "name: DIN"), ["unknown name 'DIN'", "mean 'din'?"]),
    "near activation": (("[8, 4]", "[8], activation: dicee"), ["model.activation", "'dicee'", "mean 'dice'?"]),
    "near keep": (("max_length: 7", "keep: newst"), ["features.2.keep: unknown value 'newst'", "mean 'newest'?"]),
    "table name with a space": (("table: shared", "table: a b"), ["features.1.table: must be letters, digits and _"]),
    "a key that is a number": (("group: user", "5: user"), ["data.5: a key must be text", "Do: quote it"]),
    "a table that is a number": (("item: {rows", "5: {rows"), ["tables.5: a key must be text", "Do: quote it"]),
    "a number for text": (("group: user", "group: 5"), ["data.group: must be text. Received: 5", "Do: quote it"]),
    "missing, with what to do": (("train: ", "test: "), ["Do: add it; it means: Parquet file or folder to train on"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_named_with_its_key_and_the_near_right_one(case):
    change, expected = BAD[case]
    text = problems(change)
    assert all(part in text for part in expected), text
    assert "1 problem" in text or "YAML" in text


@pytest.mark.parametrize(
    ("override", "limit"),
    [
        (f"train.epochs={2**31}", 2**31 - 1),
        (f"train.patience={2**31}", 2**31 - 1),
        (f"train.log_every_steps={2**31}", 2**31 - 1),
        (f"train.threads_per_rank={2**31}", 4096),
        (f"data.batch_size_per_rank={2**31}", 2**31 - 1),
        (f"data.shuffle_rows={2**31}", 2**31 - 1),
        (f"train.epochs={10**400}", 2**31 - 1),
    ],
)
def test_counts_have_an_upper_limit_that_is_allowed_itself(override, limit):
    key = override.partition("=")[0]
    text = problems(("# A", "#"), override)
    assert f"{key}: must be less than or equal to {limit}. Received: " in text
    section, name = key.split(".")
    assert getattr(getattr(recipe_file.parse(TEXT, [f"{key}={limit}"]), section), name) == limit


def test_near_names_of_a_choice_are_told():
    assert "unknown value 'acu'. Allowed: ['auc', 'gauc', 'logloss']. Did you mean 'auc'?" in problems(
        ("# A", "#"), "train.monitor=acu"
    )


def test_no_words_of_pydantic_reach_the_user():
    changes = [
        "features.0=5",
        "tables=5",
        "train.epochs=1.5",
        "optimizer.dense.eps=x",
        "train.shared_batch_statistics=1",
    ]
    text = problems(("# A", "#"), *changes)
    for part in ("a whole number", "a number", "true or false", "a mapping"):
        assert part in text
    for word in ("dictionary", "tuple", "instance", "integer", "boolean", "Input", "validation", "string"):
        assert word not in text


def test_a_value_of_any_depth_and_length_is_shown_in_short():
    text = problems(("# A", "#"), f"train.epochs{'.a' * 3000}=1", f"train.seed={'x' * 5000}")
    assert "train.epochs" in text
    assert "train.seed" in text
    # Each alias stands for ten of the one before it: written out, 10^30 letters.
    aliases = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 31))
    with pytest.raises(UserError) as caught:
        recipe_file.parse(aliases + TEXT, ["train.epochs=1"])
    assert len(str(caught.value)) < 5000
    with pytest.raises(UserError) as caught:
        recipe_file.parse(aliases + TEXT + "train: {epochs: *a30}\n")
    assert len(str(caught.value)) < 5000


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
        ("features.\xb2=x", "leads nowhere"),
        ("features.\xb2.kind=x", "leads nowhere"),
        (f"features.{'9' * 5000}=x", "leads nowhere"),
        ("features.-1=x", "leads nowhere"),
        ("train.epochs=" + "[" * 3000, "not valid YAML"),
        ("train.epochs=" + "{a: " * 3000, "not valid YAML"),
    ],
)
def test_a_bad_override_is_named(override, expected):
    assert expected in problems(("# A", "#"), override)


@pytest.mark.parametrize("text", ["", "[1, 2]", "text"])
def test_text_that_is_no_mapping_is_no_recipe(text):
    with pytest.raises(UserError, match=r"is not a recipe.*keys model, data, features.*Do: "):
        recipe_file.parse(text)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name in ("absent.yaml", "binary.yaml"):
        with pytest.raises(UserError, match=name):
            recipe_file.load(tmp_path / name)


def test_reading_a_recipe_does_not_import_torch():
    code = "import sys, recsys.recipe_file; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
