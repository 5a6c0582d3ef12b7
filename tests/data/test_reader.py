import dataclasses
import gc
import itertools
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.data import parquet
from recsys.data.reader import ParquetData, Prefetcher, Reader
from recsys.errors import UserError


def write(path, first, last, row_group_size=None):
    table = pa.table({"row": pa.array(range(first, last), pa.int64()), "text": [f"r{i}" for i in range(first, last)]})
    pq.write_table(table, path, row_group_size=row_group_size)


@pytest.fixture
def one_group(tmp_path):
    """One file with one row group of 101 rows."""
    write(tmp_path / "a.parquet", 0, 101)
    return ParquetData(tmp_path)


@pytest.fixture
def uneven(tmp_path):
    """200 rows in four files, one of them empty, in row groups of different sizes."""
    folder = tmp_path / "uneven"
    folder.mkdir()
    for name, first, last, size in (("a", 0, 70, 30), ("b", 70, 70, None), ("c", 70, 71, None), ("d", 71, 200, 17)):
        write(folder / f"{name}.parquet", first, last, size)
    return ParquetData(folder)


def read(reader, epoch=0, start_step=0):
    """Rows of each step, after checking that the positions and all columns tell the same rows."""
    if isinstance(epoch, int):
        epoch = dataclasses.replace(reader.epoch(epoch), start_step=start_step)
    steps = []
    for table, positions in reader.iterate(epoch):
        assert table.schema.equals(reader.schema)
        assert table.column("row").to_pylist() == positions.tolist()
        assert table.column("text").to_pylist() == [f"r{i}" for i in positions]
        steps.append(positions.tolist())
    return steps


def readers(data, world_size, **options):
    return [Reader(data, ["text", "row"], rank=r, world_size=world_size, **options) for r in range(world_size)]


@pytest.mark.parametrize("shuffle_rows", [0, 1, 7, 30, 1000])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("name", ["one_group", "uneven"])
def test_each_epoch_gives_every_row_to_exactly_one_rank_once(name, world_size, shuffle_rows, request, monkeypatch):
    monkeypatch.setattr(parquet, "_READ_ROWS", 10)
    data = request.getfixturevalue(name)
    ranks = readers(data, world_size, batch_size=8, shuffle_rows=shuffle_rows)
    for epoch in (1, 2):
        rows = [list(itertools.chain(*read(reader, epoch))) for reader in ranks]
        assert sorted(itertools.chain(*rows)) == list(range(data.num_rows))
        assert max(map(len, rows)) - min(map(len, rows)) <= 1
        assert [len(r) for r in rows] == [reader.num_rows for reader in ranks]
        # Shares are contiguous ranges, in the order of the ranks.
        assert list(itertools.chain(*map(sorted, rows))) == list(range(data.num_rows))


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 100), (2, 1), (2, 8), (3, 50), (7, 4), (150, 3), (1, 1000)])
def test_all_ranks_make_the_same_steps_of_nearly_equal_size(one_group, world_size, batch_size):
    ranks = readers(one_group, world_size, batch_size=batch_size)
    sizes = [[len(step) for step in read(reader)] for reader in ranks]
    assert (
        {len(s) for s in sizes}
        == {reader.num_steps for reader in ranks}
        == {-(-len(range(0, 101, world_size)) // batch_size)}
    )
    for own in sizes:
        assert max(own) <= batch_size
        assert max(own) - min(own) <= 1
    for step in range(ranks[0].num_steps):
        assert all(reader.epoch(0).rows_by_rank(step) == [s[step] for s in sizes] for reader in ranks)


def test_a_remainder_of_one_row_makes_no_tiny_step(one_group):
    (reader,) = readers(one_group, 1, batch_size=100)
    assert [len(step) for step in read(reader)] == [50, 51]


def test_without_shuffling_rows_keep_the_order_of_the_files(uneven):
    rows = [list(itertools.chain(*read(reader))) for reader in readers(uneven, 3, batch_size=16)]
    assert list(itertools.chain(*rows)) == list(range(200))


def test_shuffling_depends_on_seed_and_epoch_and_on_nothing_else(uneven):
    def order(epoch, seed):
        (reader,) = readers(uneven, 1, batch_size=13, shuffle_rows=50, seed=seed)
        return list(itertools.chain(*read(reader, epoch)))

    first = order(0, 1)
    assert first == order(0, 1)
    different = [first, order(1, 1), order(0, 2), list(range(200))]
    assert all(a != b for a, b in itertools.combinations(different, 2))


def test_the_order_is_told_without_reading(uneven, monkeypatch):
    for shuffle_rows in (0, 50):
        (reader,) = readers(uneven, 1, batch_size=13, shuffle_rows=shuffle_rows)
        expected = list(itertools.chain(*read(reader, 3)))
        with monkeypatch.context() as patch:
            patch.setattr(ParquetData, "open", None)
            windows = list(reader.order(3))
        assert np.concatenate(windows).tolist() == expected
        assert all(len(window) <= (shuffle_rows or 200) for window in windows)


def test_a_window_mixes_rows_of_several_row_groups(uneven):
    (reader,) = readers(uneven, 1, batch_size=13, shuffle_rows=100)
    groups = [
        {int(np.searchsorted([g.start for g in uneven.row_groups], p, "right")) for p in w} for w in reader.order(0)
    ]
    assert all(len(found) > 2 for found in groups)
    # Row groups come in another order: the first window is not made of the first 100 rows.
    assert set(next(reader.order(0)).tolist()) != set(range(100))


@pytest.mark.parametrize("shuffle_rows", [0, 25])
def test_starting_at_a_step_gives_the_same_remaining_steps(uneven, shuffle_rows):
    for reader in readers(uneven, 3, batch_size=9, shuffle_rows=shuffle_rows):
        whole = read(reader, 1)
        for start in (0, 1, 4, reader.num_steps - 1, reader.num_steps):
            assert read(reader, 1, start) == whole[start:]


def test_windows_before_the_start_are_not_decoded(uneven, monkeypatch):
    (reader,) = readers(uneven, 1, batch_size=25, shuffle_rows=50)
    decoded = []
    original = parquet.Decoder.read
    monkeypatch.setattr(parquet.Decoder, "read", lambda self, piece: decoded.append(piece) or original(self, piece))
    read(reader, 0, 6)
    *_, last = reader._stream(0, 0, reader.num_rows)
    assert decoded == last.pieces


def test_each_row_group_is_decoded_once_even_when_windows_cut_it(one_group, monkeypatch):
    seeks = []
    original = parquet.Decoder._seek
    monkeypatch.setattr(parquet.Decoder, "_seek", lambda self, group: seeks.append(group) or original(self, group))
    monkeypatch.setattr(parquet, "_READ_ROWS", 10)
    (reader,) = readers(one_group, 1, batch_size=8, shuffle_rows=7)
    read(reader)
    assert len(seeks) == 1


def test_more_ranks_than_rows_and_no_rows_at_all(tmp_path):
    write(tmp_path / "two.parquet", 0, 2)
    sizes = [
        [len(s) for s in read(reader)] for reader in readers(ParquetData(tmp_path), 3, batch_size=5, shuffle_rows=5)
    ]
    assert sorted(sizes) == [[0], [1], [1]]
    write(tmp_path / "two.parquet", 0, 0)
    (reader,) = readers(ParquetData(tmp_path / "two.parquet"), 1, batch_size=5)
    assert (reader.num_steps, read(reader), list(reader.order(0))) == (0, [], [])


def test_stray_hidden_and_empty_files_do_not_disturb(tmp_path):
    write(tmp_path / "b.parquet", 3, 7)
    write(tmp_path / "a.parquet", 0, 3)
    write(tmp_path / "aa.parquet", 0, 0)
    for name in ("_SUCCESS", ".x.crc", "part.tmp", "_meta.parquet", ".c.parquet"):
        (tmp_path / name).write_bytes(b"not parquet")
    (tmp_path / "folder.parquet").mkdir()
    data = ParquetData(tmp_path)
    assert [file.name for file in data.files] == ["a.parquet", "aa.parquet", "b.parquet"]
    assert data.skipped == sorted(["_SUCCESS", ".x.crc", "part.tmp", "_meta.parquet", ".c.parquet", "folder.parquet"])
    (reader,) = readers(data, 1, batch_size=4)
    assert list(itertools.chain(*read(reader))) == list(range(7))


def test_unreadable_data_is_an_error_that_names_it(tmp_path):
    with pytest.raises(UserError, match="absent"):
        ParquetData(tmp_path / "absent")
    (tmp_path / "note.txt").write_text("x")
    with pytest.raises(UserError, match="no parquet file"):
        ParquetData(tmp_path)
    for content in (b"", b"PAR1 not really PAR1"):
        (tmp_path / "broken.parquet").write_bytes(content)
        with pytest.raises(UserError, match=r"broken\.parquet"):
            ParquetData(tmp_path)
    (tmp_path / "broken.parquet").unlink()
    (tmp_path / "gone.parquet").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"gone\.parquet"):
        ParquetData(tmp_path)


def test_a_file_damaged_in_the_middle_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "a.parquet"
    write(path, 0, 5000)
    data = ParquetData(path)
    content = bytearray(path.read_bytes())
    content[4:3000] = bytes(2996)
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.parquet"):
        list(Reader(data, ["row"], batch_size=100).iterate(0))


def test_files_that_disagree_are_an_error_that_names_file_and_column(tmp_path):
    pq.write_table(pa.table({"x": [1], "y": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"y": ["1"], "z": [1]}), tmp_path / "b.parquet")
    with pytest.raises(UserError) as caught:
        ParquetData(tmp_path)
    for part in (
        "'x' is nothing in 'b.parquet' and int64 in the files before it",
        "'y' is string in 'b.parquet' and int64",
        "'z' is int64 in 'b.parquet' and nothing",
    ):
        assert part in str(caught.value)


def test_column_order_dictionary_width_and_list_item_names_may_differ_between_files(tmp_path):
    small = pa.array(["a", "b"]).dictionary_encode().cast(pa.dictionary(pa.int8(), pa.string()))
    large = pa.array([f"v{i}" for i in range(300)]).dictionary_encode().cast(pa.dictionary(pa.int16(), pa.string()))
    items = pa.list_(pa.field("element", pa.int64(), nullable=False))
    first = pa.table({"c": small, "l": [[1], [2, 3]], "x": [0, 1]})
    second = pa.table({"x": range(300), "l": pa.array([[i] for i in range(300)], items), "c": large})
    pq.write_table(first, tmp_path / "a.parquet")
    pq.write_table(second, tmp_path / "b.parquet")
    expected = sorted(map(str, first.to_pylist() + second.select(["c", "l", "x"]).to_pylist()))
    for shuffle_rows in (0, 1000):
        reader = Reader(ParquetData(tmp_path), ["c", "l", "x"], batch_size=100, shuffle_rows=shuffle_rows)
        found = [row for table, _ in reader.iterate(0) for row in table.to_pylist()]
        assert sorted(map(str, found)) == expected


def test_columns_of_nulls_only_in_some_files_take_the_type_of_the_others(tmp_path):
    parts = [
        {"c": [None, None], "l": [[], []]},
        {"c": [2**60, None], "l": [[1], [2**60]]},
        {"c": [None], "l": [None]},
    ]
    for name, part in zip("abc", parts, strict=True):
        pq.write_table(pa.table(part), tmp_path / f"{name}.parquet")
    data = ParquetData(tmp_path)
    assert data.schema.types == [pa.int64(), pa.list_(pa.int64())]
    tables = [table for table, _ in Reader(data, ["c", "l"], batch_size=2).iterate(0)]
    expected = {name: [value for part in parts for value in part[name]] for name in ("c", "l")}
    assert pa.concat_tables(tables).to_pydict() == expected


def test_an_unknown_column_is_an_error_with_the_near_name(one_group):
    with pytest.raises(UserError, match=r"'txet'.*mean 'text'"):
        Reader(one_group, ["row", "txet"], batch_size=1)


def test_the_fingerprint_follows_the_data_and_not_its_place(tmp_path):
    for name, last in (("here", 10), ("there", 10), ("other", 11)):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "a.parquet", 0, last)
    here, there, other = (ParquetData(tmp_path / name).fingerprint() for name in ("here", "there", "other"))
    assert here == there != other
    write(tmp_path / "there" / "a.parquet", 0, 10, row_group_size=5)
    assert ParquetData(tmp_path / "there").fingerprint() != here


_MEASURE = """
import sys
import numpy as np, pyarrow as pa
from recsys.data.reader import ParquetData, Reader
def kilobytes(entry):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(entry))
reader = Reader(ParquetData(sys.argv[1]), [f"c{i}" for i in range(30)], batch_size=512, shuffle_rows=int(sys.argv[2]))
start = kilobytes("VmRSS")
for _ in reader.iterate(0):
    pass
print((kilobytes("VmHWM") - start) // 1024)
"""


@pytest.fixture(scope="module")
def sixty_megabytes(tmp_path_factory):
    """One file of 60 MB with a single row group."""
    path = tmp_path_factory.mktemp("large") / "large.parquet"
    rng = np.random.default_rng(0)
    table = pa.table({f"c{i}": rng.integers(0, 2**62, 260_000) for i in range(30)})
    pq.write_table(table, path, row_group_size=1_000_000, compression="none", use_dictionary=False)
    assert path.stat().st_size > 60e6
    return path


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("shuffle_rows", [0, 65_536])
def test_reading_60_megabytes_grows_memory_by_less_than_200(sixty_megabytes, shuffle_rows):
    command = [sys.executable, "-c", _MEASURE, str(sixty_megabytes), str(shuffle_rows)]
    grown_mb = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown_mb < 200


def test_prefetching_changes_nothing_and_runs_ahead_by_no_more_than_its_depth():
    made = []

    def source():
        for i in range(20):
            made.append(i)
            yield i

    items = Prefetcher(source(), depth=3)
    assert next(items) == 0
    time.sleep(0.05)
    assert len(made) <= 5  # One taken, three queued, one waiting for room.
    assert list(items) == list(range(1, 20))
    assert next(items, None) is None
    assert items.waited_s > 0


def test_an_exception_comes_out_unchanged_and_in_its_place():
    error = KeyError("bad")

    def source():
        yield 1
        raise error

    items = Prefetcher(source())
    assert next(items) == 1
    with pytest.raises(KeyError) as caught:
        next(items)
    assert caught.value is error
    assert list(items) == []


@pytest.mark.parametrize("how", ["close", "forget"])
def test_the_thread_ends_when_the_consumer_stops_early(how):
    closed = threading.Event()

    def source():
        try:
            yield from itertools.count()
        finally:
            closed.set()

    items = Prefetcher(source())
    next(items)
    thread, known = items._thread, weakref.ref(items)
    if how == "close":
        items.close()
        assert not thread.is_alive()
        assert list(items) == []
    del items
    gc.collect()
    assert known() is None
    assert closed.wait(5)
    thread.join(5)
    assert not thread.is_alive()
