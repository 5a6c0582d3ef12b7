import collections
import contextlib
import pathlib
import pickle
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.counting import IdCounts, collect, raw_ids
from recsys.data import columns
from recsys.errors import UserError
from recsys.frequencies import Frequencies
from tests._reference_hash import WORD, fnv1a, splitmix64

ROOT = pathlib.Path(__file__).parent.parent
HARD_LIMIT_S = 120

# Two texts with one key, published by others as a collision of FNV-1a; the test that uses them checks it.
CLASH = ["8yn0iYCKYHlIj4-BwPqk", "GReLUrM4wMqfg9yzV3KQ"]

ENCODINGS = [
    lambda a: a,
    lambda a: a.cast(pa.large_string()),
    lambda a: a.dictionary_encode(),
    lambda a: pa.concat_arrays([pa.array(["before"]), a]).slice(1),
    lambda a: pa.concat_arrays([pa.array(["not used"]), a]).dictionary_encode().slice(1),
    lambda a: pa.concat_arrays([pa.array([str(i) for i in range(50)]), a]).dictionary_encode().slice(50),
]

texts = st.lists(st.sampled_from(["", "a", "b", "aa", "\U0001f642", "\u6f22\u5b57", "x" * 300]) | st.text(max_size=4))
integers = st.lists(st.integers(-3, 3) | st.integers(-(2**63), 2**63 - 1))


def add(counts: IdCounts, values: pa.Array) -> None:
    """As the encoder does it."""
    keys, missing = columns.id_keys(values)
    counts.add(keys, values, None if missing is None else ~missing)


def contents(counts: IdCounts) -> list[tuple]:
    """(raw id, key, count) in the order in which they come."""
    found = []
    for part in counts.parts():
        raw = raw_ids(part, counts.kind).to_pylist()
        found += zip(raw, part.keys.tolist(), part.counts.tolist(), strict=True)
    return found


def signed(value: int) -> int:
    return value - WORD if value >= WORD // 2 else value


def expected(ids: list, key_of) -> list[tuple]:
    """By `Counter`, in the order that the file of a vocabulary has, too."""
    counter = collections.Counter(ids)
    return sorted(((raw, key_of(raw), n) for raw, n in counter.items()), key=lambda row: splitmix64(row[1] % WORD))


@settings(deadline=None, max_examples=60)
@given(blocks=st.lists(integers, max_size=6), limit=st.sampled_from([1, 2, 7, 1000]))
def test_integers_are_counted_as_a_counter_counts_them_with_and_without_the_disk(blocks, limit):
    with contextlib.closing(IdCounts(limit=limit)) as counts:
        for block in blocks:
            add(counts, pa.array(block, pa.int64()))
        ids = [i for block in blocks for i in block]
        assert contents(counts) == expected(ids, lambda i: i)
        assert (counts.occurrences, counts.missing) == (len(ids), 0)


@settings(deadline=None, max_examples=60)
@given(
    blocks=st.lists(st.tuples(texts, st.sampled_from(ENCODINGS)), max_size=6),
    limit=st.sampled_from([1, 5, 1000]),
)
def test_texts_of_any_encoding_are_counted_as_a_counter_counts_them(blocks, limit):
    with contextlib.closing(IdCounts(limit=limit)) as counts:
        for block, encoding in blocks:
            add(counts, encoding(pa.array(block, pa.string())))
        add(counts, ENCODINGS[4](pa.array(["b", "b", "b"])))  # more rows than values, of which one is not used
        ids = [*(i for block, _ in blocks for i in block), "b", "b", "b"]
        assert contents(counts) == expected(ids, lambda i: signed(fnv1a(i.encode())))


@settings(deadline=None, max_examples=30)
@given(
    ids=st.lists(st.integers(0, 40) | st.none(), max_size=200), seed=st.integers(0, 5), limit=st.sampled_from([3, 999])
)
def test_nulls_are_counted_apart_and_the_order_of_blocks_changes_nothing(ids, seed, limit):
    found = []
    for order in (ids, np.random.default_rng(seed).permutation(np.array(ids, dtype=object)).tolist()):
        with contextlib.closing(IdCounts(limit=limit)) as counts:
            for first in range(0, len(order), 17):
                block = [None if i is None else str(i) for i in order[first : first + 17]]
                add(counts, pa.array(block, pa.string()))
            found.append((contents(counts), counts.missing, counts.occurrences))
    assert found[0] == found[1]
    assert found[0][1:] == (ids.count(None), len(ids) - ids.count(None))


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [
        (kind, np.iinfo(kind.to_pandas_dtype()).min, np.iinfo(kind.to_pandas_dtype()).max)
        for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
    ],
    ids=str,
)
def test_the_least_and_greatest_of_every_integer_type_are_kept_without_loss(kind, low, high):
    for encode in (lambda a: a, lambda a: a.dictionary_encode()):
        with contextlib.closing(IdCounts()) as counts:
            add(counts, encode(pa.array([low, high, high, 1, None], kind)))
            assert contents(counts) == expected([int(low), int(high), int(high), 1], signed)
            assert counts.missing == 1


def test_booleans_are_the_integers_0_and_1():
    with contextlib.closing(IdCounts()) as counts:
        add(counts, pa.array([True, False, True]))
        assert contents(counts) == expected([1, 0, 1], int)


def test_signed_and_unsigned_columns_of_one_table_meet_in_equal_keys():
    with contextlib.closing(IdCounts()) as counts:
        add(counts, pa.array([-1, 5], pa.int64()))
        add(counts, pa.array([2**64 - 1, 5], pa.uint64()))
        assert sorted(contents(counts)) == [(5, 5, 2), (2**64 - 1, -1, 2)]


def test_keys_without_raw_ids_are_counted():
    with contextlib.closing(IdCounts()) as counts:
        counts.add(np.array([7, -7, 7]), None, np.array([True, True, False]))
        assert sorted(contents(counts), key=lambda row: row[1]) == [(None, -7, 1), (None, 7, 1)]


@pytest.mark.parametrize("limit", [1, 1000])
@pytest.mark.parametrize("order", [CLASH, CLASH[::-1]], ids=["less-first", "greater-first"])
def test_two_texts_with_one_key_are_one_id_under_the_lesser_text_in_any_order(order, limit):
    assert fnv1a(CLASH[0].encode()) == fnv1a(CLASH[1].encode())
    with contextlib.closing(IdCounts(limit=limit)) as counts:
        for text in ["other", *order, "more", order[0], "other"]:
            add(counts, pa.array([text, text]))
        key = signed(fnv1a(CLASH[0].encode()))
        assert [row for row in contents(counts) if row[1] == key] == [(CLASH[0], key, 6)]
        assert len(contents(counts)) == 3


def test_counting_goes_on_after_the_counts_were_read():
    with contextlib.closing(IdCounts(limit=4)) as counts:
        for _ in range(2):
            add(counts, pa.array(range(20)))
            contents(counts)
        assert contents(counts) == contents(counts) == expected([*range(20), *range(20)], int)


def test_an_array_that_its_owner_changes_later_was_counted_as_it_was():
    with contextlib.closing(IdCounts()) as counts:
        keys = np.array([1, 2, 3])
        counts.add(keys, pa.array([1, 2, 3]))
        keys[:] = 9
        assert contents(counts) == expected([1, 2, 3], int)


@pytest.mark.parametrize("others", [pa.array(["a"]), None], ids=["text", "none"])
def test_ids_of_different_kinds_in_one_table_are_refused(others):
    with contextlib.closing(IdCounts()) as counts:
        add(counts, pa.array([1]))
        add(counts, pa.array([None], pa.string()))  # no id at all fits anything
        with pytest.raises(UserError, match=r"all integers, all text.* and "):
            counts.add(np.array([1]), others)


def test_no_room_on_disk_is_the_users_to_mend(tmp_path):
    with contextlib.closing(IdCounts(limit=3, folder=tmp_path / "not there")) as counts:
        with pytest.raises(UserError, match=r"put aside on disk.*TMPDIR"):
            add(counts, pa.array(range(100)))


def test_what_was_put_on_disk_is_removed_at_the_end(tmp_path):
    with contextlib.closing(IdCounts(limit=3, folder=tmp_path)) as counts:
        add(counts, pa.array(range(1000)))
        contents(counts)
        assert len(list(tmp_path.iterdir())) == 1
        assert len([p for p in tmp_path.rglob("*") if p.is_dir()]) == 1, "nested folders are removed at once"
    assert not list(tmp_path.iterdir())


MEMORY = """
import resource, sys
import numpy as np, pyarrow as pa
from recsys.counting import IdCounts
from recsys.data import columns
from recsys.vocabulary import Origin, Vocabulary

num_ids, folder, text = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "text"
counts = IdCounts(limit=50_000, folder=folder)
for first in range(0, 2 * num_ids, 50_000):
    ids = np.arange(first, first + 50_000) % num_ids
    values = pa.array(ids).cast(pa.string()) if text else pa.array(ids)
    counts.add(columns.id_keys(values)[0], values)
vocabulary = Vocabulary.choose(counts, folder + "/t.parquet", Origin("t", "", {}), hot=1000, min_count=2)
assert vocabulary.coverage.num_ids == num_ids and vocabulary.num_hot == 1000
counts.close()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


@pytest.mark.parametrize("kind", ["text", "integers"])
def test_memory_of_counting_and_writing_does_not_grow_with_the_number_of_ids(tmp_path, kind):
    peak_mib = []
    for num_ids in (200_000, 2_000_000):  # 1,800,000 ids held and sorted whole take 200 MiB and more
        command = [sys.executable, "-c", MEMORY, str(num_ids), str(tmp_path), kind]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HARD_LIMIT_S, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        peak_mib.append(float(done.stdout))
    assert peak_mib[1] - peak_mib[0] < 80, peak_mib


def rank_blocks(rank: int) -> list[list[str | None]]:
    rng = np.random.default_rng(rank)
    blocks = [[f"id{n % 300}" for n in rng.zipf(1.3, 200).tolist()] for _ in range(rank * 5)]
    return [*blocks, [None] * rank]


@pytest.mark.dist
@pytest.mark.parametrize("limit", [10, 100_000], ids=["disk", "memory"])
def test_rank_0_gets_the_counts_of_all_ranks_in_small_messages(tmp_path, limit):
    """Rank 0 has nothing of its own here, the others have unequal shares."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command = [*launcher, "-m", "tests.test_counting", str(tmp_path), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HARD_LIMIT_S, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found, occurrences, missing = pickle.loads((tmp_path / "found").read_bytes())
    ids = [i for rank in range(3) for block in rank_blocks(rank) for i in block]
    assert found == expected([i for i in ids if i is not None], lambda i: signed(fnv1a(i.encode())))
    assert (occurrences, missing) == (len(ids) - ids.count(None), ids.count(None))
    assert "integers and text" in (tmp_path / "mixed").read_text()


def worker(folder: str, limit: str) -> None:
    from recsys.distributed import process_group

    with process_group("cpu") as ranks, contextlib.closing(IdCounts(limit=int(limit))) as counts:
        for block in rank_blocks(ranks.rank):
            add(counts, pa.array(block, pa.string()))
        together = collect(counts, message_bytes=900)
        assert (together is counts) if ranks.rank == 0 else (together is None)
        if together is not None:
            found = contents(together), together.occurrences, together.missing
            pathlib.Path(folder, "found").write_bytes(pickle.dumps(found))
        with contextlib.closing(IdCounts()) as mixed:
            add(mixed, pa.array([1]) if ranks.rank == 2 else pa.array(["a"] * ranks.rank, pa.string()))
            with pytest.raises(UserError) as caught:
                collect(mixed)
            assert caught.value.is_printed_here == (ranks.rank == 0)
            pathlib.Path(folder, "mixed").write_text(str(caught.value))


def frequencies(ids: list[int], limit: int = 1000) -> Frequencies:
    with contextlib.closing(IdCounts(limit=limit)) as counts:
        add(counts, pa.array(ids, pa.int64()))
        return Frequencies.from_counts(counts)


@settings(deadline=None, max_examples=40)
@given(ids=integers, asked=integers, limit=st.sampled_from([2, 1000]))
def test_frequencies_are_those_of_a_counter_and_0_for_ids_never_seen(ids, asked, limit):
    counter = collections.Counter(ids)
    asked += ids[:5]
    found = frequencies(ids, limit).of(np.array(asked, dtype=np.int64))
    assert found.dtype == np.int64
    assert found.tolist() == [counter[i] for i in asked]


def test_frequencies_come_back_from_their_file(tmp_path):
    ids = [5, 5, -9, 2**63 - 1]
    frequencies(ids).write(tmp_path / "new" / "item.parquet")
    found = Frequencies.read(tmp_path / "new" / "item.parquet")
    assert found.of(np.array([5, -9, 2**63 - 1, 0])).tolist() == [2, 1, 1, 0]
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["item.parquet"]


@pytest.mark.parametrize("damage", ["missing", "text", "cut", "other", "unsorted", "twice", "floats"])
def test_a_file_that_holds_no_frequencies_is_refused(tmp_path, damage):
    path = tmp_path / "item.parquet"
    if damage == "text":
        path.write_text("hello")
    elif damage == "cut":
        frequencies(list(range(1000))).write(path)
        path.write_bytes(path.read_bytes()[:-100])
    elif damage != "missing":
        keys = {"unsorted": [2, 1], "twice": [1, 1], "floats": [1.0, 2.0]}.get(damage, [1, 2])
        pq.write_table(pa.table({"key": keys, "other" if damage == "other" else "count": [1, 1]}), path)
    with pytest.raises(UserError, match=r"no file of id frequencies.*count the ids again"):
        Frequencies.read(path)


def test_frequencies_that_cannot_be_written_are_the_users_to_mend(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        frequencies([1]).write(tmp_path / "file" / "item.parquet")


def test_neither_torch_nor_the_recipe_is_imported_before_something_is_counted():
    code = "import sys, recsys.counting, recsys.vocabulary; assert not {'torch', 'recsys.recipe'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=HARD_LIMIT_S)


if __name__ == "__main__":
    worker(*sys.argv[1:])
