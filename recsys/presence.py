"""Which ranks are still there: each tells where it stands, so that a broken exchange can name who is missing.

Nothing here takes part in training. A thread of each rank writes to the launcher's store, whose server is no rank and
outlives them; only after an error, or when a rank has been silent for long, somebody reads.
"""

import contextlib
import os
import pathlib
import re
import signal
import socket
import sys
import threading
import time
from types import FrameType

import torch.distributed as dist

from recsys.errors import UserError

_PERIOD_S = 0.5
_GRACE_S = 3 * _PERIOD_S  # a rank that is alive is heard of in between
_LEAVE_S = 5.0  # the store answers at once, or its launcher is gone
_MARGIN_S = 10.0  # by which silence may outlast the timeout, so that an exchange that fails comes first
_BROKEN = re.compile(
    r"gloo|NCCL|Connection (closed|reset|refused)|[Tt]imed out|Timeout waiting|[Pp]air closure|Pair is not connected"
)


class Terminated(SystemExit):
    """The launcher asked this rank to end."""


class Presence:
    """One rank as seen by the others, and the others as seen by it.

    Attributes:
        log: File that an explanation is added to as well.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
        """Tell the others that we are here, from now on twice a second.

        Args:
            store: Where ranks meet; all of them are there already.
            rank: Who we are.
            world_size: Number of ranks.
            timeout_s: Longest time that an exchange waits.
        """
        self.log: pathlib.Path | None = None
        self._rank, self._timeout_s = rank, timeout_s
        self._others = [other for other in range(world_size) if other != rank]
        self._store = store.clone()  # type: ignore[attr-defined]  # the first connection may be busy waiting
        self._place, self._place_s = "the set-up", time.monotonic()
        self._number = 0
        self._lock, self._left = threading.Lock(), threading.Event()
        self._host = socket.gethostname()
        self._store.set(f"who/{rank}", f"on {self._host}, pid {os.getpid()}")
        self._beat()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def at(self, place: str) -> None:
        """Note where this rank stands, such as `step 37`."""
        self._place, self._place_s = place, time.monotonic()

    def leave(self) -> None:
        """Stop telling; the other ranks leave, too."""
        self._left.set()
        # An interpreter that ends while the thread is inside the store's C++ is aborted by std::terminate.
        self._thread.join(_LEAVE_S)

    def explain(self, error: BaseException) -> UserError | None:
        """Which other ranks are behind an error that ends this one; None: none is.

        Where the error is this rank's own, it is told to the others.
        """
        broken = isinstance(error, Terminated | dist.DistError) or _BROKEN.search(str(error)) is not None
        if not broken:
            text = " ".join(str(error).split())[:300]
            self._store.set(f"ended/{self._rank}", f"{self._place}: {type(error).__name__}: {text}")
            if not isinstance(error, RuntimeError):
                return None
        with self._lock:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends all ranks, but grants some seconds
            if broken:
                self._store.set(f"waits/{self._rank}", "")
            waited_s, before = time.monotonic() - self._place_s, self._beats()
            time.sleep(_GRACE_S)
            return self._verdict(waited_s, before, broken)

    def _verdict(self, waited_s: float, before: dict[int, str], broken: bool) -> UserError | None:
        """Who is missing, by what was heard before and after the grace; the living only where nobody else is."""
        gone, behind = {}, {}
        after = self._beats()
        for rank in self._others:
            who, place = self._get(f"who/{rank}") or "unknown", after.get(rank, "0 the set-up").partition(" ")[2]
            if broken and (ended := self._get(f"ended/{rank}")):
                gone[rank] = f"rank {rank} ({who}) ended at {ended}"
            elif self._get(f"waits/{rank}") is not None:
                continue  # it misses somebody itself, and ends for that
            elif rank not in before or after[rank] == before[rank]:
                if who.startswith(f"on {self._host},"):
                    _end_if_stopped(who.rpartition(" ")[2])
                gone[rank] = (
                    f"rank {rank} ({who}) is dead or stopped, last heard of at {place} (it told every {_PERIOD_S:g} s)"
                )
            elif broken:
                behind[rank] = f"rank {rank} ({who}) is alive, but still at {place}"
        causes = gone or behind
        if not causes:
            return None
        error = UserError(
            f"Rank{'s' * (len(causes) > 1)} {', '.join(map(str, causes))} did not take part in {self._place}",
            received=f"{'; '.join(causes.values())}; rank {self._rank} waited for {waited_s:.0f} s",
            allowed=f"up to {self._timeout_s:g} s (train.timeout_s)",
            fix="look for the cause there (memory, the host's log); raise train.timeout_s if that rank was only slow",
        )
        error.is_printed_here, error.is_worth_retrying = self._store.add("told", 1) == 1, True
        if error.is_printed_here and self.log is not None:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(f"Error: {error}\n")
        return error

    def _run(self) -> None:
        """The thread: tell where we are, and look whether others have fallen silent."""
        heard = dict.fromkeys(self._others, ("", time.monotonic()))
        looked_s = time.monotonic()
        while not self._left.wait(_PERIOD_S):
            try:
                self._beat()
                if time.monotonic() - looked_s < self._timeout_s / 10:
                    continue
                looked_s = time.monotonic()
                for rank, beat in self._beats().items():
                    heard[rank] = heard[rank] if heard[rank][0] == beat else (beat, looked_s)
            except (dist.DistError, RuntimeError):
                return  # without its store the launcher is gone, and ends its ranks
            silent_s = looked_s - min(when for _, when in heard.values())
            if silent_s > self._timeout_s + _MARGIN_S and not self._left.is_set():
                # The main thread computes, or waits for a GPU, and cannot be interrupted.
                error = self.explain(Terminated())
                if error is not None:
                    if error.is_printed_here:
                        print(f"Error: {error}", file=sys.stderr, flush=True)
                    os._exit(2)

    def _beat(self) -> None:
        self._number += 1
        self._store.set(f"beat/{self._rank}", f"{self._number} {self._place}")

    def _beats(self) -> dict[int, str]:
        return {rank: beat for rank in self._others if (beat := self._get(f"beat/{rank}")) is not None}

    def _get(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None


def _end_if_stopped(pid: str) -> None:
    """End a process of our own launcher that has been stopped, which would make the launcher wait for 30 s more."""
    stat = pathlib.Path("/proc", pid, "stat")
    with contextlib.suppress(OSError):  # it is dead, or this is no Linux
        state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        if state == "T" and int(parent) == os.getppid():
            os.kill(int(pid), signal.SIGKILL)


def raise_terminated(number: int, frame: FrameType | None) -> None:
    """A handler of SIGTERM that lets a rank say why it ends.

    Raises:
        Terminated: Always.
    """
    raise Terminated(128 + number)
