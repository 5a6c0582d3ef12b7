"""Whose a run folder is: one job at a time writes to it, and all nodes of that job see it."""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

from recsys.distributed import Ranks, agreed, broadcast, gather
from recsys.errors import UserError

FILE = "owner.json"
_PERIOD_S = 5.0
_SILENCE_S = 60.0  # an owner that has been silent for longer is gone, wherever it ran
_SIGHT_S = 15.0  # network file systems show others' new files late
_TRIES = 100  # owners that come and go meanwhile


class Ownership:
    """A claim on a folder, renewed by a thread until it is released.

    A job that is started again, by torchrun or by the scheduler, keeps its claim: it has the same id of the
    rendezvous. Another one may take over from an owner whose process is gone or that has been silent for a minute; an
    owner that was only asleep finds out before it writes again.
    """

    def __init__(self, folder: Path) -> None:
        """Claim the folder.

        Raises:
            UserError: It is another job's.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._file, self._token = folder, folder / FILE, secrets.token_hex(8)
        run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        self._job = None if run_id == "none" else run_id
        about = {"token": self._token, "job": self._job, "host": socket.gethostname(), "pid": os.getpid()}
        self._text = json.dumps({**about, "system": _system()}) + "\n"
        claimed = any(self._is_first() or self._takes_over() for _ in range(_TRIES))
        assert claimed, f"{self._file} is never there when it is read"
        self._heard_s, self._left = time.monotonic(), threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _is_first(self) -> bool:
        """Claim a folder that has no owner."""
        try:
            with self._file.open("x", encoding="utf-8") as file:
                file.write(self._text)
        except FileExistsError:
            return False
        return True

    def _takes_over(self) -> bool:
        """Claim it from an owner that is gone; False where another job claims or releases it at the same moment."""
        new = self._folder / f".{FILE}-{self._token}"
        new.write_text(self._text, encoding="utf-8")
        try:
            now_s, owner = new.stat().st_mtime, _owner(self._file)
            if owner is None:
                return False
            self._refuse_unless_gone(owner, now_s - owner["heard_s"])
            # Of all that want to take over from this owner, one may at a time, and looks whether it still is the owner.
            turn = self._folder / f".{FILE}-after-{owner['token']}"
            try:
                turn.open("x").close()
            except FileExistsError:
                with contextlib.suppress(FileNotFoundError):
                    if now_s - turn.stat().st_mtime > _SILENCE_S:
                        turn.unlink()  # its process died in between
                time.sleep(0.05)
                return False
            try:
                if (still := _owner(self._file)) is None or still["token"] != owner["token"]:
                    return False
                os.replace(new, self._file)
                return True
            finally:
                turn.unlink(missing_ok=True)
        finally:
            new.unlink(missing_ok=True)

    def _refuse_unless_gone(self, owner: dict[str, Any], silent_s: float) -> None:
        """Times are those of the file system: hosts may disagree."""
        if (self._job is not None and owner["job"] == self._job) or silent_s > _SILENCE_S:
            return
        if owner["system"] == _system() and not _is_alive(owner["pid"]):
            return
        error = UserError(
            f"The run folder {str(self._folder)!r} is in use",
            received=f"{_named(owner)}, heard of {max(0.0, silent_s):.0f} s ago",
            fix=f"name another one with --run-dir; if that job is gone, wait until {_SILENCE_S:g} s have passed",
        )
        error.is_worth_retrying = True
        raise error

    def require(self) -> None:
        """To be called before anything is written.

        Raises:
            UserError: Another job has taken over, since this one was silent for too long: it was stopped, or its
                storage was.
        """
        if time.monotonic() - self._heard_s > _SILENCE_S / 2:
            self._renew()
        if self._left.is_set() and (owner := _owner(self._file)) is not None:
            raise UserError(
                f"The run folder {str(self._folder)!r} was taken over while this job was silent",
                received=_named(owner),
                fix="nothing: that one goes on with the run",
            )

    def _run(self) -> None:
        while not self._left.wait(_PERIOD_S):
            with contextlib.suppress(OSError):
                self._renew()

    def _renew(self) -> None:
        owner = _owner(self._file)
        if owner is None:
            self._is_first()  # somebody has removed the file
        elif owner["token"] != self._token:
            return self._left.set()
        else:
            os.utime(self._file)
        self._heard_s = time.monotonic()

    def release(self) -> None:
        """Give the folder up."""
        self._left.set()
        with contextlib.suppress(OSError):
            if (owner := _owner(self._file)) is not None and owner["token"] == self._token:
                self._file.unlink()


def _owner(file: Path) -> dict[str, Any] | None:
    """What the file says, and `heard_s`, when it was renewed; None where there is no owner."""
    unknown = {"token": "unknown", "job": None, "host": "unknown", "pid": "unknown", "system": None}
    try:
        with file.open(encoding="utf-8") as opened:  # both of one file, which another may replace meanwhile
            heard_s, text = os.fstat(opened.fileno()).st_mtime, opened.read()
    except FileNotFoundError:
        return None
    except PermissionError:
        heard_s, text = file.stat().st_mtime, ""  # it is not for us
    try:
        return {**unknown, **json.loads(text), "heard_s": heard_s}
    except ValueError:
        return {**unknown, "heard_s": heard_s}  # it is being written, or its job died over that


def _named(owner: dict[str, Any]) -> str:
    whose = f"job {owner['job']}, " if owner["job"] else ""
    return f"{whose}process {owner['pid']} on {owner['host']}"


def _system() -> str:
    """Where a process id means the same: containers may share a host's name and have ids of their own."""
    with contextlib.suppress(OSError):
        return f"{os.readlink('/proc/self/ns/pid')} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    return socket.gethostname()


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
