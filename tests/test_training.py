import json
import math
import pathlib

import pytest
import yaml

from recsys import recipe_file
from recsys.data.prepare import prepare
from recsys.errors import UserError
from recsys.predict import evaluate
from recsys.train import Result, train


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("data") / "synthetic"
    prepare("synthetic", folder, rows=4000, users=40, items=50, main=1.5, match=4, seed=5)
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


def test_the_overlapped_pipeline_trains_the_same_as_the_plain_one(run):
    plain, overlapped = run("a", "train.pipeline=plain"), run("b", "train.pipeline=sparse_dist")
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
    assert [path.name for path in (result.run / "checkpoints").iterdir()] == [f"step_{best['step']:08d}"]
    again = evaluate(str(result.run), data_path=str(data / "valid"))
    assert again["auc"] == pytest.approx(best["auc"], abs=1e-9)
    assert evaluate(str(result.run)) == pytest.approx(result.metrics["test"], abs=1e-9)


def test_logloss_as_monitor_keeps_the_lowest(run):
    settings = ("optimizer.sparse.learning_rate=1.0", "optimizer.dense.learning_rate=0.1", "train.epochs=5")
    result = run("a", "train.monitor=logloss", *settings)
    lines = [json.loads(line) for line in (result.run / "metrics.jsonl").read_text().splitlines()]
    valid = {line["epoch"]: line["logloss"] for line in lines if line["split"] == "valid"}
    assert result.metrics["best_epoch"] == min(valid, key=valid.get)


def test_a_loss_that_is_no_number_stops_the_run_and_says_where(run):
    with pytest.raises(UserError, match=r"not finite at step \d+.*learning_rate"):
        run("a", "optimizer.dense.learning_rate=1e30", "train.epochs=3", model="deepfm")


def test_an_evaluation_set_of_one_class_gives_null_metrics_and_no_crash(run, data, tmp_path):
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    table = pq.read_table(data / "valid")
    (tmp_path / "ones").mkdir()
    pq.write_table(table.filter(pc.equal(table["label"], 1)), tmp_path / "ones" / "part.parquet")
    result = run("a", f"data.valid={tmp_path / 'ones'}", f"data.test={tmp_path / 'ones'}")
    assert result.metrics["valid"]["auc"] is None and result.metrics["test"]["auc"] is None
    assert result.metrics["test"]["logloss"] > 0
    assert "undefined" in result.report.read_text()


def test_a_damaged_checkpoint_is_refused(run, data):
    result = run("a")
    (checkpoint,) = (result.run / "checkpoints").iterdir()
    (checkpoint / "complete.json").unlink()
    with pytest.raises(UserError, match="no complete checkpoint"):
        evaluate(str(result.run))
    with pytest.raises(UserError, match="not a complete checkpoint"):
        evaluate(str(checkpoint))
