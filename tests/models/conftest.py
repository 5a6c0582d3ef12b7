"""Inputs, batches and random weights that every model test can share."""

import pytest
import torch

from recsys.models import Batch, Field, History, Inputs, Table, build, model_class
from recsys.models.config import ModelConfig

ROWS = [
    {"user": 3, "item": 5, "category": 2, "tags": [1, 4, 4], "clicked": [5, 7, 2], "clicked_category": [2, 1, 1]},
    {"user": 0, "item": 1, "category": 0, "tags": [], "clicked": [], "clicked_category": []},
    {"user": 3, "item": 9, "category": 3, "tags": [2], "clicked": [2], "clicked_category": [2]},
    {"user": 1, "item": 5, "category": 3, "tags": [5, 0], "clicked": [9] * 6, "clicked_category": [0] * 6},
]


@pytest.fixture
def rng(generator) -> torch.Generator:
    """Each draw of a test differs from the one before; each test starts alike."""
    return generator(20170313)


@pytest.fixture
def make_inputs():
    """Two fields and their two histories, a profile field, a list, two numbers."""

    def make(item_dim: int = 3, category_dim: int = 3, other_dim: int = 3, dense: tuple[str, ...] = ("age", "price")):
        return Inputs(
            tables=[
                Table("item", 10, item_dim),
                Table("category", 4, category_dim),
                Table("user", 5, other_dim),
                Table("tag", 6, other_dim),
            ],
            fields=[
                Field("user", "user"),
                Field("item", "item"),
                Field("category", "category"),
                Field("tags", "tag", pooling="mean"),
            ],
            histories=[History({"clicked": "item", "clicked_category": "category"})],
            dense=dense,
        )

    return make


@pytest.fixture
def make_model(rng):
    """A model whose every weight and statistic is drawn, so that no zero or one of a fresh model hides an error."""

    def make(inputs: Inputs, config: ModelConfig):
        model = build(inputs, config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.5, generator=rng)
            for name, buffer in model.named_buffers():
                if name.endswith("running_mean"):
                    buffer.normal_(0, 0.5, generator=rng)
                if name.endswith("running_var"):
                    buffer.uniform_(0.5, 2, generator=rng)
        return model

    return make


@pytest.fixture
def make_batch():
    """The batch of some rows, in the layout of a model."""

    def make(inputs: Inputs, name: str, rows: list[dict]) -> Batch:
        batch = Batch.from_lists(
            inputs.layout(attends=model_class(name).attends),
            {feature: [row[feature] for row in rows] for feature in ROWS[0]},
        )
        numbers = [[0.5 * row["user"] - 1, 0.1 * row["item"]][: len(inputs.dense)] for row in rows]
        batch.dense = torch.tensor(numbers).view(len(rows), len(inputs.dense))  # lists of no rows have no width
        return batch

    return make


@pytest.fixture
def rows() -> list[dict]:
    return [dict(row) for row in ROWS]
