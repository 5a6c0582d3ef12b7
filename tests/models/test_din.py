import pytest
import torch

from recsys.embedding import num_parameters
from recsys.errors import UserError
from recsys.models import DIN, Batch, DINConfig, Field, History, Inputs, Table


def plain_din(model, rows, dense, config):
    """DIN in plain torch, row by row and event by event, reading the weights by their names.

    Batch statistics, which need every row, are the only thing that is computed over all of them at once.
    """
    state = dict(model.state_dict())
    tables = {name: weight for name, weight in model.embeddings.table_weights()}
    width = {table.name: table.dim for table in model.inputs.tables}

    def look_up(table, index):
        return tables[table][index, : width[table]]

    def first_order(row):
        """The weight behind the vector of each id of a row's fields; a list of ids gives its mean."""
        for table in ("user", "item", "category"):
            yield tables[table][row[table], width[table]]
        tags = [tables["tag"][tag, width["tag"]] for tag in row["tags"]]
        yield sum(tags) / max(len(tags), 1)

    def normalize(name, x, eps):
        mean, variance = (
            (x.mean(0), x.var(0, correction=0))
            if model.training
            else (state[f"{name}.running_mean"], state[f"{name}.running_var"])
        )
        return (x - mean) / (variance + eps).sqrt()

    def activate(kind, name, x):
        if kind == "dice":
            p = torch.sigmoid(normalize(f"{name}.norm", x, 1e-8))
            return p * x + (1 - p) * state[f"{name}.alpha"] * x
        return torch.where(x > 0, x, x * (state[f"{name}.weight"] if kind == "prelu" else 0.0))

    def linear(name, x):
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    queries = [torch.cat([look_up("item", row["item"]), look_up("category", row["category"])]) for row in rows]
    owners, features, keys = [], [], []
    for index, row in enumerate(rows):
        for item, category in zip(row["clicked"], row["clicked_category"], strict=True):
            q, k = queries[index], torch.cat([look_up("item", item), look_up("category", category)])
            owners.append(index)
            keys.append(k)
            features.append(torch.cat([q, k, q - k, q * k]))
    unit, kind = "interests.attentions.0", config.attention_activation
    hidden = activate(kind, f"{unit}.rest.0", linear(f"{unit}.first", torch.stack(features)))
    hidden = activate(kind, f"{unit}.rest.1.layers.1", linear(f"{unit}.rest.1.layers.0", hidden))
    scores = linear(f"{unit}.rest.2", hidden)[:, 0]
    pooled = []
    for index in range(len(rows)):
        mine = [n for n, owner in enumerate(owners) if owner == index]
        weights = scores[mine]
        if config.attention_normalization == "softmax" and mine:
            weights = torch.softmax(weights, 0)
        pooled.append(sum((w * keys[n] for w, n in zip(weights, mine, strict=True)), torch.zeros_like(queries[0])))
    x = []
    for index, row in enumerate(rows):
        tags = [look_up("tag", tag) for tag in row["tags"]]
        tag = sum(tags) / len(tags) if tags else torch.zeros(width["tag"])
        product = queries[index] * pooled[index] if config.interest_product else torch.zeros(0)
        x.append(torch.cat([look_up("user", row["user"]), queries[index], tag, pooled[index], product, dense[index]]))
    hidden, place = torch.stack(x), 0
    for _ in config.hidden:
        hidden = linear(f"tower.layers.{place}", hidden)
        if config.batch_norm:
            place += 1
            name = f"tower.layers.{place}"
            hidden = normalize(name, hidden, 1e-5) * state[f"{name}.weight"] + state[f"{name}.bias"]
        hidden = activate(config.activation, f"tower.layers.{place + 1}", hidden)
        place += 2
    logits = linear("output", hidden)[:, 0]
    if config.first_order:
        logits = logits + torch.stack([sum(first_order(row)) for row in rows])
    return logits


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("widths", [(3, 3, 3), (16, 8, 4), (1, 3, 1), (4, 1, 2)])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"attention_normalization": "softmax", "attention_activation": "prelu", "batch_norm": False},
        {"activation": "relu", "attention_activation": "relu"},
        {"interest_product": True},
        {"first_order": True},
    ],
    ids=["default", "softmax", "relu", "product", "first order"],
)
def test_din_equals_a_plain_version_with_the_same_weights(
    make_inputs, make_model, make_batch, rows, settings, widths, training
):
    config = DINConfig(attention_hidden=(6, 4), hidden=(8, 4), **settings)
    inputs = make_inputs(*widths)
    model = make_model(inputs, config).train(training)
    batch = make_batch(inputs, "din", rows)
    expected = plain_din(model, rows, batch.dense, config)
    torch.testing.assert_close(model(batch), expected, rtol=1e-4, atol=1e-5)


def test_published_parameter_count():
    inputs = Inputs(
        tables=[Table("item", 63_003, 64), Table("category", 803, 64)],
        fields=[Field("item_id", "item"), Field("category_id", "category")],
        histories=[History({"history_item_id": "item_id", "history_category_id": "category_id"})],
    )
    config = DINConfig(attention_hidden=(512, 256), hidden=(1024, 512, 256))
    model = DIN(inputs, config, table_device="meta")
    assert num_parameters(model) == 5_403_522


def test_width_padding_is_not_counted(make_inputs):
    counts = {d: num_parameters(DIN(make_inputs(3, 3, d), DINConfig(hidden=(4,)))) for d in (1, 2)}
    # One column more: user (5 rows) and tag (6), and in the first tower layer (4 wide) one input for each of the two.
    assert counts[2] - counts[1] == 5 + 6 + 4 * 2


def test_two_histories_have_an_attention_each_and_share_the_target(make_model):
    inputs = Inputs(
        tables=[Table("item", 10, 4)],
        fields=[Field("item", "item")],
        histories=[History({"clicked": "item"}), History({"bought": "item"})],
    )
    model = make_model(inputs, DINConfig(attention_hidden=(4,), hidden=(4,))).eval()
    first, second = model.interests.attentions

    def score(clicked, bought):
        lists = {"item": [1], "clicked": [clicked], "bought": [bought]}
        return model(Batch.from_lists(model.embeddings.layout, lists))

    assert not torch.allclose(score([2, 3], []), score([], [2, 3]))
    second.load_state_dict(first.state_dict())
    weight = model.tower.layers[0].weight
    with torch.no_grad():
        weight[:, 8:] = weight[:, 4:8]  # target, clicked, bought: 4 columns each
    torch.testing.assert_close(score([2, 3], []), score([], [2, 3]))


@pytest.mark.parametrize("categories", [[2, 1], [2]], ids=["same total", "other total"])
def test_columns_of_a_history_that_do_not_run_in_step_are_an_error(make_inputs, make_batch, categories):
    inputs = make_inputs()
    row = {"user": 0, "item": 1, "category": 0, "tags": []}
    rows = [
        {**row, "clicked": [5], "clicked_category": categories},
        {**row, "clicked": [7, 2], "clicked_category": [1]},
    ]
    with pytest.raises(UserError, match="'clicked' and 'clicked_category' have different lengths"):
        DIN(inputs)(make_batch(inputs, "din", rows))


def test_din_without_a_history_is_an_error():
    with pytest.raises(UserError, match="DIN needs a history"):
        DIN(Inputs(tables=[Table("item", 10, 4)], fields=[Field("item", "item")]))
