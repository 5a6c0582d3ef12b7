"""Measure a recipe: train it with several seeds and write mean and spread into its model's results.json.

    python -m scripts.measure models/din/movielens-100k.yaml --seeds 1 2 3

The epoch of each seed is chosen on the validation set; the test set is read once, at the end of a run. The former
`search` section of the results (how the recipe's settings were found) is kept.
"""

import argparse
import datetime
import json
import math
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from recsys import recipe_file
from recsys.errors import UserError
from recsys.recipe import Recipe

METRICS = ("auc", "gauc", "logloss", "normalized_entropy", "calibration")
_ENVIRONMENT = (
    "git_commit",
    "python",
    "torch",
    "fbgemm-gpu-cpu",
    "fbgemm-gpu",
    "torchrec",
    "processor",
    "cores",
    "device",
    "world_size",
    "threads_per_rank",
)
_SMALLEST_TOLERANCE = 0.002
"""Three seeds may agree by chance; means of other seeds still differ by this much."""

_ROOT = pathlib.Path(__file__).parent.parent


def main() -> None:
    """Train every seed, then write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=pathlib.Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    path, seeds, ranks = arguments.recipe, arguments.seeds, arguments.ranks
    try:
        recipe = load(path)
    except UserError as error:
        parser.exit(2, f"Error: {error}\n")
    with tempfile.TemporaryDirectory() as folder:
        runs = [_train(path, seed, ranks, pathlib.Path(folder) / str(seed)) for seed in seeds]
    command = command_text("measure", path, "--seeds", *seeds, "--ranks", ranks)
    results = read_results(path)
    former = results.get(path.stem, {})
    results[path.stem] = summarize(runs, recipe.train.monitor, command, datetime.date.today())
    if "search" in former:
        results[path.stem]["search"] = former["search"]
    write_results(path, results)
    print(json.dumps(results[path.stem]["test"], indent=1))
    if str(results[path.stem]["environment"].get("git_commit")).endswith("-dirty"):
        print("Warning: measured with uncommitted changes; nobody can repeat these results", file=sys.stderr)


def load(path: pathlib.Path) -> Recipe:
    """The recipe.

    Raises:
        UserError: It has problems, or lacks one of the data sets that a measurement needs.
    """
    recipe = recipe_file.load(path)
    absent = [f"data.{split}" for split in ("valid", "test") if split not in recipe.paths]
    if absent:
        raise UserError(
            f"{path} cannot be measured: the epoch is chosen on data.valid, the metrics are those of data.test",
            received=f"no {' and no '.join(absent)}",
            fix=f"name {' and '.join(absent)} in the recipe",
        )
    return recipe


def summarize(
    runs: Sequence[dict[str, dict[str, Any]]], monitor: str, command: str, date: datetime.date
) -> dict[str, Any]:
    """What results.json says about one recipe.

    Args:
        runs: For each seed, the content of the run's `metrics` and `environment` files.
        monitor: The validation metric that chose the epochs.
        command: What was typed.
        date: When.
    """
    return {
        "command": command,
        "date": date.isoformat(),
        "selection": f"epoch with the best validation {monitor}; test set read once, at the end of a run",
        "test": {name: spread([run["metrics"]["test"][name] for run in runs]) for name in METRICS},
        "valid_runs": {monitor: [_rounded(run["metrics"]["valid"][monitor]) for run in runs]},
        "best_epochs": [run["metrics"]["best_epoch"] for run in runs],
        "rows_per_s": round(statistics.median(run["metrics"]["rows_per_s"] for run in runs)),
        "environment": {key: runs[0]["environment"][key] for key in _ENVIRONMENT if key in runs[0]["environment"]},
    }


def spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean, standard deviation and single runs of a metric.

    `tolerance` is for whoever measures again: a mean that differs by more is a regression. A metric that is undefined
    in any run has no mean; one run alone has no standard deviation.
    """
    runs = [_rounded(value) for value in values]
    defined = [value for value in values if value is not None]
    if len(defined) < len(values):
        return {"mean": None, "sd": None, "tolerance": None, "runs": runs}
    sd = round(statistics.stdev(defined), 5) if len(defined) > 1 else None
    # The inner rounding keeps 0.0021 * 1e4 = 21.000000000000004 from being taken for more than 21.
    tolerance = math.ceil(round(max(3 * (sd or 0.0), _SMALLEST_TOLERANCE) * 1e4, 6)) / 1e4
    return {"mean": round(statistics.mean(defined), 5), "sd": sd, "tolerance": tolerance, "runs": runs}


def command_text(script: str, recipe: pathlib.Path, *arguments: object) -> str:
    """The command line that repeats a script's run from the root of a checkout."""
    words = [portable(a) if isinstance(a, pathlib.Path) else str(a) for a in (recipe, *arguments)]
    return f"python -m scripts.{script} {shlex.join(words)}"


def portable(path: pathlib.Path) -> str:
    """A path inside the checkout without the place of the checkout; other paths as they are."""
    return str(path.resolve().relative_to(_ROOT)) if path.resolve().is_relative_to(_ROOT) else str(path)


def read_results(recipe: pathlib.Path) -> dict[str, Any]:
    """Content of the results.json beside a recipe; empty without one."""
    path = recipe.with_name("results.json")
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def write_results(recipe: pathlib.Path, results: dict[str, Any]) -> None:
    """Replace the results.json beside a recipe."""
    recipe.with_name("results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def _train(recipe: pathlib.Path, seed: int, ranks: int, run: pathlib.Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "recsys", "train", str(recipe), f"train.seed={seed}", "--run-dir", str(run)]
    # What torchrun sets by itself, with a banner, where the variable is absent.
    if subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ}).returncode:
        sys.exit(f"training of seed {seed} failed")
    return {name: json.loads((run / f"{name}.json").read_text(encoding="utf-8")) for name in ("metrics", "environment")}


if __name__ == "__main__":
    main()
