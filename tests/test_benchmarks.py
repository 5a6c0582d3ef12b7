"""The speed benchmarks: turns, made-up data, arithmetic of the results, and one small run of each script."""

import json
import math
import pathlib
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from recsys.check import check
from scripts import bench_table_update, bench_train, bench_train_data, bench_train_ours, contest
from scripts.bench_table_update import OURS, RAW
from scripts.bench_train import BF16, DEEPFM, DIN, LARGE, PEERS, RANKS
from scripts.contest import Bar, Contestant

TALKER = """
import sys
from scripts.contest import open_channel, serve

channel = open_channel()
print("noise of a library")
asked = []

def say(word):
    print("more noise", flush=True)
    asked.append(word)
    return [sys.argv[1], len(asked)]

serve(channel, {"say": say})
"""


def talker(name: str) -> Contestant:
    return Contestant(name, [sys.executable, "-c", TALKER, name], threads=1)


# Contestants


def test_every_round_asks_everybody_once_and_every_other_round_goes_backwards():
    order = []

    class Noted(Contestant):
        def ask(self, question, **arguments):
            order.append(self.name)
            return super().ask(question, **arguments)

    with contest.stage([Noted(n, [sys.executable, "-c", TALKER, n], threads=1) for n in "ab"]) as contestants:
        answers = contest.in_turns(contestants, 3, "say", word="x")
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert answers == {"a": [["a", 1], ["a", 2], ["a", 3]], "b": [["b", 1], ["b", 2], ["b", 3]]}


def test_a_contestant_that_ends_is_reported_with_its_own_words_and_takes_all_others_along():
    fails = Contestant("fails", [sys.executable, "-c", "raise SystemExit('no such table')"], threads=1)
    other = talker("other")
    with pytest.raises(RuntimeError, match="fails ended with code 1:\nno such table"), contest.stage([other, fails]):
        pass
    assert other._process.poll() is not None


def test_a_contestant_that_fails_at_a_question_is_reported():
    with contest.stage([talker("a")]) as (a,), pytest.raises(RuntimeError, match="KeyError: 'sing'"):
        a.ask("sing")


def test_timing_leaves_the_first_step_out_and_makes_at_least_so_many():
    seen = []
    assert len(contest.timed(seen.append, seconds=0, least=3)) == 3
    assert seen == [0, 1, 2, 3]


def test_peak_memory_can_be_forgotten():
    large = np.ones(2**25)
    del large
    before = contest.peak_bytes()
    contest.forget_peak()
    assert contest.peak_bytes() < before - 2**27
    large = np.ones(2**25)
    assert contest.peak_bytes() - contest.resident_bytes() < 2**26
    assert len(large) == 2**25


@pytest.mark.parametrize(
    ("value", "limits", "met"),
    [
        (1.0, {"at_most": 1.15}, True),
        (1.2, {"at_most": 1.15}, False),
        (8.0, {"at_least": 8}, True),
        (7.9, {"at_least": 8}, False),
        (None, {"at_least": 8}, None),
    ],
)
def test_a_bar_is_met_missed_or_not_measured(value, limits, met):
    assert Bar("x", value, **limits).as_json() == {"what": "x", "value": value, **limits, "met": met}


# Tables


def test_frequent_ids_follow_zipf_and_even_ones_do_not():
    options = bench_table_update._options(["--batch", "1000", "--bag", "100"])
    for kind, share in (("zipf", math.log(2) / math.log(1001)), ("uniform", 1 / 1000)):
        ids = bench_table_update.batch(kind, 1000, options, seed=1)
        counts = torch.bincount(ids, minlength=1000)
        assert len(counts) == 1000 and len(ids) == 100_000
        # The most frequent id; over 100,000 draws its share has a standard deviation below .001.
        assert counts.max().item() / len(ids) == pytest.approx(share, abs=0.004)
    # 100,000 draws leave out few of 1,000 ids of which the rarest is drawn 14 times on average.
    assert bench_table_update.batch("zipf", 1000, options, seed=1).unique().numel() > 990


def a_size(rows: int, **step_ms: float) -> dict:
    memory = {"peak": 11_000}
    names = {"ours": OURS, "raw": RAW, "sparse_adam": "SparseAdam", "adagrad": "sparse Adagrad"}
    found = {
        names[name]: {"step_ms": {"zipf": ms, "uniform": 1.0}, "memory_mib": memory} for name, ms in step_ms.items()
    }
    return {"rows": rows, "contestants": found}


def test_bars_of_the_tables_are_ratios_of_step_times():
    sizes = [a_size(1_000_000, ours=40, raw=38, sparse_adam=400, adagrad=150), a_size(10_000_000, ours=60, raw=50)]
    found = {bar.what: (bar.value, bar.as_json()["met"]) for bar in bench_table_update.bars(sizes)}
    assert found == {
        "1,000,000 rows: step of ours / raw kernel": (1.05, True),
        "10,000,000 rows: step of ours / raw kernel": (1.2, False),
        "1,000,000 rows: step of SparseAdam / ours": (10.0, True),
        "1,000,000 rows: step of sparse Adagrad / ours": (3.75, False),
        "ours: step at 10,000,000 rows / at 1,000,000": (1.5, True),
        "raw kernel: step at 10,000,000 rows / at 1,000,000": (1.32, True),
        # 11,000 MiB are 11.534 GB.
        "10,000,000 rows: peak memory of ours, GB": (11.53, False),
    }


def run_tables(tmp_path: pathlib.Path, rows: int) -> dict:
    sizes = ["--rows", str(rows), "--dim", "16", "--batch", "32", "--bag", "4", "--rounds", "1", "--seconds", "0.01"]
    bench_table_update.main([*sizes, "--threads", "1", "--output", str(tmp_path / "found" / "x.json")])
    return json.loads((tmp_path / "found" / "x.json").read_text())


def test_a_small_run_measures_every_way_to_update_a_table(tmp_path):
    found = run_tables(tmp_path, 40_000)
    (size,) = found["sizes"]
    assert set(size["contestants"]) == {OURS, RAW, "dense Adam", "SparseAdam", "sparse Adagrad"}
    assert size["left_out"] == {} and size["measured"] == "all set up at once"
    assert all(c["step_ms"][kind] > 0 for c in size["contestants"].values() for kind in ("zipf", "uniform"))
    # Row-wise Adagrad keeps 4 bytes for each row, Adam two numbers for each weight: 40,000 x 16 x 4 x 2 / 2^20.
    state = {name: c["memory_mib"]["state"] for name, c in size["contestants"].items()}
    assert state == {OURS: 0, RAW: 0, "dense Adam": 5, "SparseAdam": 5, "sparse Adagrad": 2}
    assert found["environment"]["torch"] == torch.__version__
    assert found["command"].startswith("python -m scripts.bench_table_update --rows 40000 ")


def test_contestants_that_do_not_fit_are_left_out_and_large_tables_are_measured_one_at_a_time(tmp_path, monkeypatch):
    table = 40_000 * 16 * 4
    monkeypatch.setattr(bench_table_update, "_RESERVE", 0)
    monkeypatch.setattr(bench_table_update, "_memory", lambda: 3 * table // 2)
    (size,) = run_tables(tmp_path, 40_000)["sizes"]
    assert set(size["contestants"]) == {OURS, RAW}
    assert set(size["left_out"]) == {"dense Adam", "SparseAdam", "sparse Adagrad"}
    assert size["measured"] == "one at a time"


# Training


@pytest.mark.parametrize("limit", [2_000, 2_500_000, 25_000_000])
def test_criteo_tables_keep_the_small_ones_and_cut_the_large_ones_alike(limit):
    whole, found = bench_train_data._CRITEO_IDS, list(bench_train_data.criteo_tables(limit).values())
    cut = max(found)
    assert found == [min(rows, cut) for rows in whole]
    assert sum(found) <= limit < sum(min(rows, cut + 1) for rows in whole)


def test_arrays_for_other_libraries_equal_the_rows_of_the_file(tmp_path):
    bench_train_data.write(tmp_path, "din", 50, batch_rows=10, table_rows=30)
    arrays = bench_train_data.read_arrays(tmp_path, 20)
    for number, row in enumerate(pq.read_table(tmp_path / "data.parquet").to_pylist()[:20]):
        for target, history in (("item_id", "items"), ("category_id", "categories")):
            assert arrays[target][number] == row[target] + 1
            padded = [i + 1 for i in row[history]] + [0] * (100 - len(row[history]))
            assert arrays[history][number].tolist() == padded
            assert arrays["length"][number] == len(row[history])
        assert (arrays["user_id"][number], arrays["label"][number]) == (row["user_id"], row["label"])


@pytest.mark.parametrize("model", ["deepfm", "din"])
def test_the_made_up_data_and_its_recipe_have_no_problems(tmp_path, model):
    bench_train_data.write(tmp_path, model, 50, batch_rows=10, table_rows=1000)
    assert check(str(tmp_path / "recipe.yaml"), []) == []


def test_made_up_histories_are_15_long_on_average_and_at_most_100(tmp_path):
    bench_train_data.write(tmp_path, "din", 20_000, batch_rows=10)
    lengths = pq.read_table(tmp_path / "data.parquet")["items"].combine_chunks().value_lengths().to_numpy()
    # Geometric with mean 15: the mean of 20,000 has a standard deviation of .1, and the cut takes .02 off.
    assert lengths.mean() == pytest.approx(15, abs=0.5)
    assert (lengths.min(), lengths.max()) == (1, 100)


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        ("fbgemm::split_embedding_backward_codegen_rowwise_adagrad_cpu", "table kernels"),
        ("aten::addmm", "matrix products"),
        ("All2All_Pooled_Wait", "communication"),
        ("gloo:all_reduce", "communication"),
        ("aten::_fused_adam_", "optimizer"),
        ("aten::copy_", "copies and fills"),
        ("aten::sigmoid", "other"),
    ],
)
def test_profiled_work_is_sorted_by_kind(event, kind):
    assert bench_train_ours._kind(event) == kind


def test_matrix_products_are_those_of_all_linear_layers():
    layers = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2))
    with bench_train_ours._LinearShapes() as found:
        layers(torch.zeros(7, 4, 5))
    assert found.shapes == [(28, 5, 3), (28, 3, 2)]


def test_bars_of_training_compare_with_the_fastest_peer_of_each_setting():
    def rates(**rows_per_s: float) -> dict:
        return {name.replace("_", " "): {"rows_per_s": rate} for name, rate in rows_per_s.items()}

    peers = dict(zip(PEERS, ({"rows_per_s": 8.0}, {"rows_per_s": 10.0}, {"rows_per_s": 5.0}), strict=True))
    settings = {
        DEEPFM: {
            "contestants": {**rates(ours=40), BF16: {"rows_per_s": 50}, RANKS: {"rows_per_s": 30}, **peers},
            "products": {"fp32": {"share_of_our_step": 0.8}},
        },
        LARGE: {"contestants": {OURS: {"rows_per_s": 30}, f"{OURS}, small tables": {"rows_per_s": 39}}},
        DIN: {"contestants": {**rates(ours=70), RANKS: {"rows_per_s": 60}, **peers}},
    }
    found = [(bar.value, bar.as_json()["met"]) for bar in bench_train.bars(settings)]
    expected = [(4.0, True), (0.8, True), (5.0, False), (None, None), (1.3, False), (7.0, True)]
    assert found == [*expected, (0.75, False), (0.857, True)]


@pytest.mark.dist
def test_a_small_run_trains_both_models_in_every_way(tmp_path):
    small = ["--tables", "2000", "--large-tables", "4000", "--din-tables", "500", "--deepfm-batch", "64"]
    small += ["--din-batch", "32", "--batches", "4", "--rounds", "1", "--seconds", "0.01"]
    bench_train.main([*small, "--peers", str(tmp_path / "none"), "--output", str(tmp_path / "x.json")])
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["peers"] == "not installed"
    assert set(found["settings"]) == {DEEPFM, LARGE, DIN}
    for setting in (DEEPFM, DIN):
        measured = found["settings"][setting]
        assert set(measured["contestants"]) == set(measured["breakdown"]) == {OURS, BF16, RANKS}
        for parts in measured["breakdown"].values():
            assert set(parts["kinds_ms"]) == {*bench_train_ours.KINDS, "other"}
            assert parts["phases_ms"]["forward"] > 0 and parts["kinds_ms"]["table kernels"] > 0
        assert measured["breakdown"][RANKS]["kinds_ms"]["communication"] > 0
        assert measured["products"]["fp32"]["gflop_per_s"] > 0
    assert found["settings"][DEEPFM]["recsys_train"]["rows_per_s"] > 0


def test_other_libraries_train_on_the_same_data(tmp_path):
    options = bench_train._options([])
    if not bench_train._peers(options):
        pytest.skip("no environment of the peers: python -m scripts.bench_train --install-peers")
    contestants = []
    for model in ("deepfm", "din"):
        bench_train_data.write(tmp_path / model, model, 256, batch_rows=64, table_rows=1000)
        contestants += [bench_train._peer(name, tmp_path / model, options) for name in PEERS]
    with contest.stage(contestants):
        for contestant in contestants:
            assert contestant.ask("train", seconds=0)["rows_per_s"] > 0


def test_the_scripts_explain_themselves_without_loading_torch():
    for name in ("bench_table_update", "bench_train"):
        lines = [f"import sys, scripts.{name} as m", "try: m.main(['--help'])", "except SystemExit: pass"]
        code = "\n".join([*lines, "assert 'torch' not in sys.modules"])
        assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
