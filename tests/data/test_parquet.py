"""Parquet files that are unusual: no regular files, lists that are always empty."""

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.data.parquet import ParquetData
from recsys.data.reader import Reader
from recsys.errors import UserError


def test_a_pipe_or_device_is_refused_at_once_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "f.parquet")
    for path in (tmp_path / "f.parquet", tmp_path, "/dev/zero"):
        with pytest.raises(UserError, match=r"Received: a pipe, socket or device. Allowed: a regular file. Do: "):
            ParquetData(path)


def test_a_link_to_a_file_is_read_and_a_link_to_nothing_is_named(tmp_path):
    pq.write_table(pa.table({"x": [1]}), tmp_path / "data")
    (tmp_path / "a.parquet").symlink_to(tmp_path / "data")
    assert ParquetData(tmp_path).num_rows == 1
    (tmp_path / "b.parquet").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"b\.parquet.*a link to nothing"):
        ParquetData(tmp_path)


def test_a_path_that_no_file_system_takes_is_a_clear_error():
    with pytest.raises(UserError, match="cannot be listed"):
        ParquetData("x" * 5000)


def test_lists_of_the_fixed_size_0_are_read_as_empty_lists(tmp_path):
    for name, values in (("a", [[], [], []]), ("b", [[], None]), ("c", [None])):
        empty = pa.array(values, pa.list_(pa.int64(), 0))
        pq.write_table(pa.table({"x": range(len(values)), "l": empty}), tmp_path / f"{name}.parquet")
    pq.write_table(pa.table({"x": [7], "l": [[1, 2]]}), tmp_path / "d.parquet")
    data = ParquetData(tmp_path)
    assert data.schema.field("l").type == pa.list_(pa.int64())
    for names in (["l", "x"], ["l"]):
        (table,) = [table for table, _ in Reader(data, names, batch_size=100).iterate(0)]
        assert [value or [] for value in table["l"].to_pylist()] == [[]] * 6 + [[1, 2]]
        assert table.column_names == names


def test_columns_of_the_type_null_are_read_next_to_others(tmp_path):
    pq.write_table(pa.table({"x": [1, 2], "l": pa.nulls(2)}), tmp_path / "a.parquet")
    (table,) = [table for table, _ in Reader(ParquetData(tmp_path), ["l", "x"], batch_size=9).iterate(0)]
    assert table.to_pydict() == {"l": [None, None], "x": [1, 2]}
