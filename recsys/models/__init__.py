"""The models, by the name that a recipe gives them, and all that a notebook needs to use one.

    from recsys.models import DIN, Batch, Field, History, Inputs, Table

    inputs = Inputs(
        tables=[Table("item", rows=1000, dim=16)],
        fields=[Field("item_id", table="item")],
        histories=[History({"clicked_item_ids": "item_id"})],
    )
    model = DIN(inputs)
    batch = Batch.from_lists(model.embeddings.layout, {"item_id": [7, 8], "clicked_item_ids": [[1, 2, 3], []]})
    probabilities = model(batch).sigmoid()

Settings and schema need no torch, so importing this package loads none; a model's class is loaded when asked for.
"""

import pkgutil
from typing import TYPE_CHECKING, Any

from recsys.errors import UserError, nearest_name
from recsys.models.config import DeepFMConfig, DINConfig, ModelConfig
from recsys.schema import Field, History, Inputs, Table
from recsys.stack import require_stack

if TYPE_CHECKING:
    from torch import nn

# The registry: a config's `name` -> where its class is. A new model is one more line.
MODELS: dict[str, str] = {
    "deepfm": "recsys.models.deepfm:DeepFM",
    "din": "recsys.models.din:DIN",
}

__all__ = [
    "DIN",
    "MODELS",
    "Batch",
    "DINConfig",
    "DeepFM",
    "DeepFMConfig",
    "Field",
    "History",
    "Inputs",
    "ModelConfig",
    "Table",
    "build",
    "model_class",
]


def model_class(name: str) -> Any:
    """The class registered under `name`; loads torch.

    Raises:
        UserError: No model has that name; it tells the near one.
    """
    if name not in MODELS:
        near = nearest_name(name, MODELS)
        raise UserError(
            "There is no model of that name",
            received=name,
            allowed=sorted(MODELS),
            fix=f"did you mean {near!r}?" if near else "choose one of the allowed names",
        )
    return _resolve(MODELS[name])


def build(inputs: Inputs, config: ModelConfig, table_device: str | None = None) -> "nn.Module":
    """The model that `config` describes, for these inputs.

    Args:
        inputs: Tables, fields, histories and dense columns.
        config: Its `name` chooses the class.
        table_device: Where the tables are allocated; "meta" allocates nothing, for a planner that will.
    """
    return model_class(config.name)(inputs, config, table_device=table_device)


def __getattr__(name: str) -> Any:
    homes = {path.rpartition(":")[2]: path for path in (*MODELS.values(), "recsys.data.batch:Batch")}
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _resolve(homes[name])


def _resolve(path: str) -> Any:
    """The class at a path; first of all the one message when the compiled stack does not fit."""
    require_stack()
    return pkgutil.resolve_name(path)
