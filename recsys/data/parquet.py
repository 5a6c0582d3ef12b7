"""Parquet files as one data set: what their metadata says, and a decoder that holds little of them in memory."""

import contextlib
import hashlib
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from recsys.errors import UserError

_READ_ROWS = 65_536
"""Rows decoded at once: large reads are quicker than small ones."""
_READ_BYTES = 1 << 18
"""Bytes of a column read at once, so that a huge row group is never held in memory as a whole."""


class RowGroup(NamedTuple):
    """Row group `number` of file number `file`; `start` is the position of its first row in the data set."""

    file: int
    number: int
    start: int
    num_rows: int


class ParquetData:
    """A parquet file, or the parquet files right inside a folder sorted by name, as one data set.

    Attributes:
        path: The file or folder.
        files: The files that are read.
        skipped: Names in the folder that are not: without `.parquet` at the end, with `_` or `.` in front, folders.
        schema: Columns by name and type, in the order of the first file; their order in the others is free.
        num_rows: Rows of all files.
        row_groups: Where they are, in order.
    """

    def __init__(self, path: str | pathlib.Path) -> None:
        """Read the metadata of all files, once.

        Raises:
            UserError: There is nothing, a file cannot be read, or files disagree about a column.
        """
        self.path = pathlib.Path(path)
        self.files, self.skipped = _list_files(self.path)
        self.row_groups: list[RowGroup] = []
        self.num_rows = 0
        self.schema = pa.schema([])
        self._metadata: list[pq.FileMetaData] = []
        for number, file in enumerate(self.files):
            with _reading(file), pq.ParquetFile(file) as opened:
                metadata, schema = opened.metadata, opened.schema_arrow
            schema = pa.schema([(field.name, _plain(field.type)) for field in schema])
            self.schema = _merged(self.schema, schema, file) if number else schema
            self._metadata.append(metadata)
            for index in range(metadata.num_row_groups):
                self.row_groups.append(RowGroup(number, index, self.num_rows, metadata.row_group(index).num_rows))
                self.num_rows += self.row_groups[-1].num_rows

    def fingerprint(self) -> str:
        """Digest of file names, sizes, row groups and schema; where the data set lies does not matter."""
        files = [(file.name, file.stat().st_size) for file in self.files]
        schema = [(field.name, str(field.type)) for field in self.schema]
        return hashlib.sha256(json.dumps([files, self.row_groups, schema]).encode()).hexdigest()

    def open(self, number: int, dictionaries: Sequence[str] = ()) -> pq.ParquetFile:
        """File number `number`, without reading its metadata again; the caller closes it.

        Args:
            number: Place in `files`.
            dictionaries: Columns of text that are read as dictionaries.
        """
        return pq.ParquetFile(
            self.files[number],
            metadata=self._metadata[number],
            buffer_size=_READ_BYTES,
            pre_buffer=False,
            read_dictionary=list(dictionaries),
        )


def _list_files(path: pathlib.Path) -> tuple[list[pathlib.Path], list[str]]:
    files: list[pathlib.Path] = []
    skipped: list[pathlib.Path] = []
    try:
        if not path.is_dir():
            if not path.exists():
                raise UserError("There is no such file or folder of data", received=str(path), fix="correct the path")
            return [_regular(path)], []
        for entry in sorted(path.iterdir(), key=lambda entry: entry.name):
            wanted = entry.suffix == ".parquet" and entry.name[0] not in "_." and not entry.is_dir()
            (files if wanted else skipped).append(_regular(entry) if wanted else entry)
    except OSError as error:
        raise UserError(
            f"The data in {str(path)!r} cannot be listed",
            received=str(error),
            fix="correct the path or its permissions",
        ) from error
    if not files:
        raise UserError(
            f"The folder {str(path)!r} holds no parquet file",
            received=f"{len(skipped)} other names",
            allowed="files that end in .parquet and do not begin with `_` or `.`",
            fix="give the folder that holds them, or one file",
        )
    return files, [entry.name for entry in skipped]


def _regular(file: pathlib.Path) -> pathlib.Path:
    """The file itself; opening a pipe would wait for ever, and a device would be read as data."""
    if not file.is_file():
        raise UserError(
            f"{str(file)!r} is no file that can be read as parquet",
            received="a link to nothing" if file.is_symlink() and not file.exists() else "a pipe, socket or device",
            allowed="a regular file",
            fix="store the data in a file, or move this one out of the folder",
        )
    return file


@contextlib.contextmanager
def _reading(file: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"The file {str(file)!r} cannot be read as parquet",
            received=" ".join(str(error).split()),
            fix="write it again, or move it out of the folder",
        ) from error


def _plain(kind: pa.DataType) -> pa.DataType:
    """A type without what writers choose freely: width of dictionary indices, names and nullability of list items."""
    if pa.types.is_dictionary(kind):
        return pa.dictionary(pa.int32(), kind.value_type)
    if _is_always_empty(kind):
        return pa.list_(_plain(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain(kind.value_type), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain(kind.value_type))
    return pa.list_(_plain(kind.value_type)) if pa.types.is_list(kind) else kind


def _is_always_empty(kind: pa.DataType) -> bool:
    """Lists of the fixed size 0: Arrow writes them, but fails to read them back."""
    return bool(pa.types.is_fixed_size_list(kind) and kind.list_size == 0)


def _merged(expected: pa.Schema, found: pa.Schema, file: pathlib.Path) -> pa.Schema:
    """The schema of the files so far with that of one more; columns, or lists, of nulls only fit any type."""
    fields, problems = [], []
    for name in dict.fromkeys([*expected.names, *found.names]):
        old, new = ([schema.field(i).type for i in schema.get_all_field_indices(name)] for schema in (expected, found))
        kinds = [_merged_type(*pair) for pair in zip(old, new, strict=False)]
        if len(old) != len(new) or None in kinds:
            before, now = (", ".join(map(str, types)) or "nothing" for types in (old, new))
            problems.append(f"column {name!r} is {now} in {file.name!r} and {before} in the files before it")
        fields += [(name, kind) for kind in kinds]
    if problems:
        title = f"The files in {str(file.parent)!r} must have the same columns and types, but disagree"
        raise UserError.collect(title, problems)
    return pa.schema(fields)


def _merged_type(old: pa.DataType, new: pa.DataType) -> pa.DataType | None:
    if old == new or pa.types.is_null(new):
        return old
    if pa.types.is_null(old):
        return new
    if old.id == new.id and (pa.types.is_list(old) or pa.types.is_large_list(old)):
        value = _merged_type(old.value_type, new.value_type)
        return value and (pa.list_(value) if pa.types.is_list(old) else pa.large_list(value))
    return None


class Piece(NamedTuple):
    """`num_rows` rows of a row group, after its first `skip`."""

    group: RowGroup
    skip: int
    num_rows: int

    @property
    def position(self) -> int:
        """Place of the first row in the data set."""
        return self.group.start + self.skip


def decoded(field: pa.Field) -> pa.Field:
    """The column as `Decoder` yields it: text as a dictionary, so that each text is made, and hashed, only once."""
    is_text = pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
    return field.with_type(pa.dictionary(pa.int32(), field.type)) if is_text else field


class Decoder:
    """Reads pieces of row groups; pieces of one group that follow each other decode it once, a part at a time.

    Args:
        data: The data set.
        schema: The columns to read, as `decoded` has them.
    """

    def __init__(self, data: ParquetData, schema: pa.Schema) -> None:
        self._data, self._schema = data, schema
        self._dictionaries = [field.name for field in schema if pa.types.is_dictionary(field.type)]
        self._file: pq.ParquetFile | None = None
        self._file_number = -1
        self._names: list[str] = []  # The columns that this file has; some always empty lists cannot be read.
        self._group: RowGroup | None = None
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._rest: pa.Table = schema.empty_table()
        self._row = 0  # Row of the group at which `_rest` begins.

    def close(self) -> None:
        """Close the file that is open."""
        if self._file is not None:
            self._file.close()

    def read(self, piece: Piece) -> Iterator[pa.Table]:
        """The rows of a piece, in tables of at most 65536 rows."""
        if self._group != piece.group or self._row > piece.skip:
            self._seek(piece.group)
        last = piece.skip + piece.num_rows
        while self._row < last:
            if not self._rest.num_rows:
                self._rest = self._next()
            end = min(last, self._row + self._rest.num_rows)
            begin = max(self._row, piece.skip)
            if begin < end:
                yield self._rest.slice(begin - self._row, end - begin)
            self._rest = self._rest.slice(end - self._row)
            self._row = end

    def _seek(self, group: RowGroup) -> None:
        with _reading(self._data.files[group.file]):
            if self._file_number != group.file:
                self.close()
                self._file, self._file_number = self._data.open(group.file, self._dictionaries), group.file
                empty = {field.name for field in self._file.schema_arrow if _is_always_empty(field.type)}
                self._names = [name for name in self._schema.names if name not in empty]
            assert self._file is not None, "a file was opened above"
            self._batches = self._file.iter_batches(_READ_ROWS, [group.number], self._names)
        self._group, self._row, self._rest = group, 0, self._schema.empty_table()

    def _next(self) -> pa.Table:
        file = self._data.files[self._file_number]
        with _reading(file):
            batch = next(self._batches, None)
            if batch is None:
                raise OSError("it ends before the number of rows that its footer tells")
            table = pa.Table.from_batches([batch])
            for name in set(self._schema.names).difference(table.column_names):
                table = table.append_column(name, pa.nulls(batch.num_rows, self._schema.field(name).type))
            table = table.select(self._schema.names)
            return table if table.schema.equals(self._schema) else table.cast(self._schema)
