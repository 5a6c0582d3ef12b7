"""What becomes of ids that own no row: four table policies at equal memory, on new, rare and frequent ids.

    python -m scripts.bench_cold_ids --source MOVIETWEETINGS [--seeds 1 2 3]

Trains DeepFM on MovieTweetings and on made-up ratings whose truth is known, with each policy of `METHODS` for the
tables of users and items. A budget is a share of the rows that one row for each training id would need; at one budget
all policies have equally many rows. All else is the same for all: the learning rates and the penalty are chosen once
for each data set, on its validation set, with tables that are so large that ids hardly share rows.

Prints a table for each metric and id column, and writes benchmarks/cold_ids.json. A spread is the standard deviation
over seeds, which decide initial values and shuffling; all seeds train and test on the same rows.
"""

import argparse
import dataclasses
import datetime
import itertools
import json
import logging
import math
import os
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from rich.console import Console
from rich.table import Table

from recsys import metrics, slices
from recsys.data.prepare import prepare
from recsys.data.synthetic import hashed_effect
from recsys.errors import UserError
from recsys.recipe import PREDICTION
from recsys.stack import require_stack
from scripts.measure import spread
from scripts.search_settings import best_first, draw, run_trial

BUDGETS = (0.05, 0.2, 0.6)
METHODS: Mapping[str, Mapping[str, Any]] = {
    "one unknown row": {"ids": "hot_cold", "cold_hashes": 1},
    "hashed": {"ids": "hashed"},
    "cold rows, 1 hash": {"ids": "hot_cold", "cold_hashes": 1},
    "cold rows, 2 hashes": {"ids": "hot_cold", "cold_hashes": 2},
}
COLD_SHARES = (0.1, 0.25, 0.5)
"""Shares of a table's rows that its cold ids may get, where they get any."""
ID_COLUMNS = ("user_id", "item_id")
METRICS = {"auc": "AUC", "logloss": "log loss"}
SPACE = {
    "optimizer.sparse.learning_rate": [0.01, 0.02, 0.05, 0.1, 0.2],
    "optimizer.dense.learning_rate": [1e-3, 3e-3],
    "tables.default.l2": [0.0, 0.03, 0.1],
}
_SPACIOUS = 16  # rows for each training id while settings are chosen: 1 id in 17 shares its row
_DIM = 15  # with DeepFM's first-order weight a stored row of 16 numbers, without padding
_OUTPUT = pathlib.Path(__file__).parent.parent / "benchmarks" / "cold_ids.json"
_SPLITS = ("train", "valid", "test")


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One data set.

    Attributes:
        name: For the table.
        folder: Prepared splits.
        features: As in a recipe.
        truth: Scorer -> (N,) logits of the test rows, where the truth is known.
    """

    name: str
    folder: pathlib.Path
    features: Sequence[Mapping[str, Any]]
    truth: Mapping[str, np.ndarray]

    def column(self, split: str, name: str) -> np.ndarray:
        """One column of a split, in its order."""
        return pq.read_table(self.folder / split, columns=[name])[name].to_numpy()

    def frequencies(self, column: str) -> np.ndarray:
        """(N,) how often the id of each test row occurs in training."""
        ids, counts = np.unique(self.column("train", column), return_counts=True)
        tested = self.column("test", column)
        place = np.minimum(np.searchsorted(ids, tested), len(ids) - 1)
        return np.where(ids[place] == tested, counts[place], 0)

    def num_ids(self) -> dict[str, int]:
        """Id column -> distinct ids in training."""
        return {column: len(np.unique(self.column("train", column))) for column in ID_COLUMNS}


def main() -> None:
    """Make the data, choose settings, train everything, write and print the results."""
    arguments = parse(sys.argv[1:])
    # Read by OpenMP when torch is imported, and by recsys, which otherwise takes all cores.
    os.environ["OMP_NUM_THREADS"] = "1"
    logging.getLogger("recsys").setLevel(logging.ERROR)
    try:
        require_stack()
        import torch

        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            home = pathlib.Path(folder)
            os.environ["RECSYS_DATA"] = folder  # where vocabularies go, so that nothing is left behind
            benchmarks = [movietweetings(home, arguments.source), synthetic(home)]
            found = [measure(benchmark, arguments.seeds, home) for benchmark in benchmarks]
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
    seeds = " ".join(map(str, arguments.seeds))
    results = {
        "command": f"python -m scripts.bench_cold_ids --source MOVIETWEETINGS --seeds {seeds}",
        "date": datetime.date.today().isoformat(),
        "selection": "settings and epoch with the best validation log loss; test set read once, at the end of a run",
        "data": found,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    console = Console(width=None if sys.stdout.isatty() else 160)
    for data, metric, column in itertools.product(found, METRICS, ID_COLUMNS):
        console.print(table(data, metric, column))


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=pathlib.Path, help="folder with ratings.dat and movies.dat of MovieTweetings")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--output", type=pathlib.Path, default=_OUTPUT)
    return parser.parse_args(words)


# ---- data ----


def movietweetings(home: pathlib.Path, source: pathlib.Path | None) -> Benchmark:
    """The real data; histories are left out, so that an id is read in one place alone."""
    name = "movietweetings-100k"
    prepare(name, home / name, source)
    features = (
        {"kind": "id", "columns": list(ID_COLUMNS)},
        {"kind": "id_list", "columns": ["genres"]},
        {"kind": "number", "columns": ["year"]},
    )
    return Benchmark(name, home / name, features, {})


def synthetic(home: pathlib.Path, num_rows: int = 200_000, seed: int = 1) -> Benchmark:
    """Made-up ratings: each user and each item adds its group's effect and its own to the logit.

    The model reads the groups, so that the group's effect can be known of an id that training has not seen, and
    nothing more. Scorers in `truth`: the true logits, and the best that can be known after training, that is the true
    effects of all ids in train, and of the others how such effects are distributed.
    """
    rng = np.random.default_rng(seed)
    num_test = num_rows // 5
    num_train = num_rows - num_test - (num_rows - num_test) // 10
    columns: dict[str, np.ndarray] = {}
    logits, known, new = np.zeros(num_rows), np.zeros(num_rows), []
    for name, share_new, num_groups in (("user", 0.15, 20), ("item", 0.08, 50)):
        ids = arriving_ids(rng, num_rows, share_new)
        groups = ids % num_groups
        salts = [int(salt) for salt in rng.integers(2**63, size=2)]
        shared, own = 0.5 * hashed_effect(groups, salts[0]), hashed_effect(ids, salts[1])
        new.append(ids > ids[:num_train].max())  # ids are numbered as they arrive
        logits += shared + own
        known += shared + np.where(new[-1], 0, own)
        columns |= {f"{name}_id": ids, f"{name}_group": groups}
    columns["label"] = (rng.random(num_rows) < _sigmoid(logits)).astype(np.int8)
    whole = pa.table(columns)
    starts = [0, num_train, num_rows - num_test, num_rows]
    for split, start, stop in zip(_SPLITS, starts[:-1], starts[1:], strict=True):
        (home / "synthetic" / split).mkdir(parents=True)
        pq.write_table(whole.slice(start, stop - start), home / "synthetic" / split / "part.parquet")
    features = ({"kind": "id", "columns": [*ID_COLUMNS, "user_group", "item_group"]},)
    knowable = expected_logits(*(part[-num_test:] for part in (known, *new)))
    truth = {"truth": logits[-num_test:], "all but new ids": knowable}
    return Benchmark("synthetic", home / "synthetic", features, truth)


def expected_logits(known: np.ndarray, new_user: np.ndarray, new_item: np.ndarray) -> np.ndarray:
    """(N,) logits of the mean probabilities of rows of which only (N,) `known` is known, without new ids' effects."""
    # Effects are spread evenly over [-sqrt 3, sqrt 3): midpoints of 16 equal parts.
    effects = math.sqrt(3) * ((2 * np.arange(16) + 1) / 16 - 1)
    of_user, of_item = (np.where(new[:, None], effects, 0) for new in (new_user, new_item))
    return _logits(_sigmoid(known[:, None, None] + of_user[:, :, None] + of_item[:, None, :]).mean(axis=(1, 2)))


def arriving_ids(rng: np.random.Generator, num_rows: int, share_new: float) -> np.ndarray:
    """(num_rows,) ids 1, 2, ..., numbered as they arrive; their popularity is Zipf's.

    A row brings a new id with probability `share_new`, and repeats the id of an earlier row, drawn evenly, otherwise.
    This gives the k-th most popular id a share of about k ** -(1 - share_new), and a steady stream of new ids
    (Simon, "On a class of skew distribution functions", Biometrika 42, 1955).
    """
    rows = np.arange(num_rows)
    origin = np.where(rng.random(num_rows) < share_new, rows, (rng.random(num_rows) * rows).astype(np.int64))
    while not np.array_equal(origin, origin[origin]):  # each round doubles the steps back, so there are few
        origin = origin[origin]
    return np.unique(origin, return_inverse=True)[1] + 1


# ---- runs ----


def measure(benchmark: Benchmark, seeds: Sequence[int], home: pathlib.Path) -> dict[str, Any]:
    """Choose the settings, then train every budget, policy and seed; what the results say about one data set."""
    path = home / f"{benchmark.name}.yaml"
    path.write_text(yaml.safe_dump(recipe(benchmark)), encoding="utf-8")
    settings = choose(benchmark, path)
    distinct = benchmark.num_ids()
    outcomes, environment = [], {}
    for budget in BUDGETS:
        sizes = set()
        for method in METHODS:
            tables = policies(method, budget, distinct, settings["cold_share"])
            runs = [run(benchmark, path, {**settings["best"], **tables, "train.seed": seed}) for seed in seeds]
            environment = runs[0]["environment"]
            sizes.add(runs[0]["table_bytes"])
            outcomes.append({"budget": budget, "method": method, "tables": tables, **summarize(runs)})
            print(f"{benchmark.name}, {budget:.0%}, {method}: done", file=sys.stderr)
        assert max(sizes) <= 1.01 * min(sizes), f"policies must be equally large to within 1 %, not {sizes}"
    truth = {scorer: [{"test": score(benchmark, logits)}] for scorer, logits in benchmark.truth.items()}
    return {
        "name": benchmark.name,
        "rows": {split: len(benchmark.column(split, "label")) for split in _SPLITS},
        "distinct_ids_in_train": distinct,
        "settings": settings,
        "truth": [{"method": scorer, **summarize(scored)} for scorer, scored in truth.items()],
        "outcomes": outcomes,
        "environment": environment,
    }


def recipe(benchmark: Benchmark) -> dict[str, Any]:
    """What all runs on a data set have in common."""
    return {
        "model": {"name": "deepfm", "hidden": [32]},
        "data": {**{split: str(benchmark.folder / split) for split in _SPLITS}, "batch_size_per_rank": 512},
        "features": [dict(feature) for feature in benchmark.features],
        "tables": {"default": {"ids": "hashed", "rows": 10_000, "dim": _DIM}},
        "train": {"epochs": 10, "patience": 2, "monitor": "logloss", "device": "cpu"},
    }


def choose(benchmark: Benchmark, path: pathlib.Path) -> dict[str, Any]:
    """Settings by validation log loss: first those of `SPACE` with spacious tables, then the share of cold rows.

    The share is that of one hash at the middle budget; it holds for all budgets and for two hashes too.

    Raises:
        UserError: Nothing could be trained.
    """
    distinct = benchmark.num_ids()
    spacious = words_of(policies("hashed", _SPACIOUS, distinct, 0))
    trials = [run_trial(path, spacious, settings) for settings in draw(SPACE, num_trials=1000, seed=0)]
    best = best_first(trials, "logloss")[0]
    if "error" in best:
        raise UserError(f"No settings could be tried on {benchmark.name}", received=best["error"])
    by_share = {}
    for share in COLD_SHARES:
        tables = policies("cold rows, 1 hash", BUDGETS[len(BUDGETS) // 2], distinct, share)
        by_share[share] = run(benchmark, path, {**best["settings"], **tables})["valid_logloss"]
    return {
        "space": SPACE,
        "best": best["settings"],
        "valid_logloss": best["logloss"],
        "cold_share": min(by_share, key=by_share.__getitem__),
        "valid_logloss_by_cold_share": by_share,
    }


def policies(method: str, budget: float, distinct: Mapping[str, int], cold_share: float) -> dict[str, Any]:
    """Key path -> value of the recipe: one of `METHODS` for the table of each id column.

    Args:
        method: Its name.
        budget: Rows for ids, as a share of one row for each id.
        distinct: Table -> ids in training.
        cold_share: Share of a table's rows that cold ids get where they get any.
    """
    keys: dict[str, Any] = {}
    for name, num_ids in distinct.items():
        settings, num_rows = dict(METHODS[method]), round(budget * num_ids)
        if settings["ids"] == "hashed":
            settings["rows"] = num_rows
        else:
            cold = 0 if method == "one unknown row" else max(2, round(cold_share * num_rows))
            # The budget alone decides which ids are frequent; a minimum would leave rows unused.
            settings |= {"hot": num_rows - cold, "cold": cold, "min_count": 1}
        keys |= {f"tables.{name}.{key}": value for key, value in settings.items()}
    return keys


def words_of(settings: Mapping[str, Any]) -> list[str]:
    """Settings by key path as overrides of a recipe."""
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def run(benchmark: Benchmark, path: pathlib.Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train once; metrics of the kept epoch on the test set, bytes of the id tables, environment."""
    from recsys import recipe_file
    from recsys.predict import predict
    from recsys.train import train

    with tempfile.TemporaryDirectory() as folder:
        place, scores = pathlib.Path(folder) / "run", pathlib.Path(folder) / "scores.parquet"
        trained = train(recipe_file.load(path, words_of(settings)), run=str(place)).metrics
        predict(str(place), data_path=str(benchmark.folder / "test"), output=str(scores))
        probs = pq.read_table(scores)[PREDICTION].to_numpy()
        plan, environment = (json.loads((place / f"{name}.json").read_text()) for name in ("plan", "environment"))
    for key in ("command", "started", "data_fingerprints"):
        del environment[key]
    num_bytes = {table["name"]: sum(shard["bytes"] for shard in table["shards"]) for table in plan["tables"]}
    return {
        "test": score(benchmark, _logits(probs)),
        "valid_logloss": trained["valid"]["logloss"],
        "best_epoch": trained["best_epoch"],
        "table_bytes": sum(num_bytes[column] for column in ID_COLUMNS),
        # What finds the hot ids: a key and a row number of 8 bytes each.
        "index_bytes": sum(16 * settings.get(f"tables.{column}.hot", 0) for column in ID_COLUMNS),
        "environment": environment,
    }


# ---- results ----


def score(benchmark: Benchmark, logits: np.ndarray) -> dict[str, Any]:
    """Metrics of the test rows: of all together, and of slices by the training frequency of each id column."""
    labels, probs = benchmark.column("test", "label"), _sigmoid(logits)
    whole = metrics.compute(probs, labels, None, logits)
    sliced = {c: slices.by_frequency(probs, labels, logits, benchmark.frequencies(c)) for c in ID_COLUMNS}
    return {**{metric: whole[metric] for metric in METRICS}, "slices": sliced}


def summarize(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and spread over the seeds of everything that `run` returns."""
    tests = [run["test"] for run in runs]
    sliced = {}
    for column, parts in tests[0]["slices"].items():
        sliced[column] = [{"slice": part["slice"], "rows": part["rows"]} for part in parts]
        for metric, (i, part) in itertools.product(METRICS, enumerate(sliced[column])):
            part[metric] = _mean_sd([test["slices"][column][i][metric] for test in tests])
    found = {"test": {metric: _mean_sd([test[metric] for test in tests]) for metric in METRICS}, "slices": sliced}
    if "table_bytes" in runs[0]:
        found["valid_logloss"] = _mean_sd([run["valid_logloss"] for run in runs])
        found["best_epochs"] = [run["best_epoch"] for run in runs]
        found |= {key: runs[0][key] for key in ("table_bytes", "index_bytes")}
    return found


def table(data: Mapping[str, Any], metric: str, column: str) -> Table:
    """One metric of every budget and policy, over all test rows and over slices by the frequency of one id column."""
    parts = data["outcomes"][0]["slices"][column]
    title = f"{data['name']}: test {METRICS[metric]} by the number of training rows with the same {column}"
    shown = Table(title=title, title_justify="left")
    for name in ("budget", "policy", "KiB", f"all\n{data['rows']['test']:,} rows"):
        shown.add_column(name, justify="left" if name == "policy" else "right")
    for part in parts:
        shown.add_column(f"{part['slice']}\n{part['rows']:,} rows", justify="right")
    for found in [*data["outcomes"], *data["truth"]]:
        cells = [_cell(found["test"][metric]), *(_cell(part[metric]) for part in found["slices"][column])]
        budget = f"{found['budget']:.0%}" if "budget" in found else ""
        size = f"{found['table_bytes'] / 1024:,.0f}" if "table_bytes" in found else ""
        shown.add_row(budget, found["method"], size, *cells)
        if found["method"] == list(METHODS)[-1]:
            shown.add_section()
    return shown


def _mean_sd(values: Sequence[float | None]) -> dict[str, Any]:
    found = spread(values)
    return {"mean": found["mean"], "sd": found["sd"]}


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


def _logits(probs: np.ndarray) -> np.ndarray:
    return np.log(probs) - np.log1p(-probs)


def _cell(found: Mapping[str, Any]) -> str:
    if found["mean"] is None:
        return "undefined"
    return f"{found['mean']:.4f}" + ("" if found["sd"] is None else f" +- {found['sd']:.4f}")


if __name__ == "__main__":
    main()
