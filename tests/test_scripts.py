import argparse
import datetime
import json
import pathlib

import pytest

from recsys.errors import UserError
from scripts import demo, measure, render_results, search_settings

RECIPE = """
model: {name: deepfm}
data: {train: t, valid: v, test: e}
features: [{kind: id, columns: [a]}]
train: {monitor: MONITOR}
"""
ENVIRONMENT = {
    "git_commit": "abc",
    "python": "3.12.1",
    "torch": "2.13.0",
    "processor": "x86_64, Example CPU",
    "cores": 4,
    "device": "cpu",
    "world_size": 2,
    "threads_per_rank": 1,
}


@pytest.fixture
def recipe(tmp_path) -> pathlib.Path:
    """A recipe alone in its folder; no data belongs to it."""
    path = tmp_path / "ads.yaml"
    path.write_text(RECIPE.replace("MONITOR", "logloss"))
    return path


def a_run(auc: float | None, epoch: int = 1, rows_per_s: float = 100.0) -> dict:
    metrics = {"auc": auc, "gauc": 0.5, "logloss": 0.25, "normalized_entropy": 1.0, "calibration": 1.0, "rows": 9}
    valid = {**metrics, "logloss": 0.123456}
    return {
        "metrics": {"test": metrics, "valid": valid, "best_epoch": epoch, "rows_per_s": rows_per_s},
        "environment": {**ENVIRONMENT, "started": "today"},
    }


def summary(*runs: dict) -> dict:
    return measure.summarize(runs, "logloss", "python -m scripts.measure x", datetime.date(2030, 1, 2))


# measure


def test_spread_of_three_runs():
    # Mean .802; deviations -.002, 0, .002; variance .000008 / 2; sd .002; tolerance 3 * .002.
    expected = {"mean": 0.802, "sd": 0.002, "tolerance": 0.006, "runs": [0.8, 0.802, 0.804]}
    assert measure.spread([0.8, 0.802, 0.804]) == expected


@pytest.mark.parametrize(
    ("values", "tolerance"),
    [
        ([0.8, 0.8], 0.002),  # sd 0: the smallest tolerance
        ([0.8, 0.8 + 0.0007 * 2**0.5], 0.0021),  # sd .0007, and 3 * .0007 is 4 digits already
        ([0.8, 0.8 + 0.00071 * 2**0.5], 0.0022),  # sd .00071; .00213 is rounded up
    ],
)
def test_tolerance_is_three_sd_rounded_up_and_no_less_than_two_thousandths(values, tolerance):
    assert measure.spread(values)["tolerance"] == tolerance


def test_one_run_has_no_sd():
    assert measure.spread([0.8]) == {"mean": 0.8, "sd": None, "tolerance": 0.002, "runs": [0.8]}


def test_a_metric_that_is_undefined_in_one_run_has_no_mean():
    assert measure.spread([0.8, None]) == {"mean": None, "sd": None, "tolerance": None, "runs": [0.8, None]}


def test_summary_of_runs():
    found = summary(a_run(0.8, 3, 100.4), a_run(0.9, 5, 300.0), a_run(0.7, 4, 101.6))
    assert found["test"]["auc"] == {"mean": 0.8, "sd": 0.1, "tolerance": 0.3, "runs": [0.8, 0.9, 0.7]}
    assert list(found["test"]) == list(measure.METRICS)
    assert found["valid_runs"] == {"logloss": [0.12346] * 3}
    assert found["best_epochs"] == [3, 5, 4]
    assert found["rows_per_s"] == 102  # the median 101.6
    assert found["environment"] == ENVIRONMENT
    assert found["date"] == "2030-01-02"
    assert found["selection"] == "epoch with the best validation logloss; test set read once, at the end of a run"


def test_summary_survives_an_undefined_metric():
    assert summary(a_run(None))["test"]["auc"] == {"mean": None, "sd": None, "tolerance": None, "runs": [None]}


def test_a_command_is_what_was_typed_without_the_place_of_the_checkout():
    path = pathlib.Path(measure.__file__).parent.parent / "models/x/ads.yaml"
    text = measure.command_text("measure", path, "--seeds", 4, 5, "--ranks", 1, "a=[1, 2]")
    assert text == "python -m scripts.measure models/x/ads.yaml --seeds 4 5 --ranks 1 'a=[1, 2]'"


@pytest.mark.parametrize("split", ["valid", "test"])
def test_a_recipe_without_valid_or_test_data_is_refused(recipe, split):
    recipe.write_text(recipe.read_text().replace({"valid": "valid: v, ", "test": ", test: e"}[split], ""))
    with pytest.raises(UserError, match=f"Received: no data.{split}. Do: name data.{split}"):
        measure.load(recipe)


def test_measuring_writes_results_keeps_the_search_and_warns_of_a_dirty_checkout(recipe, monkeypatch, capsys):
    run = a_run(0.8)
    run["environment"]["git_commit"] = "abc-dirty"
    monkeypatch.setattr(measure, "_train", lambda path, seed, ranks, folder: run)
    monkeypatch.setattr("sys.argv", ["measure", str(recipe), "--seeds", "7", "--ranks", "3"])
    measure.write_results(recipe, {"ads": {"search": [1], "test": "former"}, "other": 2})
    measure.main()
    results = json.loads((recipe.parent / "results.json").read_text())
    assert results["ads"]["search"] == [1]
    assert results["ads"]["test"]["auc"]["mean"] == 0.8
    assert results["ads"]["command"].endswith("ads.yaml --seeds 7 --ranks 3")
    assert results["other"] == 2
    assert "uncommitted" in capsys.readouterr().err


def test_a_recipe_that_cannot_be_measured_ends_with_a_message_before_training(recipe, monkeypatch, capsys):
    recipe.write_text(recipe.read_text().replace(", test: e", ""))
    monkeypatch.setattr("sys.argv", ["measure", str(recipe)])
    with pytest.raises(SystemExit, match="2"):
        measure.main()
    assert capsys.readouterr().err.startswith("Error: ")


# render_results


@pytest.fixture
def tree(tmp_path) -> pathlib.Path:
    """A checkout with two models, of which only `a` has results."""
    markers = "# {title}\n\nabove\n<!-- results:begin -->\nold\n<!-- results:end -->\nbelow\n"
    for name in ("a", "b"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "movielens-100k.yaml").touch()
        (tmp_path / "models" / name / "README.md").write_text(markers.format(title=name.upper()))
    (tmp_path / "README.md").write_text(markers.format(title="recsys"))
    (tmp_path / "data" / "movielens-100k").mkdir(parents=True)
    others = {"source": "a paper", "models": [{"name": "LR", "auc": 0.7, "gauc": 0.6, "logloss": 0.5}]}
    (tmp_path / "data" / "movielens-100k" / "published.json").write_text(json.dumps(others))
    record(tmp_path, summary(a_run(0.8, 3), a_run(0.9, 5), a_run(0.7, 4)))
    return tmp_path


def record(tree: pathlib.Path, results: dict) -> None:
    (tree / "models" / "a" / "results.json").write_text(json.dumps({"movielens-100k": results}))


def test_table_has_measured_unmeasured_and_other_models_and_a_caption(tree):
    assert render_results.table(tree).splitlines() == [
        "| model | AUC | GAUC | log loss |",
        "|---|---|---|---|",
        "| **A** (this library) | 0.8000 +- 0.1000 | 0.5000 +- 0.0000 | 0.2500 +- 0.0000 |",
        "| **B** (this library) | not measured yet |  |  |",
        "| LR | 0.7000 | 0.6000 | 0.5000 |",
        "",
        "Other libraries: a paper.",
    ]


def test_an_absent_sd_is_left_out_and_an_absent_mean_is_undefined(tree):
    record(tree, summary(a_run(None)))
    assert "| **A** (this library) | undefined | 0.5000 | 0.2500 |" in render_results.table(tree)
    text = render_results.card(summary_by_name(a_run(None)))
    assert "| AUC | undefined |  |  | undefined |" in text
    assert "| GAUC | 0.5000 |  | 0.0020 | 0.5000 |" in text


def summary_by_name(*runs: dict) -> dict:
    return {"ads": summary(*runs)}


def test_a_card_tells_how_its_results_came_about():
    search = {"command": "python -m scripts.search_settings x", "date": "2030-01-01", "monitor": "auc"}
    best = {"auc": 0.75, "settings": {"model.dropout": 0.1, "x": "y"}}
    results = summary_by_name(a_run(0.8, 3), a_run(0.9, 5), a_run(0.7, 4))
    results["ads"]["search"] = [{**search, "trials": 9, "failed": 2, "best": best}]
    lines = render_results.card(results).splitlines()
    assert lines[:5] == [
        "### ads",
        "",
        "| test set | mean | sd | tolerance | runs |",
        "|---|---|---|---|---|",
        "| AUC | 0.8000 | 0.1000 | 0.3000 | 0.8000, 0.9000, 0.7000 |",
    ]
    assert lines[-8:] == [
        "- Command: `python -m scripts.measure x`, 2030-01-02, commit abc",
        "- Selection: epoch with the best validation logloss; test set read once, at the end of a run",
        "- Best epochs: 3, 5, 4",
        "- Speed: 100 rows/s in training",
        "- Hardware: x86_64, Example CPU, 4 cores; 2 rank(s) on cpu, 1 thread(s) each",
        "- Versions: python 3.12.1, torch 2.13.0",
        "- Search: `python -m scripts.search_settings x`, 2030-01-01: 9 trials (2 failed), "
        "best validation AUC 0.7500 with",
        '  `model.dropout=0.1, x="y"`',
    ]


def test_a_search_alone_is_not_a_measurement(tree):
    search = {"command": "c", "date": "d", "monitor": "auc", "trials": 1, "failed": 0}
    record(tree, {"search": [{**search, "best": {"auc": None, "settings": {}}}]})
    assert "| **A** (this library) | not measured yet |" in render_results.table(tree)
    card = render_results.render_all(tree)[tree / "models" / "a" / "README.md"]
    assert "not measured yet\n\n- Search: `c`, d: 1 trials, best validation AUC undefined" in card


def test_drift_names_the_files_that_rendering_would_change(tree):
    assert render_results.drift(tree) == ["README.md", "models/a/README.md", "models/b/README.md"]
    for path, text in render_results.render_all(tree).items():
        path.write_text(text)
    assert render_results.drift(tree) == []
    assert (tree / "models" / "b" / "README.md").read_text() == (
        "# B\n\nabove\n<!-- results:begin -->\nnot measured yet\n<!-- results:end -->\nbelow\n"
    )
    record(tree, summary(a_run(0.6)))
    assert render_results.drift(tree) == ["README.md", "models/a/README.md"]


def test_a_card_without_markers_is_an_error_that_names_it(tree):
    (tree / "models" / "b" / "README.md").write_text("# B\n")
    with pytest.raises(ValueError, match=r"models/b/README.md has not exactly one <!-- results:begin -->"):
        render_results.drift(tree)


# search_settings


@pytest.fixture
def arguments(recipe) -> argparse.Namespace:
    """A search over three values, to be recorded."""
    (recipe.parent / "search.yaml").write_text("model.dropout: [0.1, 2e-1, 0.3]\n")
    return search_settings.parse([str(recipe), "train.epochs=2", "--trials", "9", "--record", "train.patience=1"])


def stub(monkeypatch, loglosses: dict[float, float | None]) -> None:
    """Trials end with the log loss of their dropout; those without one fail."""

    def trial(path, overrides, settings):
        assert overrides == ["train.epochs=2", "train.patience=1"]
        if settings["model.dropout"] not in loglosses:
            return {"error": "no", "settings": settings}
        return {"auc": 0.5, "logloss": loglosses[settings["model.dropout"]], "settings": settings}

    monkeypatch.setattr(search_settings, "run_trial", trial)


def test_best_first_knows_the_direction_of_a_metric_and_puts_undefined_and_failed_last():
    outcomes = [{"error": "x"}, {"auc": None, "logloss": None}, {"auc": 0.6, "logloss": 0.4}]
    outcomes += [{"auc": 0.7, "logloss": 0.5}]
    assert [outcomes.index(o) for o in search_settings.best_first(outcomes, "auc")] == [3, 2, 1, 0]
    assert [outcomes.index(o) for o in search_settings.best_first(outcomes, "logloss")] == [2, 3, 1, 0]


def test_a_search_prints_its_trials_and_records_the_best(arguments, monkeypatch, capsys):
    stub(monkeypatch, {0.1: None, 0.2: 0.4})
    assert search_settings.search(arguments) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(outcome["settings"]["model.dropout"] for outcome in printed) == [0.1, 0.2, 0.3]
    (found,) = measure.read_results(arguments.recipe)["ads"]["search"]
    assert found["best"] == {"auc": 0.5, "logloss": 0.4, "settings": {"model.dropout": 0.2}}
    assert (found["trials"], found["failed"], found["monitor"]) == (3, 1, "logloss")
    assert found["space"] == {"model.dropout": [0.1, 0.2, 0.3]}
    folder = arguments.recipe.parent
    assert found["command"] == (
        f"python -m scripts.search_settings {folder}/ads.yaml train.epochs=2 train.patience=1 "
        f"--space {folder}/search.yaml --trials 9 --seed 0 --record"
    )


def test_a_second_search_is_added_to_the_first(arguments, monkeypatch):
    stub(monkeypatch, {0.2: 0.4})
    measure.write_results(arguments.recipe, {"ads": {"test": 1}})
    assert [search_settings.search(arguments) for _ in range(2)] == [0, 0]
    results = measure.read_results(arguments.recipe)["ads"]
    assert results["test"] == 1
    assert len(results["search"]) == 2


def test_a_search_whose_trials_all_fail_exits_with_1_and_records_nothing(arguments, monkeypatch):
    stub(monkeypatch, {})
    assert search_settings.search(arguments) == 1
    assert measure.read_results(arguments.recipe) == {}


def test_a_trial_that_a_user_error_stops_is_an_outcome(recipe):
    found = search_settings.run_trial(recipe, [], {"train.epochs": 0})
    assert "train.epochs" in found["error"]
    assert found["settings"] == {"train.epochs": 0}


def test_a_trial_reads_no_test_set_and_leaves_nothing_behind(recipe, monkeypatch):
    seen = {}

    def train(loaded, run):
        seen.update(recipe=loaded, run=pathlib.Path(run))
        pathlib.Path(run).mkdir()
        metrics = {"valid": {"auc": 0.6, "gauc": None, "logloss": 0.3, "rows": 5}, "best_epoch": 2}
        return argparse.Namespace(metrics=metrics)

    monkeypatch.setattr("recsys.train.train", train)
    found = search_settings.run_trial(recipe, ["train.epochs=3"], {"optimizer.dense.learning_rate": 1e-05})
    settings = {"optimizer.dense.learning_rate": 1e-05}
    assert found == {"auc": 0.6, "gauc": None, "logloss": 0.3, "best_epoch": 2, "settings": settings}
    assert seen["recipe"].data.test is None
    assert seen["recipe"].train.epochs == 3
    assert seen["recipe"].optimizer.dense.learning_rate == 1e-05
    assert not seen["run"].parent.exists()


def test_draws_differ_from_each_other_and_repeat_with_the_seed():
    space = {"a": [1, 2, 3], "b": ["x", None]}
    all_points = search_settings.draw(space, 100, seed=1)
    assert sorted((p["a"], str(p["b"])) for p in all_points) == [(a, b) for a in (1, 2, 3) for b in ("None", "x")]
    assert search_settings.draw(space, 4, seed=1) == search_settings.draw(space, 4, seed=1)
    assert len(search_settings.draw(space, 4, seed=1)) == 4


@pytest.mark.parametrize("text", ["[1]", "a: 1", "a: []", "", "a: ["])
def test_a_space_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "search.yaml").write_text(text)
    with pytest.raises(UserError, match=r"search\.yaml"):
        search_settings.read_space(tmp_path / "search.yaml")


def test_a_recipe_without_valid_data_cannot_be_searched(arguments):
    arguments.recipe.write_text(arguments.recipe.read_text().replace("valid: v, ", ""))
    arguments.overrides = []
    with pytest.raises(UserError, match=r"judged on data\.valid"):
        search_settings.search(arguments)


def test_a_search_needs_a_trial(capsys):
    with pytest.raises(SystemExit, match="2"):
        search_settings.parse(["x.yaml", "--trials", "0"])
    assert "--trials must be at least 1" in capsys.readouterr().err


# demo


def test_the_demo_names_what_is_short_of_its_promise():
    assert demo.shortfalls("din", {"auc": 0.785, "gauc": 0.71}) == []
    assert demo.shortfalls("din", {"auc": 0.78, "gauc": 0.7}) == ["din auc 0.7800 < 0.785", "din gauc 0.7000 < 0.71"]
