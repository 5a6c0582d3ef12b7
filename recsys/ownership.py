"""Whose a run folder is: one job at a time writes to it, and all nodes of that job see it."""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path

from recsys.distributed import Ranks, agreed, broadcast, gather
from recsys.errors import UserError

FILE = "owner.json"
_PERIOD_S = 5.0
_SILENCE_S = 60.0  # an owner that has been silent for longer is gone, wherever it ran
_SIGHT_S = 15.0  # network file systems show others' new files late


class Ownership:
    """A claim on a folder, renewed by a thread until it is released.

    A job that is started again, by torchrun or by the scheduler, keeps its claim: it has the same id of the
    rendezvous. Another one may take over from an owner whose process is gone or that has been silent for a minute.
    """

    def __init__(self, folder: Path) -> None:
        """Claim the folder.

        Raises:
            UserError: It is another job's.
        """
        self._file, self._token = folder / FILE, secrets.token_hex(8)
        run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        job = None if run_id == "none" else run_id
        about = {"token": self._token, "job": job, "host": socket.gethostname(), "pid": os.getpid()}
        text = json.dumps(about) + "\n"
        try:
            with self._file.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            new = folder / f".{FILE}-{self._token}"
            new.write_text(text, encoding="utf-8")
            try:
                self._refuse_unless_gone(folder, job, new.stat().st_mtime)
                os.replace(new, self._file)
            finally:
                new.unlink(missing_ok=True)
        self._left = threading.Event()
        threading.Thread(target=self._renew, daemon=True).start()

    def _refuse_unless_gone(self, folder: Path, job: str | None, now_s: float) -> None:
        """Times are those of the file system: hosts may disagree."""
        try:
            silent_s = now_s - self._file.stat().st_mtime
            owner = json.loads(self._file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return  # released meanwhile
        except ValueError:
            owner = {"job": None, "host": "unknown", "pid": "unknown"}  # it is being written, or was when its job died
        if (job is not None and owner["job"] == job) or silent_s > _SILENCE_S:
            return
        if owner["host"] == socket.gethostname() and not _is_alive(owner["pid"]):
            return
        whose = f"job {owner['job']}, " if owner["job"] else ""
        raise UserError(
            f"The run folder {str(folder)!r} is in use",
            received=f"{whose}process {owner['pid']} on {owner['host']}, heard of {max(0.0, silent_s):.0f} s ago",
            fix=f"name another one with --run-dir; if that job is gone, wait until {_SILENCE_S:g} s have passed",
        )

    def _renew(self) -> None:
        while not self._left.wait(_PERIOD_S):
            with contextlib.suppress(OSError):
                os.utime(self._file)

    def release(self) -> None:
        """Give the folder up."""
        self._left.set()
        with contextlib.suppress(OSError, ValueError):
            if json.loads(self._file.read_text(encoding="utf-8"))["token"] == self._token:
                self._file.unlink()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def require_shared(folder: Path, what: str, ranks: Ranks) -> None:
    """Make sure that all nodes of the job see a folder; nothing happens on a single one.

    Args:
        folder: A local path or one on network storage, which rank 0 can write to.
        what: What the folder is, for the message.
        ranks: Who we are.

    Raises:
        UserError: Some do not; on all ranks.
    """
    if ranks.local_world_size == ranks.world_size:
        return
    mark = folder / f".seen-{broadcast(secrets.token_hex(8))}"
    with agreed(what):
        if ranks.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            mark.touch()
    end_s = time.monotonic() + _SIGHT_S
    while not (seen := mark.exists()) and time.monotonic() < end_s:
        time.sleep(0.1)
    hosts = gather(None if seen else socket.gethostname())
    if ranks.rank == 0:
        mark.unlink()
    if blind := sorted({host for host in hosts if host is not None}):
        error = UserError(
            f"The {what} is not on storage that all nodes share",
            received=f"{folder}, made on {broadcast(socket.gethostname())}, is not there on {', '.join(blind)}",
            fix="name a folder on shared storage" + (" with --run-dir" if what == "run folder" else ""),
        )
        error.is_printed_here = ranks.rank == 0
        raise error
