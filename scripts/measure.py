"""Measure a recipe: train it with several seeds and write mean and spread into its model's results.json.

    python -m scripts.measure models/din/movielens-100k.yaml --seeds 1 2 3

The checkpoint of each seed is chosen on the validation set; the test set is read once, at the end of a run. The
former `search` section of the results (how the recipe's settings were found) is kept.
"""

import argparse
import datetime
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

_METRICS = ("auc", "gauc", "logloss", "normalized_entropy", "calibration")
_ENVIRONMENT = (
    "git_commit",
    "python",
    "torch",
    "fbgemm-gpu-cpu",
    "torchrec",
    "machine",
    "cores",
    "world_size",
    "threads_per_rank",
)


def main() -> None:
    """Train every seed, then write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=pathlib.Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            _train(arguments.recipe, seed, arguments.ranks, pathlib.Path(folder) / str(seed))
            for seed in arguments.seeds
        ]
    path = arguments.recipe.parent / "results.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    name = arguments.recipe.stem
    former = results.get(name, {})
    results[name] = {
        "command": f"python -m scripts.measure {arguments.recipe} --seeds {' '.join(map(str, arguments.seeds))}",
        "date": datetime.date.today().isoformat(),
        "selection": "epoch with the best validation AUC; test set read once at the end of a run",
        "test": {
            metric: {
                "mean": round(statistics.mean(values), 5),
                "sd": round(statistics.stdev(values), 5) if len(values) > 1 else None,
                "runs": [round(value, 5) for value in values],
            }
            for metric in _METRICS
            for values in [[run["metrics"]["test"][metric] for run in runs]]
        },
        "valid_auc_runs": [round(run["metrics"]["valid"]["auc"], 5) for run in runs],
        "best_epochs": [run["metrics"]["best_epoch"] for run in runs],
        "rows_per_s": round(statistics.median(run["metrics"]["rows_per_s"] for run in runs)),
        "environment": {key: runs[0]["environment"].get(key) for key in _ENVIRONMENT},
        **({"search": former["search"]} if "search" in former else {}),
    }
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results[name]["test"], indent=1))


def _train(recipe: pathlib.Path, seed: int, ranks: int, run: pathlib.Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "recsys", "train", str(recipe), f"train.seed={seed}", "--run-dir", str(run)]
    if subprocess.run(command).returncode:
        sys.exit(f"training of seed {seed} failed")
    return {name: json.loads((run / f"{name}.json").read_text(encoding="utf-8")) for name in ("metrics", "environment")}


if __name__ == "__main__":
    main()
