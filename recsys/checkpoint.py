"""Checkpoints: complete or not there. Everything a run needs to go on, loadable by any plan and number of ranks.

`torch.distributed.checkpoint` writes every rank's part under plan-independent names and full logical shapes;
`complete.json` is written last, and a folder without it is not a checkpoint. Entries:

    model/<parameter or buffer>          tables, dense layers, running statistics
    encoder/<buffer>                     scales of numbers, vocabularies
    optimizer/<parameter>/<slot>         `sum` of Adagrad, one per row if row-wise; `step`, `exp_avg`, ... of Adam
    rank/<r>/<name>                      random state, and statistics that ranks do not share

An incremental one, a delta, holds of the tables the rows that were touched since the one before (`deltas.py`). It is
the last link of a chain that begins with a full one; each link names the one before it and the mark it had.
"""

import contextlib
import json
import os
import uuid
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from recsys import deltas
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


class Link(NamedTuple):
    """A checkpoint of a chain, and what its marker says."""

    place: Place
    about: dict[str, Any]


def new_mark() -> str:
    """What tells a checkpoint from another one that stood in its place."""
    return uuid.uuid4().hex


def save(folder: Folder, state: State, encoder: Encoder, about: Mapping[str, Any], group: Any = None) -> None:
    """Write a checkpoint from all ranks.

    Args:
        folder: Where to write; what stands there is replaced.
        state: From `state_of`, or a copy of it.
        encoder: Its versions are stored and compared when the checkpoint is read.
        about: Plain data stored in the marker: step, epoch, metrics; of a delta also `delta` and `entries`.
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
            facts = {"mark": new_mark(), "entries": sizes_of(state), **about}
            facts |= {"encoder": encoder.versions, "files": place.sizes()}
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
        links = chain(place)
        about = links[-1].about
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
    _read(links, {name: value for name, value in state.items() if name not in about["skipped"]})
    with quiet():
        model.load_state_dict({k.removeprefix("model/"): v for k, v in state.items() if k.startswith("model/")})
    encoder.load_state_dict({k.removeprefix("encoder/"): v for k, v in state.items() if k.startswith("encoder/")})
    return about


def _read(links: list[Link], wanted: State) -> None:
    """Read entries, in place: the rows of tables link after link, all else from the last one."""
    by_row = set(links[-1].about["delta"]["by_row"]) if len(links) > 1 else set()
    rows = {name: value for name, value in wanted.items() if name in by_row}
    if rows:
        _read_from(links[0].place, rows)
        for place, about in links[1:]:
            changes = deltas.Changes(rows, about["delta"])
            _read_from(place, changes.buffers)
            changes.apply()
    _read_from(links[-1].place, {name: value for name, value in wanted.items() if name not in by_row})


def _read_from(place: Place, state: State) -> None:
    with agreed(f"checkpoint {place}"), quiet():
        try:
            dcp.load(state, storage_reader=place.reader())
        except CheckpointException as error:
            raise UserError("It is damaged", received=" ".join(str(error).split())[:300], fix=_OTHER) from error


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


def chain(folder: Folder) -> list[Link]:
    """What a checkpoint is restored from, in order: a full one, and the deltas up to this one; or itself alone.

    Raises:
        UserError: It is not whole, or a link before it is missing, damaged, or not the one that it was made after.
    """
    last = place = Place(folder)
    links: list[Link] = []
    while True:
        try:
            about = read_about(place)
            _require_whole(place, about["files"])
            if links:
                _require_next(about, links[-1].about["delta"])
        except UserError as error:
            if not links:
                raise
            raise UserError(
                f"{str(last)!r} holds changes only, and {place.name!r}, which it builds on, cannot be used",
                received=" ".join(str(error).split()),
                fix=_OTHER,
            ) from error
        links.append(Link(place, about))
        if "delta" not in about:
            return links[::-1]
        place = place.beside(about["delta"]["after"])


def _require_next(about: Mapping[str, Any], following: Mapping[str, Any]) -> None:
    number = about["delta"]["number"] if "delta" in about else 0
    if (about.get("mark"), number) != (following["mark_of_after"], following["number"] - 1):
        raise UserError(
            "It is not the one that the next one was made after",
            received=f"number {number}, mark {about.get('mark')}",
            allowed=f"number {following['number'] - 1}, mark {following['mark_of_after']}",
        )


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
            chain(place)
        except UserError as error:
            reports.append(f"Skipped {place}: {' '.join(str(error).split())}")
        else:
            return place, reports
    return None, reports


def prune(folder: Folder, keep: int, needed: set[str]) -> None:
    """Remove old checkpoints, one rank doing so.

    The newest `keep` that can be restored stay, those of `needed` names, and all that these build on. Of others the
    marker goes first, so that what is left of an interrupted removal is no checkpoint. Incomplete ones are left alone
    while they may be in the making: those newer than the newest complete one.
    """
    whole = complete(folder)
    kept, restorable = set(needed), 0
    for place in reversed(whole):
        if restorable < keep or place.name in needed:
            with contextlib.suppress(UserError):
                kept |= {link.place.name for link in chain(place)}
                restorable += 1
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
    expected = sizes_of(state)
    prefixes = ("model/", "encoder/", "optimizer/") if with_slots else ("model/", "encoder/")
    names = {name for name in (*expected, *found) if name.startswith(prefixes)}
    return {
        name: f"saved {found.get(name, 'nothing')}, the model has {expected.get(name, 'no such entry')}"
        for name in sorted(names)
        if expected.get(name) != found.get(name)
    }


def sizes_of(state: State) -> dict[str, list[int]]:
    """Full logical shape of each entry."""
    with quiet():
        return {name: list(value.size()) for name, value in sorted(state.items())}


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """A full disk, or one that cannot be written, is the user's to mend."""
    try:
        yield
    except (OSError, CheckpointException) as error:
        failed = UserError(
            "It cannot be written; checkpoints before it are as they were",
            received=" ".join(str(error).split())[-300:],
            fix="make room there, or name another place with checkpoint.folder",
        )
        failed.is_worth_retrying = True
        raise failed from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that torch gives about its own ShardedTensor and process groups."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.checkpoint")
        yield
