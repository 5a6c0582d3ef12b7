"""Random search over a recipe's settings, judged on the validation set alone.

    python -m scripts.search_settings models/din/movielens-100k.yaml --trials 40 --record

The space is a YAML file that maps key paths to lists of values. Trials are drawn without repetition and train one
after the other in this process, on one rank and one thread; the test set is taken out of the recipe, so that no trial
can see it. Each prints one JSON line as it ends. `--record` adds the outcome to the model's results.json.
"""

import argparse
import datetime
import json
import math
import os
import pathlib
import random
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import yaml

from recsys import recipe_file
from recsys.errors import UserError
from recsys.stack import require_stack
from scripts.measure import command_text, read_results, write_results

_SHOWN = 5  # best trials that are listed at the end


def main() -> None:
    """Search with the arguments of the command line; exit code 1 if all trials failed."""
    arguments = parse(sys.argv[1:])
    # Read by OpenMP when torch is imported, and by recsys, which otherwise takes all cores.
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        require_stack()
        import torch

        torch.set_num_threads(1)
        sys.exit(search(arguments))
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments; options and overrides may stand in any order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=pathlib.Path)
    parser.add_argument("--space", type=pathlib.Path, help="default: search.yaml beside the recipe")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="decides which trials are drawn")
    parser.add_argument("--record", action="store_true", help="add the outcome to the model's results.json")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that hold for all trials")
    arguments = parser.parse_intermixed_args(words)
    if arguments.trials < 1:
        parser.error("--trials must be at least 1")
    arguments.space = arguments.space or arguments.recipe.with_name("search.yaml")
    return arguments


def search(arguments: argparse.Namespace) -> int:
    """Run the trials; the exit code.

    Raises:
        UserError: The recipe or the space has problems.
    """
    path, overrides = arguments.recipe, arguments.overrides
    recipe = recipe_file.load(path, overrides)
    if recipe.data.valid is None:
        raise UserError(f"{path} cannot be searched: trials are judged on data.valid", fix="name data.valid in it")
    monitor, space = recipe.train.monitor, read_space(arguments.space)
    outcomes = []
    for settings in draw(space, arguments.trials, arguments.seed):
        outcomes.append(run_trial(path, overrides, settings))
        print(json.dumps(outcomes[-1]), flush=True)
    outcomes = best_first(outcomes, monitor)
    num_failed = sum("error" in outcome for outcome in outcomes)
    print(f"{len(outcomes)} trials, {num_failed} failed; by validation {monitor}, best first:", file=sys.stderr)
    for outcome in outcomes[:_SHOWN]:
        print(json.dumps(outcome), file=sys.stderr)
    if num_failed == len(outcomes):
        return 1
    if arguments.record:
        options = ("--space", arguments.space, "--trials", arguments.trials, "--seed", arguments.seed, "--record")
        results = read_results(path)
        results.setdefault(path.stem, {}).setdefault("search", []).append(
            {
                "date": datetime.date.today().isoformat(),
                "command": command_text("search_settings", path, *overrides, *options),
                "monitor": monitor,
                "space": space,
                "trials": len(outcomes),
                "failed": num_failed,
                "best": outcomes[0],
            }
        )
        write_results(path, results)
    return 0


def read_space(path: pathlib.Path) -> dict[str, list[Any]]:
    """Key paths and the values that each may take.

    Raises:
        UserError: The file cannot be read or is something else.
    """
    try:
        space = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"The space {str(path)!r} cannot be read", received=str(error)) from error
    if not isinstance(space, dict) or not space or not all(isinstance(v, list) and v for v in space.values()):
        raise UserError(
            f"{path} is no space to search",
            received=space,
            allowed="a mapping of key paths to lists of values, for instance `model.dropout: [0, 0.2]`",
        )
    return {key: [_number(value) for value in values] for key, values in space.items()}


def draw(space: dict[str, list[Any]], num_trials: int, seed: int) -> list[dict[str, Any]]:
    """Different points of the space, as many as are asked for or as there are."""
    size = math.prod(len(values) for values in space.values())
    trials = []
    for number in random.Random(seed).sample(range(size), min(num_trials, size)):
        settings = {}
        for key, values in space.items():
            number, index = divmod(number, len(values))
            settings[key] = values[index]
        trials.append(settings)
    return trials


def run_trial(path: pathlib.Path, overrides: Sequence[str], settings: dict[str, Any]) -> dict[str, Any]:
    """Train once; validation metrics of the best epoch, or the error."""
    from recsys.train import train

    words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    with tempfile.TemporaryDirectory() as folder:
        try:
            recipe = recipe_file.load(path, [*overrides, *words, "data.test=null"])
            metrics = train(recipe, run=str(pathlib.Path(folder) / "run")).metrics
        except UserError as error:
            return {"error": str(error), "settings": settings}
    valid = {name: metrics["valid"][name] for name in ("auc", "gauc", "logloss")}
    return {**valid, "best_epoch": metrics["best_epoch"], "settings": settings}


def best_first(outcomes: Sequence[dict[str, Any]], monitor: str) -> list[dict[str, Any]]:
    """Outcomes by a validation metric; then those where it is undefined, then failed ones."""

    def place(outcome: dict[str, Any]) -> tuple[int, float]:
        if "error" in outcome:
            return 2, 0.0
        if outcome[monitor] is None:
            return 1, 0.0
        return 0, outcome[monitor] if monitor == "logloss" else -outcome[monitor]

    return sorted(outcomes, key=place)


def _number(value: Any) -> Any:
    """The number that `1e-3` means in a recipe: YAML 1.1 reads it as text, for want of a dot."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


if __name__ == "__main__":
    main()
