import functools
import io
import math
import random
import threading

import numpy as np
import pyarrow as pa
import pytest
import torch

from recsys import ids
from recsys.encoder import NULL_GROUP, Encoder
from recsys.errors import UserError
from recsys.numbers import Statistics
from tests._encoder_data import (
    MAX_LENGTH,
    ROWS,
    bags,
    encode,
    fitted,
    good_columns,
    recipe,
    reference_bags,
    scan,
    table_of,
)
from tests._reference_hash import WORD, fnv1a

INT_TYPES = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]


@pytest.mark.parametrize("keep", ["newest", "oldest"])
@pytest.mark.parametrize("name", ["din", "deepfm"])
def test_batch_equals_a_plain_python_reference(keep, name):
    used, values = recipe(keep, name), good_columns()
    batch = encode(table_of(values), used)
    assert (batch.pooled.keys(), batch.sequence.keys()) == (list(used.layout.pooled), list(used.layout.sequence))
    for column in ("user", "item", "shop", "tags", "items", "shops"):
        assert bags(batch, column) == reference_bags(values[column], column, keep)
    # Means 3 and 45, variances 30 / 3 and 300 / 3, as `fitted` sets them.
    expected = [[(p - 3) / math.sqrt(10), (a - 45) / 10] for p, a in zip(values["price"], values["age"], strict=True)]
    torch.testing.assert_close(batch.dense, torch.tensor(expected))
    assert batch.labels.tolist() == values["label"]
    signed = [(k + 2**63) % WORD - 2**63 for k in (fnv1a(b"a"), fnv1a(b"b"))]
    assert batch.groups.tolist() == [signed[0], signed[1], NULL_GROUP, signed[1]]
    assert batch.rows.tolist() == [100, 101, 102, 103]
    assert batch.dense.dtype == batch.labels.dtype == torch.float32


def test_missing_unknown_and_empty_are_three_things():
    values = good_columns() | {"tags": [[None], ["never seen"], [], None]}
    null, unseen, empty, null_list = bags(encode(table_of(values)), "tags")
    assert null == [ids.MISSING]
    assert len(unseen) == 1
    assert unseen[0] >= ids.FIRST_ROW
    assert empty == null_list == []


@pytest.mark.parametrize("kind", INT_TYPES, ids=str)
def test_every_integer_type_gives_the_same_rows(kind):
    values = good_columns() | {"item": [1, None, 127, 0], "items": [[1, 2], [], [127], [1, None, 3, 4]]}
    expected, found = encode(table_of(values)), encode(table_of(values, item=kind, items=pa.large_list(kind)))
    assert torch.equal(found.sequence.values(), expected.sequence.values())
    assert torch.equal(found.sequence.lengths(), expected.sequence.lengths())


def test_uint64_ids_beyond_int64_keep_their_bits():
    big = [2**64 - 1, 2**63, 2**53 + 1, None]
    batch = encode(table_of(good_columns() | {"item": big}, item=pa.uint64()))
    assert bags(batch, "item") == reference_bags(big, "item")


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())], ids=str)
def test_every_text_type_gives_the_same_rows(kind):
    values = good_columns()
    expected, found = encode(table_of(values)), encode(table_of(values, user=kind))
    assert bags(found, "user") == bags(expected, "user")
    assert torch.equal(found.groups, expected.groups)


def test_nulls_in_indices_and_in_values_of_a_dictionary_are_missing():
    indices = pa.array([0, 1, None, 2], pa.uint8())
    table = table_of(good_columns())
    for dictionary in (pa.array(["a", None, "b"]), pa.array([5, None, 2**60])):
        array = pa.DictionaryArray.from_arrays(indices, dictionary)
        batch = encode(table.set_column(table.schema.get_field_index("item"), "item", array))
        assert bags(batch, "item") == reference_bags(array.to_pylist(), "item")


def test_a_slice_of_a_column_with_a_big_dictionary_and_a_dictionary_of_nulls():
    table = table_of(good_columns())
    big = pa.array([f"v{i}" for i in range(500)]).dictionary_encode().slice(3, 4)
    none = pa.array([None] * 4, pa.string()).dictionary_encode()
    for array in (big, none):
        batch = encode(table.set_column(table.schema.get_field_index("user"), "user", array))
        assert bags(batch, "user") == reference_bags(array.to_pylist(), "user")


def test_a_column_of_nulls_only_and_booleans_are_ids():
    for item in ([None] * 4, [True, False, None, True]):
        batch = encode(table_of(good_columns() | {"item": item}))
        assert bags(batch, "item") == reference_bags(item, "item")


def test_values_hidden_behind_null_lists_and_slices_do_not_move_histories():
    # A null in the middle whose slot still covers values 3 and 4, in a slice that begins after the first list.
    offsets, mask = pa.array([0, 2, 3, 5, 6, 7]), pa.array([False, False, True, False, False])
    array = pa.ListArray.from_arrays(offsets, pa.array([9, 9, 2, 3, 4, 5, 6]), mask=mask).slice(1)
    fixed = pa.array([[8, 8], [1, 2], None, [3, None], [5, 6]], pa.list_(pa.int64(), 2)).slice(1)
    for items in (array, fixed):
        values = items.to_pylist()
        table = table_of(good_columns() | {"shops": [v and [1] * len(v) for v in values], "items": [None] * 4})
        table = table.set_column(table.schema.get_field_index("items"), "items", items)
        assert bags(encode(table), "items") == reference_bags(values, "items")


def test_cut_lists_are_counted_until_the_caller_clears_them():
    encoder, table = fitted(recipe()), table_of(good_columns())
    for _ in range(2):
        encoder.encode(table, np.arange(4))
    assert dict(encoder.counters) == {"cut/tags": 2, "cut/items": 2, "cut/shops": 2}
    encoder.counters.clear()
    encoder.check(table, np.arange(4))
    assert not encoder.counters


def test_a_history_of_500_events_gives_the_batch_of_its_newest_events():
    events = list(range(500))
    long = good_columns() | {"items": [events] * 4, "shops": [[e % ROWS for e in events]] * 4}
    short = long | {name: [bag[-MAX_LENGTH:] for bag in long[name]] for name in ("items", "shops")}
    assert torch.equal(encode(table_of(long)).sequence.values(), encode(table_of(short)).sequence.values())


def test_column_order_and_surplus_columns_do_not_matter():
    table = table_of(good_columns())
    shuffled = table.select(sorted(table.schema.names, reverse=True)).append_column("extra", pa.array([1.0] * 4))
    a, b = encode(table), encode(shuffled)
    assert torch.equal(a.dense, b.dense)
    assert torch.equal(a.pooled.values(), b.pooled.values())
    assert torch.equal(a.sequence.values(), b.sequence.values())


def test_zero_rows_are_legal():
    batch = encode(table_of(good_columns()).slice(0, 0))
    assert (len(batch), batch.dense.shape, batch.sequence.values().numel()) == (0, (0, 2), 0)
    assert batch.sequence.lengths().numel() == 0


def test_record_batches_and_chunked_tables_give_the_same_batch():
    table = table_of(good_columns())
    chunked = pa.concat_tables([table.slice(0, 1), table.slice(1, 3)])
    for other in (table.to_batches()[0], chunked):
        assert torch.equal(encode(other).sequence.values(), encode(table).sequence.values())


def test_without_labels_neither_label_nor_group_is_read():
    table = table_of(good_columns()).drop_columns(["label"])
    batch = encode(table, labelled=False)
    assert batch.labels.tolist() == [0] * 4
    assert batch.groups.tolist() == [0] * 4
    encoder = fitted(recipe())
    assert set(encoder.columns) - set(encoder.feature_columns) == {"label"}


@pytest.mark.parametrize("label", [[True, False, False, True], [1.0, 0.0, 0.0, 1.0]])
def test_boolean_and_float_labels_are_accepted(label):
    assert encode(table_of(good_columns() | {"label": label})).labels.tolist() == [1, 0, 0, 1]


def test_an_encoder_without_statistics_refuses_to_encode_but_not_where_none_are_needed():
    table = table_of(good_columns())
    with pytest.raises(UserError, match="scale of the number columns"):
        Encoder(recipe()).encode(table, np.arange(4))
    batch = Encoder(recipe(transform="none")).encode(table, np.arange(4))
    assert batch.dense.tolist() == [[1, 30], [2, 40], [4, 50], [5, 60]]


def test_statistics_merge_to_those_of_all_rows_in_any_order():
    rng = np.random.default_rng(0)
    numbers = rng.normal(1e7, [[1], [1000]], size=(2, 999))
    rows = np.arange(999)
    cuts = [0, 1, 100, 100, 950]
    parts = [
        Statistics.of(*pair, 1) for pair in zip(np.split(numbers, cuts, axis=1), np.split(rows, cuts), strict=True)
    ]
    random.Random(0).shuffle(parts)
    merged = functools.reduce(Statistics.merge, parts)
    assert merged.count.tolist() == [999, 999]
    whole = Statistics.of(numbers, rows, 1)
    assert (merged.low == numbers.min(axis=1)).all()
    assert (merged.high == numbers.max(axis=1)).all()
    assert (merged.priority == whole.priority).all()
    assert (merged.sample == whole.sample).all()
    np.testing.assert_allclose(merged.mean, numbers.mean(axis=1), rtol=1e-14)
    np.testing.assert_allclose(merged.squares, numbers.var(axis=1) * 999, rtol=1e-9)


def test_scan_and_fit_standardize_the_training_data_even_at_a_huge_scale():
    rng = np.random.default_rng(1)
    price = rng.normal(1e7, 3, size=4)
    table = table_of(good_columns() | {"price": price.tolist()}, price=pa.float64())
    encoder = Encoder(recipe())
    encoder.fit(scan(encoder, table, np.arange(4)))
    dense = encoder.encode(table, np.arange(4)).dense
    torch.testing.assert_close(dense.mean(dim=0), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(dense.std(dim=0, correction=0), torch.ones(2))


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e7, -3.3])
def test_a_constant_column_is_divided_by_one(constant):
    table = table_of(good_columns() | {"price": [constant] * 3 + [constant]}, price=pa.float64())
    encoder = Encoder(recipe())
    encoder.fit(scan(encoder, table, np.arange(4)).merge(scan(encoder, table.slice(1), np.arange(3))))
    assert encoder.numbers.scale[0] == 1
    torch.testing.assert_close(encoder.encode(table, np.arange(4)).dense[:, 0], torch.zeros(4))


def test_statistics_travel_in_the_state_dict():
    stream = io.BytesIO()
    torch.save(fitted(recipe()).state_dict(), stream)
    stream.seek(0)
    restored = Encoder(recipe())
    restored.load_state_dict(torch.load(stream))
    table = table_of(good_columns())
    assert torch.equal(restored.encode(table, np.arange(4)).dense, encode(table).dense)
    assert restored.numbers.shift.dtype == torch.float64


def test_the_tensor_side_exports_to_the_same_numbers():
    encoder = fitted(recipe())

    class Core(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = encoder

        def forward(self, user, shop, numbers):
            return encoder.policy("user")(user)[0], encoder.policy("shop")(shop)[0], encoder.numbers(numbers)

    inputs = (torch.tensor([5, -1, 2**60]), torch.tensor([9, 10, -4]), torch.eye(2).double())
    for exported, eager in zip(torch.export.export(Core(), inputs).module()(*inputs), Core()(*inputs), strict=True):
        assert torch.equal(exported, eager)


@pytest.mark.parametrize(
    "nothing",
    [pa.nulls(4), pa.array([[], None, [], []], pa.list_(pa.int64(), 0)), pa.array([[], None, [], []])],
    ids=str,
)
def test_a_history_that_is_always_empty_is_read_as_empty_whatever_its_type(nothing):
    table = table_of(good_columns())
    for name in ("items", "shops", "tags"):
        table = table.set_column(table.schema.get_field_index(name), name, nothing)
    assert Encoder(recipe()).schema_problems(table.schema, "P") == []
    for part in (table, pa.concat_tables([table.slice(0, 1), table.slice(1)])):
        batch = encode(part)
        for name in ("items", "shops", "tags"):
            assert bags(batch, name) == [[]] * 4
        assert scan(Encoder(recipe()), part, np.arange(4)).count.tolist() == [4, 4]


def test_encoding_is_not_disturbed_by_a_model_that_is_traced_meanwhile():
    """torch.fx replaces the calls of all modules while it traces; the reader's thread goes on encoding then."""
    used, table = recipe(), table_of(good_columns())
    encoder, found = fitted(used), []

    class Traced(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=lambda: found.append(encoder.encode(table, np.arange(100, 104))))
            thread.start()
            thread.join()
            return x

    torch.fx.Tracer().trace(Traced())
    assert found, "the thread failed"
    expected = encode(table, used)
    assert torch.equal(found[0].dense, expected.dense)
    assert torch.equal(found[0].pooled.values(), expected.pooled.values())
