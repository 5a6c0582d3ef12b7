"""When a run's checkpoints are written: at once, or by a background thread from a copy of the moment's values."""

import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from recsys import checkpoint, deltas
from recsys.deltas import TouchedRows
from recsys.encoder import Encoder
from recsys.storage import Place


class _Last(NamedTuple):
    """The newest checkpoint of this process; its mark is told by the first rank's.

    `number`: deltas between it and the full one that it builds on.
    """

    name: str = ""
    mark: str = ""
    number: int = 0


class Saver:
    """Writes checkpoints of one run and removes old ones.

    Args:
        folder: Of all its checkpoints.
        encoder: Its versions are stored.
        keep: Newest checkpoints that stay.
        touched: Who notes touched rows, for incremental checkpoints; None: all are full.
        asynchronous: Whether `save` only copies what is saved, into memory that is kept for the next time, and
            returns. One save at most is under way; the next one waits for it.

    Attributes:
        blocked_s: Seconds that the caller has waited in `save` so far.
    """

    def __init__(
        self, folder: Place, encoder: Encoder, *, keep: int, asynchronous: bool, touched: TouchedRows | None = None
    ) -> None:
        self.folder, self.blocked_s = folder, 0.0
        self._encoder, self._keep, self._asynchronous = encoder, keep, asynchronous
        self._touched, self._last = touched, _Last()
        # The thread's messages must not mix with those of training.
        self._group = dist.new_group(backend="gloo") if asynchronous else None
        self._stager: BlockingAsyncStager | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def place(self, step: int) -> Place:
        """Where the checkpoint of a step stands."""
        return self.folder / checkpoint.step_name(step)

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Take the memory for copies before training starts: to get it takes several times as long as to copy."""
        if self._asynchronous:
            self._copied(state)

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        about: Mapping[str, Any],
        needed: set[int],
        *,
        full: bool = True,
    ) -> None:
        """Write the checkpoint of a step from all ranks, then remove old ones.

        Args:
            step: Steps done.
            state: From `checkpoint.state_of`.
            about: As in `checkpoint.save`.
            needed: Steps whose checkpoints stay in any case.
            full: False: only what has changed since the one before, if touched rows are noted and this is not the
                first one.

        Raises:
            UserError: This one, or the one before that was under way, cannot be written; on all ranks.
        """
        start_s = time.perf_counter()
        self.wait()
        stored, marked = self._of_moment(step, state, full)
        arguments = (step, stored, {**about, **marked}, needed)
        if self._asynchronous:
            self._thread = threading.Thread(target=self._write_later, args=arguments, name="checkpoint")
            self._thread.start()
        else:
            self._write(*arguments)
        self.blocked_s += time.perf_counter() - start_s

    def wait(self) -> None:
        """Return when nothing is under way.

        Raises:
            UserError: What was under way could not be written; on all ranks.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _of_moment(self, step: int, state: Mapping[str, Any], full: bool) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """What is written, and what its marker says of its place in the chain."""
        name, mark = checkpoint.step_name(step), checkpoint.new_mark()
        if self._touched is None:
            return self._copied(state) if self._asynchronous else state, {"mark": mark}
        # A checkpoint that takes the place of the one it would build on cannot be a delta.
        if full or self._last.name in ("", name):
            self._touched.clear()
            self._last = _Last(name, mark, 0)
            return self._copied(state) if self._asynchronous else state, {"mark": mark}
        stored, delta = deltas.of_state(dict(state), self._touched.take())
        before, self._last = self._last, _Last(name, mark, self._last.number + 1)
        delta |= {"after": before.name, "mark_of_after": before.mark, "number": self._last.number}
        return stored, {"mark": mark, "entries": checkpoint.sizes_of(dict(state)), "delta": delta}

    def _copied(self, state: Mapping[str, Any]) -> dict[str, Any]:
        with checkpoint.quiet():
            if self._stager is None:
                self._stager = BlockingAsyncStager(cache_staged_state_dict=True)
                self._stager.state_dict_cache = BlockingAsyncStager().stage(dict(state))
                return self._stager.state_dict_cache
            return self._stager.stage(dict(state))

    def _write_later(self, *arguments: Any) -> None:
        try:
            self._write(*arguments)
        except BaseException as error:
            self._error = error

    def _write(self, step: int, state: Mapping[str, Any], about: Mapping[str, Any], needed: set[int]) -> None:
        checkpoint.save(self.place(step), dict(state), self._encoder, about, self._group)
        if dist.get_rank() == 0:
            checkpoint.prune(self.folder, self._keep, {checkpoint.step_name(other) for other in needed})
