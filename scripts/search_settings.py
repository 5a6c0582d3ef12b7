"""Random search over a recipe's settings, judged on the validation set alone.

    python -m scripts.search_settings models/din/movielens-100k.yaml --trials 40 --space space.yaml

`space.yaml` maps key paths to lists of values. Each trial trains in a process of its own with one thread, `--jobs`
at a time; the test set is taken out of the recipe, so that no trial can see it. The outcome, best first, goes to
standard output as JSON lines.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
from typing import Any

import yaml


def main() -> None:
    """Draw the trials, run them, print them from best to worst."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=pathlib.Path)
    parser.add_argument("--space", type=pathlib.Path, required=True)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="key=value that hold for all trials")
    arguments = parser.parse_intermixed_args()
    space = yaml.safe_load(arguments.space.read_text(encoding="utf-8"))
    draw = random.Random(arguments.seed)
    trials = [{key: draw.choice(values) for key, values in space.items()} for _ in range(arguments.trials)]
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        done = list(pool.map(lambda trial: _try(arguments.recipe, trial, arguments.overrides), trials))
    for outcome in sorted(done, key=lambda o: -o.get("auc", 0.0)):
        print(json.dumps(outcome))


def _try(recipe: pathlib.Path, trial: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = pathlib.Path(folder) / "run"
        settings = [f"{key}={json.dumps(value)}" for key, value in trial.items()]
        command = [sys.executable, "-m", "recsys", "train", str(recipe), *overrides, *settings, "data.test=null"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        found = subprocess.run([*command, "--run-dir", str(run)], capture_output=True, text=True, env=environment)
        if found.returncode:
            return {"settings": trial, "error": found.stderr[-500:]}
        metrics = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
        outcome = {"auc": metrics["valid"]["auc"], "gauc": metrics["valid"]["gauc"], "epoch": metrics["best_epoch"]}
        print(json.dumps({**outcome, "settings": trial}), file=sys.stderr, flush=True)
        return {**outcome, "logloss": metrics["valid"]["logloss"], "settings": trial}


if __name__ == "__main__":
    main()
