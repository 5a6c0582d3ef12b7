import json
import random
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from recsys import ids
from recsys.data import columns
from recsys.recipe import RESERVED_ROWS
from tests._reference_hash import WORD, fnv1a, splitmix64

EDGES = [0, 1, -1, 2, 2**31, 2**53, 2**53 + 1, -(2**63), 2**63 - 1]


def keys_of(strings: list[str]) -> list[int]:
    keys, _ = columns.id_keys(pa.array(strings, pa.string()))
    return [key % WORD for key in keys.tolist()]


def test_string_keys_equal_the_published_vectors_of_fnv1a():
    # Noll's own test suite, http://www.isthe.com/chongo/src/fnv/test_fnv.c (FNV-1a, 64 bits).
    published = {"": 0xCBF29CE484222325, "a": 0xAF63DC4C8601EC8C, "b": 0xAF63DF4C8601F1A5, "foobar": 0x85944171F73967E8}
    assert keys_of(list(published)) == list(published.values())


def test_mix_equals_the_published_vectors_of_splitmix64():
    # Vigna's splitmix64.c, seeds 1234567 (as in the Rosetta Code task "Pseudo-random numbers/Splitmix64") and 0.
    published = {1234567: 6457827717110365317, 0: 0xE220A8397B1DCDAF}
    assert [v % WORD for v in ids.mix(torch.tensor(list(published))).tolist()] == list(published.values())


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 40, 500])
def test_string_keys_equal_a_byte_by_byte_reference(count):
    rng = random.Random(count)
    strings = [
        "".join(rng.choices("aZ9 \u00e9\u6f22\U0001f642\0", k=rng.choice([0, 1, 8, 8, 8, 30]))) for _ in range(count)
    ]
    strings[: count // 20] = ["x" * rng.randrange(2000) for _ in range(count // 20)]
    assert keys_of(strings) == [fnv1a(s.encode()) for s in strings]


@pytest.mark.parametrize("num_rows", [1, 2, 3, 1000, 2**31 + 11, 2**40 - 1, 2**40])
def test_hashed_rows_equal_the_unsigned_reference(num_rows, generator):
    keys = [*EDGES, *torch.randint(-(2**63), 2**63 - 1, (300,), generator=generator()).tolist()]
    expected = [ids.FIRST_ROW + (splitmix64(key % WORD) * num_rows >> 64) for key in keys]
    assert ids.hashed_rows(torch.tensor(keys), num_rows).tolist() == expected


def test_hashing_leaves_its_input_alone():
    keys = torch.tensor(EDGES)
    ids.hashed_rows(keys, 7)
    assert keys.tolist() == EDGES


def test_hashed_rows_fill_a_table_evenly():
    # Chi-square of 100 cells: mean 99, standard deviation sqrt(198) = 14; 5 deviations off is one in a million.
    for keys in (torch.arange(100_000), torch.arange(100_000) * 4096, -torch.arange(100_000)):
        counts = np.bincount(ids.hashed_rows(keys, 100).numpy() - ids.FIRST_ROW, minlength=100)
        assert ((counts - 1000) ** 2 / 1000).sum() < 99 + 5 * 14


def test_exact_rows_keep_order_and_never_leave_the_table():
    rows = ids.exact_rows(torch.tensor([0, 1, 9, 10, -1, 2**63 - 1, -(2**63)]), 10).tolist()
    assert rows == [3, 4, 12, ids.UNKNOWN, ids.UNKNOWN, ids.UNKNOWN, ids.UNKNOWN]


def test_reserved_codes_differ_and_lie_before_the_first_row():
    assert {ids.PADDING, ids.MISSING, ids.UNKNOWN} == {0, 1, 2}
    assert ids.FIRST_ROW == RESERVED_ROWS == 3


def test_ids_above_2_to_the_53_keep_their_neighbours_apart():
    values = [2**53, 2**53 + 1, None, 2**63 - 1, 2**63 - 2]
    keys, missing = columns.id_keys(pa.array(values, pa.int64()))
    assert keys.tolist() == [v or 0 for v in values]
    assert missing.tolist() == [v is None for v in values]


def test_the_row_mapping_exports_to_the_same_rows():
    class Rows(torch.nn.Module):
        def forward(self, keys: torch.Tensor) -> torch.Tensor:
            return torch.cat([ids.hashed_rows(keys, 1000), ids.exact_rows(keys, 5)])

    keys = torch.tensor(EDGES)
    exported = torch.export.export(Rows(), (keys,)).module()
    assert torch.equal(exported(keys), Rows()(keys))


def test_the_vectors_in_the_documentation_are_right():
    text = (Path(__file__).parents[1] / "docs" / "ids.md").read_text(encoding="utf-8")
    pattern = r"^\| `(.*?)` \| (0x[0-9a-f]{16}) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$"
    rows = re.findall(pattern, text, re.MULTILINE)
    assert len(rows) >= 12
    assert ids.HASH in text
    for raw, key, mixed, row_1000, row_large, second in rows:
        expected = fnv1a(json.loads(raw).encode()) if raw.startswith('"') else int(raw) % WORD
        assert int(key, 16) == expected
        assert int(mixed) == splitmix64(expected)
        assert [int(row_1000), int(row_large)] == [3 + (splitmix64(expected) * n >> 64) for n in (1000, 2**31 + 11)]
        assert int(second) == splitmix64((expected + 0x9E3779B97F4A7C15) % WORD)
    crosses = re.findall(r"^\| `(\[.*\])` \| (0x[0-9a-f]{16}) \|$", text, re.MULTILINE)
    assert len(crosses) >= 4
    for raw, key in crosses:
        first, *others = [fnv1a(v.encode()) if isinstance(v, str) else v for v in json.loads(raw)]
        for other in others:
            first = splitmix64((splitmix64(first) + other) % WORD)
        assert int(key, 16) == first
