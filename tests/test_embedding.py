import copy
import dataclasses

import pytest
import torch

from recsys.embedding import Embeddings, initial_rows, num_parameters
from recsys.models import Batch, Field, History, Inputs, Table
from recsys.stack import require_stack

require_stack()

INPUTS = Inputs(
    tables=[Table("item", 20, 3, init_std=0.5), Table("city", 6, 5, init_std=0.5), Table("tag", 8, 1, init_std=0.5)],
    fields=[Field("item", "item"), Field("city", "city"), Field("tags", "tag", "mean"), Field("sums", "tag", "sum")],
    histories=[History({"seen": "item"})],
)
IDS = {
    "item": [3, 7, 3, 19],
    "city": [0, 5, 5, 1],
    "tags": [[1, 2, 2], [], [7], [0, 1]],
    "sums": [[1, 2, 2], [], [7], [0, 1]],
    "seen": [[3, 4], [], [19, 19, 0], [5]],
}


@pytest.mark.parametrize("attends", [True, False])
def test_lookups_equal_plain_indexing_whatever_the_width(attends):
    embeddings = Embeddings(INPUTS, attends=attends)
    weights = {name: weight[:, : INPUTS.table(name).dim] for name, weight in embeddings.table_weights()}
    batch = Batch.from_lists(embeddings.layout, IDS)
    vectors, events, _ = embeddings(batch.pooled, batch.sequence, batch.weights)
    for row in range(4):
        assert torch.equal(vectors["item"][row], weights["item"][IDS["item"][row]])
        bag = weights["tag"][IDS["tags"][row]]
        torch.testing.assert_close(vectors["sums"][row], bag.sum(0))
        torch.testing.assert_close(vectors["tags"][row], bag.mean(0) if len(bag) else torch.zeros(1))
    seen = [i for bag in IDS["seen"] for i in bag]
    if attends:
        values, lengths = events["seen"]
        assert torch.equal(values, weights["item"][seen]) and lengths.tolist() == [2, 0, 3, 1]
    else:
        assert not events
        torch.testing.assert_close(vectors["seen"][2], weights["item"][[19, 19, 0]].mean(0))


@pytest.mark.parametrize("attends", [True, False])
def test_l2_is_the_gradient_of_a_penalty_on_what_the_rows_looked_up(attends):
    """Against a penalty in the loss: weight of the row * l2 / 2 * |v|^2 for each vector, each event of a history."""
    plain = Embeddings(INPUTS, attends=attends)
    pulled = copy.deepcopy(plain)
    pulled.inputs = dataclasses.replace(INPUTS, tables=[dataclasses.replace(t, l2=0.3) for t in INPUTS.tables])
    batch = Batch.from_lists(plain.layout, IDS)
    batch.weights = torch.tensor([0.1, 0.7, 0.2, 1.5])

    def loss(embeddings: Embeddings, strength: float) -> torch.Tensor:
        vectors, events, _ = embeddings(batch.pooled, batch.sequence, batch.weights)
        total = sum(v.sin().sum() for v in vectors.values()) + sum(v.sin().sum() for v, _ in events.values())
        for vector in vectors.values():
            total = total + strength / 2 * (batch.weights[:, None] * vector.square()).sum()
        for values, lengths in events.values():
            owner = [row for row, length in enumerate(lengths.tolist()) for _ in range(length)]
            total = total + strength / 2 * (batch.weights[owner][:, None] * values.square()).sum()
        return total

    loss(plain, 0.3).backward()
    loss(pulled, 0.0).backward()
    for (name, expected), (_, found) in zip(plain.table_weights(), pulled.table_weights(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, msg=name)


def test_initial_values_depend_on_the_row_and_not_on_the_shard():
    table = Table("item", 5000, 3, init_std=0.5)
    whole = initial_rows(table, 7, 0, 5000, 4)
    for start, stop in ((0, 1), (1000, 1030), (1023, 3073), (4999, 5000)):
        assert torch.equal(initial_rows(table, 7, start, stop, 4), whole[start:stop])
    assert not torch.equal(initial_rows(table, 8, 0, 10, 4), whole[:10])
    assert not torch.equal(initial_rows(dataclasses.replace(table, name="other"), 7, 0, 10, 4), whole[:10])
    assert (whole[:, 3] == 0).all(), "padding starts at zero"
    assert abs(whole[:, :3].std().item() - 0.5) < 0.01 and abs(whole[:, :3].mean().item()) < 0.01


def test_padding_of_widths_is_not_counted():
    embeddings = Embeddings(INPUTS, attends=True, extra_columns=1)
    assert num_parameters(embeddings) == 20 * (3 + 1) + 6 * (5 + 1) + 8 * (1 + 1)
