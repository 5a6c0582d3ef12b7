"""Every optimizer, per table and with schedule and clipping, against torch.optim on one process, after every step."""

import json
import math
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from recsys import models, optim, recipe_file
from recsys.data.batch import Batch
from recsys.distributed import process_group
from recsys.embedding import table_of_parameter
from recsys.job import assemble
from recsys.recipe import Recipe
from recsys.train import Result, train
from tests._train_batches import FEATURES, random_rows, slice_of, whole_weights

HARD_LIMIT_S = 300
STEPS, ROWS, CUT = 6, 32, 21  # two ranks take unequal shares of each global batch

MIXED = {
    "city": {"rows": 7, "optimizer": {"name": "sgd", "learning_rate": 0.3}},
    "type": {"optimizer": {"name": "adagrad", "learning_rate_factor": 0.5, "eps": 1e-3}},
    "item": {"rows": 9, "l2": 0.01},
    "category": {"rows": 30, "freeze": True},
}
"""One table for each optimizer: `user` follows the recipe's, row-wise Adagrad."""
DENSE = {"city": {"rows": 60, "sharding": "auto", "optimizer": "dense", "l2": 0.01}}
OWN_RATE = {"city": DENSE["city"] | {"optimizer": {"name": "dense", "learning_rate": 0.2}}}
HALF = {"default": {"dtype": "fp16"}}


def recipe(
    model: str, *, sharding="row_wise", tables: dict | None = None, train: dict | None = None, **optimizer
) -> str:
    given = tables or {}
    default = {"dim": 3, "rows": 40, "sharding": sharding, "init_std": 0.3} | given.get("default", {})
    settings = {
        "sparse": {"learning_rate": 0.1, "eps": 1e-3},
        "dense": {"learning_rate": 0.01, "eps": 1e-3},
    }
    for part, own in optimizer.items():
        settings[part] = settings.get(part, {}) | own
    return yaml.safe_dump(
        {
            "model": {"name": model, "hidden": [16, 8], **({"attention_hidden": [8]} if model == "din" else {})},
            "data": {"train": "unused"},
            "features": FEATURES,
            "tables": {"default": default, **{k: v for k, v in given.items() if k != "default"}},
            "optimizer": settings,
            "train": {"device": "cpu", **(train or {})},
        }
    )


COSINE = {"warmup_steps": 2, "decay": "cosine", "final_factor": 0.1}
LINEAR = {"warmup_steps": 1, "decay": "linear", "decay_steps": 4, "final_factor": 0.1}
JOBS = {
    "din": recipe("din", tables=MIXED),
    "din table_wise": recipe("din", sharding="table_wise", tables=MIXED),
    "deepfm": recipe("deepfm", tables=MIXED),
    "deepfm data_parallel": recipe("deepfm", sharding="data_parallel", tables=MIXED, schedule=COSINE),
    "cosine": recipe("din", tables=MIXED, schedule=COSINE),
    "linear": recipe("deepfm", tables=MIXED, schedule=LINEAR),
    "step": recipe("deepfm", tables=MIXED, schedule={"decay": "step", "step_size": 2, "gamma": 0.3}),
    "dense": recipe("deepfm", tables=DENSE, schedule=COSINE, dense={"clip_norm": 0.05, "weight_decay": 0.1}),
    "dense din": recipe("din", tables=DENSE | {"user": DENSE["city"]}, dense={"clip_norm": 0.1}),
    "dense own rate": recipe("deepfm", tables=OWN_RATE),
    "dense sgd": recipe("deepfm", tables=DENSE, dense={"name": "sgd", "learning_rate": 0.1, "eps": 1e-8}),
    "dense adagrad": recipe("deepfm", tables=DENSE, dense={"name": "adagrad", "learning_rate": 0.1}),
    "decoupled": recipe("deepfm", tables=MIXED, dense={"weight_decay": 0.5, "weight_decay_mode": "decoupled"}),
    "l2 mode": recipe("deepfm", tables=MIXED, dense={"weight_decay": 0.5}),
    "clip": recipe("din", tables=MIXED, dense={"name": "sgd", "learning_rate": 0.5, "eps": 1e-8, "clip_norm": 0.02}),
    "half": recipe("din", tables=HALF | MIXED),
    "half table_wise": recipe("din", sharding="table_wise", tables=HALF | MIXED),
    "half deepfm": recipe("deepfm", tables=HALF | MIXED, schedule=COSINE),
}
BF16 = {f"{name} bf16": recipe(name, tables=MIXED, train={"precision": "bf16"}) for name in ("din", "deepfm")}


# The worker.


def global_batch(parsed: Recipe, step: int) -> dict:
    """Ids, numbers and labels of one step, as plain lists."""
    inputs, layout = parsed.inputs, parsed.layout
    rows_of = {name: inputs.table_of(name).rows for name in (*layout.pooled, *layout.sequence)}
    return random_rows(layout, rows_of, list(inputs.history_columns), ROWS, seed=step)


def as_batch(parsed: Recipe, rows: dict, low: int, high: int, world_size: int) -> Batch:
    mine = slice_of(rows, low, high)
    batch = Batch.from_lists(parsed.layout, mine["ids"], dense=mine["dense"], labels=mine["labels"])
    batch.weights = torch.full((len(batch),), world_size / ROWS)
    batch.pad_bags(max(CUT, ROWS - CUT) if world_size > 1 else ROWS)
    return batch


def run_job(text: str, ranks) -> dict:
    """Whole weights before the first and after every step, with the rates that were logged for it."""
    parsed = recipe_file.parse(text)
    job = assemble(parsed, ranks, encoder=None)
    optimizer = job.optimizer(STEPS)
    weights, rates, losses = [whole_weights(job)], [], []
    job.task.train()
    for step in range(STEPS):
        low, high = (0, ROWS) if ranks.world_size == 1 else [(0, CUT), (CUT, ROWS)][ranks.rank]
        batch = as_batch(parsed, global_batch(parsed, step), low, high, ranks.world_size)
        optimizer.zero_grad()
        loss, _ = job.task(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        rates.append(optimizer.learning_rates())
        weights.append(whole_weights(job))
    kinds = {table["name"]: table["kind"] for table in job.describe_plan()["tables"]}
    described = job.describe_optimizers()
    return {"weights": weights, "rates": rates, "losses": losses, "kinds": kinds, "described": described}


def run_jobs(config: dict) -> None:
    """Train all jobs on this rank and all others; rank 0 saves what became of them."""
    with process_group("cpu", threads=1) as ranks:
        found = {name: run_job(text, ranks) for name, text in config["jobs"].items()}
        if ranks.rank == 0:
            torch.save(found, config["output"])


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[int, dict]:
    """Ranks -> what became of all jobs: one rank in this process, then two real ones in one launch."""
    folder = tmp_path_factory.mktemp("optimizers")
    for ranks in (1, 2):
        config = {"jobs": {**JOBS, **BF16}, "output": str(folder / f"found-{ranks}.pt")}
        if ranks == 1:
            run_jobs(config)
            continue
        (folder / "config.json").write_text(json.dumps(config))
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        done = subprocess.run(
            [*launcher, __file__, str(folder / "config.json")],
            capture_output=True,
            text=True,
            timeout=HARD_LIMIT_S,
            env={**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[1])},
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    return {ranks: torch.load(folder / f"found-{ranks}.pt", weights_only=True) for ranks in (1, 2)}


# The reference: one process, whole gradients, torch.optim and torch's own schedules.


class RowwiseAdagrad(torch.optim.Optimizer):
    """The formula, for the first `width` columns of a table."""

    def __init__(self, params, lr, eps, width) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "width": width})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for table in group["params"]:
                gradient = table.grad[:, : group["width"]]
                squares = self.state[table].setdefault("squares", torch.zeros(len(table)))
                squares += gradient.square().mean(1)
                table[:, : group["width"]] -= group["lr"] * gradient / (squares.sqrt() + group["eps"]).unsqueeze(1)


def factors_of(schedule: dict) -> list[float]:
    """What torch's schedulers make of a rate of 1."""
    schedulers = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    warmup, final = schedule.get("warmup_steps", 0), schedule.get("final_factor", 0.0)
    length = schedule.get("decay_steps", STEPS - warmup)
    decay = {
        "constant": lambda: schedulers.LambdaLR(optimizer, lambda _: 1.0),
        "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, length, eta_min=final),
        "linear": lambda: schedulers.LinearLR(optimizer, 1.0, final, total_iters=length),
        "step": lambda: schedulers.StepLR(optimizer, schedule["step_size"], schedule["gamma"]),
    }[schedule.get("decay", "constant")]
    if warmup:
        rise = schedulers.LinearLR(optimizer, 1 / warmup, 1.0, total_iters=max(1, warmup - 1))
        scheduler = schedulers.SequentialLR(optimizer, [rise, decay()], milestones=[warmup])
    else:
        scheduler = decay()
    factors = []
    for _ in range(STEPS):
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return factors


def dense_optimizer(parameters, settings: dict, *, rate: float | None = None, decays: bool = True):
    arguments = {"lr": rate or settings["learning_rate"]}
    if settings.get("name") != "sgd":
        arguments["eps"] = settings["eps"]
    if decays:
        arguments["weight_decay"] = settings.get("weight_decay", 0.0)
    kinds = {"adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}
    decoupled = settings.get("weight_decay_mode") == "decoupled"
    return (torch.optim.AdamW if decoupled else kinds[settings.get("name", "adam")])(parameters, **arguments)


def own_optimizer(table: dict) -> dict:
    own = table.get("optimizer", {})
    return {"name": own} if isinstance(own, str) else own


def table_optimizer(table, width: int, own: dict, sparse: dict, dense: dict):
    """The optimizer of one table of a recipe, as its settings read; None: frozen."""
    if own.get("freeze"):
        return None
    own = own_optimizer(own)
    if own.get("name") == "dense":
        return dense_optimizer([table], dense, rate=own.get("learning_rate"), decays=False)
    rate = own.get("learning_rate") or sparse["learning_rate"] * own.get("learning_rate_factor", 1.0)
    name, eps = own.get("name", "rowwise_adagrad"), own.get("eps", sparse["eps"])
    if name == "rowwise_adagrad":
        return RowwiseAdagrad([table], rate, eps, width)
    return torch.optim.SGD([table], rate) if name == "sgd" else torch.optim.Adagrad([table], rate, eps=eps)


def loaded_model(parsed: Recipe, start: dict) -> nn.Module:
    """The unsharded model with these weights, its tables padded and in fp32."""
    model = models.build(parsed.inputs, parsed.model)
    state = {name.removeprefix("model."): value.float() for name, value in start.items()}
    for name, value in model.state_dict().items():
        if table_of_parameter(name):
            state[name] = nn.functional.pad(state[name], (0, value.shape[1] - state[name].shape[1]))
    model.load_state_dict(state)
    return model


def reference(text: str, start: dict) -> tuple[list[dict], list[float]]:
    """Weights before the first and after every step, and the norm of the gradients that are clipped in each."""
    raw = yaml.safe_load(text)
    settings, half = raw["optimizer"], raw["tables"]["default"].get("dtype") == "fp16"
    parsed = recipe_file.parse(text, ["tables.default.dtype=fp32"])
    model = loaded_model(parsed, start)
    tables = {n: p for n, p in model.named_parameters() if table_of_parameter(n)}
    layers = [p for n, p in model.named_parameters() if n not in tables]
    optimizers, clipped = [dense_optimizer(layers, settings["dense"])], list(layers)
    for name, weight in tables.items():
        table = table_of_parameter(name)
        own = raw["tables"].get(table, {})
        width = parsed.table_settings(table).dim + model.embeddings.extra_columns
        optimizer = table_optimizer(weight, width, own, settings["sparse"], settings["dense"])
        clipped += [weight] if own_optimizer(own).get("name") == "dense" else []
        optimizers += [optimizer] if optimizer else []
    full = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    states, norms = [dict(start)], []
    for step, factor in enumerate(factors_of(settings.get("schedule", {}))):
        for optimizer, rate in zip(optimizers, full, strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
        rows = global_batch(parsed, step)
        batch = as_batch(parsed, rows, 0, ROWS, 1)
        model.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels).backward()
        limit = settings["dense"].get("clip_norm", float("inf"))
        norms.append(float(nn.utils.clip_grad_norm_(clipped, limit)))
        for optimizer in optimizers:
            optimizer.step()
        if half:
            for weight in tables.values():
                weight.data.copy_(weight.data.half())
        state = {"model." + name: value.clone() for name, value in model.state_dict().items()}
        states.append({n: v[:, : start[n].shape[1]] if v.dim() == 2 else v for n, v in state.items()})
    return states, norms


# The claims.


EVERY_JOB = pytest.mark.parametrize("name", JOBS)
EVERY_NUMBER_OF_RANKS = pytest.mark.parametrize("ranks", [1, 2])


@pytest.mark.dist
@EVERY_NUMBER_OF_RANKS
@EVERY_JOB
def test_after_every_step_all_weights_are_those_of_torch_optim(found, name, ranks):
    start = found[1][name]["weights"][0]
    expected, norms = reference(JOBS[name], start)
    for step, (want, got) in enumerate(zip(expected, found[ranks][name]["weights"], strict=True)):
        assert want.keys() == got.keys()
        for weight in want:
            difference = (want[weight].double() - got[weight].double()).abs()
            if "half" in name and table_of_parameter(weight):
                # Weights below 1 lie at most 2^-11 apart; some kernels round the step too, before they subtract it.
                assert torch.equal(got[weight], got[weight].half().float()), "stored as fp16"
                assert difference.max() <= max(1, step) * 2**-11, (step, weight, difference.max())
                assert table_of_parameter(weight) != "user" or step > 1 or (difference > 0).double().mean() < 0.01
            else:
                assert difference.max() <= (1e-4 if "half" in name else 1e-5), (step, weight, difference.max())
    limit = yaml.safe_load(JOBS[name])["optimizer"]["dense"].get("clip_norm")
    assert limit is None or max(norms) > 2 * limit, "a limit that nothing reaches proves nothing"


@pytest.mark.dist
@EVERY_NUMBER_OF_RANKS
@EVERY_JOB
def test_each_rate_that_is_logged_is_the_one_that_moved_the_weights(found, name, ranks):
    settings = yaml.safe_load(JOBS[name])
    full = {"dense": settings["optimizer"]["dense"]["learning_rate"], "tables": 0.1}
    for table, own in settings["tables"].items():
        if own.get("freeze"):
            full[f"tables/{table}"] = 0.0
        elif own_optimizer(own):
            base = full["dense" if own_optimizer(own).get("name") == "dense" else "tables"]
            full[f"tables/{table}"] = own_optimizer(own).get(
                "learning_rate", base * own_optimizer(own).get("learning_rate_factor", 1.0)
            )
    full = {key: rate for key, rate in full.items() if key in ("dense", "tables") or rate != full["tables"]}
    for factor, rates in zip(
        factors_of(settings["optimizer"].get("schedule", {})), found[ranks][name]["rates"], strict=True
    ):
        assert rates == pytest.approx({key: rate * factor for key, rate in full.items()}, abs=1e-12)


@pytest.mark.dist
@EVERY_NUMBER_OF_RANKS
@EVERY_JOB
def test_rows_that_no_batch_reads_stay_as_they_are_but_under_a_dense_optimizer(found, name, ranks):
    settings, parsed = yaml.safe_load(JOBS[name]), recipe_file.parse(JOBS[name])
    batches = [global_batch(parsed, step)["ids"] for step in range(STEPS)]
    weights = found[ranks][name]["weights"]
    for weight in weights[0]:
        if (table := table_of_parameter(weight)) is None:
            continue
        own = settings["tables"].get(table, {})
        frozen, dense = own.get("freeze", False), own_optimizer(own).get("name") == "dense"
        moved_alone = 0
        for step, ids in enumerate(batches):
            read = {
                row
                for feature, values in ids.items()
                if parsed.inputs.table_of(feature).name == table
                for value in values
                for row in (value if isinstance(value, list) else [value])
            }
            changed = (weights[step][weight] != weights[step + 1][weight]).any(1).nonzero().flatten().tolist()
            moved_alone += len(set(changed) - read)
            assert not frozen or not changed
            assert frozen or "half" in name or read <= set(changed), (table, step)
        momentum = dense and settings["optimizer"]["dense"].get("name", "adam") == "adam"
        assert (moved_alone > 0) == momentum, f"{table}: Adam's momentum moves rows of dense tables, nothing else does"


@pytest.mark.dist
@EVERY_NUMBER_OF_RANKS
def test_the_report_names_optimizer_and_settings_of_every_table_and_who_updates_it(found, ranks):
    fused, nobody, keys = (
        "the fused kernel, in the backward pass",
        "nobody",
        ("optimizer", "learning_rate", "eps", "l2"),
    )
    tables = {t["name"]: t for t in found[ranks]["din"]["described"]["tables"]}
    assert {name: tuple(table[key] for key in keys) for name, table in tables.items()} == {
        "user": ("rowwise_adagrad", 0.1, 1e-3, 0.0),
        "city": ("sgd", 0.3, None, 0.0),
        "type": ("adagrad", 0.05, 1e-3, 0.0),
        "item": ("rowwise_adagrad", 0.1, 1e-3, 0.01),
        "category": ("frozen", 0.0, None, 0.0),
    }
    assert {name: table["updated_by"] for name, table in tables.items()} == {
        **dict.fromkeys(("user", "city", "type", "item"), fused),
        "category": nobody,
    }
    replicas = found[ranks]["deepfm data_parallel"]["described"]
    kinds = {"user": "RowWiseAdagrad", "city": "SGD", "type": "Adagrad", "item": "RowWiseAdagrad"}
    assert {table["name"]: table["updated_by"] for table in replicas["tables"]} == {
        **{table: f"{kind}, on every rank" for table, kind in kinds.items()},
        "category": nobody,
    }
    assert (replicas["dense"]["optimizer"], replicas["dense"]["updated_by"]) == ("adam", "Adam, on every rank")
    (city,) = [t for t in found[ranks]["dense"]["described"]["tables"] if t["name"] == "city"]
    assert (city["optimizer"], city["learning_rate"], city["updated_by"]) == ("dense", 0.01, "Adam, on every rank")
    assert "\n".join(optim.sentences(found[ranks]["din"]["described"])).count("Table") == 5


@pytest.mark.dist
@EVERY_NUMBER_OF_RANKS
def test_a_dense_table_is_planned_as_replicas_and_no_other_is_forced(found, ranks):
    assert found[ranks]["dense"]["kinds"] == {
        "user": "row_wise", "city": "data_parallel", "type": "row_wise", "item": "row_wise", "category": "row_wise"
    }  # fmt: skip


@pytest.mark.dist
@EVERY_NUMBER_OF_RANKS
@pytest.mark.parametrize("model", ["din", "deepfm"])
def test_bf16_trains_nearly_the_same_weights_which_stay_fp32(found, model, ranks):
    full, half = found[ranks][model], found[ranks][f"{model} bf16"]
    assert half["losses"] == pytest.approx(full["losses"], rel=0.02)
    assert half["losses"] != full["losses"]
    largest = 0.0
    for name, value in full["weights"][-1].items():
        assert half["weights"][-1][name].dtype == torch.float32
        difference = (half["weights"][-1][name] - value).abs().max().item()
        largest = max(largest, difference)
        moved = (value - full["weights"][0][name]).abs().max().item()
        assert difference <= 0.1 + moved, name
    assert 1e-5 < largest


def test_a_run_that_goes_on_takes_the_rates_of_the_uninterrupted_one():
    plain = {"name": "sgd", "learning_rate": 0.3, "eps": 1e-8}
    text = recipe("deepfm", sparse=plain, dense=plain, schedule=COSINE)
    parsed, weights = recipe_file.parse(text), {}
    with process_group("cpu", threads=1) as ranks:
        for resumes in (False, True):
            job = assemble(parsed, ranks, encoder=None)
            optimizer = job.optimizer(STEPS)
            for step in range(STEPS):
                if resumes and step == 3:
                    state = optimizer.state_dict()
                    optimizer = job.optimizer(STEPS)
                    optimizer.seek(step)
                    optimizer.load_state_dict(state)
                loss, _ = job.task(as_batch(parsed, global_batch(parsed, step), 0, ROWS, 1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            weights[resumes] = whole_weights(job)
    for name, value in weights[False].items():
        assert torch.equal(value, weights[True][name]), name


@pytest.mark.parametrize("name", ["half", "half deepfm", "din", "deepfm data_parallel"])
def test_vectors_come_out_as_fp32_of_tables_stored_as_the_recipe_says(name):
    parsed = recipe_file.parse(JOBS[name])
    with process_group("cpu", threads=1) as ranks:
        job = assemble(parsed, ranks, encoder=None)
        stored = {table_of_parameter(key): value.dtype for key, value in job.task.state_dict().items()}
        batch = as_batch(parsed, global_batch(parsed, 0), 0, ROWS, 1)
        for model in (job.task.module.model, models.build(parsed.inputs, parsed.model)):
            vectors, events, _ = model.embeddings(batch.pooled, batch.sequence, batch.weights)
            assert {v.dtype for v in [*vectors.values(), *(e for e, _ in events.values())]} == {torch.float32}
    expected = torch.float16 if "half" in name else torch.float32
    assert {stored[table.name] for table in parsed.inputs.tables} == {expected}


@pytest.mark.parametrize("model", ["din", "deepfm"])
def test_bf16_does_not_reach_scores(model):
    scores = {}
    with process_group("cpu", threads=1) as ranks:
        for precision in ("fp32", "bf16"):
            parsed = recipe_file.parse(recipe(model, train={"precision": precision}))
            job = assemble(parsed, ranks, encoder=None)
            job.task.eval()
            _, (_, scores[precision]) = job.task(as_batch(parsed, global_batch(parsed, 0), 0, ROWS, 1))
    assert torch.equal(scores["bf16"], scores["fp32"])


def test_a_model_that_cuda_trains_is_read_on_the_cpu():
    text = recipe("din", sparse={"name": "adam"}, train={"device": "cuda"})
    parsed = recipe_file.parse(text)
    same = recipe_file.parse(text, ["optimizer.sparse.name=sgd", "optimizer.sparse.eps=1e-8"])
    with process_group("cpu", threads=1) as ranks:
        jobs = [assemble(parsed, ranks, encoder=None, trains=False), assemble(same, ranks, encoder=None)]
        scores = [job.task.eval()(as_batch(parsed, global_batch(parsed, 0), 0, ROWS, 1))[1][1] for job in jobs]
    assert torch.equal(*scores)


# The training command.


@pytest.fixture
def run(tmp_path):
    """`run(name, *overrides)`: train a small recipe on 96 rows, 12 steps in all."""
    draw = np.random.default_rng(3)
    columns = {name: draw.integers(0, 9, 96) for name in ("user", "city", "item")}
    columns |= {"seen": [draw.integers(0, 9, n).tolist() for n in draw.integers(0, 5, 96)]}
    pq.write_table(pa.table(columns | {"label": draw.integers(0, 2, 96)}), tmp_path / "train.parquet")

    def run(name: str, *overrides: str) -> Result:
        text = yaml.safe_dump(
            {
                "model": {"name": "din", "hidden": [8], "attention_hidden": [4]},
                "data": {"train": str(tmp_path / "train.parquet"), "batch_size_per_rank": 16},
                "features": [
                    {"kind": "id", "columns": ["user", "city", "item"]},
                    {"kind": "history", "of": {"seen": "item"}},
                ],
                "tables": {"default": {"dim": 4, "rows": 20}, "city": {"optimizer": "dense"}, "user": {"freeze": True}},
                "optimizer": {"schedule": {"warmup_steps": 3, "decay": "cosine"}},
                "train": {"device": "cpu", "epochs": 2, "log_every_steps": 1},
            }
        )
        return train(recipe_file.parse(text, overrides), run=str(tmp_path / name))

    return run


def lines_of(result: Result) -> list[dict]:
    return [json.loads(line) for line in (result.run / "train_loss.jsonl").read_text().splitlines()]


def test_a_run_writes_the_rates_of_dense_layers_and_tables_and_who_updates_what(run, caplog):
    caplog.set_level("INFO", logger="recsys")
    result = run("a")
    rates = [line["learning_rates"] for line in lines_of(result)]
    cosine = [(1 + math.cos(math.pi * step / 9)) / 2 for step in range(9)]
    for got, factor in zip(rates, [1 / 3, 2 / 3, 1.0, *cosine], strict=True):
        expected = {"dense": 1e-3, "tables": 0.05, "tables/city": 1e-3, "tables/user": 0.0}
        assert got == pytest.approx({key: rate * factor for key, rate in expected.items()}, abs=1e-12)
    events = EventAccumulator(str(result.run / "tensorboard")).Reload()
    for key in rates[0]:
        shown = [(event.step, event.value) for event in events.Scalars(f"learning_rate/{key}")]
        assert shown == [(step + 1, pytest.approx(got[key])) for step, got in enumerate(rates)]
    stored = json.loads((result.run / "environment.json").read_text())["optimizers"]
    assert {table["name"]: table["optimizer"] for table in stored["tables"]} == {
        "user": "frozen", "city": "dense", "item": "rowwise_adagrad"
    }  # fmt: skip
    text = (result.run / "log.txt").read_text()
    assert "Dense layers: adam (learning_rate 0.001, eps 1e-08" in text
    assert re.search(r"Table item: rowwise_adagrad \(learning_rate 0.05.*updated by the fused kernel", text)
    assert re.search(r"Table user: frozen .*updated by nobody", text)
    assert "warm-up steps, but" not in text


def test_both_pipelines_follow_the_schedule_and_the_precision(run):
    losses = {}
    for precision in ("fp32", "bf16"):
        for pipeline in ("plain", "sparse_dist"):
            result = run(f"{precision}-{pipeline}", f"train.precision={precision}", f"train.pipeline={pipeline}")
            losses[precision, pipeline] = [line["loss"] for line in lines_of(result)]
        assert losses[precision, "sparse_dist"] == pytest.approx(losses[precision, "plain"], abs=1e-6)
    assert losses["bf16", "plain"] == pytest.approx(losses["fp32", "plain"], rel=0.02)
    assert losses["bf16", "plain"] != losses["fp32", "plain"]


def test_a_warm_up_as_long_as_the_run_is_told(run):
    result = run("a", "optimizer.schedule={warmup_steps: 12}")
    assert "12 warm-up steps, but the run has 12" in (result.run / "log.txt").read_text()


if __name__ == "__main__":
    from recsys.stack import require_stack

    require_stack()
    run_jobs(json.loads(pathlib.Path(sys.argv[1]).read_text()))
