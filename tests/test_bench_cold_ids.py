"""The benchmark of table policies: its made-up data against plain Python, equal memory, and one small measurement."""

import collections
import io
import math
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console
from sklearn.metrics import log_loss, roc_auc_score

from recsys import recipe_file
from recsys.errors import UserError
from scripts import bench_cold_ids
from scripts.bench_cold_ids import ID_COLUMNS, METHODS, Benchmark

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Benchmark:
    """20,000 made-up rows."""
    return bench_cold_ids.synthetic(tmp_path_factory.mktemp("made"), num_rows=20_000)


def ids_of(benchmark: Benchmark, split: str, column: str) -> list[int]:
    return benchmark.column(split, column).tolist()


def test_arriving_ids_equal_a_loop_that_copies_earlier_rows():
    rng = np.random.default_rng(4)
    is_new, earlier = rng.random(500) < 0.3, rng.random(500)
    expected: list[int] = []
    for row in range(500):
        new = row == 0 or is_new[row]
        expected.append(max(expected, default=0) + 1 if new else expected[int(earlier[row] * row)])
    assert bench_cold_ids.arriving_ids(np.random.default_rng(4), 500, 0.3).tolist() == expected


def test_made_up_data_is_split_by_time_and_test_brings_new_ids(made):
    assert [len(made.column(split, "label")) for split in ("train", "valid", "test")] == [14_400, 1_600, 4_000]
    for column in ID_COLUMNS:
        train, test = set(ids_of(made, "train", column)), ids_of(made, "test", column)
        assert made.num_ids()[column] == len(train) == max(train)
        assert 0.02 < sum(number not in train for number in test) / len(test) < 0.4


def test_frequencies_equal_counting(made):
    for column in ID_COLUMNS:
        counted = collections.Counter(ids_of(made, "train", column))
        assert made.frequencies(column).tolist() == [counted[number] for number in ids_of(made, "test", column)]


def test_the_true_logit_is_one_effect_of_the_user_and_one_of_the_item(made):
    # With u(user) + i(item), the four corners of a rectangle of users and items cancel out.
    logits = dict(
        zip(zip(*(ids_of(made, "test", c) for c in ID_COLUMNS), strict=True), made.truth["truth"], strict=True)
    )
    users = collections.defaultdict(set)
    for user, item in logits:
        users[item].add(user)
    (a, _), (b, _) = sorted(((i, len(u)) for i, u in users.items()), key=lambda pair: -pair[1])[:2]
    both = sorted(users[a] & users[b])
    assert len(both) > 3
    gaps = [logits[user, a] - logits[user, b] for user in both]
    assert np.ptp(gaps) < 1e-9 and np.ptp([logits[user, a] for user in both]) > 0.1


def test_labels_follow_the_true_logits(made):
    probs, labels = 1 / (1 + np.exp(-made.truth["truth"])), made.column("test", "label")
    order = np.argsort(probs)
    for part in np.array_split(order, 5):  # 800 rows each: 4 standard errors are at most 4 * sqrt(.25 / 800) = .071
        assert labels[part].mean() == pytest.approx(probs[part].mean(), abs=0.071)


def test_what_can_be_known_is_the_truth_without_new_ids_and_less_with_them(made):
    new = np.zeros(4_000, dtype=bool)
    for column in ID_COLUMNS:
        seen = set(ids_of(made, "train", column))
        new |= np.array([number not in seen for number in ids_of(made, "test", column)])
    truth, knowable, labels = made.truth["truth"], made.truth["all but new ids"], made.column("test", "label")
    np.testing.assert_allclose(knowable[~new], truth[~new], atol=1e-9)
    assert roc_auc_score(labels[new], knowable[new]) < roc_auc_score(labels[new], truth[new])


@pytest.mark.parametrize(("new", "known"), [("user", "item"), ("item", "user")])
def test_of_a_new_id_nothing_but_its_group_can_be_known(made, new, known):
    seen = {name: set(ids_of(made, "train", f"{name}_id")) for name in (new, known)}
    columns = [ids_of(made, "test", name) for name in (f"{new}_id", f"{known}_id", f"{new}_group")]
    found, ids = collections.defaultdict(list), collections.defaultdict(set)
    for new_id, known_id, group, logit in zip(*columns, made.truth["all but new ids"], strict=True):
        if new_id not in seen[new] and known_id in seen[known]:
            found[known_id, group].append(logit)
            ids[known_id, group].add(new_id)
    several = [key for key, different in ids.items() if len(different) > 1]
    assert several
    assert max(np.ptp(found[key]) for key in several) < 1e-9


def test_expected_logits_average_probabilities_over_the_effects_of_new_ids():
    known = np.linspace(-3, 3, 7)
    never, always = np.zeros(7, bool), np.ones(7, bool)
    found = {
        (u, i): 1 / (1 + np.exp(-bench_cold_ids.expected_logits(known, always if u else never, always if i else never)))
        for u in (0, 1)
        for i in (0, 1)
    }
    np.testing.assert_allclose(found[0, 0], 1 / (1 + np.exp(-known)))
    # The sigmoid's integral is log(1 + e^x); effects are even over [-sqrt 3, sqrt 3).
    root = math.sqrt(3)
    one = (np.logaddexp(0, known + root) - np.logaddexp(0, known - root)) / (2 * root)
    np.testing.assert_allclose(found[0, 1], one, atol=1e-3)
    np.testing.assert_allclose(found[1, 0], one, atol=1e-3)
    grid = np.linspace(-root, root, 1001)
    x = known[:, None] + grid
    two = ((np.logaddexp(0, x + root) - np.logaddexp(0, x - root)) / (2 * root)).mean(axis=1)
    np.testing.assert_allclose(found[1, 1], two, atol=1e-3)


@pytest.mark.parametrize("budget", bench_cold_ids.BUDGETS)
@pytest.mark.parametrize("share", bench_cold_ids.COLD_SHARES)
def test_all_policies_have_the_same_rows_and_differ_in_nothing_but_the_tables(made, budget, share):
    distinct = {"user_id": 1_003, "item_id": 97}
    text, sizes, rest = str(bench_cold_ids.recipe(made)), set(), set()
    for method in METHODS:
        words = bench_cold_ids.words_of(bench_cold_ids.policies(method, budget, distinct, share))
        recipe = recipe_file.parse(text, words)
        sizes.add(tuple(recipe.inputs.table(column).rows for column in ID_COLUMNS))
        rest.add(recipe.model_copy(update={"tables": {}}).to_yaml())
    assert sizes == {tuple(3 + round(budget * num) for num in distinct.values())}
    assert len(rest) == 1


def test_policies_are_what_their_names_say():
    keys = {m: bench_cold_ids.policies(m, 0.5, {"t": 200}, 0.25) for m in METHODS}
    assert keys["hashed"] == {"tables.t.ids": "hashed", "tables.t.rows": 100}
    for method, hot, cold, hashes in (
        ("one unknown row", 100, 0, 1),
        ("cold rows, 1 hash", 75, 25, 1),
        ("cold rows, 2 hashes", 75, 25, 2),
    ):
        expected = {"ids": "hot_cold", "hot": hot, "cold": cold, "cold_hashes": hashes, "min_count": 1}
        assert keys[method] == {f"tables.t.{key}": value for key, value in expected.items()}


def test_scores_of_all_rows_and_of_slices_equal_scikit_learn(made):
    labels, logits = made.column("test", "label"), made.truth["all but new ids"]
    probs = 1 / (1 + np.exp(-logits))
    found = bench_cold_ids.score(made, logits)
    assert (found["auc"], found["logloss"]) == pytest.approx((roc_auc_score(labels, logits), log_loss(labels, probs)))
    counts = made.frequencies("item_id")
    inside = (counts >= 3) & (counts <= 9)
    part = next(part for part in found["slices"]["item_id"] if part["slice"] == "3-9")
    assert part["rows"] == inside.sum()
    assert part["auc"] == pytest.approx(roc_auc_score(labels[inside], logits[inside]))


def test_a_summary_has_mean_and_spread_of_each_metric_and_slice():
    runs = []
    for auc, undefined in ((0.6, 0.7), (0.8, None)):
        parts = [
            {"slice": "0", "rows": 3, "auc": auc - 0.1, "logloss": auc - 0.2, "calibration": 1},
            {"slice": "1-2", "rows": 4, "auc": undefined, "logloss": 0.5, "calibration": 1},
        ]
        test = {"auc": auc, "logloss": 1 - auc, "slices": {"item_id": parts}}
        runs.append({"test": test, "valid_logloss": auc, "best_epoch": 2, "table_bytes": 64, "index_bytes": 16})
    half = round(0.1 * math.sqrt(2), 5)  # of two values that lie .2 apart, the standard deviation is .1 * sqrt 2
    assert bench_cold_ids.summarize(runs) == {
        "test": {"auc": {"mean": 0.7, "sd": half}, "logloss": {"mean": 0.3, "sd": half}},
        "slices": {
            "item_id": [
                {"slice": "0", "rows": 3, "auc": {"mean": 0.6, "sd": half}, "logloss": {"mean": 0.5, "sd": half}},
                {"slice": "1-2", "rows": 4, "auc": {"mean": None, "sd": None}, "logloss": {"mean": 0.5, "sd": 0}},
            ]
        },
        "valid_logloss": {"mean": 0.7, "sd": half},
        "best_epochs": [2, 2],
        "table_bytes": 64,
        "index_bytes": 16,
    }


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> Benchmark:
    monkeypatch.setenv("RECSYS_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(bench_cold_ids, "BUDGETS", (0.2,))
    monkeypatch.setattr(bench_cold_ids, "COLD_SHARES", (0.3,))
    monkeypatch.setattr(bench_cold_ids, "SPACE", {"optimizer.sparse.learning_rate": [0.02, 1e-9]})
    return bench_cold_ids.synthetic(tmp_path, num_rows=5_000)


def test_a_measurement_has_every_policy_at_one_size_with_metrics_of_all_rows_and_slices(tiny, tmp_path):
    found = bench_cold_ids.measure(tiny, [1], tmp_path)
    assert found["settings"]["best"] == {"optimizer.sparse.learning_rate": 0.02}
    assert found["settings"]["cold_share"] == 0.3
    assert [outcome["method"] for outcome in found["outcomes"]] == list(METHODS)
    rows = sum(3 + round(0.2 * num) for num in tiny.num_ids().values())
    assert {outcome["table_bytes"] for outcome in found["outcomes"]} == {rows * 16 * 4}
    for outcome in [*found["outcomes"], *found["truth"]]:
        for column in ID_COLUMNS:
            assert sum(part["rows"] for part in outcome["slices"][column]) == 1_000
    (truth, _), means = found["truth"], [outcome["test"]["auc"]["mean"] for outcome in found["outcomes"]]
    assert 0.5 < min(means) and max(means) < truth["test"]["auc"]["mean"]
    assert len({*means}) == len(METHODS)
    assert found["environment"]["world_size"] == 1 and "command" not in found["environment"]

    console = Console(file=io.StringIO(), width=200)
    console.print(bench_cold_ids.table(found, "logloss", "item_id"))
    text = console.file.getvalue()
    for outcome in [*found["outcomes"], *found["truth"]]:
        (line,) = (line for line in text.splitlines() if f" {outcome['method']} " in line)
        assert f"{outcome['test']['logloss']['mean']:.4f}" in line
        assert f"{outcome['slices']['item_id'][0]['logloss']['mean']:.4f}" in line


def test_without_movietweetings_the_benchmark_ends_with_a_message():
    command = [sys.executable, "-m", "scripts.bench_cold_ids"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "sidooms/MovieTweetings" in done.stderr and "Traceback" not in done.stderr


def test_settings_that_cannot_be_tried_end_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_cold_ids, "SPACE", {"train.epochs": [0]})
    broken = bench_cold_ids.synthetic(tmp_path, num_rows=1_000)
    with pytest.raises(UserError, match=r"(?s)No settings could be tried on synthetic.*train\.epochs"):
        bench_cold_ids.measure(broken, [1], tmp_path)
