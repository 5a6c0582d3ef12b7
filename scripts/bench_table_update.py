"""What one training step of an embedding table costs: ours, the raw FBGEMM kernel, and torch's own ways.

    python -m scripts.bench_table_update [--rows 1000000 10000000]

A step looks up a batch of bags, sums each, takes a given gradient back and updates the rows. `ours` is the public path:
`recsys.embedding` with its optimizer fused by `recsys.optim`, sharded by TorchRec on one rank, ids given as a
KeyedJaggedTensor that is new in every step. `raw kernel` is FBGEMM's table with the same optimizer (row-wise Adagrad)
called directly. The others are torch.nn.EmbeddingBag with dense Adam (fused), SparseAdam and sparse Adagrad; they are
left out where table, gradient and state do not fit into memory. Each contestant is a process of its own, measured in
turns with the others; the machine's copy bandwidth is measured between them. Ids are drawn by Zipf's law (exponent 1,
the frequent ids spread over the table) and evenly.

Takes about 7 minutes and 12 GB on two quiet cores. Prints a table and writes benchmarks/table_update.json.
"""

import argparse
import functools
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from scripts.contest import (
    ROOT,
    Bar,
    Contestant,
    available_bytes,
    forget_peak,
    in_turns,
    median,
    open_channel,
    peak_bytes,
    resident_bytes,
    serve,
    stage,
    timed,
    write_results,
)

OURS, RAW = "ours", "raw kernel"
TORCH = {"dense Adam": "dense_adam", "SparseAdam": "sparse_adam", "sparse Adagrad": "sparse_adagrad"}
COPIES = {OURS: 1.0, RAW: 1.0, "dense Adam": 4.0, "SparseAdam": 3.0, "sparse Adagrad": 2.0}
"""Contestant -> sizes of the table that it needs at least: weights, dense gradient, optimizer state."""
DISTRIBUTIONS = ("zipf", "uniform")
_NUM_BATCHES = 4
_SHARE_TOGETHER = 0.8  # of the memory, for contestants that are set up at the same time
_RESERVE = 2 * 2**30  # bytes for the processes themselves and what a step allocates
_LEARNING_RATE, _EPS = 0.05, 1e-8


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    options = _options(arguments)
    if options.serve:
        _serve(options)
        return
    start_s = time.perf_counter()
    sizes = [_measure(rows, options) for rows in options.rows]
    found = {
        "dim": options.dim,
        "batch_rows": options.batch,
        "ids_per_bag": options.bag,
        "sizes": sizes,
        "bars": [bar.as_json() for bar in bars(sizes)],
        "took_s": round(time.perf_counter() - start_s),
    }
    _print(write_results(options.output, "bench_table_update", arguments, options.threads, found))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000], help="rows of the table")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2_048, help="bags of a step")
    parser.add_argument("--bag", type=int, default=128, help="ids of a bag")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="least time of one measurement")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "benchmarks" / "table_update.json")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


# The measurement.


def _measure(rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """All contestants on one size of the table."""
    table_bytes = rows * options.dim * 4
    found: dict[str, Any] = {name: [] for name in COPIES}
    bandwidth: list[float] = []
    too_large = {n: c * table_bytes + _RESERVE for n, c in COPIES.items() if c * table_bytes + _RESERVE > _memory()}
    names = [name for name in COPIES if name not in too_large]
    together = sum(COPIES[name] * table_bytes + _RESERVE / 4 for name in names) < _SHARE_TOGETHER * _memory()
    start = functools.partial(_start, rows=rows, options=options)
    ask = {"seconds": options.seconds}
    copy = _start("copy", rows=1, options=options)
    with stage([copy, *([start(name) for name in names] if together else [])]) as contestants:
        for _ in range(options.rounds):
            for name, answers in in_turns(contestants, 1, "measure", **ask).items():
                (bandwidth if name == "copy" else found[name]).extend(answers)
            for name in () if together else names:  # One at a time: each is set up anew in every round.
                with stage([start(name)]) as alone:
                    found[name].append(alone[0].ask("measure", **ask))
    gb_per_s = max(bandwidth)
    shown = {name: _summary(answers, options, gb_per_s) for name, answers in found.items() if answers}
    skipped = {
        name: f"needs {need / 2**30:.1f} GiB, {_memory() / 2**30:.1f} are there" for name, need in too_large.items()
    }
    return {
        "rows": rows,
        "table_gib": round(table_bytes / 2**30, 3),
        "unique_ids": next(iter(found.values()))[0]["unique_ids"],
        "measured": "all set up at once" if together else "one at a time",
        "copy_gb_per_s": median(bandwidth),
        "best_copy_gb_per_s": median([gb_per_s]),
        "contestants": shown,
        "left_out": skipped,
    }


@functools.cache
def _memory() -> int:
    return available_bytes()


def _start(name: str, *, rows: int, options: argparse.Namespace) -> Contestant:
    words = [sys.executable, "-m", "scripts.bench_table_update", "--serve", name, "--rows", rows]
    words += ["--dim", options.dim, "--batch", options.batch, "--bag", options.bag]
    return Contestant(name, [str(word) for word in words], threads=options.threads)


def _summary(answers: list[dict[str, Any]], options: argparse.Namespace, gb_per_s: float) -> dict[str, Any]:
    """Medians over rounds, and what a step moves at least in relation to the machine's bandwidth."""
    found: dict[str, Any] = {"step_ms": {}, "least_traffic_gb_per_s": {}, "share_of_copy": {}}
    row_bytes = 4 * options.dim
    for kind in DISTRIBUTIONS:
        step_s = median([answer["step_s"][kind] for answer in answers])
        # Every id's row is read once to be summed; every distinct row is read and written once to be updated.
        traffic = row_bytes * (options.batch * options.bag + 2 * answers[0]["unique_ids"][kind])
        found["step_ms"][kind] = median([1e3 * step_s])
        found["least_traffic_gb_per_s"][kind] = median([traffic / step_s / 1e9])
        found["share_of_copy"][kind] = median([traffic / step_s / 1e9 / gb_per_s], 3)
    return found | {
        "step_ms_of_rounds": {kind: [median([1e3 * a["step_s"][kind]]) for a in answers] for kind in DISTRIBUTIONS},
        "setup_s": median([answer["setup_s"] for answer in answers], 3),
        "memory_mib": {
            key: round(max(answer["memory"][key] for answer in answers) / 2**20) for key in answers[0]["memory"]
        },
    }


def bars(sizes: list[dict[str, Any]]) -> list[Bar]:
    """What must hold, on the Zipf batches: ratios of step times measured in one run, and memory in all."""

    def step_ms(size: dict[str, Any], name: str) -> float | None:
        return size["contestants"].get(name, {}).get("step_ms", {}).get("zipf")

    def ratio(over: float | None, under: float | None) -> float | None:
        return None if over is None or under is None else median([over / under], 3)

    found = []
    for size in sizes:
        at = f"{size['rows']:,} rows"
        found.append(
            Bar(f"{at}: step of ours / raw kernel", ratio(step_ms(size, OURS), step_ms(size, RAW)), at_most=1.15)
        )
    small, large = sizes[0], sizes[-1]
    for name, least in (("SparseAdam", 8.0), ("sparse Adagrad", 4.0)):
        what = f"{small['rows']:,} rows: step of {name} / ours"
        found.append(Bar(what, ratio(step_ms(small, name), step_ms(small, OURS)), at_least=least))
    if large is not small:
        for name, most in ((OURS, 1.7), (RAW, None)):
            what = f"{name}: step at {large['rows']:,} rows / at {small['rows']:,}"
            found.append(Bar(what, ratio(step_ms(large, name), step_ms(small, name)), at_most=most))
    # 11.5 GB allow the full-sized table of 10.24 GB its bytes and an eighth more.
    peak_gb = large["contestants"][OURS]["memory_mib"]["peak"] * 2**20 / 1e9
    most_gb = 11.5 if large["rows"] == 10_000_000 else None
    return [*found, Bar(f"{large['rows']:,} rows: peak memory of ours, GB", median([peak_gb]), at_most=most_gb)]


# A contestant's process.


def _serve(options: argparse.Namespace) -> None:
    options.channel = open_channel()
    if options.serve == "copy":
        _serve_copy(options)
        return
    # Loaded and joined by every contestant, so that their memory compares.
    from recsys.distributed import process_group
    from recsys.stack import require_stack

    require_stack()
    with process_group("cpu", threads=options.threads) as ranks:
        _serve_table(options, ranks)


def _serve_table(options: argparse.Namespace, ranks: Any) -> None:
    import torch

    base = resident_bytes()
    start_s = time.perf_counter()
    rows, dim = options.rows[0], options.dim
    build: dict[str, Callable[..., Any]] = {RAW: _raw, OURS: functools.partial(_ours, ranks)}
    build |= {name: functools.partial(_torch, optimizer) for name, optimizer in TORCH.items()}
    step, state_bytes = build[options.serve](rows, dim, options)
    setup_s = time.perf_counter() - start_s
    gradient = torch.randn(options.batch, dim, generator=torch.Generator().manual_seed(3)) / options.batch
    lengths = torch.full((options.batch,), options.bag)
    batches = {kind: [batch(kind, rows, options, seed) for seed in range(_NUM_BATCHES)] for kind in DISTRIBUTIONS}

    def measure(seconds: float) -> dict[str, Any]:
        peaks, step_s = [peak_bytes()], {}
        forget_peak()
        for kind, ids in batches.items():

            def one(n: int, ids: list[Any] = ids) -> None:
                step(ids[n % _NUM_BATCHES], lengths, gradient)

            step_s[kind] = median(timed(one, seconds=seconds))
        peaks.append(peak_bytes())
        table = rows * dim * 4
        memory = {"peak": max(peaks), "interpreter": base, "table": table, "state": state_bytes()}
        memory["peak_of_steps"] = peaks[1]
        memory["temporary"] = peaks[1] - table - memory["state"]
        memory["temporary_without_interpreter"] = memory["temporary"] - base
        unique = {kind: len(torch.unique(ids[0])) for kind, ids in batches.items()}
        return {"step_s": step_s, "memory": memory, "unique_ids": unique, "setup_s": setup_s}

    serve(options.channel, {"measure": measure})


def batch(kind: str, rows: int, options: argparse.Namespace, seed: int) -> Any:
    """(bags * ids,) int64 ids of one batch."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    shape = (options.batch * options.bag,)
    if kind == "uniform":
        return torch.randint(rows, shape, generator=generator)
    drawn = torch.rand(shape, generator=generator, dtype=torch.float64)
    ranks = ((rows + 1) ** drawn).long().clamp(1, rows) - 1
    # A factor without common divisors with the number of rows is a permutation: frequent rows are no neighbours.
    factor = next(p for p in (2_654_435_761, 2_654_435_789, 2_654_435_831) if rows % p)
    return ranks * factor % rows


def _ours(ranks: Any, rows: int, dim: int, options: argparse.Namespace) -> tuple[Callable[..., Any], Callable[[], int]]:
    import torch
    from torch import nn
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from recsys import optim, recipe_file, sharding
    from recsys.embedding import Embeddings

    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeddings = Embeddings(recipe.inputs, attends=False, table_device="meta")

        def forward(self, pooled: Any, sequence: Any, weights: Any) -> Any:
            vectors, *_ = self.embeddings(pooled, sequence, weights)
            return vectors["ids"]

    recipe = recipe_file.parse(
        f"{{model: {{name: deepfm}}, data: {{train: none}}, "
        f"features: [{{kind: id_list, columns: [ids], pooling: sum}}], "
        f"tables: {{ids: {{ids: exact, rows: {rows - 3}, dim: {dim}}}}}, "  # three rows are reserved
        f"optimizer: {{sparse: {{learning_rate: {_LEARNING_RATE}, eps: {_EPS}}}}}, train: {{device: cpu}}}}"
    )
    model = Lookup()
    optim.fuse(model.embeddings, recipe)
    plan = sharding.agreed_plan(model, recipe, ranks)
    sharded = sharding.shard(model, plan, ranks)
    sharding.initialize_tables(sharded, model.embeddings, seed=1)
    nothing = torch.zeros(0, dtype=torch.int64)
    sequence, weights = KeyedJaggedTensor([], nothing, lengths=nothing), torch.full((options.batch,), 1 / options.batch)

    def step(ids: Any, lengths: Any, gradient: Any) -> None:
        sharded(KeyedJaggedTensor(["ids"], ids, lengths=lengths), sequence, weights).backward(gradient)

    return step, lambda: rows * 4


def _raw(rows: int, dim: int, options: argparse.Namespace) -> tuple[Callable[..., Any], Callable[[], int]]:
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    kernel = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=_LEARNING_RATE,
        eps=_EPS,
        device=torch.device("cpu"),
    )
    kernel.split_embedding_weights()[0].fill_(0.01)

    def step(ids: Any, lengths: Any, gradient: Any) -> None:
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        kernel(ids, offsets).backward(gradient)

    return step, lambda: rows * 4


def _torch(
    optimizer: str, rows: int, dim: int, options: argparse.Namespace
) -> tuple[Callable[..., Any], Callable[[], int]]:
    import torch
    from torch import nn

    bag = nn.EmbeddingBag.from_pretrained(
        torch.full((rows, dim), 0.01), freeze=False, mode="sum", sparse=optimizer != "dense_adam"
    )
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "dense_adam": functools.partial(torch.optim.Adam, fused=True),
        "sparse_adam": torch.optim.SparseAdam,
        "sparse_adagrad": torch.optim.Adagrad,
    }
    updates = kinds[optimizer](bag.parameters(), lr=_LEARNING_RATE)

    def step(ids: Any, lengths: Any, gradient: Any) -> None:
        updates.zero_grad()
        bag(ids, lengths.cumsum(0) - lengths).backward(gradient)
        updates.step()

    def state_bytes() -> int:
        return sum(v.nbytes for s in updates.state.values() for v in s.values() if isinstance(v, torch.Tensor))

    return step, state_bytes


def _serve_copy(options: argparse.Namespace) -> None:
    """The rate at which this machine copies, read and written bytes counted, in GB/s."""
    import torch

    source, target = torch.ones(2**26), torch.zeros(2**26)  # 256 MiB each, beyond any cache

    def measure(seconds: float) -> float:
        return 2 * source.nbytes / 1e9 / min(timed(lambda _: target.copy_(source), seconds=min(seconds, 1.0), least=5))

    serve(options.channel, {"measure": measure})


# The table.


def _print(results: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    for size in results["sizes"]:
        title = f"{size['rows']:,} x {results['dim']}; copy {size['copy_gb_per_s']} GB/s"
        table = Table(
            "contestant", "zipf ms", "uniform ms", "zipf GB/s", "of copy", "temporary MiB", "set-up s", title=title
        )
        for name, found in size["contestants"].items():
            table.add_row(
                name,
                f"{found['step_ms']['zipf']:.1f}",
                f"{found['step_ms']['uniform']:.1f}",
                f"{found['least_traffic_gb_per_s']['zipf']:.1f}",
                f"{found['share_of_copy']['zipf']:.0%}",
                f"{found['memory_mib']['temporary']:,}",
                f"{found['setup_s']:.1f}",
            )
        for name, why in size["left_out"].items():
            table.add_row(name, why)
        Console().print(table)
    for bar in results["bars"]:
        Console().print(f"{'missed' if bar['met'] is False else 'met' if bar['met'] else '-'}: {bar}")
    print(f"{results['took_s']} s")


if __name__ == "__main__":
    main()
