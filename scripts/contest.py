"""Contestants of a benchmark: one process each, set up once, measured in turns.

A machine's speed drifts, so contestants that are measured one after another cannot be compared. Here every round
measures each of them once while the others wait for their next question, and what is reported are medians over rounds.
A contestant may be a program of another environment: this file needs nothing but the standard library.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

ROOT = pathlib.Path(__file__).parent.parent
_LOG_TAIL = 2_000  # characters of a failed contestant's output that are shown


class Contestant:
    """A process that answers questions, one at a time, until it is closed.

    Attributes:
        name: For tables and files.
    """

    def __init__(self, name: str, command: Sequence[str], *, threads: int) -> None:
        """Start the process; `wait` until it is ready.

        Args:
            name: For messages.
            command: Program and arguments; the program calls `open_channel`, then `serve`.
            threads: OMP_NUM_THREADS of the process.
        """
        self.name = name
        self._log = tempfile.TemporaryFile()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            # A library's own notices about other libraries are none of ours.
            "PYTHONWARNINGS": "ignore",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            cwd=ROOT,
        )

    def wait(self) -> None:
        """Return when the process is ready; call it once, before the first question.

        Raises:
            RuntimeError: The process has ended.
        """
        self._read()

    def ask(self, question: str, **arguments: Any) -> Any:
        """The answer of one of the functions that the process serves.

        Raises:
            RuntimeError: The process has ended.
        """
        assert self._process.stdin is not None, "opened as a pipe"
        with contextlib.suppress(BrokenPipeError):  # The reason is in its log, which `_read` shows.
            self._process.stdin.write(json.dumps({"ask": question, **arguments}) + "\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None, "opened as a pipe"
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        self._log.seek(0)
        log = self._log.read().decode(errors="replace")[-_LOG_TAIL:]
        raise RuntimeError(f"{self.name} ended with code {self._process.wait()}:\n{log}")

    def close(self) -> None:
        """End the process: it sees the end of its input."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._process.wait()
        self._log.close()


def open_channel() -> TextIO:
    """Where this process's answers go; call it first of all, since whatever prints from then on goes to the log."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return channel


def serve(channel: TextIO, answers: Mapping[str, Callable[..., Any]]) -> None:
    """Say that all is set up; then answer the questions that stand on this process's input until it ends.

    Args:
        channel: From `open_channel`.
        answers: Question -> function of its arguments, whose result JSON can carry.
    """
    print(json.dumps("ready"), file=channel, flush=True)
    for line in sys.stdin:
        arguments = json.loads(line)
        print(json.dumps(answers[arguments.pop("ask")](**arguments)), file=channel, flush=True)


@contextlib.contextmanager
def stage(contestants: Sequence[Contestant]) -> Iterator[Sequence[Contestant]]:
    """Wait until all contestants, which were started together, are ready; close them at the end."""
    try:
        for contestant in contestants:
            contestant.wait()
        yield contestants
    finally:
        for contestant in contestants:
            contestant.close()


def in_turns(contestants: Sequence[Contestant], rounds: int, question: str, **arguments: Any) -> dict[str, list[Any]]:
    """Ask each contestant the same, round by round; name -> its answers. Every other round goes backwards."""
    answers: dict[str, list[Any]] = {contestant.name: [] for contestant in contestants}
    for number in range(rounds):
        for contestant in contestants[:: -1 if number % 2 else 1]:
            answers[contestant.name].append(contestant.ask(question, **arguments))
    return answers


def timed(step: Callable[[int], Any], *, seconds: float, least: int = 2) -> list[float]:
    """Seconds of each of some steps: as many as fit into a time, but `least`; one more before them is not counted."""
    step(0)
    found: list[float] = []
    end_s = time.perf_counter() + seconds
    while len(found) < least or time.perf_counter() < end_s:
        start_s = time.perf_counter()
        step(len(found) + 1)
        found.append(time.perf_counter() - start_s)
    return found


def median(values: Sequence[float], digits: int = 4) -> float:
    """The median, rounded to significant digits."""
    return float(f"{statistics.median(values):.{digits}g}")


@dataclasses.dataclass(frozen=True)
class Bar:
    """What a figure must reach.

    Attributes:
        what: The figure, in words.
        value: What was measured; None: it was not.
        at_least: The lowest good value.
        at_most: The highest good value.
    """

    what: str
    value: float | None
    at_least: float | None = None
    at_most: float | None = None

    def as_json(self) -> dict[str, Any]:
        """As it stands in a result file; `met` is null where nothing was measured."""
        met = None
        if self.value is not None:
            met = (self.at_least is None or self.value >= self.at_least) and (
                self.at_most is None or self.value <= self.at_most
            )
        limits = {k: v for k, v in (("at_least", self.at_least), ("at_most", self.at_most)) if v is not None}
        return {"what": self.what, "value": self.value, **limits, "met": met}


def write_results(
    output: pathlib.Path, script: str, arguments: Sequence[str] | None, threads: int, results: Mapping[str, Any]
) -> dict[str, Any]:
    """Write what a benchmark has found, with command, date and machine in front; returns all of it.

    Args:
        output: JSON file.
        script: The benchmark's name.
        arguments: Of its command line; None: those of this process.
        threads: Of each contestant.
        results: What it has found.
    """
    import torch

    from recsys.distributed import Ranks
    from recsys.run_folder import environment

    facts = environment(Ranks(0, 1, 1, torch.device("cpu")), threads)
    written = {
        "command": shlex.join(["python", "-m", f"scripts.{script}", *(arguments or sys.argv[1:])]),
        "date": datetime.date.today().isoformat(),
        "environment": {name: value for name, value in facts.items() if name not in ("command", "started")},
        **results,
    }
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return written


def resident_bytes() -> int:
    """Memory that this process holds now."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """The most memory that this process has held since it started or since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Let `peak_bytes` begin anew."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def available_bytes() -> int:
    """Memory that the machine could give away without swapping."""
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024


def _status(key: str) -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024
