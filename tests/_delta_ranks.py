"""A model that trains and is saved in full and by touched rows; also the worker of the tests of deltas on two ranks.

    torchrun --nproc-per-node N tests/_delta_ranks.py CONFIG.json

CONFIG has `recipes`, `folder`, and `overrides` that give the recipe `columns` another plan, which reads it here.
"""

import json
import pathlib
import sys

import numpy as np
import pyarrow as pa
import torch
import yaml

from recsys import checkpoint, recipe_file, resumption
from recsys.deltas import TouchedRows
from recsys.distributed import Ranks, process_group
from recsys.encoder import Encoder
from recsys.job import assemble
from recsys.saving import Saver
from recsys.stack import require_stack
from recsys.storage import Place

BATCH = 12
RECIPE = {
    "model": {"name": "deepfm", "hidden": [8]},
    "data": {"train": "unused"},
    "features": [
        {"kind": "id", "columns": ["user", "item", "city", "shop", "kind"]},
        {"kind": "history", "of": {"seen": "item"}},
    ],
    "tables": {
        "default": {"dim": 8, "rows": 600},
        "user": {"ids": "hot_cold", "hot": 100, "cold": 301, "cold_hashes": 2},
        "shop": {"freeze": True},
        "city": {"rows": 300, "sharding": "data_parallel"},
        "kind": {"rows": 50, "optimizer": {"name": "dense"}},
    },
    "train": {"device": "cpu"},
}


def recipe_text(model: str = "deepfm", **tables: dict) -> str:
    """The recipe with another model, and other settings of some tables."""
    found = json.loads(json.dumps(RECIPE))
    found["model"] = {"name": model, "hidden": [8]} | ({"attention_hidden": [4]} if model == "din" else {})
    for name, settings in tables.items():
        found["tables"][name] = {**found["tables"].get(name, {}), **settings}
    return yaml.safe_dump(found)


class Trained:
    """A model, its optimizer and steps of it, on ids of its own making."""

    def __init__(self, ranks: Ranks, text: str, overrides: list[str] | None = None) -> None:
        recipe = recipe_file.parse(text, overrides or [])
        self.encoder, self.ranks, self.steps = Encoder(recipe), ranks, 0
        if "user" in self.encoder.tables:
            self.encoder.set_vocabulary("user", np.arange(0, 600, 6), np.arange(3, 103))
        self.job = assemble(recipe, ranks, self.encoder)
        self.optimizer = self.job.optimizer()
        self.touched = TouchedRows(self.job.embeddings, recipe, ranks.device)
        self.touched.watch(self.job.task)

    def batch(self):
        """Rows of this step and rank: few, so that most of the tables stays as it is."""
        rng = np.random.default_rng([self.steps, self.ranks.rank])
        columns = {name: rng.integers(0, 600, BATCH) for name in ("user", "item", "shop")}
        columns |= {"city": rng.integers(0, 300, BATCH), "kind": rng.integers(0, 50, BATCH)}
        columns["seen"] = [rng.integers(0, 600, n).tolist() for n in rng.integers(0, 4, BATCH)]
        columns["label"] = rng.integers(0, 2, BATCH)
        batch = self.encoder.encode(pa.table(columns), np.arange(BATCH))
        batch.weights = torch.full((BATCH,), 1 / BATCH)
        return batch

    def step(self) -> None:
        """One training step, and an evaluation of other rows, which touches nothing."""
        self.job.task.train()
        self.optimizer.zero_grad()
        self.job.task(self.batch())[0].backward()
        self.optimizer.step()
        self.steps += 1
        self.job.task.eval()
        with torch.no_grad():
            self.job.task(self.batch())

    def slots(self) -> dict:
        """What a checkpoint holds beside the model."""
        return resumption.slots(self.job, self.optimizer)

    def state(self) -> dict:
        """What a checkpoint holds."""
        return checkpoint.state_of(self.job.task, self.encoder, self.slots())

    def values(self) -> dict[str, torch.Tensor]:
        """A copy of all that this rank holds, but for its random state."""
        found = {}
        for name, value in self.state().items():
            shards = [s.tensor for s in value.local_shards()] if hasattr(value, "local_shards") else [value]
            found |= {f"{name} {place}": tensor.clone() for place, tensor in enumerate(shards)}
        return {name: value for name, value in found.items() if not name.startswith("rank/")}

    def read(self, place: Place | pathlib.Path) -> dict[str, torch.Tensor]:
        """Scramble everything, then read a checkpoint; the values that there are then."""
        with torch.no_grad():
            for value in self.state().values():
                for tensor in [s.tensor for s in value.local_shards()] if hasattr(value, "local_shards") else [value]:
                    tensor.fill_(7)
        slots = {name: value for name, value in self.slots().items() if not name.startswith("rank/")}
        checkpoint.load(place, self.job.task, self.encoder, slots)
        return self.values()


def save_both(trained: Trained, folder: pathlib.Path, *, asynchronous: bool = False, deltas: int = 3) -> None:
    """A full checkpoint in `folder/chain` and deltas after it, two steps apart, and full ones in `folder/whole`."""
    options = {"keep": 99, "asynchronous": asynchronous}
    chain = Saver(Place(folder / "chain"), trained.encoder, touched=trained.touched, **options)
    whole = Saver(Place(folder / "whole"), trained.encoder, keep=99, asynchronous=False)
    for _ in range(1 + deltas):
        trained.step()
        trained.step()
        whole.save(trained.steps, trained.state(), {"step": trained.steps}, set())
        chain.save(trained.steps, trained.state(), {"step": trained.steps}, set(), full=False)
    chain.wait()


def run(config: dict) -> None:
    """Train and save as the configuration says, on this rank and all others."""
    with process_group("cpu") as ranks:
        for name, text in config["recipes"].items():
            save_both(Trained(ranks, text), pathlib.Path(config["folder"]) / name)
        other = Trained(ranks, config["recipes"]["columns"], config["overrides"])
        folder = pathlib.Path(config["folder"]) / "columns"
        found, expected = (other.read(folder / kind / "step_00000008") for kind in ("chain", "whole"))
        assert all(torch.equal(found[name], value) for name, value in expected.items()), "another plan reads the same"


if __name__ == "__main__":
    require_stack()
    run(json.loads(pathlib.Path(sys.argv[1]).read_text()))
