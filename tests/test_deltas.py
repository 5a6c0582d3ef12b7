"""Incremental checkpoints: a full one and its deltas are what a full one of the same moment would be."""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch

from recsys import checkpoint, refresh
from recsys.distributed import process_group
from recsys.embedding import table_of_parameter
from recsys.errors import UserError
from recsys.saving import Saver
from recsys.storage import Place
from scripts import bench_checkpoint
from tests._delta_ranks import Trained, recipe_text, save_both

WORKER = pathlib.Path(__file__).parent / "_delta_ranks.py"


@pytest.fixture
def alone():
    with process_group("cpu") as ranks:
        yield ranks


def assert_same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        assert torch.equal(found[name], expected[name]), name


def assert_chain_is_whole(trained: Trained, folder: pathlib.Path, steps: tuple[int, ...] = (2, 4, 6, 8)) -> None:
    for step in steps:
        name = checkpoint.step_name(step)
        whole = trained.read(folder / "whole" / name)
        assert_same(trained.read(folder / "chain" / name), whole)
    deltas = [checkpoint.read_about(folder / "chain" / checkpoint.step_name(step)).get("delta") for step in steps]
    assert [delta and delta["number"] for delta in deltas] == [None, *range(1, len(steps))]


@pytest.mark.parametrize("model", ["deepfm", "din"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_deltas_in_order_restore_what_a_full_checkpoint_holds(alone, tmp_path, model, asynchronous):
    """Weights and all state, bit for bit: pooled and sequence tables, two hashes, frozen and densely trained ones."""
    trained = Trained(alone, recipe_text(model))
    save_both(trained, tmp_path, asynchronous=asynchronous)
    assert_chain_is_whole(trained, tmp_path)
    assert_same(trained.read(tmp_path / "chain" / "step_00000008"), trained.read(tmp_path / "whole" / "step_00000008"))


@pytest.mark.dist
def test_deltas_of_two_ranks_are_read_by_them_and_by_one_under_other_plans(tmp_path):
    """Row-wise, column-wise and replicated tables, and each rank with rows of its own in every step."""
    adagrad = {"optimizer": {"name": "adagrad"}}
    rows, columns = {"sharding": "row_wise"}, {"sharding": "column_wise", **adagrad}
    texts = {
        "rows": recipe_text("deepfm", user=rows, item=rows, shop=rows),
        "columns": recipe_text("din", user=columns, item={**rows, **adagrad}, shop=columns, city=adagrad),
    }
    file = tmp_path / "config.json"
    overrides = ["tables.item.sharding=column_wise", "tables.user.sharding=row_wise"]
    file.write_text(json.dumps({"recipes": texts, "folder": str(tmp_path), "overrides": overrides}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, str(WORKER), str(file)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    last = checkpoint.read_about(tmp_path / "columns/chain/step_00000008")["delta"]["stretches"]
    assert {s["column"] for s in last if "table_user" in s["entry"]} > {0}
    with process_group("cpu") as ranks:
        for name, text in texts.items():
            other = [f"tables.{table}.sharding=table_wise" for table in ("user", "item", "shop")]
            assert_chain_is_whole(Trained(ranks, text, other), tmp_path / name)


def test_a_delta_holds_the_touched_rows_alone(alone, tmp_path):
    trained = Trained(alone, recipe_text())
    save_both(trained, tmp_path, deltas=2)
    delta = checkpoint.read_about(tmp_path / "chain/step_00000006")["delta"]
    expected = {}
    for trained.steps in (4, 5):
        batch = trained.batch()
        for name in batch.pooled.keys():
            table = "item" if name == "seen" else name
            expected.setdefault(table, set()).update(batch.pooled[name].values().tolist())
    assert delta["rows"] == {table: len(expected[table]) for table in ("city", "item", "user")}
    assert not [s for s in delta["stretches"] if "table_shop" in s["entry"] or "table_kind" in s["entry"]]


def test_a_row_that_was_not_noted_is_not_in_the_delta(alone, tmp_path):
    """The comparison with a full checkpoint would notice a tracker that forgets one."""
    trained = Trained(alone, recipe_text())
    take = trained.touched.take
    trained.touched.take = lambda: {table: rows[: max(0, len(rows) - 1)] for table, rows in take().items()}
    save_both(trained, tmp_path, deltas=1)
    with pytest.raises(AssertionError):
        assert_chain_is_whole(trained, tmp_path, (2, 4))


@pytest.fixture
def chain(alone, tmp_path):
    trained = Trained(alone, recipe_text())
    save_both(trained, tmp_path)
    return trained, tmp_path / "chain"


def test_a_gap_is_refused_and_the_newest_state_before_it_taken(chain):
    trained, folder = chain
    shutil.rmtree(folder / "step_00000006")
    with pytest.raises(UserError, match=r"step_00000006.*, which it builds on, cannot be used"):
        trained.read(folder / "step_00000008")
    place, reports = checkpoint.newest(folder)
    assert place is not None and place.name == "step_00000004"
    assert len(reports) == 1 and "step_00000006" in reports[0]


def test_a_damaged_link_is_refused(chain):
    trained, folder = chain
    damaged = next((folder / "step_00000002").glob("*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(UserError, match="is missing or damaged"):
        trained.read(folder / "step_00000004")
    place, reports = checkpoint.newest(folder)
    assert place is None and len(reports) == 4


def test_a_link_that_was_written_anew_is_refused(chain):
    """A run that went on from before a damaged delta writes others by the same names."""
    trained, folder = chain
    marker = folder / "step_00000006" / "complete.json"
    about = json.loads(marker.read_text())
    marker.write_text(json.dumps({**about, "mark": "another"}))
    with pytest.raises(UserError, match="not the one that the next one was made after"):
        checkpoint.chain(folder / "step_00000008")
    saver = Saver(Place(folder), trained.encoder, keep=99, asynchronous=False)
    saver.save(6, trained.state(), {"step": 6}, set())
    with pytest.raises(UserError, match="not the one that the next one was made after"):
        checkpoint.chain(folder / "step_00000008")
    place, _ = checkpoint.newest(folder)
    assert place is not None and place.name == "step_00000006"


def test_what_a_kept_delta_builds_on_stays(chain):
    trained, folder = chain
    checkpoint.prune(folder, 1, set())
    assert len(checkpoint.complete(folder)) == 4
    saver = Saver(Place(folder), trained.encoder, keep=2, asynchronous=False, touched=trained.touched)
    for step in (10, 12):
        trained.step()
        saver.save(step, trained.state(), {"step": step}, set(), full=False)
    assert [place.name[-2:] for place in checkpoint.complete(folder)] == ["10", "12"]
    trained.read(folder / "step_00000012")


def test_removal_does_not_take_the_last_state_that_can_be_restored(chain):
    _, folder = chain
    shutil.rmtree(folder / "step_00000006")
    checkpoint.prune(folder, 1, set())
    assert {"step_00000002", "step_00000004"} <= {place.name for place in checkpoint.complete(folder)}
    place, _ = checkpoint.newest(folder)
    assert place is not None and place.name == "step_00000004"


def test_changed_rows_are_exported_with_the_ids_that_own_them(alone, tmp_path):
    """`exact`: all ids; `hot_cold`: the hot ones; hashed: none. Vectors as the model holds them then."""
    trained = Trained(alone, recipe_text(city={"ids": "exact"}))
    save_both(trained, tmp_path, deltas=1)
    place = Place(tmp_path / "chain/step_00000004")
    trained.read(place)
    weights = {table_of_parameter(name): value for name, value in trained.job.task.state_dict().items()}
    rows_of = checkpoint.read_about(place)["delta"]["rows"]
    exported = {part["table"][0].as_py(): part.to_pylist() for part in refresh.tables(place, trained.job.recipe)}
    assert {table: len(rows) for table, rows in exported.items()} == rows_of
    owners = {
        "city": lambda row: row - 3,
        "item": lambda row: None,
        "user": lambda row: 6 * (row - 3) if row < 103 else None,
    }
    for table, rows in exported.items():
        (weight,) = (
            [shard.tensor for shard in weights[table].local_shards()]
            if hasattr(weights[table], "local_shards")
            else [weights[table]]
        )
        for row in rows:
            assert row["vector"] == weight[row["row"], :9].tolist()
            assert row["id"] == owners[table](row["row"])
    with pytest.raises(UserError, match="a full checkpoint, which does not say what has changed"):
        refresh.tables(Place(tmp_path / "chain/step_00000002"), trained.job.recipe)


def test_the_benchmark_measures_both_kinds_and_removes_its_files(tmp_path):
    (tmp_path / "meanwhile").mkdir()
    output = tmp_path / "found" / "x.json"
    small = ["--gigabytes", "0.002", "--rounds", "2", "--folder", str(tmp_path / "meanwhile")]
    bench_checkpoint.main([*small, "--output", str(output)])
    found = json.loads(output.read_text())
    assert len(found["sync_s"]) == len(found["async_s"]) == 2
    assert found["full_bytes"] > found["rows"] * found["row_bytes"] > found["delta"]["bytes"] > 0
    assert found["delta"]["touched_rows"] == found["rows"] // 100
    assert list((tmp_path / "meanwhile").iterdir()) == []
