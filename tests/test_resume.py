"""A run that goes on is the run that never stopped."""

import functools
import json
import pathlib
import shutil
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from recsys import checkpoint, recipe_file, refresh
from recsys.data.prepare import prepare
from recsys.errors import UserError
from recsys.train import train
from tests._train_part import run as train_part

WORKER = pathlib.Path(__file__).parent / "_train_part.py"
NUM_ROWS = 1600  # of the training set


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("data") / "synthetic"
    prepare("synthetic", folder, options={"rows": 2000, "users": 40, "items": 50, "main": 1.5, "match": 4, "seed": 5})
    return folder


@pytest.fixture(scope="module")
def recipe(data):
    """`recipe(model)`: the text of a small recipe with hot and cold ids, dropout and shuffling."""

    def recipe(model: str = "deepfm") -> str:
        features = [
            {"kind": "id", "columns": ["user_id", "item_id", "category_id"]},
            {"kind": "history", "of": {"history_item_id": "item_id", "history_category_id": "category_id"}},
            {"kind": "number", "columns": ["number_1"]},
        ]
        return yaml.safe_dump(
            {
                "model": {"name": model, "hidden": [8], "dropout": 0.2}
                | ({"attention_hidden": [4]} if model == "din" else {}),
                "data": {split: str(data / split) for split in ("train", "valid", "test")}
                | {"group": "user_id", "batch_size_per_rank": 64, "shuffle_rows": 300},
                "features": features,
                "tables": {
                    "default": {"dim": 4, "rows": 50, "ids": "hot_cold", "hot": 20, "cold": 10, "cold_hashes": 2}
                },
                "optimizer": {"schedule": {"warmup_steps": 5, "decay": "cosine"}},
                "train": {"epochs": 2, "device": "cpu", "log_every_steps": 1},
                "checkpoint": {"keep": 100},
            }
        )

    return recipe


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    """`whole(model)`: the folder of a run on one rank that nothing has stopped."""

    @functools.cache
    def whole(model: str) -> pathlib.Path:
        folder = tmp_path_factory.mktemp("whole") / model
        train_part({"recipe": recipe(model), "run": str(folder)})
        return folder

    return whole


def part(ranks: int, folder: pathlib.Path, **config: object) -> None:
    """Train on real ranks, one of them in this process."""
    if ranks == 1:
        train_part(config)
        return
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run([*command, str(WORKER), str(file)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def entries(run: pathlib.Path, step: int) -> dict[str, torch.Tensor]:
    """All of a checkpoint as plain tensors, read without this library."""
    plain = run.parent / f"{run.name}-{step}.pt"
    dcp_to_torch_save(run / "checkpoints" / f"step_{step:08d}", plain)
    return torch.load(plain, weights_only=True)


def assert_same(one: dict, two: dict, tolerance: float = 0.0) -> None:
    if tolerance:  # Random states belong to ranks, of which there are others.
        one, two = ({k: v for k, v in found.items() if not k.startswith("rank/")} for found in (one, two))
    assert one.keys() == two.keys()
    for name in one:
        if not tolerance:
            assert torch.equal(one[name], two[name]), name
        else:
            assert one[name].shape == two[name].shape, name
            assert (one[name].double() - two[name].double()).abs().max() <= tolerance, name


def scores(run: pathlib.Path) -> dict:
    """What a run came to, but for its speed."""
    found = json.loads((run / "metrics.json").read_text())
    return {k: v for k, v in found.items() if k not in ("rows_per_s", "reader_wait_share")}


@pytest.mark.parametrize("model", ["deepfm", "din"])
@pytest.mark.parametrize("stop_after", [3, 25, 40], ids=["first epoch", "end of the first epoch", "second epoch"])
def test_a_stopped_run_ends_as_one_that_was_not(recipe, whole, tmp_path, model, stop_after):
    """Weights, optimizers, schedule, dropout, shuffling, vocabularies and statistics, bit for bit; and the metrics."""
    text = recipe(model)
    assert not train_part({"recipe": text, "run": str(tmp_path / "cut"), "stop_after": stop_after})
    assert not (tmp_path / "cut" / "metrics.json").exists()
    train_part({"recipe": text, "run": str(tmp_path / "cut"), "resume": "auto"})
    assert_same(entries(whole(model), 50), entries(tmp_path / "cut", 50))
    assert scores(whole(model)) == scores(tmp_path / "cut")
    curves = [(run / "train_loss.jsonl").read_text().splitlines() for run in (whole(model), tmp_path / "cut")]
    assert curves[0] == curves[1]


@pytest.mark.parametrize("pipeline", ["plain", "sparse_dist"])
def test_a_run_that_goes_on_from_a_delta_ends_as_one_that_was_not_stopped(recipe, whole, tmp_path, pipeline):
    """Full checkpoints every 10 steps, deltas every 4 and when stopped; also where ids are fetched steps ahead."""
    overrides = ["checkpoint.every_steps=10", "checkpoint.delta_steps=4", f"train.pipeline={pipeline}"]
    settings = {"recipe": recipe(), "overrides": overrides, "run": str(tmp_path / "cut")}
    assert not train_part({**settings, "stop_after": 17})
    found = {place.name[-2:]: place for place in checkpoint.complete(tmp_path / "cut" / "checkpoints")}
    numbers = {name: checkpoint.read_about(place).get("delta", {}).get("number") for name, place in found.items()}
    assert numbers == {"04": None, "08": 1, "10": None, "12": 1, "16": 2, "17": 3}
    changed = tmp_path / "changed.parquet"
    assert refresh.write(str(tmp_path / "cut"), str(changed)) == pq.read_metadata(changed).num_rows > 0
    assert not train_part({**settings, "resume": "auto", "stop_after": 23})
    train_part({**settings, "resume": "auto"})
    assert_same(entries(whole("deepfm"), 50), entries(tmp_path / "cut", 50))


@pytest.mark.dist
def test_two_ranks_that_are_stopped_go_on_bit_for_bit(recipe, tmp_path):
    """With all that belongs to a rank alone: random state, statistics of its own, gradients that it holds back."""
    text, folder = recipe("din"), tmp_path
    own = ["train.shared_batch_statistics=false", "train.communication={dense: top_k, top_k_share: 0.1}"]
    part(2, folder, recipe=text, overrides=own, run=str(tmp_path / "whole"))
    part(2, folder, recipe=text, overrides=own, run=str(tmp_path / "cut"), stop_after=5)
    assert [path.name for path in (tmp_path / "cut" / "checkpoints").iterdir()] == ["step_00000007"]
    part(2, folder, recipe=text, overrides=own, run=str(tmp_path / "cut"), resume="auto")
    assert_same(entries(tmp_path / "whole", 26), entries(tmp_path / "cut", 26))
    assert scores(tmp_path / "whole") == scores(tmp_path / "cut")


@pytest.mark.dist
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adagrad"])
def test_any_ranks_and_plans_go_on_with_the_same_weights(recipe, tmp_path, optimizer):
    """Two ranks row-wise, one rank table-wise, two ranks with replicas, against one rank; all rows in every step."""
    common = ["model.dropout=0.0", "optimizer.schedule={decay: constant}", f"optimizer.sparse.name={optimizer}"]
    text = recipe("deepfm")
    whole = [*common, "train.epochs=6", f"data.batch_size_per_rank={NUM_ROWS}"]
    part(1, tmp_path, recipe=text, overrides=whole, run=f"{tmp_path}/one")
    for ranks, kind, epochs in ((2, "row_wise", 2), (1, "table_wise", 4), (2, "data_parallel", 6)):
        rows = f"data.batch_size_per_rank={NUM_ROWS // ranks}"
        overrides = [*common, f"train.epochs={epochs}", f"tables.default.sharding={kind}", rows]
        part(ranks, tmp_path, recipe=text, overrides=overrides, run=f"{tmp_path}/mixed", resume="auto")
    assert_same(entries(tmp_path / "one", 6), entries(tmp_path / "mixed", 6), tolerance=1e-5)


def test_an_epoch_goes_on_with_other_ranks_and_reads_each_row_once(recipe, tmp_path):
    run, text = tmp_path / "run", recipe()
    assert not train_part({"recipe": text, "run": str(run), "stop_after": 4})
    part(2, tmp_path, recipe=text, run=str(run), resume="auto")
    steps = [json.loads(line)["step"] for line in (run / "train_loss.jsonl").read_text().splitlines()]
    rest = -(-(NUM_ROWS - 4 * 64) // (2 * 64))
    assert steps == list(range(1, 4 + rest + -(-NUM_ROWS // 128) + 1))


def test_damaged_and_unfinished_checkpoints_are_told_and_skipped(recipe, tmp_path, caplog):
    run, text = tmp_path / "run", recipe()
    train_part({"recipe": text, "overrides": ["checkpoint.every_steps=5"], "run": str(run), "stop_after": 22})
    folders = sorted((run / "checkpoints").iterdir())
    assert [folder.name[-2:] for folder in folders] == ["05", "10", "15", "20", "22"]
    (folders[-1] / "complete.json").unlink()
    shard = next(folders[-2].glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    caplog.set_level("INFO", logger="recsys")
    train_part({"recipe": text, "run": str(run), "resume": "auto"})
    said = [record.getMessage() for record in caplog.records]
    assert sum("Skipped" in line and ("step_00000022" in line or "step_00000020" in line) for line in said) == 2
    assert any(line.startswith("Going on from") and "step_00000015" in line for line in said)


def test_resuming_says_fresh_start_or_refuses_what_is_not_there(recipe, tmp_path, caplog):
    caplog.set_level("INFO", logger="recsys")
    text = recipe()
    parsed = recipe_file.parse(text, ["train.epochs=1"])
    with pytest.raises(UserError, match="no complete checkpoint"):
        train(parsed, run=str(tmp_path / "a"), resume=str(tmp_path / "nowhere"))
    first = train(parsed, run=str(tmp_path / "b"), resume="auto")
    assert any("Fresh start" in record.getMessage() for record in caplog.records)
    with pytest.raises(UserError, match="has ended"):
        train(recipe_file.parse(text, ["train.epochs=1", "train.seed=9"]), run=str(tmp_path / "b"), resume="auto")
    log = (tmp_path / "b" / "train_loss.jsonl").read_text()
    again = train(parsed, run=str(tmp_path / "b"), resume="auto")
    assert "has ended" in caplog.records[-1].getMessage() and again.report.exists()
    assert again.metrics == json.loads(json.dumps(first.metrics)), "what a scheduler starts once too often succeeds"
    assert (tmp_path / "b" / "train_loss.jsonl").read_text() == log
    with pytest.raises(UserError, match=r"already belongs to a run.*--resume auto"):
        train(parsed, run=str(tmp_path / "b"))


def test_going_on_inside_an_epoch_with_other_data_is_refused(recipe, data, tmp_path):
    text = recipe()
    assert not train_part({"recipe": text, "run": str(tmp_path / "a"), "stop_after": 3})
    with pytest.raises(UserError, match=r"(?s)inside an epoch.*shuffle_rows is 7, was 300"):
        train_part({"recipe": text, "overrides": ["data.shuffle_rows=7"], "run": str(tmp_path / "a"), "resume": "auto"})


@pytest.mark.parametrize("lost", ["model/model.output.weight", "optimizer/model.output.weight/exp_avg"])
def test_a_missing_entry_is_named(recipe, tmp_path, lost):
    run, text = tmp_path / "run", recipe()
    train_part({"recipe": text, "run": str(run), "stop_after": 3})
    folder = run / "checkpoints" / "step_00000003"
    about = json.loads((folder / "complete.json").read_text())
    whole = entries(run, 3)
    del whole[lost], about["entries"][lost]
    shutil.rmtree(folder)
    dcp.save(whole, checkpoint_id=folder)
    about["files"] = {path.name: path.stat().st_size for path in folder.iterdir()}
    (folder / "complete.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match=f"{lost}: saved nothing"):
        train_part({"recipe": text, "run": str(run), "resume": "auto"})


def test_a_warm_start_takes_what_fits_and_lists_the_rest(recipe, tmp_path, caplog):
    text = recipe()
    train(recipe_file.parse(text, ["train.epochs=1"]), run=str(tmp_path / "old"))
    caplog.set_level("INFO", logger="recsys")
    overrides = ["model.hidden=[12]", f"train.warm_start={tmp_path / 'old'}", "checkpoint.every_steps=1"]
    train_part({"recipe": text, "overrides": overrides, "run": str(tmp_path / "new"), "stop_after": 1})
    said = [record.getMessage() for record in caplog.records]
    assert any("Left out: model/model.tower.layers.0.weight" in line for line in said)
    assert not any("Left out" in line and "embedding_bags" in line for line in said)
    old, new = entries(tmp_path / "old", 25), entries(tmp_path / "new", 1)
    name = next(name for name in old if "table_item_id" in name and name.startswith("model/"))
    fresh = json.loads((tmp_path / "new" / "checkpoints" / "step_00000001" / "complete.json").read_text())["step"]
    assert fresh == 1
    unchanged = (old[name] == new[name]).all(dim=1)
    assert unchanged.any() and (old[name] - new[name]).abs().max() < 0.2
