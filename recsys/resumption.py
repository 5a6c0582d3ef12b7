"""Where a run stands, and how it goes on: what a checkpoint holds besides the model, and which one is taken."""

import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from recsys import checkpoint
from recsys.data.epoch import Epoch
from recsys.data.reader import Reader
from recsys.distributed import Ranks, agreed, broadcast
from recsys.errors import UserError
from recsys.job import Job
from recsys.layers.norm import BatchNorm
from recsys.optim import ModelOptimizer
from recsys.scoring import Evaluation
from recsys.storage import Place

log = logging.getLogger("recsys")


@dataclasses.dataclass
class Progress:
    """How far a run has come; plain data but for `best_valid`, which is made of it.

    Attributes:
        step: Steps done.
        epoch: The epoch that comes next, or goes on.
        position: Where that epoch stands (`Epoch.position`); None: at its beginning.
        loss: Sum of the mean losses of its steps so far.
        best: The evaluation of the epoch that is kept; empty before the first.
        best_valid: All that was found on the validation set then.
        last: The evaluation of the last whole epoch.
        elapsed_s: Seconds spent, restarts left out.
        ended: No epoch comes any more, since patience has run out.
    """

    step: int = 0
    epoch: int = 1
    position: dict[str, Any] | None = None
    loss: float = 0.0
    best: dict[str, Any] = dataclasses.field(default_factory=dict)
    best_valid: Evaluation | None = None
    last: dict[str, Any] = dataclasses.field(default_factory=dict)
    elapsed_s: float = 0.0
    ended: bool = False

    def as_json(self) -> dict[str, Any]:
        """As it stands in a checkpoint's marker."""
        valid = None if self.best_valid is None else self.best_valid._asdict()
        return {**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}, "best_valid": valid}

    @classmethod
    def of_json(cls, stored: Mapping[str, Any]) -> "Progress":
        """From a checkpoint's marker."""
        valid = stored["best_valid"]
        return cls(**{**stored, "best_valid": None if valid is None else Evaluation(**valid)})


def slots(job: Job, optimizer: ModelOptimizer) -> dict[str, Any]:
    """What goes on beside model and encoder: state of all optimizers, and what belongs to this rank alone."""
    found = optimizer.slots()
    mine = f"rank/{job.ranks.rank}"
    found[f"{mine}/random"] = torch.get_rng_state()
    if job.ranks.device.type == "cuda":
        found[f"{mine}/random_cuda"] = torch.cuda.get_rng_state()
    if job.unsent is not None:
        found |= {f"{mine}/unsent/{name}": gradient for name, gradient in job.unsent.residuals.items()}
    if job.ranks.world_size > 1 and not job.recipe.train.shared_batch_statistics:
        for name, module in job.task.named_modules():
            if isinstance(module, BatchNorm):
                found[f"{mine}/{name}.running_mean"] = module.running_mean
                found[f"{mine}/{name}.running_var"] = module.running_var
    return found


def about(job: Job, reader: Reader, progress: Progress) -> dict[str, Any]:
    """What the marker of a checkpoint says."""
    return {
        "step": progress.step,
        "epoch": progress.epoch,
        "world_size": job.ranks.world_size,
        "reading": _reading(job, reader),
        "progress": progress.as_json(),
    }


def restore(place: Place, job: Job, optimizer: ModelOptimizer, reader: Reader) -> Progress:
    """Let a run stand where a checkpoint was taken, whatever the plan and the number of ranks were then.

    Raises:
        UserError: The checkpoint does not fit, or stands inside an epoch of other data; on all ranks.
    """
    with agreed(f"checkpoint {place}"):
        stored = checkpoint.read_about(place)
        if "progress" not in stored:
            raise UserError("It holds a model but no run to go on with", fix="use train.warm_start to start from it")
        progress = Progress.of_json(stored["progress"])
        old, new = stored["reading"], _reading(job, reader)
        changed = [f"{key} is {new[key]}, was {old.get(key)}" for key in new if new[key] != old.get(key)]
        if progress.position is not None and changed:
            raise UserError(
                "It stands inside an epoch, which cannot go on with other data or another order of rows",
                received="; ".join(changed),
                fix="restore these, or start from it with train.warm_start",
            )
    same_ranks = stored["world_size"] == job.ranks.world_size
    wanted = slots(job, optimizer)
    checkpoint.load(
        place,
        job.task,
        job.encoder,
        wanted if same_ranks else {k: v for k, v in wanted.items() if not k.startswith("rank/")},
    )
    if same_ranks:
        torch.set_rng_state(wanted[f"rank/{job.ranks.rank}/random"])
        if job.ranks.device.type == "cuda":
            torch.cuda.set_rng_state(wanted[f"rank/{job.ranks.rank}/random_cuda"])
    else:
        key = [job.recipe.train.seed, job.ranks.rank, progress.step]
        if job.unsent is not None:
            log.warning("Gradients that %d ranks held back (top_k) are lost", stored["world_size"])
        torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1))
    optimizer.seek(progress.step)
    return progress


def _reading(job: Job, reader: Reader) -> dict[str, Any]:
    """What the order of rows depends on, besides epoch and ranks."""
    return {"data": reader.data.fingerprint(), "seed": reader.seed, "shuffle_rows": reader.shuffle_rows}


def epoch_of(reader: Reader, progress: Progress, number: int) -> Epoch:
    """The epoch of that number, or what is left of it."""
    return reader.epoch(number, progress.position if number == progress.epoch else None)


class Choice(NamedTuple):
    """What a run starts from.

    Attributes:
        place: A checkpoint; None: the beginning.
        reports: Sentences for the log.
    """

    place: Place | None
    reports: list[str]


def choose(resume: str, checkpoints: Place, ranks: Ranks) -> Choice:
    """The checkpoint that a run goes on from, agreed between ranks.

    Args:
        resume: `auto`: the newest of `checkpoints` that is whole, if there is any. `never`: none. Else the address of
            a checkpoint, or of a folder with some.
        checkpoints: The run's own.
        ranks: Who we are.

    Raises:
        UserError: What was named is not there; on all ranks.
    """
    if resume == "never":
        return Choice(None, [])
    with agreed("resume"):
        found: tuple[str | None, list[str]] = (None, [])
        if ranks.rank == 0:
            found = _chosen(resume, checkpoints)
    url, reports = broadcast(found)
    return Choice(None if url is None else Place(url), reports)


def _chosen(resume: str, checkpoints: Place) -> tuple[str | None, list[str]]:
    if resume == "auto":
        place, reports = checkpoint.newest(checkpoints)
        reports.append("Fresh start: there is no checkpoint" if place is None else f"Going on from {place}")
        return (None if place is None else place.url), reports
    given = named(resume)
    return given.url, [f"Going on from {given}"]


def named(address: str) -> Place:
    """The checkpoint of that address, or the newest whole one of a run folder or a folder of checkpoints.

    Raises:
        UserError: There is none.
    """
    given = Place(address)
    if given.name.startswith("step_"):
        checkpoint.read_about(given)
        return given
    for folder in (given / "checkpoints", given):
        place, _ = checkpoint.newest(folder)
        if place is not None:
            return place
    raise UserError(
        "There is no complete checkpoint",
        received=address,
        allowed="a checkpoint, a run folder with one, or a folder of checkpoints",
        fix="correct the address; --resume auto begins anew where there is none",
    )


def restarted() -> bool:
    """Whether a launcher on this host has started this job before and does so again; ask all hosts."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
