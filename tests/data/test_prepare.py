"""Preparation: a folder is complete or absent, reused only when it fits, and its summary tells what is in it."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.data import prepare as module
from recsys.data.prepare import DATASETS, ValueDigest, prepare
from recsys.data.synthetic import Synthetic
from recsys.errors import UserError

SMALL = {"rows": 3_000, "seed": 2}


def contents(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_summary_equals_what_the_files_hold(tmp_path):
    summary = prepare("synthetic", tmp_path / "out", options=SMALL)
    assert list(summary.splits) == ["train", "valid", "test"]
    for name, split in summary.splits.items():
        rows = [row for part in sorted((tmp_path / "out" / name).glob("*")) for row in pq.read_table(part).to_pylist()]
        assert split.rows == len(rows)
        assert split.positive_share == pytest.approx(sum(row["label"] for row in rows) / len(rows))
        assert split.mean_history == pytest.approx(sum(len(row["history_item_id"]) for row in rows) / len(rows))
    saved = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert saved["splits"]["test"]["sha256"] == summary.splits["test"].sha256
    assert saved["options"]["seed"] == 2 and saved["options"]["users"] == 10_000
    text = str(summary)
    for split in summary.splits.values():
        assert f"{split.rows:,}" in text and f"{split.positive_share:.2%}" in text and split.sha256 in text
    assert f"bayes_auc: {summary.facts['bayes_auc']:.6f}" in text


def test_same_options_give_the_same_bytes_and_another_seed_does_not(tmp_path):
    for name in ("a", "b"):
        prepare("synthetic", tmp_path / name, options=SMALL)
    prepare("synthetic", tmp_path / "c", options={"rows": 3_000, "seed": 3})
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert not set(contents(tmp_path / "a").values()) & set(contents(tmp_path / "c").values())


def test_rows_are_cut_into_row_groups_and_part_files(tmp_path, monkeypatch):
    whole = prepare("synthetic", tmp_path / "whole", options={"rows": 50_000})
    assert pq.ParquetFile(tmp_path / "whole/train/part-00000.parquet").num_row_groups == 3  # ceil(40,000 / 16,384)
    monkeypatch.setattr(module, "PART_ROWS", 10_000)
    monkeypatch.setattr("recsys.data.synthetic.CHUNK_ROWS", 4_096)
    cut = prepare("synthetic", tmp_path / "cut", options={"rows": 50_000})
    assert len(list((tmp_path / "cut/train").iterdir())) == 4  # a part ends with the chunk that reaches 10,000 rows
    assert cut.splits["train"].rows == whole.splits["train"].rows


def test_a_complete_folder_is_reused_untouched(tmp_path):
    first = prepare("synthetic", tmp_path / "out", options=SMALL)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")}
    again = prepare("synthetic", tmp_path / "out", options={"rows": "3000", "seed": "2"})
    assert again.reused and not first.reused
    assert (again.splits, again.facts, again.options) == (first.splits, first.facts, first.options)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")} == before
    assert "was already" in str(again) and "is now" in str(first)


def test_a_folder_with_other_options_or_other_content_is_never_overwritten(tmp_path):
    prepare("synthetic", tmp_path / "out", options=SMALL)
    with pytest.raises(UserError, match=r"taken by something else.*'seed': 2.*Allowed.*'seed': 9"):
        prepare("synthetic", tmp_path / "out", options={"rows": 3_000, "seed": 9})
    with pytest.raises(UserError, match="taken"):
        prepare("movielens-100k", tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=r"without a readable summary\.json"):
        prepare("synthetic", tmp_path / "mine", options=SMALL)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="taken"):
        prepare("synthetic", tmp_path / "file", options=SMALL)


def test_a_folder_that_lost_a_file_or_a_newer_summary_is_not_reused(tmp_path):
    prepare("synthetic", tmp_path / "out", options=SMALL)
    (tmp_path / "out/valid/part-00000.parquet").unlink()
    with pytest.raises(UserError, match=r"\['valid'\] lost rows"):
        prepare("synthetic", tmp_path / "out", options=SMALL)
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    for wrong in ({**summary, "more": 1}, [], {**summary, "splits": {"train": {}}}):
        (tmp_path / "out/summary.json").write_text(json.dumps(wrong))
        with pytest.raises(UserError, match="without a readable"):
            prepare("synthetic", tmp_path / "out", options=SMALL)


def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch):
    class Dies(Synthetic):
        def tables(self):
            yield from list(super().tables())[:2]
            raise KeyboardInterrupt

    monkeypatch.setitem(DATASETS, "synthetic", Dies)
    with pytest.raises(KeyboardInterrupt):
        prepare("synthetic", tmp_path / "out", options=SMALL)
    assert list(tmp_path.iterdir()) == []


def test_of_two_runs_at_once_the_later_reuses_the_earlier(tmp_path, monkeypatch):
    class Slow(Synthetic):
        def facts(self):
            monkeypatch.setitem(DATASETS, "synthetic", Synthetic)
            prepare("synthetic", tmp_path / "out", options=SMALL)  # another process gets there first
            return super().facts()

    monkeypatch.setitem(DATASETS, "synthetic", Slow)
    assert prepare("synthetic", tmp_path / "out", options=SMALL).reused
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_empty_folder_and_missing_parents_are_fine(tmp_path):
    (tmp_path / "empty").mkdir()
    assert not prepare("synthetic", tmp_path / "empty", options=SMALL).reused
    assert not prepare("synthetic", tmp_path / "a/b/c", options=SMALL).reused


def test_an_output_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        prepare("synthetic", tmp_path / "file" / "out", options=SMALL)


def test_unknown_names_and_options_suggest_the_nearest(tmp_path):
    with pytest.raises(UserError, match="mean 'synthetic'"):
        prepare("synthetics", tmp_path / "out")
    with pytest.raises(UserError, match="Allowed: movielens-100k, movietweetings-100k, synthetic"):
        prepare("criteo", tmp_path / "out")
    with pytest.raises(UserError, match=r"(?s)2 problems.*row: unknown option. Did you mean 'rows'") as error:
        prepare("synthetic", tmp_path / "out", options={"row": 3, "seed": -1})
    assert "seed: Input should be greater than or equal to 0, received -1" in str(error.value)
    with pytest.raises(UserError, match=r"(?s)rows: unknown option.*give no option"):
        prepare("movielens-100k", tmp_path / "out", options={"rows": 3})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["output", "name", "source", "options", "self"])
def test_no_name_of_an_option_hits_an_argument(tmp_path, key):
    with pytest.raises(UserError, match=f"{key}: unknown option"):
        prepare("synthetic", tmp_path / "out", options={"rows": "100", key: "x"})


def test_the_command_hands_every_option_on_as_an_option(tmp_path):
    keys = ["output", "name", "source"]
    command = [sys.executable, "-m", "recsys", "prepare", "synthetic", *(f"{key}=x" for key in keys)]
    done = subprocess.run([*command, "--output", tmp_path / "out"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert all(f"{key}: unknown option" in done.stderr for key in keys)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mean_history", "inf"),
        ("mean_history", "nan"),
        ("mean_history", "1e300"),
        ("users", str(10**23)),
        ("items", str(10**23)),
        ("categories", str(10**23)),
        ("contexts", f"20,{10**23}"),
        ("contexts", ",".join(["2"] * 1_001)),
        ("numbers", str(10**9)),
        ("rows", str(10**23)),
        ("seed", str(10**23)),
        ("max_history", str(10**9)),
        ("zipf", "1e300"),
        ("main", "inf"),
        ("main", "1e308"),
        ("interaction", "1e308"),
        ("match", "inf"),
        ("click_share", "nan"),
    ],
)
def test_numbers_beyond_any_use_are_one_clear_error(tmp_path, key, value):
    with pytest.raises(UserError, match=rf"(?s)1 problem\).*- {key}[^\n]*received"):
        prepare("synthetic", tmp_path / "out", options={"rows": "100", key: value})
    assert not (tmp_path / "out").exists()


def test_a_home_that_is_not_known_is_a_clear_error():
    with pytest.raises(UserError, match="~nouser/out"):
        prepare("synthetic", "~nouser/out", options=SMALL)


def rows(numbers, lists, words) -> pa.Table:
    return pa.table({"n": numbers, "l": pa.array(lists, pa.list_(pa.int64())), "w": words})


def digest(*tables: pa.Table) -> str:
    result = ValueDigest()
    for table in tables:
        result.update(table)
    return result.hexdigest()


def test_the_checksum_sees_values_and_not_how_they_are_cut():
    table = rows([1, 2, 3, 4], [[1, 2], [], [3], [4, 5]], ["ab", "", "c\xe9", "d"])
    assert digest(table) == digest(table.slice(0, 1), table.slice(1, 0), table.slice(1, 3))
    changed = [
        rows([1, 2, 3, 5], [[1, 2], [], [3], [4, 5]], ["ab", "", "c\xe9", "d"]),
        rows([1, 2, 3, 4], [[1], [2], [3], [4, 5]], ["ab", "", "c\xe9", "d"]),
        rows([1, 2, 3, 4], [[1, 2], [], [3], [4, 5]], ["a", "b", "c\xe9", "d"]),
        rows(np.array([1, 2, 3, 4], np.int32), [[1, 2], [], [3], [4, 5]], ["ab", "", "c\xe9", "d"]),
        table.rename_columns(["m", "l", "w"]),
        table.take([1, 0, 2, 3]),
    ]
    assert len({digest(table), *map(digest, changed)}) == 1 + len(changed)


def test_nulls_are_caught_before_they_reach_a_file():
    with pytest.raises(AssertionError, match="column w holds nulls"):
        digest(rows([1], [[1]], [None]))
