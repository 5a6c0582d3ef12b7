"""Recipes, clusters and plans that the planning tests share."""

import copy
import json
import pathlib

import yaml

from recsys import models, optim, recipe_file
from recsys.cluster import cluster_of
from recsys.plan import Plan
from recsys.planner import Planner

ROOT = pathlib.Path(__file__).parent.parent
CRITEO = ROOT / "models/deepfm/criteo.yaml"
HARD_LIMIT_S = 120

# Width 7 of DeepFM's tables is stored as 8: the first-order weight rides along.
WIDTH = 8


def text_of(
    model: str = "deepfm", batch: int = 100, dense: dict | None = None, sparse: str = "adagrad", **tables
) -> str:
    """A recipe whose tables are ids of their own, `item` with a history."""
    default = {"dim": 7, "rows": 1000, **tables.pop("default", {})}
    names = [name for name in tables if name != "item"]
    return yaml.safe_dump(
        {
            "model": {"name": model, "hidden": [16], **({"attention_hidden": [8]} if model == "din" else {})},
            "data": {"train": "unused", "batch_size_per_rank": batch},
            "features": [
                {"kind": "id", "columns": [*names, "item"]},
                {"kind": "history", "of": {"seen": "item"}, "max_length": 10},
            ],
            "tables": {"default": default, **tables},
            "optimizer": {"sparse": {"name": sparse}, **({"dense": dense} if dense else {})},
        }
    )


def model_of(recipe):
    model = models.build(recipe.inputs, recipe.model, table_device="meta")
    optim.fuse(model.embeddings, recipe)
    return model


def planner_of(text: str, *overrides: str, trains: bool = True, **where) -> Planner:
    recipe = recipe_file.parse(text, overrides)
    return Planner(model_of(recipe), recipe, cluster_of(**where), trains=trains)


def plan_of(text: str, *overrides: str, **where) -> Plan:
    return planner_of(text, *overrides, **where).plan()


def tables_of(plan: Plan) -> dict:
    return {table.name: table for table in plan.tables}


SMALL = {"nodes": 1, "devices_per_node": 2, "device": "cpu", "memory": "1GB"}
NODES = {"nodes": 4, "devices_per_node": 8, "machine": "a100-80gb"}
T4 = {"devices_per_node": 2, "machine": "t4-16gb"}

MIXED = text_of(
    "deepfm",
    tiny={"rows": 20},
    rows={"sharding": "row_wise"},
    cols={"sharding": "column_wise"},
    whole={"rows": 5000, "sharding": "table_wise"},
)
MIXED_RANKS = {"nodes": 2, "devices_per_node": 2, "device": "cpu", "memory": "1GB"}


def change(plan: Plan, table_name: str, **values) -> Plan:
    """The plan with another table; `shards=f` applies f to a list of the shards' dictionaries."""
    content = copy.deepcopy(plan.to_json())
    (table,) = (t for t in content["tables"] if t["name"] == table_name)
    if shards := values.pop("shards", None):
        table["shards"] = shards(table["shards"]) or table["shards"]
    table.update(values)
    return Plan._from_json(json.loads(json.dumps(content)))


def set_first(**values):
    def change_first(shards):
        shards[0].update(values)

    return change_first
