"""Arrow arrays -> numpy, without a Python loop over rows and without a float on an id's way.

All functions respect the offset of a slice, which the raw buffers do not.
"""

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from recsys.ids import string_keys


def is_text(kind: pa.DataType) -> bool:
    """Text, dictionary-encoded or not."""
    kind = value_type(kind)
    return pt.is_string(kind) or pt.is_large_string(kind) or pt.is_string_view(kind)


def is_id(kind: pa.DataType) -> bool:
    """Types that `id_keys` reads. A column of nulls only has the type null."""
    value = value_type(kind)
    return is_text(value) or pt.is_integer(value) or pt.is_boolean(value) or pt.is_null(value)


def value_type(kind: pa.DataType) -> pa.DataType:
    """The type of single values, behind dictionaries."""
    return kind.value_type if pt.is_dictionary(kind) else kind


def id_kind(kind: pa.DataType) -> str | None:
    """What ids, or lists of them, are stored as: `text` or `integers`; None for nulls only and for what is no id."""
    value = value_type(kind.value_type if is_list(kind) else kind)
    if is_text(value):
        return "text"
    return "integers" if pt.is_integer(value) or pt.is_boolean(value) else None


def is_list(kind: pa.DataType) -> bool:
    """Types that `list_parts` reads."""
    return pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind)


def is_number(kind: pa.DataType) -> bool:
    """Types that `numbers` reads."""
    return pt.is_floating(kind) or pt.is_integer(kind) or pt.is_boolean(kind) or pt.is_decimal(kind)


def single_array(table: pa.Table | pa.RecordBatch, name: str) -> pa.Array:
    """A column as one array, text in views as large text; copies that, and what comes in several chunks."""
    column = table.column(name)
    if (kind := _without(column.type, views=True)) != column.type:
        column = column.cast(kind)  # Arrow cannot pick values out of views.
    if isinstance(column, pa.Array):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    if is_list(kind) or (pt.is_dictionary(kind) and any(chunk.dictionary.null_count for chunk in column.chunks)):
        column = column.cast(_without(kind, dictionaries=True))  # Arrow cannot join dictionaries that hold nulls.
    return column.combine_chunks()


def _without(kind: pa.DataType, *, views: bool = False, dictionaries: bool = False) -> pa.DataType:
    """The type with large text in place of text views, or with plain values in place of dictionaries."""
    if is_list(kind):
        value = _without(kind.value_type, views=views, dictionaries=dictionaries)
        if pt.is_fixed_size_list(kind):
            return pa.list_(value, kind.list_size)
        return pa.list_(value) if pt.is_list(kind) else pa.large_list(value)
    if pt.is_dictionary(kind):
        value = _without(kind.value_type, views=views)
        return value if dictionaries else pa.dictionary(kind.index_type, value)
    return pa.large_string() if views and pt.is_string_view(kind) else kind


@dataclasses.dataclass(frozen=True, eq=False)
class Keys:
    """Keys of n ids, text and dictionaries by their distinct values.

    Attributes:
        distinct: (m,) int64.
        index: (n,) which of them each id has; None: they are the ids' own, m = n.
        missing: (n,) bool, True where the id is null, whose key is any; None: nowhere.
    """

    distinct: np.ndarray
    index: np.ndarray | None
    missing: np.ndarray | None


def id_keys(array: pa.Array) -> tuple[np.ndarray, np.ndarray | None]:
    """(n,) int64 keys, and (n,) bool that is True where the id is null (None: nowhere). Null ids have the key 0.

    Integers and booleans are their own key, uint64 by its bits; text is hashed.
    """
    coded = coded_keys(array)
    keys = coded.distinct if coded.index is None else coded.distinct[coded.index]
    return (keys, None) if coded.missing is None else (np.where(coded.missing, 0, keys), coded.missing)


def coded_keys(array: pa.Array) -> Keys:
    """As `id_keys`, without writing the keys of a dictionary's values out for every id."""
    if not len(array):
        return Keys(np.zeros(0, dtype=np.int64), None, None)
    kind = array.type
    if pt.is_dictionary(kind):
        return _dictionary_keys(array)
    if pt.is_null(kind) or pt.is_boolean(kind):
        return coded_keys(array.cast(pa.int8()))
    if pt.is_string_view(kind):
        return coded_keys(array.cast(pa.large_string()))
    missing = None if array.null_count == 0 else array.is_null().to_numpy(zero_copy_only=False)
    buffers, n, offset = array.buffers(), len(array), array.offset
    if is_text(kind):
        width = np.int64 if pt.is_large_string(kind) else np.int32
        offsets = np.frombuffer(buffers[1], dtype=width)[offset : offset + n + 1]
        data = np.zeros(0, dtype=np.uint8) if buffers[2] is None else np.frombuffer(buffers[2], dtype=np.uint8)
        keys = string_keys(data, offsets)
    else:
        values = np.frombuffer(buffers[1], dtype=kind.to_pandas_dtype())[offset : offset + n]
        keys = values.view(np.int64) if values.dtype == np.uint64 else values.astype(np.int64, copy=False)
    return Keys(keys, None, missing)


def _dictionary_keys(array: pa.DictionaryArray) -> Keys:
    if len(array.dictionary) > len(array):  # A slice of a big column: its rows are fewer than the values to hash.
        return coded_keys(array.dictionary_decode())
    index, missing = id_keys(array.indices)
    if not len(array.dictionary):
        return Keys(index, None, missing)
    values = coded_keys(array.dictionary)
    if values.missing is not None:
        missing = values.missing[index] if missing is None else missing | values.missing[index]
    return Keys(values.distinct, index, missing)


def list_parts(array: pa.Array) -> tuple[np.ndarray, pa.Array]:
    """(n,) int64 lengths, a null list being empty, and the values of all lists one after another.

    A column of the type null is one of null lists.
    """
    if pt.is_null(array.type):
        return np.zeros(len(array), dtype=np.int64), array.slice(0, 0)
    lengths = pc.list_value_length(array)
    if lengths.null_count:
        lengths = lengths.fill_null(0)
    return lengths.to_numpy(zero_copy_only=False).astype(np.int64), array.flatten()


def cut_lists(lengths: np.ndarray, max_length: int, *, newest: bool) -> tuple[np.ndarray | None, int]:
    """Which values stay when lists keep at most `max_length`, from the end (`newest`) or the start.

    Returns:
        Places of the values that stay, None where that is all of them, and how many lists are cut.
    """
    if not len(lengths) or lengths.max() <= max_length:
        return None, 0
    kept = np.minimum(lengths, max_length)
    ends = np.cumsum(lengths)
    starts = ends - (kept if newest else lengths)
    return places(starts, kept), int((lengths > max_length).sum())


def places(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(sum of lengths,) int64: start, start + 1, ... of each list, one list after another."""
    starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    if not len(lengths):
        return np.zeros(0, dtype=np.int64)
    steps = np.ones(lengths.sum(), dtype=np.int64)
    steps[0] = starts[0]
    steps[np.cumsum(lengths[:-1])] = starts[1:] - (starts[:-1] + lengths[:-1] - 1)  # From one list's end to the next.
    return np.cumsum(steps, out=steps)


def row_of(place: int, lengths: np.ndarray) -> int:
    """The row whose list holds a value, by the value's place among those of all lists."""
    return int(np.searchsorted(np.cumsum(lengths), place, side="right"))


def shown(table: pa.Table | pa.RecordBatch, name: str, row: int) -> str:
    """A value as messages show it."""
    scalar = single_array(table, name)[row]
    if pt.is_temporal(scalar.type) and scalar.is_valid:  # Python's own types do not hold all of Arrow's times.
        return f"{scalar.cast(pa.int64() if scalar.type.bit_width == 64 else pa.int32())} as {scalar.type}"
    value = scalar.as_py()
    return "null" if value is None else repr(value)


def numbers(array: pa.Array) -> np.ndarray:
    """(n,) floating-point values, NaN where null."""
    if not pt.is_floating(array.type):
        array = pc.cast(array, pa.float64(), safe=False)
    return array.to_numpy(zero_copy_only=False)
