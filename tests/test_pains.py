"""Every complaint of docs/pains.md names its tests; those without a better place are here."""

import ast
import collections
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from recsys import ids, models, recipe_file
from recsys.check import check
from recsys.data.batch import Batch
from recsys.data.parquet import ParquetData
from recsys.data.reader import Reader
from recsys.encoder import Encoder
from recsys.errors import UserError
from recsys.models import DINConfig, Field, History, Inputs, Table
from recsys.predict import evaluate, predict
from recsys.train import train
from tests._reference_hash import WORD, splitmix64

ROOT = pathlib.Path(__file__).parents[1]
HARD_LIMIT_S = 240
NUM_COMPLAINTS = {
    "Data and features": 29,
    "Hashing and cold ids": 11,
    "Sharding and ranks": 10,
    "Training, metrics and checkpoints": 29,
    "Launching on clusters": 13,
}


# The document.


def complaints() -> dict[str, list[list[str]]]:
    """Heading -> cells of the rows of its table."""
    sections = re.split(r"^## ", (ROOT / "docs" / "pains.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    found = {}
    for section in sections:
        heading, _, text = section.partition("\n")
        lines = [line.strip().strip("|").split("|") for line in text.splitlines() if re.match(r"\| \d", line)]
        found[heading] = [[cell.strip() for cell in line] for line in lines]
    return found


def names_in(path: pathlib.Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_complaint_has_a_row_that_names_tests_which_exist_or_a_reason():
    found = complaints()
    assert {heading: len(rows) for heading, rows in found.items()} == NUM_COMPLAINTS
    for heading, rows in found.items():
        assert [int(row[0]) for row in rows] == list(range(1, len(rows) + 1)), heading
        for _, _, answer, tests in rows:
            named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)
            assert len(named) == tests.count("::"), f"a test is not written as `tests/file.py::name`: {tests}"
            assert named or answer.startswith("Does not apply: "), f"neither a test nor a reason: {answer}"
            for path, name in named:
                assert (ROOT / path).is_file() and name in names_in(ROOT / path), f"{path}::{name} does not exist"


# Ids.


def encoder_of(tables: dict, **kinds: dict) -> Encoder:
    content = {
        "model": {"name": "deepfm"},
        "data": {"train": "unused"},
        "features": [{"kind": "id", "columns": ["item"], **kinds}],
        "tables": {"item": tables},
    }
    return Encoder(recipe_file.parse(yaml.safe_dump(content)))


def test_ids_5_and_9984_never_index_a_table_of_two_rows_as_they_are():
    table = pa.table({"item": [5, 9984, 9984], "label": [0, 1, 1]})
    with pytest.raises(UserError, match=r"row 0\. Received: 5\. Allowed: 0\.\.1"):
        encoder_of({"ids": "exact", "rows": 2}).encode(table, np.arange(3))
    dense = encoder_of({"ids": "hot_cold", "hot": 2, "cold": 0})
    dense.set_vocabulary("item", np.array([5, 9984]), np.array([4, 3]))
    assert dense.encode(table, np.arange(3)).pooled.values().tolist() == [4, 3, 3]
    hashed = encoder_of({"ids": "hashed", "rows": 2}).encode(table, np.arange(3)).pooled.values().tolist()
    assert hashed == [3 + (splitmix64(i) * 2 >> 64) for i in (5, 9984, 9984)]


def test_neighbours_above_2_to_the_53_with_nulls_among_them_keep_their_rows_from_file_to_batch(tmp_path):
    values = [2**53, 2**53 + 1, None, 2**53 + 2, 2**63 - 1, 2**63 - 2]
    item = pa.array(values, pa.int64())
    pq.write_table(pa.table({"item": item, "label": [0] * 6}), tmp_path / "a.parquet")
    ((table, rows),) = Reader(ParquetData(tmp_path), ["item", "label"], batch_size=9).iterate(0)
    encoder = encoder_of({"ids": "hot_cold", "hot": 5, "cold": 1})
    known = np.array(sorted(v for v in values if v is not None))
    encoder.set_vocabulary("item", known, np.arange(3, 8))
    assert encoder.encode(table, rows).pooled.values().tolist() == [3, 4, 1, 5, 7, 6]
    as_float = table.set_column(0, "item", pa.array([v and float(v) for v in values]))
    with pytest.raises(UserError, match=r"floating-point numbers.*lose digits"):
        encoder.encode(as_float, rows)


@pytest.mark.parametrize("num_hashes", [1, 2])
def test_hot_and_cold_rows_of_an_exported_policy_are_those_of_the_documents_for_ids_never_seen_too(num_hashes):
    policy = ids.HotColdIds(3, 7, num_hashes)
    policy.keys.copy_(torch.tensor([-5, 2**53 + 1, 2**63 - 1]))
    policy.rows.copy_(torch.tensor([5, 3, -1]))
    keys = [2**53 + 1, -5, 2**53, 0, -1, 2**63 - 1, -(2**63), 77]
    half = -(-7 // num_hashes)
    rows = [6 + (splitmix64(key % WORD) * half >> 64) for key in keys]
    seconds = [6 + half + (splitmix64((key + 0x9E3779B97F4A7C15) % WORD) * (7 - half) >> 64) for key in keys]
    rows[:2], seconds[:2] = [3, 5], [-1, -1]
    found = torch.export.export(policy, (torch.tensor(keys),)).module()(torch.tensor(keys))
    assert found[0].tolist() == rows
    assert found[1] is None if num_hashes == 1 else found[1].tolist() == seconds


def test_a_history_without_its_target_is_an_error_that_names_both():
    features = [{"kind": "id", "columns": ["user"]}, {"kind": "history", "of": {"clicked": "item"}}]
    content = {"model": {"name": "din"}, "data": {"train": "t"}, "features": features}
    with pytest.raises(UserError, match="history 'clicked' is compared with 'item', which no `id` feature declares"):
        recipe_file.parse(yaml.safe_dump(content))


def test_a_missing_column_and_a_wrong_type_are_told_in_one_go_and_so_are_the_mistakes_of_a_recipe(tmp_path):
    pq.write_table(pa.table({"item": [1], "age": ["x"], "label": [1]}), tmp_path / "a.parquet")
    features = [{"kind": "id", "columns": ["item", "user"]}, {"kind": "number", "columns": ["age"]}]
    content = {"model": {"name": "deepfm"}, "data": {"train": str(tmp_path)}, "features": features}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(content))
    start_s = time.perf_counter()
    problems = check(str(tmp_path / "r.yaml"), [])
    assert len(problems) == 2 and "'user' is missing" in problems[0] + problems[1]
    assert any("'age' has the type string" in problem for problem in problems)
    (problem,) = check(str(tmp_path / "r.yaml"), ["tables.shop.dim=3", "train.monitor=gauc"])
    assert "(2 problems)" in problem and "tables.shop: no feature uses" in problem and "train.monitor" in problem
    assert time.perf_counter() - start_s < 5
    assert not torch.distributed.is_initialized()


# Batches made by hand.

INPUTS = Inputs(
    tables=[Table("item", 20, 4, init_std=0.5), Table("tag", 9, 4, init_std=0.5)],
    fields=[Field("item", "item"), Field("tags", "tag", "mean")],
    histories=[History({"seen": "item"})],
)
JAGGED = {
    "item": ([3, 7], [1, 1]),
    "tags": ([1, 2, 8], [3, 0]),
    "seen": ([4, 5], [0, 2]),
}


def batch_of(values: torch.dtype, lengths: torch.dtype, names: list[str]) -> Batch:
    jagged = {name: (torch.tensor(v, dtype=values), torch.tensor(n, dtype=lengths)) for name, (v, n) in JAGGED.items()}
    return Batch.from_jagged(INPUTS.layout(attends=True), {name: jagged[name] for name in names})


@pytest.mark.parametrize("values", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("lengths", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("names", [["item", "tags", "seen"], ["seen", "tags", "item"]], ids=" ".join)
def test_integer_widths_and_the_order_of_features_do_not_change_a_score(values, lengths, names):
    model = models.build(INPUTS, DINConfig(attention_hidden=(4,), hidden=(4,))).eval()
    expected = model(batch_of(torch.int64, torch.int64, list(JAGGED)))
    batch = batch_of(values, lengths, names)
    assert {t.dtype for k in (batch.pooled, batch.sequence) for t in (k.values(), k.lengths())} == {torch.int64}
    assert torch.equal(model(batch), expected)
    assert expected[0] != expected[1]


def test_lengths_that_do_not_sum_to_the_values_are_an_error_that_names_the_feature_and_both_numbers():
    layout = INPUTS.layout(attends=True)
    good = {name: (torch.tensor(v), torch.tensor(n)) for name, (v, n) in JAGGED.items()}
    wrong = good | {"tags": (torch.tensor([1, 2, 8]), torch.tensor([3, 1]))}
    with pytest.raises(UserError, match=r"'tags' do not fit.*2 lengths that sum to 4, 3 values"):
        Batch.from_jagged(layout, wrong)
    short = good | {"tags": (torch.tensor([1, 2, 8]), torch.tensor([3]))}
    with pytest.raises(UserError, match=r"'tags' do not fit.*1 lengths that sum to 3, 3 values. Allowed: 2 lengths"):
        Batch.from_jagged(layout, short)


# Whole runs.


def written(path: pathlib.Path, columns: dict, *, batch: int = 50, **content: object) -> str:
    """A parquet file, and beside it a recipe that reads it; returns the recipe's path."""
    pq.write_table(pa.table(columns), path, use_dictionary=False)
    recipe = {
        "model": {"name": "deepfm", "hidden": [4]},
        "data": {"train": str(path), "batch_size_per_rank": batch, "shuffle_rows": 0},
        "train": {"device": "cpu", "threads_per_rank": 1, "log_every_steps": 1},
    }
    path.with_suffix(".yaml").write_text(yaml.safe_dump(recipe | content))
    return str(path.with_suffix(".yaml"))


def test_a_column_a_hundred_million_times_larger_trains_like_the_column_itself(tmp_path):
    rng = np.random.default_rng(0)
    small = rng.normal(0.3, 0.1, 1000)
    columns = {"item": rng.integers(0, 9, 1000), "label": (small > 0.3).astype(np.int8)}
    features = [{"kind": "id", "columns": ["item"]}, {"kind": "number", "columns": ["price"]}]
    losses = []
    for name, price in (("small", small), ("large", small * 1e8)):
        recipe = written(tmp_path / f"{name}.parquet", columns | {"price": price}, features=features)
        run = train(recipe_file.load(recipe), run=str(tmp_path / name)).run
        losses.append([json.loads(line)["loss"] for line in (run / "train_loss.jsonl").read_text().splitlines()])
    assert len(losses[0]) == 20 and losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert losses[1][-1] < losses[1][0]


_TRAIN = """
import sys
from recsys import recipe_file
from recsys.predict import evaluate, predict
from recsys.train import train
train(recipe_file.load(sys.argv[1]), run=sys.argv[2])
with open("/proc/self/status") as status:
    print("peak", next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmHWM")))
"""
CAPACITY = 80_000
NUM_LOOKUPS = 10 * CAPACITY


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> dict[int, tuple[pathlib.Path, int]]:
    """Times of a table's capacity that there are distinct ids, 1 or 10, in as many rows -> run folder, peak MB."""
    folder = tmp_path_factory.mktemp("full")
    processes = {}
    for times in (1, 10):
        numbers = np.random.default_rng(0).permutation(np.arange(NUM_LOOKUPS) % (times * CAPACITY))
        recipe = written(
            folder / f"{times}.parquet",
            {"hashed": numbers * 1_000_003, "mixed": numbers * 7 - 2**40, "label": (numbers % 3 == 0).astype(np.int8)},
            batch=20_000,
            features=[{"kind": "id", "columns": ["hashed", "mixed"]}],
            tables={
                "default": {"dim": 31, "rows": CAPACITY},
                "mixed": {"ids": "hot_cold", "hot": CAPACITY // 2, "cold": CAPACITY // 2, "min_count": 1},
            },
        )
        command = [sys.executable, "-c", _TRAIN, recipe, str(folder / f"run-{times}")]
        environment = {**os.environ, "RECSYS_DATA": str(folder / "home"), "PYTHONPATH": str(ROOT)}
        processes[times] = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        told = {times: process.communicate(timeout=HARD_LIMIT_S)[0] for times, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
    return {times: (folder / f"run-{times}", int(text.split("peak ")[1])) for times, text in told.items()}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_ten_times_more_ids_than_rows_take_the_memory_and_the_checkpoint_of_as_many_ids_as_rows(full):
    """720,000 more rows of 32 numbers would take 92 MB per table, a dictionary of the ids 60 MB."""
    assert abs(full[10][1] - full[1][1]) < 40
    sizes = {n: sum(f.stat().st_size for f in (run / "checkpoints").rglob("*.*")) for n, (run, _) in full.items()}
    assert sizes[1] > 2 * CAPACITY * 32 * 4 and abs(sizes[10] / sizes[1] - 1) < 0.01


def shares(ids_of_row: dict[int, int], hot_rows: int) -> dict[str, float]:
    """Figures of a table of which each id was looked up equally often, by how many ids each of its rows has."""
    num_ids, shared = sum(ids_of_row.values()), [n for n in ids_of_row.values() if n > 1]
    return {
        "occupancy": len(ids_of_row) / CAPACITY,
        "collision_rate": len(shared) / len(ids_of_row),
        "shared_traffic": sum(shared) / num_ids,
        "hot": sum(n for row, n in ids_of_row.items() if row < hot_rows) / num_ids,
    }


@pytest.mark.parametrize("times", [1, 10])
def test_occupancy_collisions_and_traffic_of_a_full_table_equal_a_plain_count(full, times):
    found = json.loads((full[times][0] / "metrics.json").read_text())["tables"]
    numbers, half = range(times * CAPACITY), CAPACITY // 2
    hashed = collections.Counter(splitmix64(n * 1_000_003) * CAPACITY >> 64 for n in numbers)
    # All ids occur equally often, so that the smallest ones are hot.
    cold = (splitmix64((n * 7 - 2**40) % WORD) * half >> 64 for n in numbers[half:])
    mixed = collections.Counter([*range(half), *(half + row for row in cold)])
    for name, ids_of_row, hot_rows in (("hashed", hashed, 0), ("mixed", mixed, half)):
        told = {**found[name], **found[name]["traffic"]}
        expected = shares(ids_of_row, hot_rows)
        assert {key: told[key] for key in expected} == pytest.approx(expected), name
        assert told["lookups"] == NUM_LOOKUPS and told["missing"] == told["unknown"] == 0


def on_two_ranks(*arguments: str) -> None:
    """`recsys ARGUMENTS` on two ranks, to its end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "recsys"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options = {"capture_output": True, "text": True, "timeout": HARD_LIMIT_S, "env": environment}
    done = subprocess.run([*command, *arguments], check=False, **options)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.dist
def test_an_odd_number_of_rows_is_trained_evaluated_and_predicted_on_two_ranks_as_on_one(tmp_path, monkeypatch):
    monkeypatch.setenv("RECSYS_DATA", str(tmp_path / "home"))
    rng = np.random.default_rng(0)
    columns = {
        "row": np.arange(1037),
        "item": rng.zipf(1.3, 1037) % 500,
        "tags": [rng.integers(0, 50, n) for n in rng.integers(0, 4, 1037)],
        "label": rng.integers(0, 2, 1037),
    }
    path = tmp_path / "data.parquet"
    features = [{"kind": "id", "columns": ["item"]}, {"kind": "id_list", "columns": ["tags"]}]
    tables = {"default": {"ids": "hot_cold", "hot": 20, "cold": 9, "cold_hashes": 2, "sharding": "row_wise"}}
    data = {split: str(path) for split in ("train", "valid", "test")} | {"item": "item", "group": "row"}
    recipe = written(path, columns, features=features, tables=tables, data=data | {"batch_size_per_rank": 50})
    train(recipe_file.load(recipe, ["train.epochs=3"]), run=str(tmp_path / "run-1"))
    on_two_ranks("train", recipe, "train.epochs=3", "--run-dir", str(tmp_path / "run-2"))
    one, two = (json.loads((tmp_path / f"run-{ranks}" / "metrics.json").read_text()) for ranks in (1, 2))
    assert (one["tables"], one["traffic"], one["changed"]) == (two["tables"], two["traffic"], two["changed"])
    assert two["step"] in (11, 22, 33) and two["epochs"] == 3 and two["test"]["rows"] == 1037
    for split in ("valid", "test"):
        pairs = zip(one["slices"][split], two["slices"][split], strict=True)
        assert all(a[name] == b[name] for a, b in pairs for name in ("slice", "rows", "positives"))
    predict(str(tmp_path / "run-2"), data_path=str(path), output=str(tmp_path / "1.parquet"))
    arguments = ["--data", str(path), "--output", str(tmp_path / "2.parquet")]
    on_two_ranks("predict", str(tmp_path / "run-2"), *arguments)
    one, two = (pq.read_table(tmp_path / f"{ranks}.parquet") for ranks in (1, 2))
    assert two["row"].to_pylist() == list(range(1037)) and two["item"].to_pylist() == columns["item"].tolist()
    assert np.abs(one["probability"].to_numpy() - two["probability"].to_numpy()).max() < 1e-6
    again = evaluate(str(tmp_path / "run-2"))
    tested = json.loads((tmp_path / "run-2" / "metrics.json").read_text())["test"]
    assert {name: again[name] for name in tested} == pytest.approx(tested, abs=1e-6)
