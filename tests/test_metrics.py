import json
import logging
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from recsys import metrics
from recsys.errors import UserError

few_rows = st.lists(st.tuples(st.integers(0, 8), st.booleans(), st.integers(-2, 2)), min_size=1, max_size=40)


def counted_auc(scores, labels):
    """AUC by looking at every pair of a positive and a negative row; None when there is no such pair."""
    positives = [s for s, y in zip(scores, labels, strict=True) if y]
    negatives = [s for s, y in zip(scores, labels, strict=True) if not y]
    if not positives or not negatives:
        return None
    wins = sum((p > n) + 0.5 * (p == n) for p in positives for n in negatives)
    return wins / (len(positives) * len(negatives))


def looped_gauc(scores, labels, groups):
    """(GAUC, groups in it) by a loop over groups."""
    total, weight, num_groups = 0.0, 0, 0
    for key in set(groups.tolist()):
        inside = groups == key
        auc = counted_auc(scores[inside], labels[inside])
        if auc is not None:
            total, weight, num_groups = total + auc * inside.sum(), weight + inside.sum(), num_groups + 1
    return (total / weight if weight else None), num_groups


def clicks(num_rows, seed=0, num_groups=50):
    """(probs, labels, groups) with ties, of a model that knows the truth."""
    rng = np.random.default_rng(seed)
    probs = np.round(rng.beta(1, 4, num_rows), 2)
    return probs, (rng.random(num_rows) < probs).astype(np.float32), rng.integers(-num_groups, 0, num_rows) * 10**15


@given(few_rows)
@settings(max_examples=200, deadline=None)
def test_auc_and_gauc_equal_the_count_of_pairs(rows):
    scores, labels, groups = (np.array(column) for column in zip(*rows, strict=True))
    values = metrics.compute(scores / 8, labels, groups)
    gauc, num_groups = looped_gauc(scores, labels, groups)
    assert values["auc"] == counted_auc(scores, labels)
    assert values["gauc"] == pytest.approx(gauc, abs=1e-12)
    assert values["groups"] == num_groups


def test_every_metric_equals_its_reference_on_many_rows():
    probs, labels, groups = clicks(5_000)
    values = metrics.compute(probs, labels, groups)
    base_rate = labels.mean(dtype=np.float64)
    constant_guess = sk.log_loss(labels, np.full(len(labels), base_rate))
    assert list(values) == list(metrics.METRICS)
    assert values["auc"] == pytest.approx(sk.roc_auc_score(labels, probs), abs=1e-12)
    assert values["gauc"] == pytest.approx(looped_gauc(probs, labels, groups)[0], abs=1e-12)
    assert values["logloss"] == pytest.approx(sk.log_loss(labels, probs), rel=1e-12)
    assert values["normalized_entropy"] == pytest.approx(sk.log_loss(labels, probs) / constant_guess, rel=1e-12)
    assert values["calibration"] == pytest.approx(probs.mean() / base_rate, rel=1e-12)
    assert values["rows"] == len(labels)


def test_row_order_changes_nothing():
    probs, labels, groups = clicks(2_000)
    order = np.random.default_rng(1).permutation(len(probs))
    before = metrics.compute(probs, labels, groups)
    assert metrics.compute(probs[order], labels[order], groups[order]) == pytest.approx(before, rel=1e-12)


def test_rows_of_all_negative_batches_count():
    probs, labels, groups = clicks(400)
    labels[:300] = 0  # three batches of 100 without a positive
    batch_auc = counted_auc(probs[300:], labels[300:])
    auc = metrics.compute(probs, labels, groups)["auc"]
    assert auc == pytest.approx(sk.roc_auc_score(labels, probs), abs=1e-12)
    assert auc != pytest.approx(batch_auc, abs=1e-3), "the only batch with an AUC of its own must not decide"


def test_tiny_scores_keep_an_exact_auc():
    rng = np.random.default_rng(0)
    labels = rng.random(20_000) < 0.01
    probs = np.clip(0.001 + 0.0005 * rng.random(20_000) + 0.0003 * labels, 0.001, 0.002).astype(np.float32)
    values = metrics.compute(probs, labels, None)
    assert values["auc"] == pytest.approx(sk.roc_auc_score(labels, probs), abs=1e-12)


def test_constant_predictions_score_exactly_one_half():
    _, labels, groups = clicks(999)
    values = metrics.compute(np.full(999, 0.1), labels, groups)
    assert values["auc"] == 0.5
    assert values["gauc"] == pytest.approx(0.5, abs=1e-15)


def test_groups_of_one_row_or_one_class_do_not_count():
    probs = np.array([0.1, 0.9, 0.5, 0.6, 0.7, 0.2, 0.3])
    labels = np.array([1, 0, 1, 0, 0, 1, 1])
    groups = np.array([7, 7, 8, 9, 9, 2**62, 2**62])  # 8: one row; 9 and 2**62: one class
    values = metrics.compute(probs, labels, groups)
    assert values["gauc"] == 0.0  # the only pair with both classes, group 7, is the wrong way round
    assert values["groups"] == 1


@pytest.mark.parametrize(
    ("label", "undefined"),
    [(1, {"auc", "gauc", "normalized_entropy"}), (0, {"auc", "gauc", "normalized_entropy", "calibration"})],
)
def test_one_class_is_undefined_with_one_warning_each_time(caplog, label, undefined):
    probs, labels, groups = np.array([0.2, 0.4]), np.full(2, label), np.array([1, 1])
    for _ in range(2):
        caplog.clear()
        values = metrics.compute(probs, labels, groups)
        assert {name for name, value in values.items() if value is None} == undefined
        assert values["logloss"] == pytest.approx(sk.log_loss(labels, probs, labels=[0, 1]))
        [record] = caplog.records
        assert (record.name, record.levelno) == ("recsys", logging.WARNING)
        assert f"all 2 labels are {label}" in record.getMessage()


def test_no_rows_are_undefined_with_one_warning(caplog):
    empty = np.zeros(0)
    values = metrics.compute(empty, empty, empty, logits=empty)
    assert (values["rows"], values["groups"]) == (0, 0)
    assert all(value is None for name, value in values.items() if name not in ("rows", "groups"))
    [record] = caplog.records
    assert "no rows" in record.getMessage()


@pytest.mark.parametrize(
    ("groups", "reason"), [(None, "no group key was given"), (np.arange(100), "no group has both classes")]
)
def test_gauc_without_usable_groups_is_undefined_with_one_warning(caplog, groups, reason):
    probs, labels, _ = clicks(100)
    values = metrics.compute(probs, labels, groups)
    assert [name for name, value in values.items() if value is None] == ["gauc"]
    [record] = caplog.records
    assert reason in record.getMessage()


def test_defined_metrics_do_not_warn(caplog):
    metrics.compute(*clicks(100, num_groups=3))
    assert not caplog.records


def test_logloss_is_finite_at_probabilities_0_and_1_and_at_most_the_clip():
    wrong, labels = np.array([0.0, 1.0], dtype=np.float32), np.array([1, 0])
    assert metrics.compute(wrong, labels, None)["logloss"] == pytest.approx(-math.log(2**-52))
    assert metrics.compute(1 - wrong, labels, None)["logloss"] == pytest.approx(0, abs=1e-15)


def test_logits_of_100_neither_overflow_nor_tie():
    logits = np.array([100.0, 90.0, -100.0, 1.0])
    labels = np.array([1, 0, 0, 1])
    probs = (1 / (1 + np.exp(-logits))).astype(np.float32)
    assert probs[0] == probs[1] == 1, "the probabilities must saturate for this test to mean something"
    values = metrics.compute(probs, labels, None, logits=logits)
    losses = [0.0, 90.0, 0.0, math.log1p(math.exp(-1))]  # log(1 + e^-x) for label 1, x + log(1 + e^-x) for label 0
    assert values["logloss"] == pytest.approx(math.fsum(losses) / 4, rel=1e-12)
    assert values["auc"] == counted_auc(logits, labels)


def test_logloss_sums_in_float64():
    probs = np.full(3_000_000, 0.1, dtype=np.float32)
    value = metrics.compute(probs, np.arange(len(probs)) % 2, None)["logloss"]
    p = float(probs[0])
    assert value == pytest.approx(-(math.log(p) + math.log(1 - p)) / 2, rel=1e-12)


def test_two_evaluations_of_the_same_rows_agree_and_leave_the_arrays_alone():
    arrays = clicks(500)
    copies = [array.copy() for array in arrays]
    first = metrics.compute(*arrays)
    metrics.compute(*clicks(300, seed=5))
    assert metrics.compute(*arrays) == first
    for array, copy in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.1, 1.5])
def test_a_score_that_is_no_probability_names_its_row(bad):
    with pytest.raises(UserError, match=r"1 of 3 probabilities.*row 1") as error:
        metrics.compute(np.array([0.1, bad, 0.2]), np.array([0, 1, 0]), None)
    assert repr(error.value.received) == repr(float(bad))


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_logit_that_is_not_finite_names_its_row(bad):
    with pytest.raises(UserError, match=r"1 of 2 logits.*row 0"):
        metrics.compute(np.array([0.1, 0.2]), np.array([0, 1]), None, logits=np.array([bad, 2]))


@pytest.mark.parametrize("bad", [2, -1, 0.5, float("nan")])
def test_a_label_other_than_0_or_1_names_its_row(bad):
    with pytest.raises(UserError, match=r"1 of 3 labels.*row 2"):
        metrics.compute(np.array([0.1, 0.3, 0.2]), np.array([0, 1, bad]), None)


def test_arrays_that_do_not_fit_are_refused():
    two, three = np.array([0.1, 0.2]), np.array([0, 1, 0])
    with pytest.raises(UserError, match="labels do not fit"):
        metrics.compute(two, three, None)
    with pytest.raises(UserError, match="group keys do not fit"):
        metrics.compute(two, three[:2], three)
    with pytest.raises(UserError, match="logits do not fit"):
        metrics.compute(two, three[:2], None, logits=three)
    with pytest.raises(UserError, match="one value per row"):
        metrics.compute(two[:, None], three[:2], None)


def test_group_keys_that_are_no_integers_are_refused():
    with pytest.raises(UserError, match="must be integers"):
        metrics.compute(np.array([0.1, 0.2]), np.array([0, 1]), np.array(["a", "b"]))


def test_calibration_curve_equals_the_mean_of_each_quantile():
    rng = np.random.default_rng(0)
    probs = rng.random(1_000)
    labels = rng.random(1_000) < probs
    curve = metrics.calibration_curve(probs, labels, bins=20)
    rows = sorted(zip(probs, labels, strict=True))
    expected = [rows[start : start + 50] for start in range(0, 1_000, 50)]
    assert [point["count"] for point in curve] == [50] * 20
    assert [point["mean_prob"] for point in curve] == pytest.approx([sum(p for p, _ in b) / 50 for b in expected])
    assert [point["mean_label"] for point in curve] == pytest.approx([sum(int(y) for _, y in b) / 50 for b in expected])


@given(few_rows, st.integers(1, 25))
@settings(max_examples=100, deadline=None)
def test_calibration_curve_keeps_ties_together_and_every_row(rows, bins):
    probs = np.array([row[0] for row in rows]) / 8
    labels = np.array([row[1] for row in rows])
    curve = metrics.calibration_curve(probs, labels, bins=bins)
    assert curve == metrics.calibration_curve(probs[::-1], labels[::-1], bins=bins)
    assert len(curve) <= min(bins, len(set(probs.tolist())))
    assert sum(point["count"] for point in curve) == len(probs)
    assert sum(point["mean_label"] * point["count"] for point in curve) == pytest.approx(labels.sum())


def test_calibration_curve_of_no_rows_is_empty_and_of_no_bins_an_error():
    assert metrics.calibration_curve(np.zeros(0), np.zeros(0)) == []
    with pytest.raises(UserError, match="needs bins"):
        metrics.calibration_curve(np.zeros(0), np.zeros(0), bins=0)


def test_the_module_does_not_import_torch():
    code = "import sys, recsys.metrics; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_gather_in_one_process_returns_the_arrays():
    arrays = list(clicks(10))
    gathered = metrics.gather(arrays)
    assert all(a is b for a, b in zip(gathered, arrays, strict=True))


GATHER_ON_TWO_RANKS = """
    import datetime, json, sys
    import numpy as np
    import torch.distributed as dist
    from recsys import metrics

    # The limit makes a hang an error: the test never waits for it when all is well.
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    rank = dist.get_rank()
    data = np.load(sys.argv[1])
    found = []
    for sizes in json.loads(sys.argv[2]):
        start = sum(sizes[:rank])
        mine = [data[name][start : start + sizes[rank]] for name in ("probs", "labels", "groups")]
        if sizes[rank] == 0:
            mine = [np.array([])] * 3
        gathered = metrics.gather(mine)
        if rank:
            assert gathered is None
        else:
            found.append({
                "groups": gathered[2].tolist(),
                "dtypes": [str(array.dtype) for array in gathered],
                "metrics": metrics.compute(*gathered),
            })
    if rank == 0:
        json.dump(found, open(sys.argv[3], "w"))
    dist.destroy_process_group()
"""


@pytest.mark.dist
def test_metrics_over_two_ranks_equal_those_of_one(tmp_path):
    probs, labels, groups = clicks(90, num_groups=4)
    labels[:30] = 0  # a rank that holds these rows only has no AUC of its own
    np.savez(tmp_path / "rows.npz", probs=probs.astype(np.float32), labels=labels, groups=groups)
    (tmp_path / "worker.py").write_text(textwrap.dedent(GATHER_ON_TWO_RANKS))
    sizes = [[30, 60], [60, 30], [0, 90], [90, 0], [0, 0]]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = [tmp_path / "worker.py", tmp_path / "rows.npz", json.dumps(sizes), tmp_path / "found.json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(metrics.__file__).parents[1])}
    subprocess.run([*launch, *map(str, arguments)], check=True, timeout=120, env=environment)
    found = json.loads((tmp_path / "found.json").read_text())
    expected = metrics.compute(probs.astype(np.float32), labels, groups)
    for case in found[:4]:
        assert case["groups"] == groups.tolist(), "rank order"
        assert case["dtypes"] == ["float32", "float32", "int64"]
        assert case["metrics"] == expected
    assert found[4]["metrics"]["rows"] == 0
