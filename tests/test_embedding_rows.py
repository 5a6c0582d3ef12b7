"""Ids that read two rows, and ids with weights, against plain torch that goes through one id after another."""

import copy
import dataclasses
import itertools
import random

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys.embedding import Embeddings
from recsys.encoder import Encoder
from recsys.errors import UserError
from recsys.models import Batch, Field, History, Inputs, Table, build
from recsys.recipe import Recipe
from recsys.stack import require_stack
from tests._encoder_data import bags as bags_of
from tests._reference_features import Known, Reference

require_stack()

TABLES = [
    Table("item", 20, 3, init_std=0.5, second_row=12),
    Table("tag", 11, 5, init_std=0.5, second_row=7),
    Table("word", 8, 4, init_std=0.5),
]
INPUTS = Inputs(
    tables=TABLES,
    fields=[
        Field("item", "item"),
        Field("viewed", "item", "mean"),
        Field("tags", "tag", "mean", weighted=True),
        Field("tag_sum", "tag", "sum", weighted=True),
        Field("more_tags", "tag", "mean"),
        Field("words", "word", "mean", weighted=True),
        Field("plain_words", "word", "mean"),
    ],
    histories=[History({"seen": "item"})],
)
WEIGHTED = [field.name for field in INPUTS.fields if field.weighted]
MEANS = {"viewed", "tags", "more_tags", "words", "plain_words", "seen"}

Bags = dict[str, list[list[tuple[list[int], float]]]]
"""Input -> for each row of data its ids, each being the rows of its table and its weight."""


def random_bags(inputs: Inputs, num_rows: int, seed: int) -> Bags:
    """Some bags are empty, some ids read one row and some two, some weights are 0."""
    rng = random.Random(seed)
    bags: Bags = {}
    for name in (*(field.name for field in inputs.fields), *inputs.history_columns):
        table = inputs.table_of(name)
        first_rows, second_rows = range(table.second_row or table.rows), range(table.second_row or 0, table.rows)
        bags[name] = []
        for _ in range(num_rows):
            bag = []
            for _ in range(1 if name == "item" else rng.randrange(4)):
                second = [rng.choice(second_rows)] if table.second_row and rng.random() < 0.6 else []
                weight = rng.choice([0.0, 0.5, 1.0, 3.0]) if name in WEIGHTED else 1.0
                bag.append(([rng.choice(first_rows), *second], weight))
            bags[name].append(bag)
    return bags


def batch_of(embeddings: Embeddings, bags: Bags) -> Batch:
    """The bags as the encoder lays them out: second rows behind first ones, with the same weight."""
    rows = {name: [[row for ids, _ in bag for row in ids] for bag in column] for name, column in bags.items()}
    batch = Batch.from_lists(embeddings.layout, rows)
    weights = [w for name in embeddings.layout.pooled for bag in bags[name] for ids, w in bag for _ in ids]
    pooled = batch.pooled
    batch.pooled = KeyedJaggedTensor(
        pooled.keys(), pooled.values(), weights=torch.tensor(weights), lengths=pooled.lengths()
    )
    return batch


def plain_vector(weight: Tensor, bag: list[tuple[list[int], float]], *, mean: bool) -> Tensor:
    """The vector of one bag, by the words of the documents."""
    total, divisor = torch.zeros(weight.shape[1]), 0.0
    for rows, amount in bag:
        for row in rows:
            total = total + amount * weight[row]
        divisor += amount
    return total / divisor if mean and divisor else total


def plain(embeddings: Embeddings, bags: Bags, weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """(B, width) vectors by name, and the (N, width) vectors of the events of `seen`."""
    inputs = embeddings.inputs
    vectors = {
        name: torch.stack([plain_vector(weights[inputs.table_of(name).name], b, mean=name in MEANS) for b in column])
        for name, column in bags.items()
    }
    events = [plain_vector(weights["item"], [event], mean=False) for bag in bags["seen"] for event in bag]
    return vectors, torch.stack([torch.zeros(3), *events])[1:]


def unpadded(embeddings: Embeddings) -> dict[str, Tensor]:
    """Copies of the tables as wide as they are declared, which gradients can flow into."""
    found = {name: w[:, : embeddings.inputs.table(name).dim].detach() for name, w in embeddings.table_weights()}
    return {name: weight.clone().requires_grad_() for name, weight in found.items()}


def mixed(vectors: dict[str, Tensor], events: Tensor) -> Tensor:
    """A loss in which no two numbers can stand for each other."""
    parts = [*(vectors[name] for name in sorted(vectors)), events]
    flat = torch.cat([part.flatten() for part in parts])
    return (flat.sin() * torch.linspace(0.5, 2, len(flat))).sum()


@pytest.mark.parametrize("attends", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_vectors_events_and_gradients_equal_plain_torch(attends, seed):
    embeddings, bags = Embeddings(INPUTS, attends=attends), random_bags(INPUTS, 6, seed)
    batch, weights = batch_of(embeddings, bags), unpadded(embeddings)
    vectors, events, _ = embeddings(batch.pooled, batch.sequence, batch.weights)
    expected, expected_events = plain(embeddings, bags, weights)
    found_events = torch.zeros(0)
    if attends:
        expected.pop("seen")
        found_events, lengths = events["seen"]
        assert lengths.tolist() == [len(bag) for bag in bags["seen"]]
        torch.testing.assert_close(found_events, expected_events)
    assert vectors.keys() == expected.keys()
    for name, vector in vectors.items():
        torch.testing.assert_close(vector, expected[name], msg=lambda text, name=name: f"{name}: {text}")
    mixed(vectors, found_events).backward()
    mixed(expected, expected_events if attends else torch.zeros(0)).backward()
    for name, weight in embeddings.table_weights():
        dim = INPUTS.table(name).dim
        torch.testing.assert_close(weight.grad[:, :dim], weights[name].grad, msg=name)
        assert not weight.grad[:, dim:].any(), "padding of the width is never trained"


def test_a_second_row_is_added_to_the_row_in_front_of_it_and_counts_as_no_id_of_its_own():
    """With numbers that a hand can check: rows of the table are 1, 10, 100 and 1000 in the first column."""
    inputs = Inputs(
        [Table("t", 4, 1, second_row=2)],
        [Field("target", "t"), Field("mean", "t", "mean")],
        [History({"seen": "target"})],
    )
    embeddings = Embeddings(inputs, attends=True)
    ((_, weight),) = embeddings.table_weights()
    with torch.no_grad():
        weight[:, 0] = torch.tensor([1.0, 10.0, 100.0, 1000.0])
    ids = {"target": [[0, 2], [1]], "mean": [[0, 3, 1, 2], []], "seen": [[1, 3, 0, 0, 2], []]}
    batch = Batch.from_lists(embeddings.layout, ids)
    vectors, events, _ = embeddings(batch.pooled, batch.sequence, batch.weights)
    assert vectors["target"].flatten().tolist() == [101, 10]
    assert vectors["mean"].flatten().tolist() == [(1 + 1000 + 10 + 100) / 2, 0]
    values, lengths = events["seen"]
    assert (values.flatten().tolist(), lengths.tolist()) == ([1010, 1, 101], [3, 0])


@pytest.mark.parametrize("attends", [True, False])
def test_empty_bags_padded_to_other_ranks_rows_change_nothing(attends):
    embeddings, bags = Embeddings(INPUTS, attends=attends), random_bags(INPUTS, 5, seed=7)
    batch, padded = batch_of(embeddings, bags), batch_of(embeddings, bags)
    padded.pad_bags(9)
    found = [embeddings(b.pooled, b.sequence, b.weights) for b in (batch, padded)]
    for name in found[0][0]:
        assert torch.equal(found[0][0][name], found[1][0][name]), name
    for name in found[0][1]:
        for one, other in zip(found[0][1][name], found[1][1][name], strict=True):
            assert torch.equal(one, other), name


@pytest.mark.parametrize("attends", [True, False])
def test_a_batch_of_empty_bags_gives_zeros_and_no_gradient(attends):
    embeddings = Embeddings(INPUTS, attends=attends)
    bags: Bags = {name: [[], []] for name in (*(field.name for field in INPUTS.fields), "seen")}
    batch = batch_of(embeddings, bags)
    vectors, events, _ = embeddings(batch.pooled, batch.sequence, batch.weights)
    for name, vector in vectors.items():
        assert torch.equal(vector, torch.zeros(2, INPUTS.table_of(name).dim)), name
    if attends:
        assert events["seen"][0].shape == (0, 3)
        assert events["seen"][1].tolist() == [0, 0]
    sum(vector.sum() for vector in vectors.values()).backward()
    for name, weight in embeddings.table_weights():
        assert weight.grad is None or not weight.grad.any(), name


def test_a_mean_by_weights_that_sum_to_zero_is_zero_with_zero_gradients():
    embeddings = Embeddings(INPUTS, attends=True)
    bags: Bags = {name: [[([0], 1.0)]] * 3 for name in (*(field.name for field in INPUTS.fields), "seen")}
    bags["tags"] = [[([1, 8], 0.0), ([2], 0.0)], [], [([1], 0.0), ([3], 2.0)]]
    batch = batch_of(embeddings, bags)
    vectors, *_ = embeddings(batch.pooled, batch.sequence, batch.weights)
    weight = dict(embeddings.table_weights())["tag"]
    assert torch.equal(vectors["tags"][:2], torch.zeros(2, 5))
    torch.testing.assert_close(vectors["tags"][2], weight[3, :5])
    vectors["tags"].square().sum().backward()
    assert weight.grad.isfinite().all()
    assert not weight.grad[[1, 2, 8]].any()
    assert weight.grad[3, :5].all()


def test_doubled_weights_double_a_sum_and_leave_a_mean_alone():
    embeddings, bags = Embeddings(INPUTS, attends=True), random_bags(INPUTS, 8, seed=3)
    doubled = {
        name: [[(rows, 2 * weight if name in WEIGHTED else weight) for rows, weight in bag] for bag in column]
        for name, column in bags.items()
    }
    batch, twice = batch_of(embeddings, bags), batch_of(embeddings, doubled)
    once, *_ = embeddings(batch.pooled, batch.sequence, batch.weights)
    found, *_ = embeddings(twice.pooled, twice.sequence, twice.weights)
    for name in once:
        factor = 2 if name == "tag_sum" else 1
        torch.testing.assert_close(found[name], factor * once[name], msg=name)


@pytest.mark.parametrize("attends", [True, False])
def test_l2_pulls_on_the_vectors_of_ids_and_not_on_their_rows(attends):
    """Against a penalty in the loss: weight of the row * l2 / 2 * |v|^2 for each vector, each event of a history."""
    pulled = Embeddings(INPUTS, attends=attends)
    bags = random_bags(INPUTS, 6, seed=11)
    batch, weights = batch_of(pulled, bags), unpadded(pulled)
    batch.weights = torch.tensor([0.1, 0.7, 0.2, 1.5, 0.0, 0.4])
    pulled.inputs = dataclasses.replace(INPUTS, tables=[dataclasses.replace(t, l2=0.3) for t in TABLES])
    vectors, events, _ = pulled(batch.pooled, batch.sequence, batch.weights)
    mixed(vectors, events["seen"][0] if attends else torch.zeros(0)).backward()
    expected, expected_events = plain(pulled, bags, weights)
    if attends:
        expected.pop("seen")
    loss = mixed(expected, expected_events if attends else torch.zeros(0))
    for vector in expected.values():
        loss = loss + 0.3 / 2 * (batch.weights[:, None] * vector.square()).sum()
    owner = [row for row, bag in enumerate(bags["seen"]) for _ in bag]
    if attends:
        loss = loss + 0.3 / 2 * (batch.weights[owner][:, None] * expected_events.square()).sum()
    loss.backward()
    for name, weight in pulled.table_weights():
        dim = INPUTS.table(name).dim
        torch.testing.assert_close(weight.grad[:, :dim], weights[name].grad, msg=name)


def test_weights_where_vectors_are_read_one_by_one_are_refused():
    fields = [Field("item", "item", weighted=True)]
    inputs = Inputs(TABLES[:1], fields, [History({"seen": "item"})])
    with pytest.raises(UserError, match=r"one by one.*'item'"):
        Embeddings(inputs, attends=True)
    Embeddings(inputs, attends=False)


def recipe(model: str, hidden: tuple[int, ...] = (4,)) -> Recipe:
    features = [
        {"kind": "id", "columns": ["user", "item"]},
        {"kind": "history", "of": {"seen": "item"}},
        {"kind": "id_list", "columns": ["tags", "words"], "weights": {"tags": "tag_weights"}},
    ]
    tables = {"ids": "hot_cold", "hot": 2, "cold": 9, "cold_hashes": 2, "dim": 4}
    return Recipe.model_validate(
        {
            "model": {"name": model, "hidden": hidden},
            "data": {"train": "t"},
            "features": features,
            "tables": {"default": tables, "words": {"ids": "hashed", "rows": 9}},
        }
    )


ROWS = {
    "user": [1, 2, None],
    "item": [7, None, 9],
    "seen": [[7, 8], [], [9, 9, 7]],
    "tags": [["a", "b"], [], ["c"]],
    "tag_weights": [[0.5, 2.0], [], [3.0]],
    "words": [["x"], ["y", "z"], []],
    "label": [0, 1, 1],
}


def test_weighted_and_unweighted_lists_of_one_model_match_a_factorization_machine_by_hand():
    used = recipe("deepfm", hidden=())
    model, batch = build(used.inputs, used.model), Encoder(used).encode(pa.table(ROWS), np.arange(3))
    tables = {name: weight.detach() for name, weight in model.embeddings.table_weights()}
    for table in tables.values():
        table[:, :5] = torch.arange(len(table)).unsqueeze(1).remainder(7) / 7 + torch.arange(5) / 10
    expected = Reference(used, ROWS)
    logits = []
    for row in range(3):
        vectors = []
        for name in used.layout.pooled:
            table, bag = used.inputs.table_of(name), expected.bags[name][row]
            amounts = expected.weights[name][row] if name == "tags" else [1.0] * len(bag)
            num_ids = sum(a for r, a in zip(bag, amounts, strict=True) if r < (table.second_row or table.rows))
            total = sum((a * tables[table.name][r] for r, a in zip(bag, amounts, strict=True)), torch.zeros(8))
            vectors.append(total / num_ids if num_ids and name not in ("user", "item") else total)
        pairs = sum(a[:4] @ b[:4] for a, b in itertools.combinations(vectors, 2))
        logits.append(sum(v[4] for v in vectors) + pairs + model.bias.item())
    torch.testing.assert_close(model(batch).detach(), torch.stack(logits))


@pytest.mark.parametrize("users", [[1, 2, 3], [1, 2**63 - 1, 2]])
def test_a_new_vocabulary_holds_at_once_and_the_key_that_fills_it_up_is_an_id_like_any_other(users):
    used, columns = recipe("deepfm"), ROWS | {"user": users}
    encoder = Encoder(used)
    for hot in ({}, {2: 3}, {1: 4, 2: 3}):
        index = sorted(hot.items()) + [(2**63 - 1, -1)] * (2 - len(hot))
        encoder.set_vocabulary("user", *np.array(index, dtype=np.int64).T)
        batch = encoder.encode(pa.table(columns), np.arange(3))
        assert bags_of(batch, "user") == Reference(used, columns, Known(hot={"user": hot})).bags["user"]


@pytest.mark.parametrize("order", [[1], [1, 1], [1, 3], []])
def test_a_batch_can_be_made_of_the_rows_whose_lists_are_empty(order):
    features = [{"kind": "id", "columns": ["user"]}, {"kind": "id_list", "columns": ["tags"]}]
    used = Recipe.model_validate({"model": {"name": "deepfm"}, "data": {"train": "t"}, "features": features})
    columns = {"user": [1, 2, 3, 4], "tags": [["a"], [], ["b", "c"], None], "label": [0, 1, 0, 1]}
    rows = Encoder(used).encode_rows(pa.table(columns), np.arange(4)).take(np.array(order, dtype=np.int64))
    batch = Encoder(used).batch(rows)
    assert batch.pooled.lengths().tolist() == [1] * len(order) + [0] * len(order)
    assert len(batch.pooled.values()) == len(order)


@pytest.mark.parametrize("model", ["din", "deepfm"])
def test_encoded_rows_give_the_same_logits_padded_and_one_by_one(model):
    used = recipe(model)
    encoder, module, table = Encoder(used), build(used.inputs, used.model).eval(), pa.table(ROWS)
    whole, padded = encoder.encode(table, np.arange(3)), encoder.encode(table, np.arange(3))
    padded.pad_bags(5)
    expected = module(whole)
    torch.testing.assert_close(module(padded), expected)
    single = [module(encoder.encode(table.slice(i, 1), np.arange(1))) for i in range(3)]
    torch.testing.assert_close(torch.cat(single), expected)


@pytest.mark.parametrize("model", ["din", "deepfm"])
def test_zero_encoded_rows_give_zero_logits(model):
    used = recipe(model)
    encoder, module = Encoder(used), build(used.inputs, used.model).eval()
    batch = encoder.encode(pa.table(ROWS).slice(0, 0), np.arange(0))
    padded = copy.copy(batch)
    padded.pad_bags(3)
    assert module(batch).shape == module(padded).shape == (0,)
