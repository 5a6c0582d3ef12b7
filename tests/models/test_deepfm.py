import itertools

import pytest
import torch

from recsys.embedding import num_parameters
from recsys.errors import UserError
from recsys.models import Batch, DeepFM, DeepFMConfig, Field, Inputs, Table

TABLE_OF = {
    "user": "user",
    "item": "item",
    "category": "category",
    "tags": "tag",
    "clicked": "item",
    "clicked_category": "category",
}
MEANS = {"tags", "clicked", "clicked_category"}


def plain_deepfm(model, rows, dense, dim):
    """DeepFM in plain torch, row by row, pair by pair; a tower of ReLU layers."""
    state = dict(model.state_dict())
    tables = dict(model.embeddings.table_weights())
    logits = []
    for row, numbers in zip(rows, dense, strict=True):
        vectors, weights = [], []
        for feature, table in TABLE_OF.items():
            ids = row[feature] if isinstance(row[feature], list) else [row[feature]]
            divisor = max(len(ids), 1) if feature in MEANS else 1
            looked_up = tables[table][ids] if ids else torch.zeros(1, dim + 1)
            vectors.append(looked_up[:, :dim].sum(0) / divisor)
            weights.append(looked_up[:, dim].sum() / divisor)
        for number, vector in zip(numbers, state["number_vectors"], strict=True):
            vectors.append(number * vector[:dim])
            weights.append(number * vector[dim])
        pairs = sum(torch.dot(a, b) for a, b in itertools.combinations(vectors, 2))
        hidden = torch.cat(vectors)
        for layer in (0, 2):
            hidden = state[f"tower.layers.{layer}.weight"] @ hidden + state[f"tower.layers.{layer}.bias"]
            hidden = hidden.clamp(min=0)
        logits.append(state["bias"][0] + sum(weights) + pairs + (state["output.weight"] @ hidden)[0])
    return torch.stack(logits)


@pytest.mark.parametrize("dim", [1, 3, 4])
def test_deepfm_equals_a_plain_version_with_the_same_weights(make_inputs, make_model, make_batch, rows, dim):
    inputs = make_inputs(dim, dim, dim)
    model = make_model(inputs, DeepFMConfig(hidden=(6, 4)))
    batch = make_batch(inputs, "deepfm", rows)
    expected = plain_deepfm(model, rows, batch.dense, dim)
    torch.testing.assert_close(model(batch), expected, rtol=1e-4, atol=1e-5)


def test_without_a_tower_it_is_a_factorization_machine(make_inputs, make_model, make_batch, rows):
    inputs = make_inputs()
    model = make_model(inputs, DeepFMConfig(hidden=(6, 4)))
    shallow = DeepFM(inputs, DeepFMConfig(hidden=()))
    left = shallow.load_state_dict(model.state_dict(), strict=False)
    assert not left.missing_keys and all(key.startswith(("tower", "output")) for key in left.unexpected_keys)
    with torch.no_grad():
        model.output.weight.zero_()
    batch = make_batch(inputs, "deepfm", rows)
    torch.testing.assert_close(shallow(batch), model(batch))


def test_fresh_first_order_weights_are_zero_and_come_from_the_lookup_of_the_vector():
    inputs = Inputs(tables=[Table("item", 5, 3)], fields=[Field("item", "item")])
    model = DeepFM(inputs, DeepFMConfig(hidden=()))
    batch = Batch.from_lists(model.embeddings.layout, {"item": [0, 4]})
    assert model(batch).tolist() == [0.0, 0.0]  # one field has no pair
    ((_, weight),) = model.embeddings.table_weights()
    with torch.no_grad():
        weight[4, 3] = 2.5
    assert model(batch).tolist() == [0.0, 2.5]


def test_parameter_count(make_inputs):
    dim, hidden = 3, 7
    tables = (10 + 4 + 5 + 6 + 2) * (dim + 1)  # rows and numbers: a vector and a weight each
    tower = (6 + 2) * dim * hidden + hidden + hidden  # six fields and two numbers; output without bias
    assert num_parameters(DeepFM(make_inputs(), DeepFMConfig(hidden=(hidden,)))) == 1 + tables + tower


def test_different_widths_are_an_error_that_names_the_fields(make_inputs):
    with pytest.raises(UserError, match=r"width 8: user, tags; width 16: item, category, clicked, clicked_category"):
        DeepFM(make_inputs(16, 16, 8))


def test_deepfm_without_id_features_is_an_error():
    with pytest.raises(UserError, match="at least one id feature"):
        DeepFM(Inputs(tables=[], dense=["age"]))
