"""SIGTERM, as schedulers send it before they take a machine away: all ranks stop after the same step."""

import signal
import threading
import types
from typing import Any

import torch.distributed as dist

from recsys.distributed import Ranks, store

EXIT_CODE = 75
"""Of a run that was told to stop and has saved itself: EX_TEMPFAIL of sysexits.h, try again later."""
_KEY = "step"


class InterruptedRunError(Exception):
    """The run was told to stop; it has been saved and can go on from there."""


class Interruption:
    """Listens to SIGTERM inside its context; in the main thread, the only one that Python lets do so.

    Ranks may hear of it at different moments. The first that does names a step, two after its own, in the store that
    all ranks read at the end of every step: no rank is further ahead than one step, since a step ends with an exchange
    between all of them.
    """

    def __init__(self, ranks: Ranks) -> None:
        """Args: who we are."""
        self._asked = False
        self._store = dist.PrefixStore("recsys/interruption", store()) if ranks.world_size > 1 else None
        self._previous: Any = None

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._hear)
        return self

    def __exit__(self, *_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._previous)

    def _hear(self, number: int, frame: types.FrameType | None) -> None:
        self._asked = True

    def ends(self, step: int) -> bool:
        """Whether all ranks stop now, after `step` steps; to be asked after every step."""
        if self._store is None:
            return self._asked
        if self._asked:
            self._store.compare_set(_KEY, "", str(step + 2))  # the first rank's word counts
        return self._store.check([_KEY]) and step >= int(self._store.get(_KEY))
