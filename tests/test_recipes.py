import pathlib
import re

import pyarrow.parquet as pq
import pytest
import torch

from recsys import models, recipe_file
from recsys.cluster import cluster_of
from recsys.data import movielens
from recsys.data.prepare import DATASETS, prepare
from recsys.embedding import Embeddings
from recsys.errors import UserError
from recsys.plan_report import plan_recipe
from recsys.train import train

ROOT = pathlib.Path(__file__).parent.parent
RECIPES = sorted(path for path in ROOT.glob("models/*/*.yaml") if path.name != "search.yaml")
NAMES = [str(path.relative_to(ROOT)) for path in RECIPES]


def has_data(path: pathlib.Path) -> bool:
    """Whether `recsys prepare` makes the data of a recipe; the others are planned only."""
    folders = pathlib.PurePath(recipe_file.load(path).data.train).parts
    return folders[:1] == ("${RECSYS_DATA}",) and folders[1] in DATASETS


@pytest.fixture(scope="module")
def data_home(tmp_path_factory) -> pathlib.Path:
    """A data folder in which each data set of the shipped recipes is there with its first rows."""
    try:
        movielens.fetch()
    except UserError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("home")
    prepare("movielens-100k", folder / "whole")
    for split in ("train", "valid", "test"):
        (folder / "movielens-100k" / split).mkdir(parents=True)
        table = pq.read_table(folder / "whole" / split).slice(0, 300)
        pq.write_table(table, folder / "movielens-100k" / split / "part.parquet")
    return folder


def test_there_are_recipes():
    assert NAMES


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_a_recipe_says_what_on_which_data_where_and_how(path):
    head = path.read_text().splitlines()[:4]
    assert [line.split(":")[0] for line in head] == ["# What", "# Data", "# Machine", "# Command"]
    assert str(path.relative_to(ROOT)) in head[3]


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_a_recipe_survives_being_resolved(path):
    recipe = recipe_file.load(path)
    assert recipe_file.parse(recipe.to_yaml()) == recipe


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_a_recipe_builds_without_allocating_its_tables(path):
    recipe = recipe_file.load(path)
    model = models.build(recipe.inputs, recipe.model, table_device="meta")
    (embeddings,) = (module for module in model.modules() if isinstance(module, Embeddings))
    assert all(weight.device.type == "meta" for _, weight in embeddings.table_weights())
    assert all(p.device.type == "cpu" for p in model.parameters() if p.device != torch.device("meta"))


@pytest.mark.parametrize("path", [p for p in RECIPES if not has_data(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_a_recipe_without_data_says_so_and_is_planned_for_the_machines_that_it_names(path):
    head = path.read_text().splitlines()[:4]
    assert "planned only" in head[2]
    (nodes,), (devices,), (machine,) = (
        re.findall(rf"{option} (\S+)", head[3]) for option in ("--nodes", "--devices-per-node", "--machine")
    )
    recipe = recipe_file.load(path)
    plan = plan_recipe(recipe, cluster_of(int(nodes), int(devices), machine=machine))
    assert {table.name for table in plan.tables} == {table.name for table in recipe.inputs.tables}


@pytest.mark.parametrize("path", [p for p in RECIPES if has_data(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_a_recipe_trains_two_steps_on_the_first_rows_of_its_data(path, data_home, tmp_path, monkeypatch):
    monkeypatch.setenv("RECSYS_DATA", str(data_home))
    recipe = recipe_file.load(path, ["train.epochs=1", "train.device=cpu", "data.batch_size_per_rank=150"])
    result = train(recipe, run=str(tmp_path / "run"))
    assert result.metrics["step"] == 2
    assert result.metrics["test"]["rows"] == 300
