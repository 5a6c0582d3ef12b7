import datetime
import json
import math
import pathlib

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import yaml

from recsys import recipe_file
from recsys.data.prepare import prepare
from recsys.errors import UserError
from recsys.predict import evaluate, predict
from recsys.train import Result, train


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("data") / "synthetic"
    prepare("synthetic", folder, options={"rows": 4000, "users": 40, "items": 50, "main": 1.5, "match": 4, "seed": 5})
    return folder


@pytest.fixture
def run(data, tmp_path):
    """`run(name, *overrides)`: train the small recipe on one rank in this process."""

    def run(name: str, *overrides: str, model: str = "din") -> Result:
        text = yaml.safe_dump(
            {
                "model": {"name": model, "hidden": [8], **({"attention_hidden": [4]} if model == "din" else {})},
                "data": {split: str(data / split) for split in ("train", "valid", "test")}
                | {"group": "user_id", "batch_size_per_rank": 100, "shuffle_rows": 1000},
                "features": [
                    {"kind": "id", "columns": ["user_id", "item_id", "category_id"]},
                    {"kind": "history", "of": {"history_item_id": "item_id", "history_category_id": "category_id"}},
                    {"kind": "number", "columns": ["number_1"]},
                ],
                "tables": {"default": {"dim": 4, "rows": 200, "l2": 0.01}},
                "train": {"epochs": 2, "device": "cpu", "log_every_steps": 1},
            }
        )
        return train(recipe_file.parse(text, overrides), run=str(tmp_path / name))

    return run


def losses(result: Result) -> list[float]:
    lines = (result.run / "train_loss.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_the_same_seed_gives_the_same_run_and_another_seed_another(run):
    first, second, other = run("a"), run("b"), run("c", "train.seed=2")
    assert losses(first) == losses(second)
    assert first.metrics["test"] == second.metrics["test"]
    assert losses(first) != losses(other)


def test_evaluation_between_epochs_does_not_change_training(run):
    assert losses(run("a")) == losses(run("b", "data.valid=null"))


def test_the_overlapped_pipeline_trains_the_same_as_the_plain_one(run, caplog):
    caplog.set_level("INFO", logger="recsys")
    plain, overlapped = run("a", "train.pipeline=plain"), run("b", "train.pipeline=sparse_dist")
    assert "during a step: no (train.pipeline=plain)" in (plain.run / "log.txt").read_text()
    assert "during a step: yes (train.pipeline=sparse_dist)" in (overlapped.run / "log.txt").read_text()
    assert losses(overlapped) == pytest.approx(losses(plain), abs=1e-6)
    assert overlapped.metrics["test"]["auc"] == pytest.approx(plain.metrics["test"]["auc"], abs=1e-6)


def test_every_epoch_takes_the_agreed_steps_and_shuffles_anew(run):
    result = run("a", "train.epochs=3")
    curve = losses(result)
    assert len(curve) == 3 * math.ceil(3200 / 100)
    assert result.metrics["step"] <= len(curve)
    epochs = [curve[i * 32 : (i + 1) * 32] for i in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_best_epoch_is_kept_and_training_stops_early(run, data):
    settings = ("optimizer.sparse.learning_rate=1.0", "optimizer.dense.learning_rate=0.1")
    result = run("a", "train.epochs=12", "train.patience=2", *settings)
    lines = [json.loads(line) for line in (result.run / "metrics.jsonl").read_text().splitlines()]
    valid = [line for line in lines if line["split"] == "valid"]
    best = max(valid, key=lambda line: line["auc"])
    assert result.metrics["best_epoch"] == best["epoch"]
    assert result.metrics["epochs"] == len(valid) == best["epoch"] + 2 < 12, "choose settings that overfit"
    steps = [line["step"] for line in valid]
    kept = sorted({best["step"], *steps[-2:]})
    assert sorted(path.name for path in (result.run / "checkpoints").iterdir()) == [f"step_{s:08d}" for s in kept]
    again = evaluate(str(result.run), data_path=str(data / "valid"))
    assert again["auc"] == pytest.approx(best["auc"], abs=1e-9)
    tested = evaluate(str(result.run))
    assert tested.pop("slices") == result.metrics["slices"]["test"]
    assert tested.pop("traffic") == result.metrics["traffic"]["test"]
    assert tested == pytest.approx(result.metrics["test"], abs=1e-9)


def test_logloss_as_monitor_keeps_the_lowest(run):
    settings = ("optimizer.sparse.learning_rate=1.0", "optimizer.dense.learning_rate=0.1", "train.epochs=5")
    result = run("a", "train.monitor=logloss", *settings)
    lines = [json.loads(line) for line in (result.run / "metrics.jsonl").read_text().splitlines()]
    valid = {line["epoch"]: line["logloss"] for line in lines if line["split"] == "valid"}
    assert result.metrics["best_epoch"] == min(valid, key=valid.get)


def test_a_loss_that_is_no_number_stops_the_run_and_says_where(run):
    with pytest.raises(UserError, match=r"not finite at step \d+.*learning_rate"):
        run("a", "optimizer.dense.learning_rate=1e30", "train.epochs=3", model="deepfm")


def test_a_damaged_checkpoint_is_refused(run, data):
    result = run("a")
    checkpoint = result.run / "checkpoints" / f"step_{result.metrics['step']:08d}"
    (shard,) = checkpoint.glob("*.distcp")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(UserError, match="missing or damaged"):
        evaluate(str(result.run))
    shard.write_bytes(whole)
    text = (result.run / "recipe.yaml").read_text()
    (result.run / "recipe.yaml").write_text(text.replace("rows: 200", "rows: 300"))
    with pytest.raises(UserError, match=r"(?s)does not fit the model.*\[203, 4\].*\[303, 4\]"):
        evaluate(str(result.run))
    (result.run / "recipe.yaml").write_text(text)
    for folder in (result.run / "checkpoints").iterdir():
        (folder / "complete.json").unlink()
    with pytest.raises(UserError, match="no complete checkpoint"):
        evaluate(str(result.run))
    with pytest.raises(UserError, match="not a complete checkpoint"):
        evaluate(str(checkpoint))


def test_where_the_monitored_metric_is_undefined_the_newest_epoch_is_kept(run, data, tmp_path):
    table = pq.read_table(data / "valid")
    (tmp_path / "ones").mkdir()
    pq.write_table(table.filter(pc.equal(table["label"], 1)), tmp_path / "ones" / "part.parquet")
    result = run("a", f"data.valid={tmp_path / 'ones'}", f"data.test={tmp_path / 'ones'}", "train.epochs=3")
    assert result.metrics["valid"]["auc"] is None and result.metrics["test"]["auc"] is None
    assert result.metrics["best_epoch"] == 3
    assert result.metrics["test"]["logloss"] > 0
    assert "undefined" in result.report.read_text()


def test_predictions_keep_the_keys_and_never_land_in_the_data(run, data, tmp_path):
    result = run("a")
    source = tmp_path / "own.parquet"
    pq.write_table(pq.read_table(data / "test").drop_columns(["label"]), source)
    before = source.read_bytes()
    for output in (source, tmp_path / "no" / "x.parquet", tmp_path):
        with pytest.raises(UserError, match="Received"):
            predict(str(result.run), data_path=str(source), output=str(output))
    assert source.read_bytes() == before
    with pytest.raises(UserError, match="part of the data"):
        predict(str(result.run), data_path=str(data / "test"), output=str(data / "test" / "more.parquet"))
    num_rows = predict(str(result.run), data_path=str(source), output=str(tmp_path / "out.parquet"))
    found = pq.read_table(tmp_path / "out.parquet")
    assert num_rows == found.num_rows == pq.read_table(source).num_rows
    assert found.schema.names == ["user_id", "item_id", "category_id", "probability"]


def test_a_folder_with_anything_in_it_is_not_taken_for_a_run(run, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "metrics.json").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file", "file/below"):
        with pytest.raises(UserError, match="run folder"):
            run(name)
    assert (tmp_path / "full" / "metrics.json").read_text() == "mine"
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["metrics.json"]


def test_the_shortest_recipe_trains(data, tmp_path):
    text = f"{{model: {{name: deepfm}}, data: {{train: {data}/train}}, features: [{{kind: id, columns: [item_id]}}]}}"
    result = train(recipe_file.parse(text, ["train.device=cpu"]), run=str(tmp_path / "run"))
    assert result.metrics["best_epoch"] == 1 and "test" not in result.metrics
    lines = [json.loads(line) for line in (result.run / "metrics.jsonl").read_text().splitlines()]
    assert [line["split"] for line in lines] == ["train"]
    with pytest.raises(UserError, match="no test set"):
        evaluate(str(result.run))


def test_cut_histories_are_counted(run, data):
    lengths = pc.list_value_length(pq.read_table(data / "train")["history_item_id"]).to_pylist()
    result = run("a", "features.1.max_length=5", "train.epochs=1")
    expected = sum(length > 5 for length in lengths)
    changed = result.metrics["changed"]["train"]
    assert changed == {"cut/history_category_id": expected, "cut/history_item_id": expected}


def test_two_runs_that_start_in_one_second_get_folders_of_their_own(data, tmp_path, monkeypatch):
    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 2, 3, 4, 5, tzinfo=tz)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("recsys.run_folder.datetime.datetime", Clock)
    text = f"{{model: {{name: deepfm}}, data: {{train: {data}/train}}, features: [{{kind: id, columns: [item_id]}}]}}"
    recipe = recipe_file.parse(text, ["train.device=cpu"])
    folders = [train(recipe, name="x").run for _ in range(2)]
    assert [str(folder) for folder in folders] == ["runs/x-20260102-030405", "runs/x-20260102-030405-2"]
