"""Tables of every id policy in real training: one process, real ranks, every plan, ids that nobody saw before.

    torchrun --nproc-per-node N tests/test_hot_cold_training.py CONFIG.json

is the worker of these tests: it trains the jobs of CONFIG one after another and saves what became of them.
"""

import collections
import contextlib
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torchrec.distributed.train_pipeline import TrainPipelineBase
from typer.testing import CliRunner

from recsys import checkpoint, recipe_file, scoring
from recsys.cli import app
from recsys.data.parquet import ParquetData
from recsys.data.reader import Reader
from recsys.distributed import Ranks, process_group
from recsys.embedding import initial_rows, table_of_parameter
from recsys.encoder import Encoder
from recsys.errors import UserError
from recsys.job import Data, assemble
from recsys.predict import evaluate, predict
from recsys.schema import Table
from recsys.stack import require_stack
from recsys.survey import survey
from recsys.train import Result, train
from tests._reference_hash import fnv1a, splitmix64
from tests._train_batches import whole_weights

HARD_LIMIT_S = 300
NUM_ROWS = 361  # 2 x 180 + 1: with 2 and with 12 steps, two ranks fill the same global batches as one
BATCH_OF_STEPS = {2: 100, 12: 16}  # steps of an epoch -> most rows of one of two ranks
SHARDINGS = ("row_wise", "table_wise", "data_parallel")
POLICIES = ("exact", "hashed", "hot_cold")
POOLINGS = ("sum", "mean", "sequence")


# Data and recipes.


def rows_of_data(num_rows: int = NUM_ROWS, seed: int = 0) -> dict[str, list]:
    """Columns of every kind; items are large and skewed, some of them null, some lists empty or null."""
    rng = np.random.default_rng(seed)

    def item() -> int | None:
        return None if rng.random() < 0.03 else 2**53 + int(rng.zipf(1.4)) % 60

    events = [int(length) for length in rng.integers(0, 6, num_rows)]
    tags = [int(length) for length in rng.integers(0, 5, num_rows)]
    return {
        "user": [int(u) for u in rng.zipf(1.5, num_rows) % 30],
        "shop": [int(s) for s in rng.integers(0, 7, num_rows)],
        "item": [item() for _ in range(num_rows)],
        "items": [[item() for _ in range(n)] if n else (None if rng.random() < 0.5 else []) for n in events],
        "shops": [[int(s) for s in rng.integers(0, 7, n)] if n else None for n in events],
        "bought": [[item() for _ in range(n)] for n in rng.integers(0, 3, num_rows)],
        "tags": [[int(t) for t in rng.zipf(1.5, n) % 40] for n in tags],
        "tag_weights": [[float(w) for w in rng.random(n)] for n in tags],
        "price": [float(p) for p in rng.normal(1e7, 3e6, num_rows)],
        "label": [int(v) for v in rng.integers(0, 2, num_rows)],
        "click": [[0, 1, 2, None][i] for i in rng.choice(4, num_rows, p=[0.4, 0.4, 0.1, 0.1])],
    }


def as_text(values: list) -> list:
    return [as_text(v) if isinstance(v, list) else None if v is None else f"id {v}" for v in values]


def table_of(columns: dict[str, list], kind: str) -> pa.Table:
    """The data with ids as integers, or the same ids as text; `shop` stays a number for exact tables."""
    if kind == "text":
        columns = columns | {name: as_text(columns[name]) for name in ("user", "item", "items", "bought", "tags")}
    types = {name: pa.list_(pa.int64()) for name in ("shops",)}
    return pa.table({name: pa.array(values, types.get(name)) for name, values in columns.items()})


def order_of_one_rank(path: pathlib.Path, steps: int) -> np.ndarray:
    """The order of rows in which one rank makes the same global batches of them as two ranks do."""
    data = ParquetData(path)
    ranks = [Reader(data, ["label"], batch_size=BATCH_OF_STEPS[steps], rank=r, world_size=2) for r in range(2)]
    parts = itertools.chain.from_iterable(zip(*(rank.iterate(0) for rank in ranks), strict=True))
    return np.concatenate([positions for _, positions in parts])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """All data: `KIND-2.parquet` for two ranks, `KIND-1-STEPS.parquet` for one; the cache of vocabularies."""
    folder = tmp_path_factory.mktemp("hot_cold")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECSYS_DATA", str(folder / "home"))
        for kind in ("integers", "text"):
            table = table_of(rows_of_data(), kind)
            pq.write_table(table, folder / f"{kind}-2.parquet", row_group_size=50)
            for steps in BATCH_OF_STEPS:
                order = order_of_one_rank(folder / f"{kind}-2.parquet", steps)
                pq.write_table(table.take(order), folder / f"{kind}-1-{steps}.parquet")
        yield folder


def recipe(kind: str, steps: int, features: list[dict], tables: dict, model: str = "deepfm", **data: str) -> dict:
    settings = {"hidden": [6], **({"attention_hidden": [4]} if model == "din" else {})}
    return {
        "model": {"name": model, **settings},
        "data": {"train": kind, "batch_size_per_rank": BATCH_OF_STEPS[steps], "shuffle_rows": 0, **data},
        "features": features,
        "tables": {"default": {"dim": 3, "init_std": 0.3, "sharding": "row_wise"}, **tables},
        "optimizer": {"sparse": {"learning_rate": 0.1}, "dense": {"learning_rate": 0.01}},
        "train": {"device": "cpu", "threads_per_rank": 1},
    }


HISTORIES = [
    {"kind": "history", "of": {"items": "item", "shops": "shop"}, "max_length": 4},
    {"kind": "history", "of": {"bought": "item"}},
]
IDS = [{"kind": "id", "columns": ["user", "item", "shop"]}, {"kind": "number", "columns": ["price"]}]
TAGS = {"kind": "id_list", "columns": ["tags"], "max_length": 3}


def hot_cold(hashes: int) -> dict[str, dict]:
    """10 hot rows, 7 cold ones (which two hashes share as 4 and 3): rows that do not divide by the ranks."""
    shared = {"ids": "hot_cold", "hot": 10, "cold": 7, "cold_hashes": hashes}
    return {"user": {"ids": "hashed", "rows": 9}, "item": shared, "shop": {"ids": "exact", "rows": 7}, "tags": shared}


def long_jobs() -> dict[str, dict]:
    """12 steps an epoch."""
    everything = [*IDS, *HISTORIES, TAGS]
    weighted = TAGS | {"weights": {"tags": "tag_weights"}}
    uneven = {"item": {"rows": 4091}, "shop": {"ids": "exact", "rows": 7}, "user": {"rows": 1}}
    return {
        "din, 1 hash": recipe("integers", 12, everything, hot_cold(1), "din"),
        "din, 2 hashes": recipe("text", 12, everything, hot_cold(2), "din"),
        "deepfm, 1 hash": recipe("text", 12, everything, hot_cold(1)),
        "deepfm, 2 hashes": recipe("integers", 12, everything, hot_cold(2)),
        "4091, 7 and 1 rows": recipe("integers", 12, IDS, uneven),
        "skipped labels": recipe("integers", 12, [*IDS, TAGS], hot_cold(1), label="click", bad_labels="skip"),
        "weights": recipe("integers", 12, [*IDS, weighted], hot_cold(2)),
    }


def smoke_jobs() -> dict[str, dict]:
    """Every policy under every plan in every use, with one table and with two; 2 steps an epoch."""
    tables = {"exact": {"ids": "exact", "rows": 7}, "hashed": {"rows": 5}, "hot_cold": hot_cold(2)["item"] | {"hot": 3}}
    jobs = {}
    for number, policy, sharding, pooling in itertools.product((1, 2), POLICIES, SHARDINGS, POOLINGS):
        if (sharding, pooling) == ("data_parallel", "sequence"):
            continue  # Refused: see below.
        columns = ["shop", "user"][:number]
        features: list[dict] = [{"kind": "id_list", "columns": ["shops"], "pooling": pooling, "table": "shop"}]
        if pooling == "sequence":
            features = [{"kind": "id", "columns": columns}, {"kind": "history", "of": {"shops": "shop"}}]
        elif number == 2:
            features.append({"kind": "id_list", "columns": ["tags"], "pooling": pooling, "table": "user"})
        used = {name: tables[policy] | {"bad_ids": "clamp", "sharding": sharding} for name in columns}
        model = "din" if pooling == "sequence" else "deepfm"
        jobs[f"{number} {policy} {sharding} {pooling}"] = recipe("integers", 2, features, used, model)
    return jobs


LONG_JOBS = long_jobs()
JOBS = {**smoke_jobs(), **LONG_JOBS}


def steps_of(job: dict) -> int:
    return next(steps for steps, batch in BATCH_OF_STEPS.items() if batch == job["data"]["batch_size_per_rank"])


def alone(name: str) -> str:
    """The job of one rank that a job of two ranks must equal."""
    return name.replace("table_wise", "row_wise").replace("data_parallel", "row_wise")


# The worker.


def run_jobs(config: dict) -> None:
    """Train all jobs on this rank and all others; rank 0 saves what became of them, after each for all so far."""
    found = {}
    with process_group("cpu", threads=1) as ranks:
        for name, job in config["jobs"].items():
            found[name] = run_job(job, ranks)
            if ranks.rank == 0:
                torch.save(found, config["output"])


def run_job(config: dict, ranks: Ranks) -> dict:
    """Scores and whole weights before and after one epoch, and after reading a checkpoint of another run."""
    used = recipe_file.parse(config["recipe"])
    encoder = Encoder(used)
    data = Data.open(used, encoder, ranks)
    learnt = survey(data)
    job = assemble(used, ranks, encoder)
    scores = [scoring.score(job.task, data, data.reader("train"))]
    weights = [whole_weights(job)]
    reader = data.reader("train")
    pipeline = TrainPipelineBase(job.task.train(), job.optimizer(), ranks.device)
    with contextlib.closing(data.batches(reader)) as batches:
        losses = [pipeline.progress(batches)[0].item() for _ in range(reader.num_steps)]
    weights.append(whole_weights(job))
    scores.append(scoring.score(job.task, data, data.reader("train")))
    state = checkpoint.state_of(job.task, encoder)
    checkpoint.save(config["save"], state, encoder, {"step": reader.num_steps})
    if "load" in config:
        checkpoint.load(pathlib.Path(config["load"]), job.task, encoder)
        weights.append(whole_weights(job))
    return {
        "scores": None if scores[0] is None else [torch.from_numpy(s.logits) for s in scores if s is not None],
        "weights": weights,
        "losses": losses,
        "changed": {split: dict(counted) for split, counted in learnt.counters.items()},
        "tables": learnt.tables,
        "kinds": {table["name"]: table["kind"] for table in job.describe_plan()["tables"]},
        "encoder": {name: value.clone() for name, value in encoder.state_dict().items()},
    }


def config_of(folder: pathlib.Path, ranks: int) -> dict:
    """All jobs as one rank or two ranks run them. Two ranks read the checkpoints of one, in the end.

    One rank trains each job under one plan only: what the others are compared with.
    """
    jobs, places = {}, {name: str(number) for number, name in enumerate(JOBS)}
    for name, content in JOBS.items():
        if ranks == 1 and name != alone(name):
            continue
        batch, kind = content["data"]["batch_size_per_rank"], content["data"]["train"]
        file = f"{kind}-2.parquet" if ranks == 2 else f"{kind}-1-{steps_of(content)}.parquet"
        data = {"train": str(folder / file), "batch_size_per_rank": batch if ranks == 2 else 2 * batch}
        text = yaml.safe_dump(content | {"data": content["data"] | data})
        jobs[name] = {"recipe": text, "save": str(folder / f"saved-{ranks}-{places[name]}")}
        if ranks == 2:
            jobs[name]["load"] = str(folder / f"saved-1-{places[alone(name)]}")
    return {"jobs": jobs, "output": str(folder / f"found-{ranks}.pt")}


@pytest.fixture(scope="module")
def all_jobs(folder) -> tuple[dict[int, dict], str]:
    """Ranks -> what became of the jobs: one rank in this process, two real ones in one launch; what the latter said."""
    run_jobs(config_of(folder, 1))
    (folder / "config.json").write_text(json.dumps(config_of(folder, 2)))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, __file__, str(folder / "config.json")]
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=HARD_LIMIT_S, env=environment, check=False)
    return {ranks: torch.load(folder / f"found-{ranks}.pt", weights_only=True) for ranks in (1, 2)}, done.stderr


@pytest.fixture(params=JOBS)
def pair(request, all_jobs) -> tuple[str, dict, dict]:
    """A job, and what became of it on one rank and on two."""
    found, said = all_jobs
    is_there = request.param in found[2]
    assert is_there, f"two ranks did not come to the end of this job or one before it: {said[-3000:]}"
    return request.param, found[1][alone(request.param)], found[2][request.param]


# Two ranks against one.


def assert_close(one: dict, two: dict, tolerance: float) -> None:
    assert one.keys() == two.keys()
    for name in one:
        assert (one[name].double() - two[name].double()).abs().max() <= tolerance, name


@pytest.mark.dist
def test_two_ranks_train_the_weights_and_scores_of_one(pair, folder):
    name, one, two = pair
    assert_close(one["weights"][0], two["weights"][0], 0.0)
    assert_close(one["weights"][1], two["weights"][1], 1e-5)
    order = order_of_one_rank(folder / f"{JOBS[name]['data']['train']}-2.parquet", steps_of(JOBS[name]))
    for at_start_or_end in (0, 1):
        assert (one["scores"][at_start_or_end] - two["scores"][at_start_or_end][order]).abs().max() < 1e-5
    assert set(two["kinds"].values()) == {JOBS[name]["tables"]["default" if name in LONG_JOBS else "shop"]["sharding"]}
    assert len(two["losses"]) == steps_of(JOBS[name]) and np.isfinite(two["losses"]).all()
    for weight, value in one["weights"][1].items():
        assert weight.endswith("bias") or not torch.equal(value, one["weights"][0][weight]), f"{weight} never moved"


@pytest.mark.dist
def test_what_two_ranks_learn_of_the_data_is_what_one_learns(pair):
    _, one, two = pair
    assert two["tables"] == one["tables"]
    assert two["changed"] == one["changed"]
    torch.testing.assert_close(one["encoder"], two["encoder"], rtol=1e-12, atol=0)


@pytest.mark.dist
def test_a_checkpoint_of_one_rank_and_plan_is_read_by_two_ranks_under_another_unchanged(pair):
    _, one, two = pair
    assert_close(one["weights"][1], two["weights"][2], 0.0)


@pytest.mark.dist
def test_no_table_is_rounded_up_to_the_number_of_ranks(all_jobs):
    weights = all_jobs[0][2]["4091, 7 and 1 rows"]["weights"][1]
    rows = {table: len(value) for name, value in weights.items() if (table := table_of_parameter(name)) is not None}
    assert rows == {"item": 4091 + 3, "shop": 7 + 3, "user": 1 + 3}


# Whole runs, with ids in the test set that training never saw.


@pytest.fixture(scope="module")
def train_run(folder):
    """`train_run(kind, name, *overrides)`: a whole run on rows of its own, DIN, one hash of integers or two of text."""
    for (seed, split), kind in itertools.product(enumerate(("train", "other", "test"), 1), ("integers", "text")):
        columns = rows_of_data(seed=seed)
        if split == "test":
            columns["item"][:100] = [10**15 + i for i in range(100)]
            columns["items"], columns["shops"] = [None] * NUM_ROWS, [None] * NUM_ROWS
        pq.write_table(table_of(columns, kind), folder / f"{split}-{kind}.parquet")

    def train_run(kind: str, name: str, *overrides: str) -> Result:
        paths = {split: str(folder / f"{split}-{kind}.parquet") for split in ("train", "test")}
        tables = hot_cold(1 if kind == "integers" else 2)
        del tables["tags"]
        content = recipe(kind, 12, [*IDS, *HISTORIES], tables, "din", **paths)
        return train(recipe_file.parse(yaml.safe_dump(content), overrides), run=str(folder / name))

    return train_run


@pytest.fixture(scope="module", params=["integers", "text"])
def first(request, train_run) -> tuple[str, Result]:
    return request.param, train_run(request.param, f"first-{request.param}")


def without_times(metrics: dict) -> dict:
    return {name: value for name, value in metrics.items() if name not in ("rows_per_s", "reader_wait_share")}


def vocabulary_of(run: pathlib.Path) -> dict:
    table = pq.read_table(run / "vocabulary" / "item.parquet")
    return dict(zip(table["value"].to_pylist(), table["row"].to_pylist(), strict=True))


def state_of(run: pathlib.Path, tmp_path: pathlib.Path) -> dict[str, torch.Tensor]:
    """All entries of a run's checkpoint, read by torch alone."""
    (saved,) = (run / "checkpoints").iterdir()
    dcp_to_torch_save(saved, tmp_path / "whole.pt")
    return torch.load(tmp_path / "whole.pt", weights_only=True)


def test_a_second_run_reuses_the_vocabulary_and_other_data_gets_its_own(first, train_run, folder, caplog):
    kind, result = first
    caplog.set_level("INFO", "recsys")
    again = train_run(kind, f"again-{kind}")
    other = train_run(kind, f"other-{kind}", f"data.train={folder}/other-{kind}.parquet")
    (how, path), (how_other, path_other) = re.findall(r"Table item: .*; vocabulary (.* \w+) (\S+)", caplog.text)
    assert (how, how_other) == ("reused from", "written to") and path != path_other
    for used, run in ((path, result.run), (path, again.run), (path_other, other.run)):
        assert (run / "vocabulary" / "item.parquet").read_bytes() == pathlib.Path(used).read_bytes()
    assert without_times(again.metrics) == without_times(result.metrics)
    assert vocabulary_of(result.run) != vocabulary_of(other.run)


def test_a_grown_vocabulary_keeps_the_rows_of_old_ids_in_the_run_that_names_it(
    first, train_run, folder, caplog, tmp_path
):
    kind, result = first
    caplog.set_level("INFO", "recsys")
    grown, other = folder / f"grown-{kind}", f"data.train={folder}/other-{kind}.parquet"
    wider = [other, "tables.item.hot=30", "tables.item.min_count=1"]
    command = ["vocab", str(result.run / "recipe.yaml"), *wider, "--grow", str(result.run), "--output", str(grown)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    run = train_run(kind, f"grown-run-{kind}", *wider, f"data.vocabulary={grown}").run
    assert f"reused from {grown}" in caplog.text
    old, new = vocabulary_of(result.run), vocabulary_of(run)
    kept = {value: row for value, row in old.items() if row is not None}
    assert kept and kept == {value: new[value] for value in kept}
    state = state_of(run, tmp_path)
    index = zip(*(state[f"encoder/policies.table_item.{name}"].tolist() for name in ("keys", "rows")), strict=True)
    table = pq.read_table(grown / "item.parquet")
    assert {key: row for key, row in index if row >= 0} == {
        key: row for key, row in zip(*(table[name].to_pylist() for name in ("key", "row")), strict=True) if row
    }
    added = [row for value, row in new.items() if row is not None and value not in kept]
    assert sorted(added) == list(range(3 + len(kept), 3 + len(kept) + len(added))) and added


def test_an_evaluation_gives_the_slices_and_traffic_of_the_run_from_its_checkpoint_alone(first, tmp_path, monkeypatch):
    monkeypatch.setenv("RECSYS_DATA", str(tmp_path / "nowhere"))
    shutil.copytree(first[1].run, tmp_path / "run", ignore=shutil.ignore_patterns("vocabulary"))
    tested, final = evaluate(str(tmp_path / "run")), first[1].metrics
    assert (tested.pop("slices"), tested.pop("traffic")) == (final["slices"]["test"], final["traffic"]["test"])
    assert tested == pytest.approx(final["test"], abs=1e-9)


def test_slices_and_traffic_of_ids_never_seen_equal_a_plain_count(first, folder):
    kind, result = first
    tables = [pq.read_table(folder / f"{split}-{kind}.parquet").to_pydict() for split in ("train", "test")]
    seen, hot = collections.Counter(tables[0]["item"]), {v for v, row in vocabulary_of(result.run).items() if row}
    occurrences = [0 if item is None else seen[item] for item in tables[1]["item"]]
    starts = [0, 1, 3, 10, 100, math.inf]
    expected = [sum(a <= n < b for n in occurrences) for a, b in itertools.pairwise(starts)]
    assert [row["rows"] for row in result.metrics["slices"]["test"]] == expected and expected[0] >= 100
    lookups = [*tables[1]["item"], *itertools.chain(*tables[1]["bought"])]
    shares = {"missing": sum(v is None for v in lookups), "hot": sum(v in hot for v in lookups), "unknown": 0}
    shares["cold"] = len(lookups) - sum(shares.values())
    assert result.metrics["traffic"]["test"]["item"] == pytest.approx({k: n / len(lookups) for k, n in shares.items()})


def test_ids_never_seen_score_finite_through_shared_rows_that_training_moved(first, folder, tmp_path):
    kind, result = first
    new = [10**15 + 7 * i for i in range(60)]
    row = pq.read_table(folder / f"test-{kind}.parquet").slice(0, 1).drop_columns(["label", "click"])
    table = pa.concat_tables([row] * len(new))
    values = pa.array(new if kind == "integers" else as_text(new))
    pq.write_table(table.set_column(table.schema.get_field_index("item"), "item", values), tmp_path / "new.parquet")
    predict(str(result.run), data_path=str(tmp_path / "new.parquet"), output=str(tmp_path / "out.parquet"))
    scores = collections.defaultdict(list)
    probabilities = pq.read_table(tmp_path / "out.parquet")["probability"].to_pylist()
    for value, probability in zip(values.to_pylist(), probabilities, strict=True):
        key = value if kind == "integers" else fnv1a(value.encode())
        rows = [13 + (splitmix64(key) * 7 >> 64)]
        if kind == "text":  # two hashes, on 4 and 3 rows
            rows = [13 + (splitmix64(key) * 4 >> 64), 17 + (splitmix64(key + 0x9E3779B97F4A7C15) * 3 >> 64)]
        scores[tuple(rows)].append(probability)
    assert len(scores) == (7 if kind == "integers" else 12) and np.isfinite(probabilities).all()
    assert all(max(alike) - min(alike) < 1e-7 for alike in scores.values())
    assert len({round(alike[0], 6) for alike in scores.values()}) == len(scores)
    state = state_of(result.run, tmp_path)
    (weight,) = (v for n, v in state.items() if n.startswith("model/") and table_of_parameter(n) == "item")
    start = initial_rows(Table("item", len(weight), 3, 0.3), 1, 0, len(weight), 4)
    moved = (weight != start).any(1)
    assert moved[13:20].all(), "all shared rows are trained"
    owned = {row for row in vocabulary_of(result.run).values() if row}
    assert {row for row in range(3, 13) if moved[row]} <= owned and not moved[0]


def test_text_for_a_model_of_integers_is_refused_with_one_message_and_the_other_way_round(first, folder, tmp_path):
    kind, result = first
    path = folder / f"test-{'text' if kind == 'integers' else 'integers'}.parquet"
    with pytest.raises(UserError) as caught:
        predict(str(result.run), data_path=str(path), output=str(tmp_path / "out.parquet"))
    assert "the training data" in str(caught.value) and "never match" in str(caught.value)
    assert not (tmp_path / "out.parquet").exists()


def test_columns_in_another_order_are_predicted_bit_for_bit_alike(first, folder, tmp_path):
    kind, result = first
    table = pq.read_table(folder / f"test-{kind}.parquet")
    pq.write_table(table.select(sorted(table.column_names, reverse=True)), tmp_path / "turned.parquet")
    for path, output in ((folder / f"test-{kind}.parquet", "a.parquet"), (tmp_path / "turned.parquet", "b.parquet")):
        predict(str(result.run), data_path=str(path), output=str(tmp_path / output))
    a, b = (pq.read_table(tmp_path / name) for name in ("a.parquet", "b.parquet"))
    assert a["probability"].equals(b["probability"]) and a.num_rows == NUM_ROWS


def test_a_replicated_table_of_a_history_is_refused_by_the_recipe():
    """The one place of the matrix above that is left out."""
    tables = hot_cold(1) | {"item": hot_cold(1)["item"] | {"sharding": "data_parallel"}}
    with pytest.raises(UserError, match=r"tables\.item\.sharding.*data_parallel"):
        recipe_file.parse(yaml.safe_dump(recipe("integers", 2, [*IDS, *HISTORIES, TAGS], tables, "din")))


if __name__ == "__main__":
    require_stack()
    run_jobs(json.loads(pathlib.Path(sys.argv[1]).read_text()))
