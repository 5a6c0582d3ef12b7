"""Checkpoints: complete or not there. Tables, dense weights and the encoder's state, loadable by any plan.

`torch.distributed.checkpoint` writes every rank's shards under plan-independent names and full logical shapes;
`complete.json` is written last, and a folder without it is not a checkpoint.
"""

import json
import pathlib
import shutil
import warnings
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from recsys.distributed import agreed
from recsys.errors import UserError

_MARKER = "complete.json"


def save(folder: pathlib.Path, model: nn.Module, encoder: nn.Module, about: dict[str, Any]) -> None:
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
            text = json.dumps({**about, "entries": sorted(state)}, indent=1)
            (folder / _MARKER).write_text(text + "\n", encoding="utf-8")


def load(folder: pathlib.Path, model: nn.Module, encoder: nn.Module) -> dict[str, Any]:
    """Read a checkpoint into a model of any plan and number of ranks; returns what `save` stored about it.

    Raises:
        UserError: The folder is no complete checkpoint, or holds other entries than the model.
    """
    about = read_about(folder)
    state = _state(model, encoder)
    missing, extra = sorted(set(state) - set(about["entries"])), sorted(set(about["entries"]) - set(state))
    if missing or extra:
        raise UserError(
            f"The checkpoint {str(folder)!r} does not fit the model",
            received=f"missing {missing}, not in the model {extra}",
            fix="use the recipe that it was trained with",
        )
    with _quiet():
        dcp.load(state, checkpoint_id=folder)
    model.load_state_dict({k.removeprefix("model/"): v for k, v in state.items() if k.startswith("model/")})
    encoder.load_state_dict({k.removeprefix("encoder/"): v for k, v in state.items() if k.startswith("encoder/")})
    return about


def read_about(folder: pathlib.Path) -> dict[str, Any]:
    """What was stored about a checkpoint, from its completion marker."""
    marker = folder / _MARKER
    if not marker.is_file():
        raise UserError(
            f"{str(folder)!r} is not a complete checkpoint", received=f"no {_MARKER}", fix="choose another one"
        )
    return json.loads(marker.read_text(encoding="utf-8"))


def complete(folder: pathlib.Path) -> list[pathlib.Path]:
    """The complete checkpoints in a folder, oldest step first."""
    return sorted(path.parent for path in folder.glob(f"*/{_MARKER}"))


def _state(model: nn.Module, encoder: nn.Module) -> dict[str, Any]:
    return {f"model/{k}": v for k, v in model.state_dict().items()} | {
        f"encoder/{k}": v for k, v in encoder.state_dict().items()
    }


def _quiet() -> warnings.catch_warnings:
    """DCP warns about its own use of ShardedTensor and of the default process group."""
    return warnings.catch_warnings(action="ignore", category=FutureWarning)
