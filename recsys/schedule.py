"""How learning rates change over a run: one factor for all of them."""

import math
from typing import Literal

import pydantic

from recsys.features import MAX_COUNT, Count, Settings


class Schedule(Settings):
    """A warm-up, then a decay; what it yields multiplies every learning rate, of dense layers and tables alike."""

    warmup_steps: int = pydantic.Field(default=0, ge=0, le=MAX_COUNT)
    """Steps over which the rates rise evenly, the last of them with the full rate; 0: none."""
    decay: Literal["constant", "linear", "cosine", "step"] = "constant"
    """What follows the warm-up: nothing, a fall to `final_factor` in a line or in half a cosine wave, or a drop to
    `gamma` of it every `step_size` steps."""
    decay_steps: Count | None = None
    """Steps that the fall takes (`linear`, `cosine`); the rates stay where it ends. None: the rest of the run."""
    final_factor: float = pydantic.Field(default=0.0, ge=0, le=1)
    """Share of the full rate that the fall ends at (`linear`, `cosine`)."""
    step_size: Count | None = None
    """Steps between two drops (`step`)."""
    gamma: float = pydantic.Field(default=0.1, gt=0, lt=1)
    """Share of the rate that a drop leaves (`step`)."""

    @pydantic.model_validator(mode="after")
    def _keys_belong_together(self) -> "Schedule":
        problems = []
        falls, steps = self.decay in ("linear", "cosine"), self.decay == "step"
        belongs = {"decay_steps": falls, "final_factor": falls, "step_size": steps, "gamma": steps}
        for name, is_read in belongs.items():
            if not is_read and getattr(self, name) != type(self).model_fields[name].default:
                problems.append(f"`{name}` has no effect with `decay: {self.decay}`. Do: remove it, or change decay")
        if steps and self.step_size is None:
            problems.append("`decay: step` needs `step_size`. Do: add the number of steps between two drops")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def factor(self, step: int, total_steps: int | None) -> float:
        """What the learning rates of a step are multiplied with.

        Args:
            step: Steps that were taken before it: 0 for the first.
            total_steps: Steps of the whole run; None where it is not known, which a fall without `decay_steps` needs.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        step -= self.warmup_steps
        if self.decay == "constant":
            return 1.0
        if self.decay == "step":
            assert self.step_size is not None, "checked when the schedule was made"
            return self.gamma ** (step // self.step_size)
        if self.decay_steps is None:
            assert total_steps is not None, "a fall over the rest of the run needs the run's length"
        length = self.decay_steps or (total_steps or 0) - self.warmup_steps
        gone = min(1.0, step / max(1, length))
        left = 1 - gone if self.decay == "linear" else (1 + math.cos(math.pi * gone)) / 2
        return self.final_factor + (1 - self.final_factor) * left
