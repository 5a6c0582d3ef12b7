"""Synthetic data: its truth against plain Python and scikit-learn, its shape, and its seed."""

import itertools
import math

import numpy as np
import pyarrow as pa
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from recsys.data import synthetic
from recsys.data.synthetic import Synthetic, SyntheticOptions, zipf_ids
from recsys.errors import UserError


def make(**options) -> Synthetic:
    return Synthetic(SyntheticOptions(**options))


def splits_of(dataset: Synthetic) -> dict[str, pa.Table]:
    chunks: dict[str, list[pa.Table]] = {}
    for name, table in dataset.tables():
        chunks.setdefault(name, []).append(table)
    return {name: pa.concat_tables(tables) for name, tables in chunks.items()}


def plain_effect(number: int, salt: int) -> float:
    """splitmix64's finaliser in Python integers, spread over [-sqrt 3, sqrt 3)."""
    mask = 2**64 - 1
    z = (number * 0x9E3779B97F4A7C15 + salt) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return (2 * (z >> 11) / 2**53 - 1) * math.sqrt(3)


def test_logits_are_main_effects_pairs_and_match_added_up_by_hand():
    dataset = make(rows=10, main=0.7, interaction=1.3, match=2.0, numbers=2, contexts=(30,), mean_history=4)
    columns, logits = dataset.chunk(0, 0, 40)
    names = ["user_id", "item_id", "category_id", "context_1"]
    history, labels = columns["history_category_id"].to_pylist(), []
    for row, logit in enumerate(logits):
        ids = [int(columns[name][row]) for name in names]
        mains = [plain_effect(i, salts[0]) for i, salts in zip(ids, dataset._salts, strict=True)]
        mains += [(float(columns[f"number_{j}"][row]) - 10) / 3 for j in (1, 2)]
        vectors = [[plain_effect(i, s) for s in salts[1:]] for i, salts in zip(ids, dataset._salts, strict=True)]
        pairs = [sum(a * b for a, b in zip(v, w, strict=True)) for v, w in itertools.combinations(vectors, 2)]
        share = history[row].count(ids[2]) / len(history[row]) if history[row] else 0.0
        expected = 0.7 * sum(mains) / math.sqrt(6) + 1.3 * sum(pairs) / math.sqrt(4 * 6) + 2.0 * share
        labels.append(logit - expected)
    assert np.ptp(labels) < 1e-5  # what is left is the bias, the same in every row
    assert labels[0] == pytest.approx(dataset._bias, abs=1e-5)


def test_bayes_figures_equal_scikit_learn_on_the_test_split():
    dataset = make(rows=20_000, seed=3)
    test = splits_of(dataset)["test"]
    _, logits = dataset.chunk(2, 0, 2_000)
    labels = test["label"].to_numpy()
    probs = 1 / (1 + np.exp(-logits))
    facts = dataset.facts()
    assert facts["bayes_auc"] == pytest.approx(roc_auc_score(labels, probs), abs=1e-6)
    assert facts["bayes_log_loss"] == pytest.approx(log_loss(labels, probs), abs=1e-6)


def test_bayes_auc_counts_ties_half_and_is_none_for_one_class():
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 5, 300).astype(np.float32), rng.integers(0, 2, 300)
    dataset = make(rows=10)
    dataset._test = [(scores[:100], labels[:100]), (scores[100:], labels[100:])]
    assert dataset.facts()["bayes_auc"] == pytest.approx(roc_auc_score(labels, scores))
    dataset._test = [(scores, np.ones(300))]
    assert dataset.facts()["bayes_auc"] is None


def test_bayes_figures_of_two_classes_come_without_a_warning(caplog):
    dataset = make(rows=2_000)
    list(dataset.tables())
    assert None not in dataset.facts().values()
    assert caplog.records == []


def test_labels_follow_the_true_probabilities():
    dataset = make(rows=10, seed=5)
    columns, logits = dataset.chunk(0, 0, 60_000)
    probs, labels = 1 / (1 + np.exp(-logits)), np.asarray(columns["label"])
    for part in np.array_split(np.argsort(probs), 10):
        spread = math.sqrt(float((probs[part] * (1 - probs[part])).sum())) / len(part)
        assert abs(labels[part].mean() - probs[part].mean()) < 4 * spread


@pytest.mark.parametrize("share", [0.03, 0.25, 0.6])
def test_click_share_is_met(share):
    columns, _ = make(rows=10, click_share=share).chunk(0, 0, 50_000)
    assert np.mean(columns["label"]) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("signal", ["main", "interaction", "match"])
def test_each_signal_alone_can_be_learnt_and_without_any_there_is_none(signal):
    none = {"main": 0.0, "interaction": 0.0, "match": 0.0}
    only = make(rows=20_000, **{**none, signal: 2.0})
    list(only.tables())
    assert only.facts()["bayes_auc"] > 0.6
    nothing = make(rows=20_000, **none)
    list(nothing.tables())
    assert nothing.facts()["bayes_auc"] == 0.5


@pytest.mark.parametrize("exponent", [0.8, 1.0, 1.3])
def test_ids_are_zipf(exponent):
    count, draws = 1_000, 200_000
    ids = zipf_ids(np.random.default_rng(1).random(draws), count, exponent)
    assert ids.min() >= 1 and ids.max() <= count

    def area(low: float, high: float) -> float:  # integral of x ** -exponent
        return math.log(high / low) if exponent == 1 else (high ** (1 - exponent) - low ** (1 - exponent))

    for k in (1, 2, 5, 20):
        share = area(k, k + 1) / area(1, count + 1)
        assert (ids == k).mean() == pytest.approx(share, abs=4 * math.sqrt(share / draws))


def test_zipf_ids_reach_both_ends_and_never_pass_them():
    for exponent in (0.5, 1.0, 1.1, 3.0):
        ids = zipf_ids(np.array([0.0, np.nextafter(1, 0)]), 400_000_000, exponent)
        assert ids[0] == 1 and 1 <= ids[1] <= 400_000_000


def test_history_lengths_are_geometric_and_cut():
    lengths = synthetic._geometric(np.random.default_rng(2).random(100_000), 10.0, 10**6)
    for length in (0, 1, 5, 30):
        assert (lengths >= length).mean() == pytest.approx((10 / 11) ** length, abs=0.006)
    columns, _ = make(rows=10, mean_history=10, max_history=7).chunk(0, 0, 5_000)
    assert max(map(len, columns["history_item_id"].to_pylist())) == 7


def test_item_decides_category_and_histories_run_in_step():
    columns, _ = make(rows=10, items=103, categories=10, mean_history=5).chunk(0, 0, 3_000)
    assert columns["item_id"].max() <= 103 and columns["item_id"].min() >= 1
    assert ((columns["item_id"] - 1) % 10 + 1 == columns["category_id"]).all()
    for items, categories in zip(*(columns[f"history_{c}_id"].to_pylist() for c in ("item", "category")), strict=True):
        assert [(i - 1) % 10 + 1 for i in items] == categories


def test_same_seed_same_rows_and_another_seed_other_rows():
    first, again, other = (splits_of(make(rows=500, seed=s)) for s in (4, 4, 5))
    assert first == again
    for name, table in first.items():
        assert all(table[column] != other[name][column] for column in table.column_names if column != "timestamp")


def test_splits_are_80_10_10_in_order_of_time():
    splits = splits_of(make(rows=100_003))
    assert {name: table.num_rows for name, table in splits.items()} == {
        "train": 80_003,
        "valid": 10_000,
        "test": 10_000,
    }
    seconds = np.concatenate([table["timestamp"].to_numpy() for table in splits.values()])
    assert (np.diff(seconds) == 1).all()


def test_wide_rows_without_histories_are_a_matter_of_options():
    columns, _ = make(rows=10, numbers=13, contexts=",".join(["1000"] * 23), mean_history=0).chunk(0, 0, 100)
    assert sum(name.startswith("number_") for name in columns) == 13
    assert len(columns) == 13 + 26 + 3  # numbers, ids, two histories and the label
    assert columns["history_item_id"].to_pylist() == [[]] * 100
    assert make(rows=10, contexts=()).chunk(0, 0, 5)[1].shape == (5,)


def test_extreme_strengths_raise_no_floating_point_warning():
    with np.errstate(all="raise", under="ignore"):
        make(rows=10, match=1e6, main=1e6, click_share=0.999).chunk(0, 0, 100)


def test_a_source_is_refused(tmp_path):
    with pytest.raises(UserError, match="made, not read"):
        Synthetic(SyntheticOptions(), tmp_path)
