"""What compressed communication saves and costs: bytes on the wire, step time and test metrics on two ranks.

    python -m scripts.bench_compression [--models din deepfm] [--seeds 1 2 3]

Trains the recipes of MovieLens-100K on two gloo ranks of this machine, with each of `SETTINGS`. Tables are cut
table-wise, so that int8 is possible, and once more row-wise. For each setting:

- bytes that leave a rank in one step, ids and lengths included, by what they are: counted where tensors are handed to
  the collectives, with what gloo makes of each of them, and held against the kernel's own count of the loopback
  device, which adds headers and whatever else the machine sends to itself meanwhile;
- milliseconds of a step. All settings live in the same two processes and take turns, round by round; what counts is
  the median of the rounds. Between two ranks of one machine nothing is gained by sending less: see what it costs;
- test AUC and log loss of whole trainings, mean and standard deviation over seeds.

Prints a table and writes benchmarks/compression.json.
"""

import argparse
import contextlib
import datetime
import itertools
import json
import logging
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from recsys import recipe_file
from recsys.data.batch import Batch
from recsys.distributed import Ranks, process_group
from recsys.encoder import Encoder
from recsys.job import Data, assemble
from recsys.recipe import Recipe
from recsys.run_folder import environment
from recsys.stack import require_stack
from recsys.survey import survey
from recsys.train import train
from scripts.count_bytes import Collectives, by_direction, loopback_bytes

_ROOT = pathlib.Path(__file__).parent.parent
_RANKS = 2
_KEY = "train.communication"
SETTINGS: dict[str, list[str]] = {
    "fp32": [],
    "vectors fp16": ["embeddings=fp16", "embedding_gradients=fp32"],
    "vectors and gradients fp16": ["embeddings=fp16"],
    "vectors and gradients bf16": ["embeddings=bf16"],
    "vectors and gradients int8": ["embeddings=int8"],
    "dense fp16": ["dense=fp16"],
    "dense bf16": ["dense=bf16"],
    "dense top 1 %": ["dense=top_k"],
    "all bf16": ["embeddings=bf16", "dense=bf16"],
    "int8, dense top 1 %": ["embeddings=int8", "dense=top_k"],
}
ROW_WISE: dict[str, list[str]] = {
    f"row-wise, {name}": SETTINGS[name] for name in ("fp32", "vectors and gradients fp16", "vectors and gradients bf16")
}
_DIRECTIONS = ("ids", "vectors", "gradients", "dense", "other")


def recipe_of(model: str, setting: str, overrides: Sequence[str]) -> Recipe:
    """A model's MovieLens-100K recipe with one of the settings."""
    kind = "row_wise" if setting in ROW_WISE else "table_wise"
    settings = (SETTINGS | ROW_WISE)[setting]
    path = _ROOT / "models" / model / "movielens-100k.yaml"
    given = [f"tables.default.sharding={kind}", *(f"{_KEY}.{s}" for s in settings), *overrides]
    return recipe_file.load(str(path), given)


def main() -> None:
    """Start the ranks, or be one of them."""
    arguments = _parse()
    if "RANK" in os.environ:
        _on_rank(arguments)
        return
    _run("-m", "recsys", "prepare", "movielens-100k")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(_RANKS))
    with tempfile.TemporaryDirectory() as folder:
        _run(*launcher, "-m", "scripts.bench_compression", *sys.argv[1:], "--scratch", folder)
        found = json.loads((pathlib.Path(folder) / "found.json").read_text(encoding="utf-8"))
    facts = {
        "command": shlex.join(["python", "-m", "scripts.bench_compression", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        **found,
    }
    arguments.output.parent.mkdir(exist_ok=True)
    arguments.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    for model, settings in facts["models"].items():
        Console().print(_table(model, settings))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["din", "deepfm"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--settings", nargs="+", default=[*SETTINGS, *ROW_WISE])
    parser.add_argument("--steps", type=int, default=30, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--overrides", nargs="*", default=[], help="of every recipe, such as train.epochs=1")
    parser.add_argument("--output", type=pathlib.Path, default=_ROOT / "benchmarks" / "compression.json")
    parser.add_argument("--scratch", type=pathlib.Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(*arguments: str) -> None:
    code = subprocess.run([sys.executable, *arguments], env={"OMP_NUM_THREADS": "1", **os.environ}).returncode
    if code:
        sys.exit(code)


def _on_rank(arguments: argparse.Namespace) -> None:
    require_stack()
    logging.getLogger("recsys").setLevel(logging.ERROR)
    models: dict[str, Any] = {}
    recipes = {
        m: {name: recipe_of(m, name, arguments.overrides) for name in arguments.settings} for m in arguments.models
    }
    with process_group("cpu") as ranks:
        facts = environment(ranks, torch.get_num_threads())
        for model, settings in recipes.items():  # before the trainings, whose time does not matter
            models[model] = measure(settings, ranks, arguments.steps, arguments.rounds)
    for model, settings in recipes.items():
        for name, recipe in settings.items():
            models[model][name]["test"] = _train(recipe, arguments.seeds, arguments.scratch)
    if os.environ["RANK"] == "0":
        names = ("git_commit", "python", "torch", "torchrec", "processor", "cores", "world_size", "threads_per_rank")
        found = {"environment": {name: facts.get(name) for name in names}, "seeds": arguments.seeds, "models": models}
        (arguments.scratch / "found.json").write_text(json.dumps(found), encoding="utf-8")


Pass = Callable[[Collectives | None], None]
"""All batches once; the counter, if there is one, is told the phase of each step."""


def measure(recipes: Mapping[str, Recipe], ranks: Ranks, steps: int, rounds: int) -> dict[str, Any]:
    """Bytes and times of a step for each setting, on the same batches."""
    batches = _batches(next(iter(recipes.values())), ranks, steps)
    contestants = {name: _contestant(recipe, ranks, batches) for name, recipe in recipes.items()}
    found: dict[str, Any] = {}
    for name, contestant in contestants.items():
        contestant(None)  # buckets of gradients are put together in the first steps
        counter = Collectives()
        contestant(counter)
        sent = torch.tensor([by_direction(counter.messages)[direction] for direction in _DIRECTIONS])
        dist.all_reduce(sent)
        per_step = dict(zip(_DIRECTIONS, (sent / ranks.world_size / steps).round().int().tolist(), strict=True))
        kernel = _loopback(contestant) / ranks.world_size / steps
        found[name] = {
            "bytes": {**per_step, "all": sum(per_step.values())},
            "loopback_bytes": round(kernel),
        }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name in list(contestants)[:: -1 if number % 2 else 1]:
            dist.barrier()
            start_s = time.perf_counter()
            contestants[name](None)
            dist.barrier()
            times[name].append(1e3 * (time.perf_counter() - start_s) / steps)
    for name, some in times.items():
        found[name]["step_ms"] = round(statistics.median(some), 3)
        found[name]["step_ms_of_rounds"] = [round(t, 3) for t in some]
    return found


def _batches(recipe: Recipe, ranks: Ranks, steps: int) -> list[Batch]:
    encoder = Encoder(recipe)
    data = Data.open(recipe, encoder, ranks)
    survey(data)
    reader = data.reader("train", shuffle_rows=recipe.data.shuffle_rows)
    with contextlib.closing(data.batches(reader)) as batches:
        return list(itertools.islice(batches, steps))


def _contestant(recipe: Recipe, ranks: Ranks, batches: Sequence[Batch]) -> Pass:
    job = assemble(recipe, ranks, Encoder(recipe))
    optimizer, task = job.optimizer(), job.task.train()

    def run(counter: Collectives | None) -> None:
        for batch in batches:
            optimizer.zero_grad()
            with counter or contextlib.nullcontext():
                if counter:
                    counter.phase = "forward"
                loss, _ = task(batch)
                if counter:
                    counter.phase = "backward"
                loss.backward()
            optimizer.step()

    return run


def _loopback(run: Pass) -> int:
    """Bytes that this host sends to itself while all ranks work."""
    dist.barrier()
    before = loopback_bytes()
    dist.barrier()
    run(None)
    dist.barrier()
    return loopback_bytes() - before


def _train(recipe: Recipe, seeds: Sequence[int], scratch: pathlib.Path) -> dict[str, Any]:
    """Test metrics of whole trainings, over seeds."""
    scores: dict[str, list[float]] = {"auc": [], "logloss": []}
    for seed in seeds:
        seeded = recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": seed})})
        folder = scratch / f"run-{next(_numbers)}"  # new each time, and the same on all ranks
        test = train(seeded, run=str(folder)).metrics["test"]
        for name, values in scores.items():
            values.append(test[name])
    return {
        name: {
            "mean": round(statistics.fmean(values), 5),
            "spread": round(statistics.stdev(values), 5) if len(values) > 1 else None,
        }
        for name, values in scores.items()
    }


_numbers = itertools.count()


def _table(model: str, settings: Mapping[str, Any]) -> Table:
    table = Table(model, *(f"{d}, kB" for d in _DIRECTIONS), "all", "kernel", "step ms", "AUC", "log loss")
    for name, found in settings.items():
        bytes_ = [found["bytes"][direction] for direction in (*_DIRECTIONS, "all")] + [found["loopback_bytes"]]
        scores = [
            f"{score['mean']:.4f}" + (f" +- {score['spread']:.4f}" if score["spread"] is not None else "")
            for score in found["test"].values()
        ]
        table.add_row(name, *(f"{count / 1e3:,.1f}" for count in bytes_), f"{found['step_ms']:.2f}", *scores)
    return table


if __name__ == "__main__":
    main()
