import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import yaml
from torch.nn.parallel import DistributedDataParallel

from recsys import communication, recipe_file
from recsys.communication import Codec, TopK
from recsys.distributed import process_group
from recsys.errors import UserError
from tests._exchange import run
from tests._plans import ROOT, SMALL, plan_of, tables_of, text_of

WORKER = pathlib.Path(__file__).parent / "_exchange.py"
HARD_LIMIT_S = 180
POOLED = ("row_wise", "table_wise", "column_wise", "table_row_wise", "grid")
SEQUENCE = ("row_wise", "table_wise", "column_wise")
SUMMING = ("row_wise", "table_row_wise", "grid")
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
ROUNDING = {"fp16": 2**-11, "bf16": 2**-8, "int8": 1 / 254}  # of a number; of a block's largest number
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)


def recipe(model: str, kind: str, **train) -> str:
    return yaml.safe_dump(
        {
            "model": {"name": model, "hidden": [16, 8], **({"attention_hidden": [8]} if model == "din" else {})},
            "data": {"train": "unused", "batch_size_per_rank": 12},
            "features": [
                {"kind": "id", "columns": ["user", "city", "item"]},
                {"kind": "history", "of": {"seen": "item"}},
                {"kind": "number", "columns": ["age"]},
            ],
            # DeepFM's first-order weight makes 15 columns 16; DIN's are of two widths
            "tables": {
                "default": {"dim": 15 if model == "deepfm" else 16, "rows": 40, "sharding": kind, "init_std": 0.3},
                "city": {"rows": 1, **({"dim": 12} if model == "din" else {})},
            },
            # Adagrad would turn the smallest difference of a first gradient into a whole step
            "optimizer": {
                "sparse": {"name": "sgd", "learning_rate": 1.0},
                "dense": {"name": "sgd", "learning_rate": 0.1},
            },
            "train": train,
        }
    )


def case(model="deepfm", kind="table_wise", steps=1, cut=13, overrides=(), **more) -> dict:
    communication = {k: more.pop(k) for k in ("embeddings", "embedding_gradients", "dense") if k in more}
    text = recipe(model, kind, **({"communication": communication} if communication else {}))
    return {"recipe": text, "steps": steps, "cut": cut, "overrides": list(overrides), **more}


def matrix() -> dict[str, dict]:
    cases = {}
    for model, kinds in (("deepfm", POOLED), ("din", SEQUENCE)):
        for kind in kinds:
            cases[f"{model}-{kind}-none"] = case(model, kind)
            for precision in ("fp32", "fp16", "bf16", "int8"):
                if precision != "int8" or kind not in SUMMING:
                    cases[f"{model}-{kind}-{precision}"] = case(model, kind, embeddings=precision)
    return cases


FROZEN = ("optimizer.dense.learning_rate=1e-30", "optimizer.sparse.learning_rate=1e-30")
MILLION = {
    "weight": 2.0**-20,
    "overrides": ["data.batch_size_per_rank=1048576", "optimizer.sparse.learning_rate=1048576"],
}
DENSE = {
    **{f"layers-{dense}": case(dense=dense) for dense in ("fp32", "fp16", "bf16")},
    **{f"replicas-{dense}": case(kind="data_parallel", dense=dense) for dense in ("fp32", "fp16", "bf16")},
    "replicas-top_k": case(kind="data_parallel", dense="top_k"),
    "frozen-fp32": case(steps=12, overrides=FROZEN),
    "frozen-top_k": case(steps=12, overrides=FROZEN, dense="top_k"),
    "trained-top_k": case(steps=4, dense="top_k"),
}
OTHERS = {
    "million-fp32": case(**MILLION),
    **{f"million-{p}": case(**MILLION, embeddings="fp32", embedding_gradients=p) for p in ROUNDING},
    **{f"empty-{p}": case("din", cut=24, embeddings=p) for p in ("fp32", *ROUNDING)},
    "plain": case("din", "row_wise", steps=4, embeddings="bf16"),
    "pipelined": case("din", "row_wise", steps=4, embeddings="bf16", pipeline=True),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """`found(name, rank=0)`: what became of a case on two ranks; all of them are trained in one start."""
    folder = tmp_path_factory.mktemp("exchanged")
    (folder / "config.json").write_text(json.dumps({"output": str(folder), "cases": matrix() | DENSE | OTHERS}))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(WORKER), str(folder / "config.json")],
        capture_output=True,
        text=True,
        timeout=HARD_LIMIT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return lambda name, rank=0: torch.load(folder / f"{name}.{rank}.pt", weights_only=False)


def exchanged(result: dict) -> dict:
    """(phase, dtype) -> bytes of the vectors and their gradients handed to collectives."""
    totals: dict = {}
    for phase, collective, dtype, num_bytes, _ in result["messages"]:
        if dtype in FLOATS and collective != "allreduce_":
            totals[phase, dtype] = totals.get((phase, dtype), 0) + num_bytes
    return totals


def updates(result: dict) -> dict:
    return {name: result["after"][name] - value for name, value in result["before"].items() if value is not None}


@pytest.mark.dist
@pytest.mark.parametrize("name", [name for name in matrix() if name.endswith(("16", "int8"))])
def test_vectors_and_gradients_are_sent_in_the_precision_that_the_recipe_names(found, name):
    model, kind, precision = name.split("-")
    base, result = found(f"{model}-{kind}-fp32"), found(name)
    assert set(result["kinds"].values()) == {kind}
    whole, sent = exchanged(base), exchanged(result)
    assert {dtype for _, dtype in whole} == {torch.float32}
    assert {dtype for _, dtype in sent} == {HALVES.get(precision, torch.uint8)}
    for phase in ("forward", "backward"):
        before, after = (sum(n for (p, _), n in totals.items() if p == phase) for totals in (whole, sent))
        if precision in HALVES:
            assert after == before / 2
        else:  # a byte for each number, and four for each block of them, which divides all widths
            smallest, largest = {"deepfm": (16, 16), "din": (4, 16)}[model]
            if kind == "column_wise":
                smallest, largest = min(smallest, 8), 8
            assert before / 4 * (1 + 4 / largest) <= after <= before / 4 * (1 + 4 / smallest)
    ids = [[m for m in r["messages"] if m[2] in (torch.int32, torch.int64)] for r in (base, result)]
    assert ids[0] == ids[1] != [], "ids are never compressed"


@pytest.mark.dist
@pytest.mark.parametrize("name", [name for name in matrix() if name.endswith(("16", "int8"))])
def test_vectors_arrive_as_the_rounded_ones_and_unrounded_in_evaluation(found, name):
    model, kind, precision = name.split("-")
    base, result = found(f"{model}-{kind}-fp32")["vectors"], found(name)["vectors"]
    largest = max(v.abs().max() for v in base["training"].values())
    changed = False
    for feature, exact in base["training"].items():
        vector = result["training"][feature]
        assert torch.equal(result["evaluation"][feature], exact), "evaluation sends fp32"
        if feature in ("user", "city", "item") and precision in HALVES:  # one id: its row, rounded once
            assert torch.equal(vector, exact.to(HALVES[precision]).float())
        else:  # a sum of up to 5 rows, of which each rank rounds its part, and the sum is rounded again
            assert (vector - exact).abs().max() <= 3 * ROUNDING[precision] * 5 * largest
        changed |= not torch.equal(vector, exact)
    assert changed


@pytest.mark.dist
@pytest.mark.parametrize("name", [name for name in matrix() if name.endswith("fp32")])
def test_fp32_is_what_no_key_at_all_does_to_the_last_bit(found, name):
    none, explicit = found(name.replace("fp32", "none")), found(name)
    assert none["messages"] == explicit["messages"]
    for weight, value in none["after"].items():
        assert value is None or torch.equal(value, explicit["after"][weight])


@pytest.mark.dist
@pytest.mark.parametrize("precision", ROUNDING)
def test_gradients_of_a_batch_of_a_million_rows_do_not_vanish(found, precision):
    """A row's gradients are 2^-20 of its loss's, where fp16 alone keeps a few bits or none."""
    sent = {phase: dtype for phase, dtype in exchanged(found(f"million-{precision}"))}
    assert sent == {"forward": torch.float32, "backward": HALVES.get(precision, torch.uint8)}
    exact, rounded = updates(found("million-fp32")), updates(found(f"million-{precision}"))
    tables = [name for name in exact if "embedding_bags" in name]
    assert len(tables) == 3
    for name in tables:
        smallest = exact[name].abs()[exact[name] != 0].min() / 2**20
        assert smallest < 2**-24, "the smallest number of fp16"
        # Columns of a row differ in size; int8 rounds to a share of the largest.
        scale = exact[name].abs() if precision != "int8" else exact[name].abs().amax(1, keepdim=True)
        error = (rounded[name] - exact[name]).abs()
        # A row that several ids of a batch read adds up their errors, of contributions that may cancel.
        assert (error <= 1.01 * ROUNDING[precision] * scale + 1e-6).float().mean() > 0.8
        assert error.max() <= 8 * ROUNDING[precision] * exact[name].abs().max()
        assert torch.equal(rounded[name].any(1), exact[name].any(1)), "a row that no id reads is not trained"


@pytest.mark.dist
@pytest.mark.parametrize("precision", ROUNDING)
def test_a_rank_without_rows_exchanges_like_any_other(found, precision):
    exact, rounded = updates(found("empty-fp32")), updates(found(f"empty-{precision}"))
    largest = max(value.abs().max() for value in exact.values())
    for name, value in exact.items():
        assert (rounded[name] - value).abs().max() <= 20 * ROUNDING[precision] * largest, name


@pytest.mark.dist
def test_the_overlapped_pipeline_compresses_alike(found):
    plain, pipelined = found("plain"), found("pipelined")
    for name, value in plain["after"].items():
        assert value is None or torch.equal(value, pipelined["after"][name])


@pytest.mark.dist
@pytest.mark.parametrize("what", ["layers", "replicas"])
@pytest.mark.parametrize("precision", HALVES)
def test_averaged_gradients_are_sent_in_16_bits_those_of_replicated_tables_too(found, what, precision):
    base, result = found(f"{what}-fp32"), found(f"{what}-{precision}")
    whole, sent = (
        [m for m in r["messages"] if m[0] == "backward" and m[1] == "allreduce_" and m[2] in FLOATS]
        for r in (base, result)
    )
    assert {m[2] for m in sent} == {HALVES[precision]}
    assert len(whole) == len(sent) == (2 if what == "replicas" else 1)
    assert [m[3] for m in sent] == [m[3] / 2 for m in whole]
    largest = max(g.abs().max() for g in base["sums"].values())
    for name, gradient in base["sums"].items():
        error = (result["sums"][name] - gradient).abs()
        # Each rank's half and their sum are rounded; halves may be larger than their sum.
        assert error.max() <= 3 * ROUNDING[precision] * largest, name
        assert name.endswith("bias") or (result["sums"][name] == gradient).float().mean() < 0.9


@pytest.mark.dist
def test_what_was_sent_and_what_is_kept_back_add_up_to_the_true_gradients(found):
    true, sent = found("frozen-fp32")["sums"], found("frozen-top_k")["sums"]
    kept = [found("frozen-top_k", rank)["unsent"] for rank in range(2)]
    layers = {name for name in true if "embedding" not in name}
    assert len(layers) > 4 and {name.removeprefix("_dmp_wrapped_module.module.") for name in layers} == kept[0].keys()
    for name in layers:
        short = name.removeprefix("_dmp_wrapped_module.module.")
        total = sent[name] + (kept[0][short] + kept[1][short]) / 2
        assert (total - true[name]).abs().max() <= 1e-5 * true[name].abs().max() + 1e-8, name
        assert not torch.equal(kept[0][short], kept[1][short]) or name.endswith("bias")
    num_weights = sum(gradient.numel() for name, gradient in true.items() if name in layers)
    num_sent = round(0.01 * num_weights)
    result = found("frozen-top_k")
    assert num_sent <= result["sent"] <= 2 * num_sent, "each of two ranks sends its own choice"
    (message,) = (m for m in result["messages"] if m[1] == "_allgather_base_" and m[2] == torch.int32)
    assert message[3] == 8 * num_sent


@pytest.mark.dist
def test_ranks_stay_equal_to_the_last_bit_with_top_k(found):
    zero, one = (found("trained-top_k", rank) for rank in range(2))
    layers = [name for name, value in one["after"].items() if value is not None]
    assert len(layers) > 4
    for name in layers:
        assert torch.equal(zero["after"][name], one["after"][name])
    assert any(not torch.equal(zero["after"][name], zero["before"][name]) for name in layers)


@pytest.mark.dist
def test_top_k_leaves_replicated_tables_in_fp32(found):
    messages = [m for m in found("replicas-top_k")["messages"] if m[0] == "backward" and m[1] == "allreduce_"]
    tables = [m for m in messages if m[2] == torch.float32]
    assert len(tables) == 1 and {m[2] for m in messages} <= {torch.float32, torch.int32}


class Forgetful(TopK):
    """Top-k without error feedback."""

    def hook(self, state, bucket):
        for residual in self.residuals.values():
            residual.zero_()
        return super().hook(state, bucket)


def descend(kind: type[TopK]) -> torch.Tensor:
    """Two weights of which the first has a large gradient that is zero on average, and the second a small one."""
    with process_group("cpu", threads=1):
        layer = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.zeros_(layer.weight)
        wrapped = DistributedDataParallel(layer, static_graph=True, gradient_as_bucket_view=True)
        top_k = kind(0.5, dict(layer.named_parameters()))
        wrapped.register_comm_hook(None, top_k.hook)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
        for step in range(2000):
            optimizer.zero_grad()
            noise, signal = wrapped(torch.eye(2)).flatten()
            (10 * (-1) ** step * noise + (signal - 1) ** 2 / 2).backward()
            optimizer.step()
        return layer.weight.detach().flatten()


def test_error_feedback_converges_where_top_k_alone_does_not():
    with_feedback, without = descend(TopK), descend(Forgetful)
    assert without[1] == 0, "the smaller gradient is never sent"
    assert abs(with_feedback[1] - 1) < 0.2


@pytest.mark.parametrize("scale", [1.0, 4096.0])
def test_fp16_keeps_what_the_scale_has_saved_and_stops_at_its_limits(scale):
    codec = Codec("fp16", lambda: True, scale=scale)
    numbers = torch.tensor([0.0, 1e-9, 1e-7, -1e-5, 0.1, 3.0, 1e9, -1e9])
    back = codec.decode(codec.encode(numbers))
    expected = (numbers.double() * scale).clamp(-65504, 65504).to(torch.float16).double() / scale
    assert torch.equal(back.double(), expected)
    assert (back[1] == 0) == (scale == 1.0)
    assert codec.decode(codec.encode(torch.tensor([float("nan")]))).isnan(), "a diverged model is not hidden"


def test_int8_keeps_zeros_and_rounds_to_a_255th_of_a_blocks_range(generator):
    codec = Codec("int8", lambda: True, block=8)
    numbers = torch.randn(50, 8, generator=generator()) * 10 ** torch.linspace(-30, 30, 50).unsqueeze(1)
    numbers[:, 5:] = 0
    numbers[7] = 0
    encoded = codec.encode(numbers.view(-1))
    assert (encoded.dtype, len(encoded)) == (torch.uint8, codec.calc_quantized_size(400)) == (torch.uint8, 50 * 12)
    back = codec.decode(encoded).view(50, 8)
    assert torch.equal(back[numbers == 0], numbers[numbers == 0])
    limit = numbers.abs().amax(1, keepdim=True) / 254 * 1.001
    assert ((back - numbers).abs() <= limit).all()
    assert len(codec.decode(codec.encode(torch.zeros(0)))) == codec.calc_quantized_size(0) == 0
    odd = Codec("int8", lambda: True, block=17)
    assert (odd.decode(odd.encode(torch.arange(17.0))) - torch.arange(17)).abs().max() <= 16 / 254 * 1.001
    with pytest.raises(AssertionError, match="whole blocks"):
        codec.calc_quantized_size(12)


def test_one_rank_sends_nothing_whatever_the_recipe_says():
    settings = {"embeddings": "fp16", "dense": "top_k"}
    with process_group("cpu", threads=1) as ranks:
        plain, compressed = (run(case(steps=2, **more), ranks) for more in ({}, settings))
    assert compressed["unsent"] == {}
    assert all(torch.equal(value, compressed["after"][name]) for name, value in plain["after"].items())
    parsed = recipe_file.parse(case(**settings)["recipe"])
    assert "does nothing on one rank" in communication.sentence(parsed, 1)
    assert set(communication.describe(parsed, 1).values()) == {None}
    assert "embeddings fp16, embedding gradients fp16" in communication.sentence(parsed, 2)
    assert communication.sentence(recipe_file.parse(case()["recipe"]), 1) is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["embeddings=int8"], r"tables\.user\.sharding: With int8.*partial.sums.*Received: row_wise\. .*table_wise"),
        (["embedding_gradients=int8"], r"tables\.item\.sharding: With int8"),
        (["embeddings=fp8"], r"embeddings: TorchRec replaces it.*Allowed: fp32, fp16, bf16, int8"),
        (["embeddings=half"], r"unknown value 'half'. Allowed: \['fp32', 'fp16', 'bf16', 'int8'\]"),
        (["dense=int8"], r"dense: int8 gradients cannot be added up.*Allowed: fp32, fp16, bf16, top_k"),
        (["top_k_share=0.1"], "`top_k_share` has no effect without `dense: top_k`"),
        (["dense=top_k", "top_k_share=0.9"], r"top_k_share"),
        (["dense=top_k", "../optimizer.dense.clip_norm=1"], r"clip_norm: with train\.communication\.dense=top_k"),
        (["../train.comm_precision=fp16"], r"comm_precision: there is no such key.*train\.communication\.embeddings"),
    ],
)
def test_what_does_not_work_is_refused_with_what_does(overrides, message):
    given = [o.removeprefix("../") if o.startswith("../") else f"train.communication.{o}" for o in overrides]
    with pytest.raises(UserError, match=f"(?s){message}"):
        recipe_file.parse(recipe("deepfm", "row_wise"), given)


def test_int8_leaves_the_planner_the_kinds_that_add_nothing_up():
    text = text_of("din", user={"rows": 4_000_000}, tiny={"rows": 20}, item={"rows": 4_000_000})
    kinds = {name: table.kind for name, table in tables_of(plan_of(text, **SMALL)).items()}
    assert kinds == {"user": "row_wise", "tiny": "data_parallel", "item": "row_wise"}
    plan = plan_of(text, "train.communication.embeddings=int8", **SMALL)
    kinds = {name: table.kind for name, table in tables_of(plan).items()}
    assert kinds.pop("user") in ("table_wise", "column_wise")
    assert kinds == {"tiny": "data_parallel", "item": "row_wise"}, "events are never added up"


def test_estimated_exchanges_follow_the_key():
    text = text_of(
        whole={"sharding": "table_wise"}, spread={"sharding": "row_wise"}, copied={"sharding": "data_parallel"}
    )

    def exchange_ms(*overrides) -> dict:
        plan = plan_of(text, *(f"train.communication.{o}" for o in overrides), **SMALL)
        tables = {name: max(s.exchange_ms for s in t.shards) for name, t in tables_of(plan).items()}
        return tables | {"dense": plan.dense.exchange_ms}

    plain, half = exchange_ms(), exchange_ms("embeddings=fp16")
    assert [half[name] / plain[name] for name in ("whole", "spread", "copied", "dense")] == [0.5, 0.5, 1, 1]
    dense = exchange_ms("dense=bf16")
    assert [dense[name] / plain[name] for name in ("whole", "spread", "dense")] == [1, 1, 0.5]
    assert 0.5 <= dense["copied"] / plain["copied"] < 1, "what updates a replica is no exchange"
    # Two ranks: 8 bytes for each number sent, against 8 that an all-reduce counts for each.
    assert exchange_ms("dense=top_k", "top_k_share=0.02")["dense"] / plain["dense"] == pytest.approx(0.02)
    kept = [plan_of(text, f"train.communication.dense={dense}", **SMALL).dense for dense in ("fp32", "top_k")]
    assert kept[1].gradient_bytes - kept[0].gradient_bytes == kept[0].bytes, "what is not sent is as large as weights"


def test_the_document_lists_what_is_accepted():
    rows = [line.split("|")[1:-1] for line in (ROOT / "docs/communication.md").read_text().splitlines()]
    rows = [[cell.strip() for cell in row] for row in rows if len(row) == 5 and row[1].strip().startswith("`")]
    said = {}
    for table, kind, _, halves, int8 in rows[1:]:
        model = "deepfm" if table == "pooled" else "din"
        for precision in ("fp16", "bf16", "int8"):
            said[model, kind.strip("`"), precision] = (int8 if precision == "int8" else halves) == "yes"
    accepted = {}
    for model, kind, precision in said:
        text = yaml.safe_load(recipe(model, kind if model == "deepfm" else "auto"))
        text["tables"]["item"] = {"sharding": kind}
        try:
            recipe_file.parse(yaml.safe_dump(text), [f"train.communication.embeddings={precision}"])
            accepted[model, kind, precision] = True
        except UserError:
            accepted[model, kind, precision] = False
    assert accepted == said
    assert {kind for _, kind, _ in said} == {*POOLED, "data_parallel"}
