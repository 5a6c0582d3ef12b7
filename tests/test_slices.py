import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from recsys.errors import UserError
from recsys.slices import SLICE_STARTS, by_frequency, slice_names

# The rule once more, by hand: which slice a number of training occurrences falls into.
OCCURRENCES = {"0": [0], "1-2": [1, 2], "3-9": [3, 5, 9], "10-99": [10, 42, 99], "100+": [100, 101, 10**12]}
row = st.tuples(
    st.floats(-5, 5), st.booleans(), st.sampled_from([count for counts in OCCURRENCES.values() for count in counts])
)


def scored(rows):
    logits, labels, counts = (np.array(column) for column in zip(*rows, strict=True))
    return 1 / (1 + np.exp(-logits)), labels.astype(np.float64), logits, counts


def test_the_slices_are_named_by_their_bounds():
    assert slice_names() == list(OCCURRENCES)
    assert list(SLICE_STARTS) == [min(counts) for counts in OCCURRENCES.values()]


@given(st.lists(row, min_size=1, max_size=60))
@settings(max_examples=150, deadline=None)
def test_each_slice_has_the_metrics_of_its_own_rows(rows):
    probs, labels, logits, counts = scored(rows)
    found = by_frequency(probs, labels, logits, counts)
    assert [part["slice"] for part in found] == list(OCCURRENCES)
    for part in found:
        inside = np.isin(counts, OCCURRENCES[part["slice"]])
        own = labels[inside]
        assert (part["rows"], part["positives"]) == (inside.sum(), own.sum())
        if len(own):
            assert part["logloss"] == pytest.approx(sk.log_loss(own, probs[inside], labels=[0, 1]), rel=1e-9)
        if 0 < own.sum() < len(own):
            assert part["auc"] == pytest.approx(sk.roc_auc_score(own, logits[inside]), abs=1e-12)
        if own.any():
            assert part["calibration"] == pytest.approx(probs[inside].mean() / own.mean(), rel=1e-12)
        undefined = {name for name in ("auc", "logloss", "calibration") if part[name] is None}
        expected = set() if 0 < own.sum() < len(own) else {"auc"}
        expected |= set() if len(own) else {"logloss"}
        assert undefined == expected | (set() if own.any() else {"calibration"})
    assert sum(part["rows"] for part in found) == len(rows)


def test_logits_rank_where_probabilities_have_saturated():
    logits, labels = np.array([800.0, 900.0]), np.array([0.0, 1.0])
    probs, counts = np.ones(2), np.array([5, 5])
    by_name = {part["slice"]: part for part in by_frequency(probs, labels, logits, counts)}
    assert by_name["3-9"]["auc"] == 1
    by_name = {part["slice"]: part for part in by_frequency(probs, labels, None, counts)}
    assert by_name["3-9"]["auc"] == 0.5


def test_no_rows_at_all_give_empty_slices():
    empty = np.zeros(0)
    found = by_frequency(empty, empty, empty, np.zeros(0, dtype=np.int64))
    nothing = {"rows": 0, "positives": 0, "auc": None, "logloss": None, "calibration": None}
    assert found == [{"slice": name} | nothing for name in OCCURRENCES]


def test_undefined_slices_write_nothing_to_the_log(caplog):
    with caplog.at_level(logging.DEBUG, logger="recsys"):
        by_frequency(np.array([0.5]), np.array([1.0]), None, np.array([0]))
    assert not caplog.records


def test_bad_labels_are_the_users_and_bad_counts_are_a_bug():
    probs = np.array([0.5, 0.5])
    with pytest.raises(UserError, match="not binary"):
        by_frequency(probs, np.array([0.0, 2.0]), None, np.array([0, 0]))
    with pytest.raises(AssertionError, match="occurrences"):
        by_frequency(probs, np.array([0.0, 1.0]), None, np.array([0]))
    with pytest.raises(AssertionError, match="occurred -1 times"):
        by_frequency(probs, np.array([0.0, 1.0]), None, np.array([0, -1]))
