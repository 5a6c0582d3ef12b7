import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

HARD_LIMIT_S = 120

# The contract that other tools are built on: command -> options. Changing it is a decision, not an accident.
SURFACE = {
    "prepare": {"--output", "--source"},
    "check": set(),
    "plan": {
        *("--nodes", "--devices-per-node", "--device", "--machine", "--memory", "--host-memory"),
        *("--memory-bandwidth", "--intra-bandwidth", "--inter-bandwidth", "--json", "--picture"),
    },
    "train": {"--run", "--run-dir", "--resume"},
    "evaluate": {"--data", "--json"},
    "vocab": {"--output", "--grow", "--json"},
    "predict": {"--data", "--output"},
    "changes": {"--output", "--step"},
    "doctor": {"--network"},
}


def recsys(*arguments: str, ranks: int = 0) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        [sys.executable, *launcher, "-m", "recsys", *arguments],
        capture_output=True,
        text=True,
        timeout=HARD_LIMIT_S,
        env=environment,
        check=False,
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> pathlib.Path:
    """A prepared synthetic data set with a signal that a model can find."""
    folder = tmp_path_factory.mktemp("data") / "synthetic"
    done = recsys(
        "prepare",
        "synthetic",
        "rows=12000",
        "users=50",
        "items=60",
        "main=1.5",
        "match=4",
        "seed=3",
        "--output",
        str(folder),
    )
    assert done.returncode == 0, done.stderr
    return folder


def recipe(data: pathlib.Path, **changes: object) -> dict:
    found = {
        "model": {"name": "din", "hidden": [16], "attention_hidden": [8]},
        "data": {split: str(data / split) for split in ("train", "valid", "test")}
        | {"group": "user_id", "batch_size_per_rank": 128},
        "features": [
            {"kind": "id", "columns": ["user_id", "item_id", "category_id"]},
            {"kind": "history", "of": {"history_item_id": "item_id", "history_category_id": "category_id"}},
            {"kind": "number", "columns": ["number_1"]},
        ],
        "tables": {"default": {"dim": 8, "rows": 1000, "sharding": "row_wise"}},
        "train": {"epochs": 4},
    }
    return found | changes


@pytest.fixture
def write(tmp_path):
    """Write a recipe and return its path."""

    def write(content: dict) -> str:
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(content))
        return str(path)

    return write


def test_the_command_surface_is_frozen():
    from typer.main import get_command

    from recsys.cli import app

    found = {
        name: {option for p in command.params for option in p.opts if option.startswith("--")} - {"--help"}
        for name, command in get_command(app).commands.items()
    }
    assert found == SURFACE


def test_help_and_recipes_load_neither_torch_nor_arrow():
    heavy = {"torch", "torchrec", "pyarrow", "pandas"}
    code = f"import sys, recsys.cli, recsys.recipe_file; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def corrupt(data: pathlib.Path, folder: pathlib.Path, change) -> pathlib.Path:
    """A copy of the training split whose table went through `change`."""
    table = change(pq.read_table(data / "train"))
    folder.mkdir()
    pq.write_table(table, folder / "part.parquet", row_group_size=1000)
    return folder


def set_value(name: str, row: int, value: object):
    def change(table: pa.Table) -> pa.Table:
        values = table[name].to_pylist()
        values[row] = value
        index = table.schema.get_field_index(name)
        return table.set_column(index, name, pa.array(values, table.schema.field(name).type))

    return change


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("key", ["model.hiden", "unknown key", "'hidden'"]),
        ("column", ["numbr_1", "'number_1'"]),
        ("unreadable", ["part.parquet"]),
        ("absent", ["nowhere"]),
        ("id", ["item_id", "row 5003", "70000", "0..999"]),
        ("nan", ["number_1", "row 77", "nan"]),
    ],
)
def test_a_mistake_ends_in_one_error_before_training(data, tmp_path, write, case, words):
    content = recipe(data)
    if case == "key":
        content["model"] = {"name": "din", "hiden": [3]}
    if case == "column":
        content["features"][2] = {"kind": "number", "columns": ["numbr_1"]}
    if case == "unreadable":
        (tmp_path / "broken").mkdir()
        (tmp_path / "broken" / "part.parquet").write_bytes(b"PAR1 this is no parquet file")
        content["data"]["train"] = str(tmp_path / "broken")
    if case == "absent":
        content["data"]["train"] = str(tmp_path / "nowhere")
    if case == "id":
        content["tables"]["item_id"] = {"ids": "exact", "rows": 1000}
        content["data"]["train"] = str(corrupt(data, tmp_path / "bad", set_value("item_id", 5003, 70000)))
    if case == "nan":
        content["data"]["train"] = str(corrupt(data, tmp_path / "bad", set_value("number_1", 77, float("nan"))))
    done = recsys("train", write(content), "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert len(re.findall("^Error: ", done.stderr, re.M)) == 1
    for word in words:
        assert word in done.stderr
    assert not (tmp_path / "run").exists()


def test_check_lists_all_problems_at_once_and_needs_no_torchrec(data, tmp_path, write):
    content = recipe(data)
    content["model"] = {"name": "deepfm", "hidden": [4]}
    content["features"][1:] = [{"kind": "number", "columns": ["numbr_1", "history_item_id"]}]
    content["data"]["valid"] = str(tmp_path / "nowhere")
    for module in ("torchrec", "fbgemm_gpu"):
        (tmp_path / "block" / module).mkdir(parents=True)
        (tmp_path / "block" / module / "__init__.py").write_text("raise ImportError('blocked')")
    done = subprocess.run(
        [sys.executable, "-m", "recsys", "check", write(content)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": f"{tmp_path / 'block'}:{pathlib.Path(__file__).parent.parent}"},
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in ("numbr_1", "history_item_id", "nowhere"):
        assert word in done.stderr


@pytest.mark.dist
def test_a_bad_id_on_one_rank_ends_all_ranks_with_one_error(data, tmp_path, write):
    content = recipe(data)
    content["tables"]["item_id"] = {"ids": "exact", "rows": 1000}
    rows = pq.read_table(data / "train").num_rows
    content["data"]["train"] = str(corrupt(data, tmp_path / "bad", set_value("item_id", rows - 2, -1)))
    done = recsys("train", write(content), "--run-dir", str(tmp_path / "run"), ranks=2)
    assert done.returncode != 0
    assert len(re.findall("^Error: ", done.stderr, re.M)) == 1
    for word in ("rank 1 of 2", "item_id", f"row {rows - 2}", "-1"):
        assert word in done.stderr


@pytest.mark.dist
def test_a_run_explains_itself_and_is_read_back_on_another_number_of_ranks(data, tmp_path, write):
    run = tmp_path / "run"
    done = recsys("train", write(recipe(data)), "--run-dir", str(run), ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    names = "recipe.yaml plan.json environment.json metrics.jsonl metrics.json train_loss.jsonl report.html log.txt"
    assert {path.name for path in run.iterdir()} >= set(names.split()) | {
        "loss.png",
        "auc.png",
        "calibration.png",
        "plan.png",
    }
    final = json.loads((run / "metrics.json").read_text())
    assert final["test"]["auc"] > 0.65, "the synthetic truth was not found"
    first = json.loads((run / "train_loss.jsonl").read_text().splitlines()[0])
    assert 0.5 < first["loss"] < 0.85, "the mean over the rows of all ranks starts near ln 2"
    plan = json.loads((run / "plan.json").read_text())
    for table in plan["tables"]:
        assert table["kind"] == "row_wise"
        assert sum(shard["rows"] for shard in table["shards"]) == table["rows"]

    done = recsys("evaluate", str(run), "--json", str(tmp_path / "again.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    again = json.loads((tmp_path / "again.json").read_text())
    for name, value in final["test"].items():
        assert again[name] == pytest.approx(value, abs=1e-6), name

    # other row order, no label: the same row must get the same probability, at its own place
    table = pq.read_table(data / "test").drop_columns(["label"])
    order = np.random.default_rng(0).permutation(table.num_rows)
    (tmp_path / "shuffled").mkdir()
    pq.write_table(table.take(order), tmp_path / "shuffled" / "part.parquet", row_group_size=100)
    for name, path in (("plain", data / "test"), ("mixed", tmp_path / "shuffled")):
        done = recsys("predict", str(run), "--data", str(path), "--output", str(tmp_path / f"{name}.parquet"))
        assert done.returncode == 0, done.stderr[-3000:]
    plain, mixed = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("plain", "mixed"))
    assert plain.num_rows == table.num_rows
    assert plain["item_id"].to_pylist() == table["item_id"].to_pylist()
    probabilities = plain["probability"].to_numpy()
    assert np.abs(mixed["probability"].to_numpy() - probabilities[order]).max() < 1e-6
    assert probabilities.std() > 0.01
    assert ((probabilities > 0) & (probabilities < 1)).all()


def test_a_used_run_folder_is_refused(data, tmp_path, write):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("mine")
    done = recsys("train", write(recipe(data)), "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "already belongs to a run" in done.stderr
    assert (tmp_path / "run" / "recipe.yaml").read_text() == "mine"


@pytest.mark.dist
def test_ranks_with_statistics_of_their_own_report_the_metrics_of_the_model_that_is_saved(data, tmp_path, write):
    content = recipe(data, train={"epochs": 1, "shared_batch_statistics": False})
    run = tmp_path / "run"
    done = recsys("train", write(content), "--run-dir", str(run), ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    done = recsys("evaluate", str(run), "--json", str(tmp_path / "again.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    expected = json.loads((run / "metrics.json").read_text())["test"]
    again = json.loads((tmp_path / "again.json").read_text())
    assert {name: again[name] for name in expected} == pytest.approx(expected, abs=1e-6)


@pytest.mark.dist
@pytest.mark.parametrize("command", ["train", "predict"])
def test_ranks_that_find_the_same_mistake_say_it_once(data, tmp_path, write, command):
    content = recipe(data)
    content["features"][2] = {"kind": "number", "columns": ["numbr_1"]}
    arguments = {"train": ["train", write(content)], "predict": ["predict", "nowhere", "--data", "x", "--output", "y"]}
    done = recsys(*arguments[command], ranks=2)
    assert done.returncode != 0
    assert len(re.findall("^Error: ", done.stderr, re.M)) == 1
    last_lines = "\n".join(done.stderr.splitlines()[-20:])
    assert {"train": "numbr_1", "predict": "nowhere"}[command] in last_lines, "torchrun's summary shows the cause"
