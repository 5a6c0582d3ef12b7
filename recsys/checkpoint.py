"""Checkpoints: complete or not there. Tables, dense weights and the encoder's state, loadable by any plan.

`torch.distributed.checkpoint` writes every rank's shards under plan-independent names and full logical shapes;
`complete.json` is written last, and a folder without it is not a checkpoint.
"""

import contextlib
import json
import pathlib
import shutil
import warnings
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from recsys.distributed import agreed
from recsys.encoder import Encoder
from recsys.errors import UserError

_MARKER = "complete.json"
_OTHER = "choose another checkpoint of the run, or train again"


def save(folder: pathlib.Path, model: nn.Module, encoder: Encoder, about: dict[str, Any]) -> None:
    """Write a checkpoint from all ranks.

    Args:
        folder: Where to write; what stands there is replaced.
        model: The sharded model.
        encoder: The encoder whose statistics the model was trained with.
        about: Plain data stored in the marker: step, epoch, metrics.
    """
    with agreed("checkpoint"):
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
    state = _state(model, encoder)
    with _quiet():
        dcp.save(state, checkpoint_id=folder)
    with agreed("checkpoint"):
        if dist.get_rank() == 0:
            files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
            text = json.dumps(
                {**about, "encoder": encoder.versions, "entries": _sizes(state), "files": files}, indent=1
            )
            (folder / _MARKER).write_text(text + "\n", encoding="utf-8")


def load(folder: pathlib.Path, model: nn.Module, encoder: Encoder) -> dict[str, Any]:
    """Read a checkpoint into a model of any plan and number of ranks; returns what `save` stored about it.

    Raises:
        UserError: The folder is no complete checkpoint, is damaged, or holds other entries than the model; on all
            ranks.
    """
    with agreed(f"checkpoint {folder}"):
        about = read_about(folder)
        if about["encoder"] != encoder.versions:
            raise UserError(
                "It was trained on ids that were made in another way",
                received=about["encoder"],
                allowed=encoder.versions,
                fix="install those versions, or train again",
            )
        state = _state(model, encoder)
        expected, found = _sizes(state), about["entries"]
        problems = [
            f"{name}: saved {found.get(name, 'nothing')}, the model has {expected.get(name, 'no such entry')}"
            for name in sorted({*expected, *found})
            if expected.get(name) != found.get(name)
        ]
        if problems:
            raise UserError.collect(
                "It does not fit the model", problems, fix="use the recipe that it was trained with"
            )
        for name, size in about["files"].items():
            if not (folder / name).is_file() or (folder / name).stat().st_size != size:
                raise UserError(f"Its file {name!r} is missing or damaged", allowed=f"{size} bytes", fix=_OTHER)
    with agreed(f"checkpoint {folder}"), _quiet():
        try:
            dcp.load(state, checkpoint_id=folder)
        except CheckpointException as error:
            raise UserError("It is damaged", received=" ".join(str(error).split())[:300], fix=_OTHER) from error
    model.load_state_dict({k.removeprefix("model/"): v for k, v in state.items() if k.startswith("model/")})
    encoder.load_state_dict({k.removeprefix("encoder/"): v for k, v in state.items() if k.startswith("encoder/")})
    return about


def read_about(folder: pathlib.Path) -> dict[str, Any]:
    """What was stored about a checkpoint, from its completion marker."""
    marker = folder / _MARKER
    try:
        about = json.loads(marker.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{str(folder)!r} is not a complete checkpoint", received=str(error), fix=_OTHER) from error
    if not isinstance(about, dict) or not {"encoder", "entries", "files", "step"} <= about.keys():
        raise UserError(f"{str(marker)!r} is not what was saved", received=f"{str(about)[:80]}", fix=_OTHER)
    return about


def complete(folder: pathlib.Path) -> list[pathlib.Path]:
    """The complete checkpoints in a folder, oldest step first."""
    return sorted(path.parent for path in folder.glob(f"step_[0-9]*/{_MARKER}"))


def _state(model: nn.Module, encoder: Encoder) -> dict[str, Any]:
    return {f"model/{k}": v for k, v in model.state_dict().items()} | {
        f"encoder/{k}": v for k, v in encoder.state_dict().items()
    }


def _sizes(state: dict[str, Any]) -> dict[str, list[int]]:
    """Full logical shape of each entry."""
    with _quiet():
        return {name: list(value.size()) for name, value in sorted(state.items())}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings that torch gives about its own ShardedTensor and process groups."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
