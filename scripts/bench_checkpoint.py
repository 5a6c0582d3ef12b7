"""How long training waits for a checkpoint, written at once or in the background, and how large a delta is.

    python -m scripts.bench_checkpoint [--gigabytes 2] [--rounds 3]

One rank, one table with row-wise Adagrad; `--gigabytes` counts weights and state. Three things are measured. `sync`:
the time in `Saver.save` that writes before it returns. `async`: the same with a background thread, which copies first,
into memory that is taken once before training starts (`async_prepared_s`); each round ends with the wait for the
writing, which is not counted, since training would go on meanwhile. `delta`: bytes and times after steps that touched
1 % of the rows. Rounds alternate between sync and async, and medians count. Bars: async waits for less than 20 % of
sync, and a delta has less than 3 % of the bytes of a full checkpoint. Needs about twice the size in memory and on the
disk; the files are removed.

Prints a table and writes benchmarks/checkpoint.json.
"""

import argparse
import datetime
import json
import pathlib
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from recsys import checkpoint, resumption
from recsys.data.batch import Batch
from recsys.deltas import TouchedRows
from recsys.distributed import Ranks, process_group
from recsys.encoder import Encoder
from recsys.job import assemble
from recsys.recipe_file import parse
from recsys.run_folder import environment
from recsys.saving import Saver
from recsys.storage import Place

_ROOT = pathlib.Path(__file__).parent.parent
_DIM = 63  # DeepFM's first-order weight rides along: 64 columns
_ROW_BYTES = 4 * (64 + 1)
_BATCH_ROWS = 4_096
_TOUCHED_SHARE = 0.01
_ASYNC_BAR, _DELTA_BAR = 0.20, 0.03


def main(arguments: list[str] | None = None) -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where the checkpoints are written meanwhile; default: a temporary folder")
    parser.add_argument("--output", type=pathlib.Path, default=_ROOT / "benchmarks" / "checkpoint.json")
    options = parser.parse_args(arguments)
    rows = int(options.gigabytes * 1e9 / _ROW_BYTES)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, process_group("cpu") as ranks:
        _require_room(folder, rows)
        results = _Measured(ranks, rows, Place(folder)).results(options.rounds)
        facts = environment(ranks, torch.get_num_threads())
    names = ("git_commit", "python", "torch", "torchrec", "processor", "cores", "threads_per_rank")
    facts = {
        "command": shlex.join(["python", "-m", "scripts.bench_checkpoint", *(arguments or sys.argv[1:])]),
        "date": datetime.date.today().isoformat(),
        "environment": {name: facts.get(name) for name in names},
        "rows": rows,
        "row_bytes": _ROW_BYTES,
        "rounds": options.rounds,
        **results,
    }
    _print(facts)
    options.output.parent.mkdir(exist_ok=True, parents=True)
    options.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def _require_room(folder: str, rows: int) -> None:
    if shutil.disk_usage(folder).free < 2.5 * rows * _ROW_BYTES:
        raise SystemExit(f"{folder} has no room for two checkpoints: name another place with --folder")


class _Measured:
    """The model, its savers and what they take."""

    def __init__(self, ranks: Ranks, rows: int, folder: Place) -> None:
        recipe = parse(
            "{model: {name: deepfm, hidden: [16]}, data: {train: unused}, features: [{kind: id, columns: [id]}], "
            f"tables: {{default: {{dim: {_DIM}, rows: {rows}}}}}, train: {{device: cpu}}}}"
        )
        self.rows, self.folder, self.layout = rows, folder, recipe.layout
        self.encoder = Encoder(recipe)
        self.job = assemble(recipe, ranks, self.encoder)
        self.optimizer = self.job.optimizer()
        self.touched = TouchedRows(self.job.embeddings, recipe, ranks.device)
        self.touched.watch(self.job.task)
        self.step = 0
        self.savers = {
            name: Saver(folder / name, self.encoder, keep=1, asynchronous=name == "async", touched=self.touched)
            for name in ("sync", "async")
        }

    def train(self, ids: torch.Tensor) -> None:
        """One step."""
        batch = Batch.from_lists(self.layout, {"id": ids.tolist()}, labels=[0.0] * len(ids))
        batch.dense = batch.dense.view(len(ids), 0)
        self.optimizer.zero_grad()
        self.job.task(batch)[0].backward()
        self.optimizer.step()

    def state(self) -> checkpoint.State:
        """What is saved."""
        return checkpoint.state_of(self.job.task, self.encoder, resumption.slots(self.job, self.optimizer))

    def save(self, name: str, *, full: bool = True) -> float:
        """Seconds that the caller waited."""
        self.step += 1
        saver, before_s = self.savers[name], self.savers[name].blocked_s
        saver.save(self.step, self.state(), {"step": self.step}, set(), full=full)
        return saver.blocked_s - before_s

    def results(self, rounds: int) -> dict[str, Any]:
        """All that is measured, and whether it clears the bars."""
        waited: dict[str, list[float]] = {"sync": [], "async": []}
        written: list[float] = []
        self.train(torch.randint(3, self.rows, (_BATCH_ROWS,)))
        start_s = time.perf_counter()
        self.savers["async"].prepare(self.state())
        prepared_s = time.perf_counter() - start_s
        for round_ in range(rounds):
            for name in ("sync", "async") if round_ % 2 == 0 else ("async", "sync"):
                (self.folder / name).remove()  # One checkpoint of each kind at a time, whatever is kept.
                start_s = time.perf_counter()
                waited[name].append(self.save(name))
                self.savers[name].wait()
                if name == "async":
                    written.append(time.perf_counter() - start_s)
        full_bytes = sum(self.savers["async"].place(self._last("async")).sizes().values())
        delta = self._delta()
        sync_s, later_s = statistics.median(waited["sync"]), statistics.median(waited["async"][1:] or waited["async"])
        shares = {"async": later_s / sync_s, "async_first": waited["async"][0] / sync_s}
        shares["delta_bytes"] = delta["bytes"] / full_bytes
        return {
            "sync_s": [round(value, 3) for value in waited["sync"]],
            "async_s": [round(value, 3) for value in waited["async"]],
            "async_until_written_s": [round(value, 3) for value in written],
            "async_prepared_s": round(prepared_s, 3),
            "full_bytes": full_bytes,
            "delta": delta,
            "shares": {name: round(value, 4) for name, value in shares.items()},
            "bars": {
                "async": {"below": _ASYNC_BAR, "met": shares["async"] < _ASYNC_BAR},
                "async_first": {"below": _ASYNC_BAR, "met": shares["async_first"] < _ASYNC_BAR},
                "delta_bytes": {"below": _DELTA_BAR, "met": shares["delta_bytes"] < _DELTA_BAR},
            },
        }

    def _delta(self) -> dict[str, Any]:
        """A delta after steps that touched 1 % of the rows, after a full one by the same saver."""
        touched = torch.randperm(self.rows)[: int(self.rows * _TOUCHED_SHARE)] + 3
        start_s = time.perf_counter()
        parts = touched.split(_BATCH_ROWS)
        for part in parts:
            self.train(part)
        trained_s = time.perf_counter() - start_s
        waited_s = self.save("async", full=False)
        self.savers["async"].wait()
        place = self.savers["async"].place(self._last("async"))
        about = checkpoint.read_about(place)
        assert about["delta"]["rows"] == {"id": len(touched)}, "the touched rows, and no other"
        return {
            "touched_rows": len(touched),
            "steps": len(parts),
            "training_s": round(trained_s, 3),
            "waited_s": round(waited_s, 3),
            "bytes": sum(place.sizes().values()),
        }

    def _last(self, name: str) -> int:
        return int(checkpoint.complete(self.folder / name)[-1].name.removeprefix("step_"))


def _print(facts: dict[str, Any]) -> None:
    table = Table("", "measured", "of", "share", "bar")
    shares, bars = facts["shares"], facts["bars"]
    sync = f"{statistics.median(facts['sync_s']):.2f} s"
    later = statistics.median(facts["async_s"][1:] or facts["async_s"])
    shown = {
        "async_first": (f"{facts['async_s'][0]:.2f} s", sync),
        "async": (f"{later:.2f} s", sync),
        "delta_bytes": (f"{facts['delta']['bytes']:,} B", f"{facts['full_bytes']:,} B"),
    }
    for name, (measured, whole) in shown.items():
        mark = "met" if bars[name]["met"] else "MISSED"
        table.add_row(name, measured, whole, f"{shares[name]:.2%}", f"< {bars[name]['below']:.0%} {mark}")
    Console().print(table)


if __name__ == "__main__":
    main()
