"""How fast whole models train, and where the time goes; beside other libraries, on the machine's own scale.

    python -m scripts.bench_train [--install-peers]

Three settings on made-up data (scripts.bench_train_data): DeepFM on a Criteo-sized set, the same with ten times the
tables, and DIN. Ours trains end to end from parquet, reader and encoder included: with one process, in bf16, and with
one process per core. The others (scripts.bench_train_peers) run their own training step on batches that lie in memory.
All are processes of their own, measured in turns. With them in every round: how long the matrix products of our dense
layers take by themselves, which no training step can undercut. Then a step of ours is taken apart.

The others live in an environment of their own, `--peers`, which `--install-peers` makes; without it they are left out.
Takes about 10 minutes and 14 GB on two quiet cores. Prints tables and writes benchmarks/train.json.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from scripts.bench_train_data import BATCH_ROWS, DIM, write
from scripts.contest import ROOT, Bar, Contestant, available_bytes, in_turns, median, stage, write_results

PEERS = ("deepctr-torch", "torch-rechub", "FuxiCTR")
OURS, BF16, RANKS = "ours", "ours, bf16", "ours, one rank per core"
DEEPFM, LARGE, DIN = "DeepFM", "DeepFM, large tables", "DIN"
_PACKAGES = ("torch", "numpy", "deepctr-torch", "torch-rechub", "fuxictr")
_BREAKDOWN_STEPS = 10
_RESERVE = 3 * 2**30  # bytes for the processes themselves


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    options = _options(arguments)
    start_s = time.perf_counter()
    if options.install_peers:
        install_peers(options.peers)
    settings: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        os.environ["RECSYS_DATA"] = name  # so that nothing is left behind
        _write(folder, options)
        settings[DEEPFM] = _together(folder / "deepfm", options)
        settings[DEEPFM]["recsys_train"] = _whole_run(folder / "deepfm", folder / "run", options)
        if options.large_tables:
            settings[LARGE] = _large(folder / "deepfm", folder / "large", options)
        settings[DIN] = _together(folder / "din", options)
    found = {
        "peers": _peer_versions(options.peers),
        "settings": settings,
        "bars": [bar.as_json() for bar in bars(settings)],
        "took_s": round(time.perf_counter() - start_s),
    }
    _print(write_results(options.output, "bench_train", arguments, options.threads, found))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=pathlib.Path, default=cache / "recsys" / "peers", help="their environment")
    parser.add_argument("--install-peers", action="store_true", help="make that environment first")
    parser.add_argument("--tables", type=int, default=2_500_000, help="rows of all DeepFM tables together")
    parser.add_argument("--large-tables", type=int, default=25_000_000, help="the same for large tables; 0: none")
    parser.add_argument("--din-tables", type=int, help="largest table of DIN")
    parser.add_argument("--deepfm-batch", type=int, default=BATCH_ROWS["deepfm"])
    parser.add_argument("--din-batch", type=int, default=BATCH_ROWS["din"])
    parser.add_argument("--batches", type=int, default=128, help="batches of the data")
    parser.add_argument("--threads", type=int, default=2, help="cores: threads of a process, or ranks with one thread")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="least time of one measurement")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "benchmarks" / "train.json")
    return parser.parse_args(arguments)


def install_peers(folder: pathlib.Path) -> None:
    """Make the environment of the other libraries; nothing happens where all of them are there in their versions."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    requirements = ROOT / "requirements"
    subprocess.run([*pip, "-c", str(requirements / "cpu.txt"), "-r", str(requirements / "peers.txt")], check=True)


def _write(folder: pathlib.Path, options: argparse.Namespace) -> None:
    num_rows = options.batches * options.deepfm_batch
    for name, rows in (("deepfm", options.tables), ("large", options.large_tables)):
        if rows:
            write(folder / name, "deepfm", num_rows, table_rows=rows, batch_rows=options.deepfm_batch)
    num_rows = options.batches * options.din_batch
    write(folder / "din", "din", num_rows, table_rows=options.din_tables, batch_rows=options.din_batch)


# The contestants.


def _ours(name: str, folder: pathlib.Path, options: argparse.Namespace) -> Contestant:
    """Our training of a recipe, as one process or as one rank per core."""
    words = [sys.executable, "-m"]
    overrides = ["train.precision=bf16"] if name == BF16 else []
    if name == RANKS:
        words += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(options.threads), "-m"]
        batch_rows = json.loads((folder / "spec.json").read_text())["batch_rows"]
        overrides.append(f"data.batch_size_per_rank={batch_rows // options.threads}")
    words += ["scripts.bench_train_ours", str(folder / "recipe.yaml"), *overrides]
    return Contestant(name, words, threads=1 if name == RANKS else options.threads)


def _peer(name: str, folder: pathlib.Path, options: argparse.Namespace) -> Contestant:
    words = [str(options.peers / "bin" / "python"), "-m", "scripts.bench_train_peers", name, str(folder)]
    return Contestant(name, words, threads=options.threads)


def _peers(options: argparse.Namespace) -> tuple[str, ...]:
    return PEERS if (options.peers / "bin" / "python").exists() else ()


# The settings.


def _together(folder: pathlib.Path, options: argparse.Namespace) -> dict[str, Any]:
    """All contestants in turns, and our steps taken apart."""
    products: dict[str, list[Any]] = {"fp32": [], "bf16": []}
    answers: dict[str, list[Any]] = {}
    ours = [_ours(name, folder, options) for name in (OURS, BF16, RANKS)]
    with stage([*ours, *(_peer(name, folder, options) for name in _peers(options))]) as contestants:
        for _ in range(options.rounds):
            for name, found in in_turns(contestants, 1, "train", seconds=options.seconds).items():
                answers.setdefault(name, []).extend(found)
            for dtype, times in products.items():
                times.append(ours[0].ask("products", seconds=options.seconds / 4, dtype=dtype))
        parts = {c.name: c.ask("breakdown", steps=_BREAKDOWN_STEPS) for c in ours}
    shown = {name: _summary(rounds) for name, rounds in answers.items()}
    return {"contestants": shown, "breakdown": parts, "products": _products(products, shown)}


def _large(small: pathlib.Path, large: pathlib.Path, options: argparse.Namespace) -> dict[str, Any]:
    """Large tables: ours, small and large, in turns with one of the others at a time, for the sake of memory."""
    answers: dict[str, list[Any]] = {}
    left_out: dict[str, str] = {}
    # Weights, gradient and two moments, of the vectors and the first-order weights, and what Adam computes with.
    need = options.large_tables * (DIM + 1) * 4 * 6 + _RESERVE
    ours = [_ours(OURS, small, options), _ours(OURS, large, options)]
    ours[0].name = f"{OURS}, small tables"
    with stage(ours):
        for name in _peers(options) or ("",):
            if name and available_bytes() < need:
                left_out[name] = f"needs {need / 2**30:.1f} GiB, {available_bytes() / 2**30:.1f} are there"
                continue
            with stage([_peer(name, large, options)] if name else []) as peers:
                for turn, found in in_turns([*ours, *peers], options.rounds, "train", seconds=options.seconds).items():
                    answers.setdefault(turn, []).extend(found)
    return {"contestants": {name: _summary(rounds) for name, rounds in answers.items()}, "left_out": left_out}


def _whole_run(folder: pathlib.Path, run: pathlib.Path, options: argparse.Namespace) -> dict[str, Any]:
    """One epoch by `recsys train` itself, as a check on what is measured in pieces."""
    command = [sys.executable, "-m", "recsys", "train", str(folder / "recipe.yaml"), "--run-dir", str(run)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL)
    metrics = json.loads((run / "metrics.json").read_text())
    return {"rows_per_s": round(metrics["rows_per_s"]), "reader_wait_share": round(metrics["reader_wait_share"], 4)}


def _summary(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over rounds."""
    found = {
        "rows_per_s": median([a["rows_per_s"] for a in answers]),
        "step_ms": median([1e3 * a["step_s"] for a in answers]),
        "rows_per_s_of_rounds": [a["rows_per_s"] for a in answers],
        "peak_gib": round(max(a["peak_bytes"] for a in answers) / 2**30, 2),
    }
    if "reader_wait_share" in answers[0]:
        found["reader_wait_share"] = median([a["reader_wait_share"] for a in answers])
        found["input_cpu_ms"] = {
            key: round(statistics.mean(a["input_cpu_ms"][key] for a in answers), 2)
            for key in answers[0]["input_cpu_ms"]
        }
    return found


def _products(products: dict[str, list[Any]], contestants: dict[str, Any]) -> dict[str, Any]:
    """The dense layers' matrix products alone, and their share of our step."""
    found = {}
    for dtype, name in (("fp32", OURS), ("bf16", BF16)):
        step_ms = median([1e3 * answer["step_s"] for answer in products[dtype]])
        found[dtype] = {
            "step_ms": step_ms,
            "gflop_per_s": median([answer["gflop_per_s"] for answer in products[dtype]]),
            "share_of_our_step": median([step_ms / contestants[name]["step_ms"]], 3),
        }
    return found


def bars(settings: dict[str, Any]) -> list[Bar]:
    """What must hold: ratios of rates and step times measured in one run."""

    def rate(setting: str, name: str) -> float | None:
        return settings.get(setting, {}).get("contestants", {}).get(name, {}).get("rows_per_s")

    def fastest(setting: str) -> float | None:
        return max((found for name in PEERS if (found := rate(setting, name)) is not None), default=None)

    def ratio(over: float | None, under: float | None) -> float | None:
        return None if over is None or under is None else median([over / under], 3)

    share = settings[DEEPFM]["products"]["fp32"]["share_of_our_step"]
    slowed = ratio(rate(LARGE, f"{OURS}, small tables"), rate(LARGE, OURS))
    return [
        Bar(f"{DEEPFM}: ours / fastest other library", ratio(rate(DEEPFM, OURS), fastest(DEEPFM)), at_least=3.5),
        Bar(f"{DEEPFM}: matrix products alone / our step", share, at_least=0.75),
        Bar(f"{DEEPFM}: ours in bf16 / fastest other library", ratio(rate(DEEPFM, BF16), fastest(DEEPFM)), at_least=6),
        Bar(f"{LARGE}: ours / fastest other library", ratio(rate(LARGE, OURS), fastest(LARGE)), at_least=15),
        Bar(f"{LARGE}: our step / with small tables", slowed, at_most=1.2),
        Bar(f"{DIN}: ours / fastest other library", ratio(rate(DIN, OURS), fastest(DIN)), at_least=6),
        *(
            Bar(f"{setting}: one rank per core / one process", ratio(rate(setting, RANKS), rate(setting, OURS)), 0.8)
            for setting in (DEEPFM, DIN)
        ),
    ]


# Facts and tables.


def _peer_versions(folder: pathlib.Path) -> dict[str, str] | str:
    """Versions in the environment of the other libraries."""
    python = folder / "bin" / "python"
    if not python.exists():
        return "not installed"
    code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    found = subprocess.run([str(python), "-c", code, *_PACKAGES], check=True, capture_output=True, text=True)
    return json.loads(found.stdout)


def _print(results: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=120)
    for title, setting in results["settings"].items():
        table = Table("contestant", "rows/s", "ms per step", "memory GiB", "waits for reader", title=title)
        for name, found in setting["contestants"].items():
            waits = f"{found['reader_wait_share']:.1%}" if "reader_wait_share" in found else ""
            step = f"{found['step_ms']:.1f}"
            table.add_row(name, f"{found['rows_per_s']:,.0f}", step, f"{found['peak_gib']:.1f}", waits)
        for name, why in setting.get("left_out", {}).items():
            table.add_row(name, why)
        console.print(table)
        for name, parts in setting.get("breakdown", {}).items():
            spent_on_input = {"input_cpu_ms": setting["contestants"][name]["input_cpu_ms"]}
            for kind, spent in (parts | spent_on_input).items():
                console.print(f"  {name}, {kind}: " + ", ".join(f"{k} {v:g}" for k, v in spent.items()))
        for dtype, found in setting.get("products", {}).items():
            console.print(f"  matrix products, {dtype}: {found}")
    for bar in results["bars"]:
        console.print(f"{'not measured' if bar['met'] is None else 'met' if bar['met'] else 'MISSED'}: {bar}")
    console.print(f"{results['took_s']} s")


if __name__ == "__main__":
    main()
