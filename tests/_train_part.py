"""Worker of the resume tests: train a recipe on these ranks, told to stop after some step as by SIGTERM.

    torchrun --nproc-per-node N tests/_train_part.py CONFIG.json

Stopping goes through the signal itself: rank 0 sends it to itself when the step is done.
"""

import json
import os
import pathlib
import signal
import sys
from typing import Any

from recsys import interruption, recipe_file
from recsys.distributed import Ranks
from recsys.stack import require_stack
from recsys.train import train


class _StopAfter(interruption.Interruption):
    """Hears SIGTERM of its own after a step; with several ranks the job stops two steps later."""

    step: int | None = None

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._rank = ranks.rank

    def ends(self, step: int) -> bool:
        if step == self.step and self._rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().ends(step)


def run(config: dict[str, Any]) -> bool:
    """Train as the configuration says; False: it was stopped, and has been saved."""
    import recsys.train as module

    original, module.Interruption = module.Interruption, type("_", (_StopAfter,), {"step": config.get("stop_after")})
    try:
        recipe = recipe_file.parse(config["recipe"], config.get("overrides", []))
        train(recipe, run=config["run"], resume=config.get("resume", "never"))
    except interruption.InterruptedRunError:
        return False
    finally:
        module.Interruption = original
    return True


if __name__ == "__main__":
    require_stack()
    run(json.loads(pathlib.Path(sys.argv[1]).read_text()))
