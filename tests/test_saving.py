"""When and where checkpoints are written, and what a failed one leaves."""

import json
import pathlib
import resource
import signal

import pytest
import torch
import yaml

from recsys import checkpoint, recipe_file, resumption
from recsys.distributed import process_group
from recsys.encoder import Encoder
from recsys.errors import UserError
from recsys.job import assemble
from recsys.saving import Saver
from recsys.storage import Place
from recsys.train import train
from tests._train_batches import random_rows

BATCH = 32
RECIPE = {
    "model": {"name": "deepfm", "hidden": [8]},
    "data": {"train": "unused"},
    "features": [{"kind": "id", "columns": ["user", "item"]}],
    "tables": {"default": {"dim": 4, "rows": 500}},
    "train": {"device": "cpu"},
}


class _Run:
    """A model, its optimizer and steps of it, without data."""

    def __init__(self, ranks) -> None:
        recipe = recipe_file.parse(yaml.safe_dump(RECIPE))
        self.encoder, self.ranks = Encoder(recipe), ranks
        self.job = assemble(recipe, ranks, self.encoder)
        self.optimizer = self.job.optimizer()
        self.layout, self.steps = recipe.layout, 0

    def step(self) -> None:
        from recsys.data.batch import Batch

        rows = random_rows(self.layout, {"user": 500, "item": 500}, [], BATCH, seed=self.steps)
        batch = Batch.from_lists(self.layout, rows["ids"], labels=rows["labels"])
        batch.weights = torch.full((BATCH,), 1 / BATCH)
        self.optimizer.zero_grad()
        self.job.task(batch)[0].backward()
        self.optimizer.step()
        self.steps += 1

    def state(self) -> dict:
        return checkpoint.state_of(self.job.task, self.encoder, resumption.slots(self.job, self.optimizer))

    def values(self) -> dict[str, torch.Tensor]:
        whole = {}
        for name, value in self.state().items():
            (value,) = [s.tensor for s in value.local_shards()] if hasattr(value, "local_shards") else [value]
            whole[name] = value.clone()
        return whole


@pytest.fixture
def run():
    with process_group("cpu") as ranks:
        yield _Run(ranks)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_stored_are_the_values_of_the_call(run, tmp_path, asynchronous):
    """Steps that follow at once, while the values are still being written, do not reach the checkpoint."""
    saver = Saver(Place(tmp_path), run.encoder, keep=9, asynchronous=asynchronous)
    moments = []
    for _ in range(3):  # The second and third copies go into memory that the first one has left.
        run.step()
        moments.append(run.values())
        saver.save(run.steps, run.state(), {"step": run.steps}, set())
        for parameter in run.job.task.parameters():
            parameter.data.add_(1)
    saver.wait()
    for number, expected in enumerate(moments, 1):
        checkpoint.load(saver.place(number), run.job.task, run.encoder, resumption.slots(run.job, run.optimizer))
        found = run.values()
        assert found.keys() == expected.keys()
        for name in found.keys() - {"rank/0/random"}:
            assert torch.equal(found[name], expected[name]), name


def test_old_checkpoints_go_and_needed_ones_stay(run, tmp_path):
    saver = Saver(Place(tmp_path), run.encoder, keep=2, asynchronous=True)
    for step in range(1, 7):
        saver.save(step, run.state(), {"step": step}, {2})
    saver.wait()
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["2", "5", "6"]


def test_removal_never_takes_the_last_complete_checkpoint_nor_one_in_the_making(run, tmp_path):
    saver = Saver(Place(tmp_path), run.encoder, keep=1, asynchronous=False)
    for step in (1, 2, 3):
        saver.save(step, run.state(), {"step": step}, set())
    (tmp_path / "step_00000003" / "complete.json").unlink()  # as if it were being written
    saver.save(4, run.state(), {"step": 4}, set())
    (tmp_path / "step_00000004" / "complete.json").unlink()
    saver.save(2, run.state(), {"step": 2}, set())
    checkpoint.prune(tmp_path, 1, set())
    assert [place.name for place in checkpoint.complete(tmp_path)] == ["step_00000002"]
    assert (tmp_path / "step_00000004").is_dir()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_is_told_and_the_checkpoint_before_stays_good(run, tmp_path, asynchronous):
    """Files may not grow beyond 4 KiB: the system refuses to write, as when a disk is full."""
    saver = Saver(Place(tmp_path), run.encoder, keep=1, asynchronous=asynchronous)
    run.step()
    saver.save(1, run.state(), {"step": 1}, set())
    saver.wait()
    good = run.values()
    run.step()
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(UserError, match=r"cannot be written; checkpoints before it are as they were"):
            saver.save(2, run.state(), {"step": 2}, set())
            saver.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [place.name for place in checkpoint.complete(tmp_path)] == ["step_00000001"]
    place, reports = checkpoint.newest(tmp_path)
    assert place is not None and place.name == "step_00000001" and "step_00000002" in reports[0]
    checkpoint.load(place, run.job.task, run.encoder, resumption.slots(run.job, run.optimizer))
    assert all(torch.equal(value, good[name]) for name, value in run.values().items() if "rank/" not in name)


def test_a_checkpoint_holds_tensors_and_json_only(run, tmp_path):
    run.step()
    saver = Saver(Place(tmp_path), run.encoder, keep=1, asynchronous=False)
    saver.save(1, run.state(), {"step": 1}, set())
    about = json.loads((tmp_path / "step_00000001" / "complete.json").read_text())
    assert about["entries"]["model/model.embeddings.pooled.embedding_bags.table_item.weight"] == [503, 8]
    assert about["entries"]["optimizer/model.embeddings.pooled.embedding_bags.table_item.weight/sum"] == [503]


def test_checkpoints_live_behind_an_address_without_renaming(tmp_path, monkeypatch):
    """Saved, listed, resumed, pruned and evaluated on fsspec's memory file system, which is no local one."""
    from fsspec.implementations.memory import MemoryFileSystem

    from recsys.data.prepare import prepare
    from recsys.predict import evaluate

    data = tmp_path / "data"
    prepare("synthetic", data, options={"rows": 500, "users": 20, "items": 20, "seed": 5})
    recipe = {
        **RECIPE,
        "data": {split: str(data / split) for split in ("train", "valid", "test")} | {"batch_size_per_rank": 100},
        "features": [{"kind": "id", "columns": ["user_id", "item_id"]}],
        "checkpoint": {"folder": "memory://bucket/run", "every_steps": 2, "keep": 1},
    }
    text = yaml.safe_dump(recipe)
    first = train(recipe_file.parse(text), run=str(tmp_path / "run"))
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert [place.name for place in checkpoint.complete("memory://bucket/run")] == ["step_00000004"]
    longer = train(recipe_file.parse(text, ["train.epochs=2"]), run=str(tmp_path / "run"), resume="auto")
    assert (first.metrics["step"], longer.metrics["epochs"]) == (4, 2)
    assert evaluate(str(tmp_path / "run"))["auc"] == pytest.approx(longer.metrics["test"]["auc"], abs=1e-9)
    assert all("run" in path for path in MemoryFileSystem.store)


def test_addresses_are_passed_on_as_they_are():
    assert (Place("memory://b/x") / "y").url == "memory://b/x/y"
    assert str(Place("memory://b/x/")) == "memory://b/x/"
    assert (Place(pathlib.Path("/tmp/x")) / "y").url == "/tmp/x/y"
    with pytest.raises(UserError, match="cannot be used"):
        Place("nosuch://b/x")
