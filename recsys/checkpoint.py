"""Checkpoints: complete or not there. Everything a run needs to go on, loadable by any plan and number of ranks.

`torch.distributed.checkpoint` writes every rank's part under plan-independent names and full logical shapes;
`complete.json` is written last, and a folder without it is not a checkpoint. Entries:

    model/<parameter or buffer>          tables, dense layers, running statistics
    encoder/<buffer>                     scales of numbers, vocabularies
    optimizer/<parameter>/<slot>         `sum` of Adagrad, one per row if row-wise; `step`, `exp_avg`, ... of Adam
    rank/<r>/<name>                      random state, and statistics that ranks do not share
"""

import contextlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from recsys.distributed import agreed
from recsys.encoder import Encoder
from recsys.errors import UserError
from recsys.storage import Place

_MARKER = "complete.json"
_OTHER = "choose another checkpoint of the run, or train again"
_KEYS = {"encoder", "entries", "files", "step"}
Folder = str | os.PathLike[str] | Place
State = dict[str, Any]


def state_of(model: nn.Module, encoder: Encoder, slots: Mapping[str, Any] | None = None) -> State:
    """Names and live tensors of a checkpoint.

    Args:
        model: The sharded model.
        encoder: The encoder whose statistics the model was trained with.
        slots: State of the optimizers, and of this rank alone, by name.
    """
    with quiet():
        return (
            {f"model/{k}": v for k, v in model.state_dict().items()}
            | {f"encoder/{k}": v for k, v in encoder.state_dict().items()}
            | dict(slots or {})
        )


def save(folder: Folder, state: State, encoder: Encoder, about: Mapping[str, Any], group: Any = None) -> None:
    """Write a checkpoint from all ranks.

    Args:
        folder: Where to write; what stands there is replaced.
        state: From `state_of`, or a copy of it.
        encoder: Its versions are stored and compared when the checkpoint is read.
        about: Plain data stored in the marker: step, epoch, metrics.
        group: Ranks' group for messages; None: the group of all ranks, which nothing else may use meanwhile.

    Raises:
        UserError: It cannot be written; on all ranks. There is then no checkpoint in the folder.
    """
    place = Place(folder)
    with agreed(f"checkpoint {place}", group), _writing():
        if dist.get_rank() == 0:
            place.remove()
            place.make()
    with agreed(f"checkpoint {place}", group), _writing(), quiet():
        dcp.save(state, storage_writer=place.writer(), process_group=group)
    with agreed(f"checkpoint {place}", group), _writing():
        if dist.get_rank() == 0:
            versions = encoder.versions
            facts = {**about, "encoder": versions, "entries": _sizes(state), "files": place.sizes()}
            place.write_text(_MARKER, json.dumps(facts, indent=1) + "\n")


def load(
    folder: Folder, model: nn.Module, encoder: Encoder, slots: State | None = None, *, partly: bool = False
) -> dict[str, Any]:
    """Read a checkpoint into a model of any plan and number of ranks; returns what `save` stored about it.

    Args:
        folder: Where it stands.
        model: The sharded model.
        encoder: Its encoder.
        slots: As in `state_of`: what else is read, in place. None: that is left where it is.
        partly: Read the entries that fit and leave the others as they are. `skipped` in the result says why, by name.

    Raises:
        UserError: The folder is no complete checkpoint, is damaged, or holds other entries than the model; on all
            ranks.
    """
    place = Place(folder)
    with agreed(f"checkpoint {place}"):
        about = read_about(place)
        if about["encoder"] != encoder.versions:
            raise UserError(
                "It was trained on ids that were made in another way",
                received=about["encoder"],
                allowed=encoder.versions,
                fix="install those versions, or train again",
            )
        state = state_of(model, encoder, slots)
        about["skipped"] = _differences(state, about["entries"], bool(slots))
        if about["skipped"] and not partly:
            raise UserError.collect(
                "It does not fit the model",
                [f"{name}: {why}" for name, why in about["skipped"].items()],
                fix="use the recipe that it was trained with, or load what fits with train.warm_start",
            )
        _require_whole(place, about["files"])
    wanted = {name: value for name, value in state.items() if name not in about["skipped"]}
    with agreed(f"checkpoint {place}"), quiet():
        try:
            dcp.load(wanted, storage_reader=place.reader())
        except CheckpointException as error:
            raise UserError("It is damaged", received=" ".join(str(error).split())[:300], fix=_OTHER) from error
    with quiet():
        model.load_state_dict({k.removeprefix("model/"): v for k, v in state.items() if k.startswith("model/")})
    encoder.load_state_dict({k.removeprefix("encoder/"): v for k, v in state.items() if k.startswith("encoder/")})
    return about


def read_about(folder: Folder) -> dict[str, Any]:
    """What was stored about a checkpoint, from its completion marker."""
    place = Place(folder)
    try:
        about = json.loads(place.read_text(_MARKER))
    except (OSError, ValueError) as error:
        raise UserError(f"{str(place)!r} is not a complete checkpoint", received=str(error), fix=_OTHER) from error
    if not isinstance(about, dict) or not about.keys() >= _KEYS:
        raise UserError(f"{str(place / _MARKER)!r} is not what was saved", received=f"{str(about)[:80]}", fix=_OTHER)
    return about


def step_name(step: int) -> str:
    """The name of the folder of a step's checkpoint."""
    return f"step_{step:08d}"


def complete(folder: Folder) -> list[Place]:
    """The complete checkpoints in a folder, oldest step first."""
    return [place for place in Place(folder).folders() if place.name.startswith("step_") and place.is_there(_MARKER)]


def newest(folder: Folder) -> tuple[Place | None, list[str]]:
    """The newest checkpoint in a folder that is complete and undamaged, and sentences on newer ones that are not."""
    reports: list[str] = []
    for place in reversed([p for p in Place(folder).folders() if p.name.startswith("step_")]):
        try:
            _require_whole(place, read_about(place)["files"])
        except UserError as error:
            reports.append(f"Skipped {place}: {' '.join(str(error).split())}")
        else:
            return place, reports
    return None, reports


def prune(folder: Folder, keep: int, needed: set[str]) -> None:
    """Remove old checkpoints, one rank doing so: all but the newest `keep` complete ones and those of `needed` names.

    The marker goes first, so that what is left of an interrupted removal is no checkpoint. Incomplete ones are left
    alone while they may be in the making: those newer than the newest complete one.
    """
    whole = complete(folder)
    kept = {place.name for place in whole[-keep:]} | needed
    last = whole[-1].name if whole else ""
    for place in Place(folder).folders():
        if place.name.startswith("step_") and place.name not in kept and place.name < last:
            place.remove_file(_MARKER)
            place.remove()


def _require_whole(place: Place, files: Mapping[str, int]) -> None:
    sizes = place.sizes()
    for name, size in files.items():
        if sizes.get(name) != size:
            raise UserError(
                f"Its file {name!r} is missing or damaged",
                received=f"{sizes.get(name, 'no')} bytes",
                allowed=f"{size} bytes",
                fix=_OTHER,
            )


def _differences(state: State, found: Mapping[str, list[int]], with_slots: bool) -> dict[str, str]:
    """Entries that the model or the checkpoint alone has, or whose shapes differ, and how; those of ranks left out."""
    expected = _sizes(state)
    prefixes = ("model/", "encoder/", "optimizer/") if with_slots else ("model/", "encoder/")
    names = {name for name in (*expected, *found) if name.startswith(prefixes)}
    return {
        name: f"saved {found.get(name, 'nothing')}, the model has {expected.get(name, 'no such entry')}"
        for name in sorted(names)
        if expected.get(name) != found.get(name)
    }


def _sizes(state: State) -> dict[str, list[int]]:
    """Full logical shape of each entry."""
    with quiet():
        return {name: list(value.size()) for name, value in sorted(state.items())}


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """A full disk, or one that cannot be written, is the user's to mend."""
    try:
        yield
    except (OSError, CheckpointException) as error:
        raise UserError(
            "It cannot be written; checkpoints before it are as they were",
            received=" ".join(str(error).split())[-300:],
            fix="make room there, or name another place with checkpoint.folder",
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that torch gives about its own ShardedTensor and process groups."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.checkpoint")
        yield
