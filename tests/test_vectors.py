"""Pretrained vectors by raw id: into the rows of those ids, on any plan, and nowhere else."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from recsys import recipe_file
from recsys.check import check
from recsys.data.columns import id_keys
from recsys.distributed import process_group
from recsys.encoder import Encoder
from recsys.errors import UserError
from recsys.job import Job, assemble
from recsys.train import train
from recsys.vectors import Loaded, load_vectors
from tests._train_batches import whole_weights

HARD_LIMIT_S = 120
DIM, NUM_IDS = 6, 100


def recipe(table: dict, model: str = "deepfm") -> str:
    history = [{"kind": "history", "of": {"seen": "user"}}] if model == "din" else []
    return yaml.safe_dump(
        {
            "model": {"name": model, "hidden": [4]},
            "data": {"train": "unused"},
            "features": [{"kind": "id", "columns": ["user"]}, *history],
            "tables": {"user": {"dim": DIM, **table}},
            "train": {"device": "cpu"},
        }
    )


EXACT = {"ids": "exact", "rows": 130}
JOBS = {
    "row_wise": recipe(EXACT | {"sharding": "row_wise"}),
    "table_wise": recipe(EXACT | {"sharding": "table_wise"}),
    "data_parallel": recipe(EXACT | {"sharding": "data_parallel"}),
    "sequence": recipe(EXACT | {"sharding": "row_wise"}, "din"),
    "fp16": recipe(EXACT | {"sharding": "row_wise", "dtype": "fp16"}),
    "columns": recipe(EXACT | {"sharding": "column_wise", "optimizer": "adagrad", "dim": 255}),
    "hashed": recipe({"rows": 80, "sharding": "row_wise"}),
    "hot_cold": recipe({"ids": "hot_cold", "hot": 90, "cold": 10, "cold_hashes": 2, "sharding": "row_wise"}),
}


def ids_of(name: str) -> pa.Array:
    """Odd numbers 1 .. 199, in no order, or the same as text."""
    odd = np.random.default_rng(0).permutation(np.arange(1, 2 * NUM_IDS, 2))
    return pa.array([f"id {i}" for i in odd]) if name in ("hashed", "hot_cold") else pa.array(odd)


def vectors_of(name: str) -> np.ndarray:
    dim = yaml.safe_load(JOBS[name])["tables"]["user"]["dim"]
    return np.random.default_rng(1).normal(size=(NUM_IDS, dim)).astype(np.float16).astype(np.float32)


def assembled(text: str, ranks) -> Job:
    parsed = recipe_file.parse(text)
    return assemble(parsed, ranks, Encoder(parsed))


def give_vocabulary(job: Job, name: str) -> None:
    """The first 60 ids are hot."""
    keys = np.sort(id_keys(ids_of(name)[:60])[0])
    top = np.iinfo(np.int64).max
    filled = np.concatenate([keys, np.full(30, top)])
    job.encoder.set_vocabulary("user", filled, np.concatenate([3 + np.arange(60), np.full(30, -1)]))


def looked_up(job: Job, ids: pa.Array) -> torch.Tensor:
    """(n, dim) what the sharded model reads for raw ids."""
    histories = {"seen": pa.array([[]] * len(ids), pa.list_(ids.type))} if job.recipe.model.attends else {}
    table = pa.table({"user": ids, **histories})
    batch = job.encoder.encode(table, np.arange(len(ids)), labelled=False)
    with torch.no_grad():
        vectors, *_ = job.task.module.model.embeddings(batch.pooled, batch.sequence, batch.weights)
    return vectors["user"][:, : job.recipe.inputs.table("user").dim]


def run_jobs(config: dict) -> None:
    """Load vectors into every job's table and read all ids back; rank 0 saves what was found."""
    found = {}
    with process_group("cpu", threads=1) as ranks:
        for name, text in JOBS.items():
            job = assembled(text, ranks)
            if name == "hot_cold":
                give_vocabulary(job, name)
            for key, value in job.task.state_dict().items():
                if "embeddings" in key:  # first-order weights begin at 0, which hides that they are overwritten
                    for shard in value.local_shards() if hasattr(value, "local_shards") else [value]:
                        getattr(shard, "tensor", shard).add_(1.0)
            before = whole_weights(job)
            loaded = load_vectors(job, "user", ids_of(name), vectors_of(name))
            ids = ids_of(name)
            if "exact" in text:
                ids = ids.filter(pa.array(np.asarray(ids) < 130))
            found[name] = {
                "loaded": [loaded.num_written, loaded.num_shared, loaded.unknown],
                "vectors": looked_up(job, ids),
                "weights": [before, whole_weights(job)],
                "kind": job.describe_plan()["tables"][0]["kind"],
                "shards": len(job.describe_plan()["tables"][0]["shards"]),
            }
        if ranks.rank == 0:
            torch.save(found, config["output"])


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[int, dict]:
    folder = tmp_path_factory.mktemp("vectors")
    run_jobs({"output": str(folder / "1.pt")})
    (folder / "config.json").write_text(json.dumps({"output": str(folder / "2.pt")}))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, __file__, str(folder / "config.json")]
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=HARD_LIMIT_S, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {ranks: torch.load(folder / f"{ranks}.pt", weights_only=True) for ranks in (1, 2)}


EXACT_JOBS = [name for name, text in JOBS.items() if "exact" in text]


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", EXACT_JOBS)
def test_every_id_reads_its_vector_back_and_unknown_ids_are_told(found, name, ranks):
    numbers, got = np.asarray(ids_of(name)), found[ranks][name]
    expected = vectors_of(name)[numbers < 130]
    assert torch.equal(got["vectors"], torch.from_numpy(expected))
    assert got["loaded"] == [65, 0, [n for n in numbers.tolist() if n >= 130]]
    assert got["kind"] == {"columns": "column_wise"}.get(name, "row_wise" if name in ("sequence", "fp16") else name)


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", EXACT_JOBS)
def test_rows_of_other_ids_and_extra_columns_stay(found, name, ranks):
    dim = vectors_of(name).shape[1]
    rows = [3 + n for n in np.asarray(ids_of(name)).tolist() if n < 130]
    before, after = found[ranks][name]["weights"]
    for weight in before:
        same = torch.ones_like(before[weight], dtype=torch.bool)
        if "embeddings" in weight:
            same[rows, :dim] = False
        assert torch.equal(before[weight][same], after[weight][same]), weight


@pytest.mark.dist
def test_two_ranks_hold_parts_of_the_table(found):
    assert [found[2][name]["shards"] for name in ("row_wise", "columns", "sequence", "fp16")] == [2] * 4


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [1, 2])
def test_of_ids_that_share_a_row_the_first_one_writes_it(found, ranks):
    name, got = "hashed", found[ranks]["hashed"]
    policy = Encoder(recipe_file.parse(JOBS[name])).policy("user")
    rows = policy(torch.from_numpy(id_keys(ids_of(name))[0]))[0].tolist()
    expected = torch.stack([torch.from_numpy(vectors_of(name)[rows.index(row)]) for row in rows])
    assert torch.equal(got["vectors"], expected)
    assert got["loaded"] == [len(set(rows)), NUM_IDS - len(set(rows)), []]
    assert 0 < len(set(rows)) < NUM_IDS


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [1, 2])
def test_ids_without_a_row_of_their_own_are_unknown_to_a_hot_cold_table(found, ranks):
    got = found[ranks]["hot_cold"]
    assert got["loaded"] == [60, 0, ids_of("hot_cold")[60:].to_pylist()]
    assert torch.equal(got["vectors"][:60], torch.from_numpy(vectors_of("hot_cold")[:60]))
    before, after = got["weights"]
    (weight,) = [name for name in before if "embeddings" in name]
    assert torch.equal(before[weight][63:], after[weight][63:]), "shared rows stay"


@pytest.mark.parametrize(
    ("table", "ids", "vectors", "expected"),
    [
        (EXACT, [1, 2], np.zeros((2, 5)), r"shape \(2, 5\) for 2 ids. Allowed: \(2, 6\)"),
        (EXACT, [1, 2], np.zeros((3, 6)), r"shape \(3, 6\) for 2 ids"),
        (EXACT, [1, 2], np.array([[0.0] * 6, [0, 0, np.nan, 0, 0, 0]]), "not finite. Received: id 2"),
        (EXACT, [1, None], np.zeros((2, 6)), "An id is null"),
        (EXACT, ["1", "2"], np.zeros((2, 6)), "The ids of 'user' are integers. Received: text"),
    ],
)
def test_what_does_not_fit_is_refused(table, ids, vectors, expected):
    with process_group("cpu", threads=1) as ranks:
        job = assembled(recipe(table), ranks)
        with pytest.raises(UserError, match=expected):
            load_vectors(job, "user", ids, vectors)
        assert load_vectors(job, "user", [], np.zeros((0, 6))) == Loaded(0, 0, [])


def test_ids_of_another_kind_than_the_training_datas_are_refused():
    with process_group("cpu", threads=1) as ranks:
        job = assembled(recipe({"rows": 10}), ranks)
        job.encoder.know_kinds(pa.schema([("user", pa.string())]))
        with pytest.raises(UserError, match="integers: 'user' in the vectors; text: the training data"):
            load_vectors(job, "user", [1], np.zeros((1, 6)))


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    """Training data and vectors for 3 of its ids and an unknown one."""
    users = pa.array([0, 1, 2, 3] * 8)
    pq.write_table(pa.table({"user": users, "label": pa.array([0, 1] * 16)}), tmp_path / "train.parquet")
    vectors = pa.array([[float(i)] * DIM for i in (1, 2, 3, 4)], pa.list_(pa.float64()))
    pq.write_table(pa.table({"id": [1, 2, 3, 999], "vector": vectors}), tmp_path / "vectors.parquet")
    text = recipe(EXACT | {"vectors": str(tmp_path / "vectors.parquet"), "freeze": True})
    (tmp_path / "recipe.yaml").write_text(text.replace("unused", str(tmp_path / "train.parquet")))
    return tmp_path


def test_a_recipe_loads_the_vectors_that_it_names_and_freezes_them(folder, caplog):
    caplog.set_level("INFO", logger="recsys")
    result = train(recipe_file.load(folder / "recipe.yaml"), run=str(folder / "run"))
    text = (result.run / "log.txt").read_text() + caplog.text
    assert "3 of 4 ids written" in text and "1 unknown ids: [999]" in text
    with process_group("cpu", threads=1) as ranks:
        from recsys import checkpoint
        from recsys.run_folder import RunFolder

        run, path = RunFolder.open(str(result.run))
        parsed = run.recipe()
        job = assemble(parsed, ranks, Encoder(parsed), trains=False)
        checkpoint.load(path, job.task, job.encoder)
        assert looked_up(job, pa.array([1, 2, 3]))[:, 0].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (None, "no such file"),
        ({"id": [1], "vec": [[0.0] * DIM]}, r"lacks columns: \['vector'\]"),
        ({"id": [1.5], "vector": [[0.0] * DIM]}, "`id` holds no ids. Received: double"),
        ({"id": [1], "vector": ["x"]}, "`vector` holds no vectors. Received: string"),
        (
            {"id": [1], "vector": pa.array([[0.0] * 5], pa.list_(pa.float32(), 5))},
            "Received: 5. Allowed: the table's dim, 6",
        ),
    ],
)
def test_check_tells_what_is_wrong_with_a_file_of_vectors(folder, table, expected):
    path = folder / "vectors.parquet"
    path.unlink()
    if table is not None:
        pq.write_table(pa.table(table), path)
    (told,) = check(str(folder / "recipe.yaml"), [])
    assert told.startswith("tables.user.vectors")
    with pytest.raises(UserError, match=expected):
        raise UserError(told)
    with pytest.raises(UserError, match=expected):
        train(recipe_file.load(folder / "recipe.yaml"), run=str(folder / "run"))


def test_vectors_of_uneven_length_are_told_when_they_are_read(folder):
    pq.write_table(pa.table({"id": [1, 2], "vector": [[0.0] * DIM, [0.0]]}), folder / "vectors.parquet")
    with pytest.raises(UserError, match=r"Received: \[1, 6\]. Allowed: the table's dim, 6"):
        train(recipe_file.load(folder / "recipe.yaml"), run=str(folder / "run"))


if __name__ == "__main__":
    from recsys.stack import require_stack

    require_stack()
    run_jobs(json.loads(pathlib.Path(sys.argv[1]).read_text()))
