"""How often each id occurs: exact, in one pass over the data, in memory that does not grow with the number of ids.

Distinct ids are held as runs: parallel arrays in the order of the mixed key, in which equal keys are neighbours and
every prefix of its bits is one range. Runs that memory has no room for lie on disk, cut into such ranges, and are read
back range by range. The order is the same whether anything went to disk or not, and whatever came first.
"""

import contextlib
import itertools
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from recsys.errors import UserError

LIMIT = 8_000_000
"""Distinct ids of one table in memory. At its peak, counting takes some 130 bytes for each, and 8 times its text."""
_TEXT_BYTES_PER_ID = 64
"""Room for text that goes with the room for one id: texts longer than that lower the limit."""
_BLOCK = 1 << 20
"""Ids that are made distinct at once: few enough for the cache, many enough that frequent ids are met often."""
_RANGE_BITS = 6
"""Bits of the mixed key by which a run on disk is cut, so into 64 ranges; each is cut again where it is too big."""
_MAX_LEVEL = 64 // _RANGE_BITS
_MESSAGE_BYTES = 64 << 20
"""What rank 0 receives at once from all ranks together."""


class Run(NamedTuple):
    """Ids (m of them), how often each occurs, and their text where ids are text.

    Attributes:
        keys: (m,) int64.
        counts: (m,) int64.
        texts: (m,) large_string, or None.
    """

    keys: np.ndarray
    counts: np.ndarray
    texts: pa.Array | None = None


NO_IDS = Run(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def select(run: Run, ids: np.ndarray | slice) -> Run:
    """Some ids of a run, given by a mask or as a range."""
    if run.texts is None:
        return Run(run.keys[ids], run.counts[ids])
    texts = run.texts[ids] if isinstance(ids, slice) else run.texts.filter(pa.array(ids))
    return Run(run.keys[ids], run.counts[ids], texts)


def raw_ids(run: Run, kind: pa.DataType) -> pa.Array:
    """(m,) the raw ids of a run, of the type that `IdCounts.kind` names."""
    if run.texts is not None:
        return run.texts
    return pa.nulls(len(run.keys)) if kind == pa.null() else pa.array(run.keys.view(kind.to_pandas_dtype()))


def mixed(keys: np.ndarray) -> np.ndarray:
    """(m,) uint64, by which runs are ordered: a one-to-one function of the key that spreads any keys evenly."""
    import torch  # here, since it takes longer to import than everything else together

    from recsys import ids

    keys = np.require(keys, requirements="W")  # torch warns of memory that Arrow owns and will not have written to
    return ids.mix(torch.from_numpy(keys)).numpy().view(np.uint64)


def combine(runs: Sequence[Run]) -> Run:
    """One run of all ids, each once, in order. Of different texts with one key, which share a row, the least stays."""
    keys = np.concatenate([run.keys for run in runs])
    order = np.argsort(mixed(keys))
    keys = keys[order]
    is_first = np.ones(len(keys), dtype=bool)
    np.not_equal(keys[1:], keys[:-1], out=is_first[1:])
    starts = np.flatnonzero(is_first)
    counts = np.concatenate([run.counts for run in runs])[order]
    totals = np.add.reduceat(counts, starts) if len(starts) else counts
    texts = [run.texts for run in runs if run.texts is not None]
    if not texts:
        return Run(keys[starts], totals)
    ordered = pa.concat_arrays(texts).take(pa.array(order))
    assert len(ordered) == len(keys), "either all runs of a table have texts or none has"
    return Run(keys[starts], totals, _least_texts(ordered, is_first, starts))


def _least_texts(texts: pa.Array, is_first: np.ndarray, starts: np.ndarray) -> pa.Array:
    """The least text of each group of neighbours; `starts` are their first positions. Nearly all groups are alike."""
    least = texts.take(pa.array(starts))
    differs = pc.not_equal(texts.slice(1), texts.slice(0, max(len(texts) - 1, 0))).to_numpy(zero_copy_only=False)
    clashes = np.flatnonzero(differs & ~is_first[1:]) + 1
    if not len(clashes):
        return least
    groups = np.unique(np.searchsorted(starts, clashes, side="right") - 1)
    ends = np.append(starts[1:], len(texts))
    chosen = [min(texts[starts[group] : ends[group]].to_pylist()) for group in groups]
    mask = np.zeros(len(starts), dtype=bool)
    mask[groups] = True
    return pc.replace_with_mask(least, pa.array(mask), pa.array(chosen, pa.large_string()))


def merged_kind(old: pa.DataType | None, new: pa.DataType | None) -> pa.DataType | None:
    """Type of the raw ids of two sets of counts together; see `IdCounts.kind`.

    Raises:
        UserError: Their ids never match.
    """
    if old is None or new is None or old == new:
        return new if old is None else old
    if {old, new} == {pa.int64(), pa.uint64()}:
        return pa.uint64()
    names = {pa.large_string(): "text", pa.null(): "ids without a raw value"}
    raise UserError(
        "The ids of one table must be all integers, all text, or all without a raw value (crosses of columns)",
        received=" and ".join(sorted(names.get(kind, "integers") for kind in (old, new))),
        fix="give these columns tables of their own",
    )


class IdCounts:
    """Counts of the ids of one table.

    Attributes:
        occurrences: Ids that were counted.
        missing: Nulls, which are not among them.
        kind: Type that holds the raw ids: int64, uint64 (some lie beyond int64), large_string, null (there is no raw
            id), or None as long as nothing was counted. An integer is its key, so a table with both negative ids and
            ids beyond int64, of which pairs are one id to the model, has the readings of uint64.
    """

    def __init__(self, *, limit: int = LIMIT, folder: str | pathlib.Path | None = None) -> None:
        """Start with nothing.

        Args:
            limit: Most distinct ids in memory between two blocks; beyond, and where texts are long before it, they
                go to disk.
            folder: Where a temporary folder for them is made when it is needed; None: the system's place.
        """
        self.occurrences = self.missing = 0
        self.kind: pa.DataType | None = None
        self._block = max(1, min(_BLOCK, limit))
        self._waiting: list[np.ndarray] = []
        self._num_waiting = 0
        self._runs = _Runs(limit, folder, level=0)

    def add(self, keys: np.ndarray, values: pa.Array | None = None, present: np.ndarray | None = None) -> None:
        """Count a block.

        Args:
            keys: (n,) int64.
            values: (n,) the raw ids, integers or text in any encoding; None where a key has no raw id.
            present: (n,) bool, False for nulls, whose keys mean nothing; None: there are none.

        Raises:
            UserError: The ids are of another kind than those before, or there is no room on disk.
        """
        assert keys.dtype == np.int64, f"keys are int64, not {keys.dtype}"
        assert values is None or len(values) == len(keys), "a block has one raw id per key"
        if present is not None and not present.all():
            self.missing += len(keys) - int(np.count_nonzero(present))
            keys = keys[present]
            values = values if values is None else values.filter(pa.array(present))
        if not len(keys):
            return
        self.kind = merged_kind(self.kind, _kind(keys, values))
        self.occurrences += len(keys)
        for first in range(0, len(keys), self._block):
            part = keys[first : first + self._block]
            if self.kind == pa.large_string():
                assert values is not None, "text has raw ids"
                self._runs.add(_distinct_texts(part, values.slice(first, self._block)))
                continue
            self._waiting.append(part.copy())  # The caller's may be a view of a table that would stay in memory.
            self._num_waiting += len(part)
            if self._num_waiting >= self._block:
                self._settle()

    def merge(self, part: Run, kind: pa.DataType | None) -> None:
        """Count what has been counted elsewhere, nulls aside."""
        self.kind = merged_kind(self.kind, kind)
        self.occurrences += int(part.counts.sum())
        self._runs.add(part)

    def parts(self) -> Iterator[Run]:
        """All ids, each once, in order, in runs of at most about `limit` ids; can be called again, and `add` too."""
        self._settle()
        return self._runs.parts()

    def close(self) -> None:
        """Remove what is on disk."""
        self._runs.close()

    def _settle(self) -> None:
        if self._waiting:
            ordered = np.sort(np.concatenate(self._waiting))
            self._waiting, self._num_waiting = [], 0
            starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
            self._runs.add(Run(ordered[starts], np.diff(starts, append=len(ordered))))


def _kind(keys: np.ndarray, values: pa.Array | None) -> pa.DataType:
    from recsys.data import columns  # which imports torch: see `mixed`

    if values is None:
        return pa.null()
    if columns.is_text(values.type):
        return pa.large_string()
    number = values.type.value_type if pt.is_dictionary(values.type) else values.type
    assert pt.is_integer(number) or pt.is_boolean(number), f"ids are integers or text, not {number}"
    return pa.uint64() if pt.is_uint64(number) and keys.min() < 0 else pa.int64()


def _distinct_texts(keys: np.ndarray, values: pa.Array) -> Run:
    """The texts of a block, each once (twice where a dictionary holds it twice), in no order."""
    if pt.is_dictionary(values.type) and len(values.dictionary) > len(values):
        values = values.dictionary_decode()  # A slice of a big column: its rows are fewer than all values.
    if not pt.is_dictionary(values.type):
        values = values.cast(pa.large_string()).dictionary_encode()
    codes = values.indices.to_numpy().astype(np.int64, copy=False)
    counts = np.bincount(codes, minlength=len(values.dictionary))
    position = np.zeros(len(counts), dtype=np.int64)
    position[codes] = np.arange(len(codes))
    used = np.flatnonzero(counts)
    texts = values.dictionary.cast(pa.large_string()).take(pa.array(used))
    return Run(keys[position[used]], counts[used], texts)


class _Runs:
    """Adds runs up: in memory, or on disk by ranges of the mixed key, whose bits are read from `level` on."""

    def __init__(self, limit: int, folder: str | pathlib.Path | None, level: int) -> None:
        self._limit, self._parent, self._level = limit, folder, level
        self._block = max(1, min(_BLOCK, limit))
        self._settled: Run | None = None
        self._waiting: list[Run] = []
        self._num_waiting = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._spilled: list[pathlib.Path] = []

    def add(self, run: Run) -> None:
        if not len(run.keys):
            return
        self._waiting.append(run)
        self._num_waiting += _size(run)
        # Settling again only when as much waits as is settled keeps its cost per id constant.
        if self._num_waiting > max(self._block, _size(self._settled)):
            self._settle()

    def parts(self) -> Iterator[Run]:
        self._settle()
        if not self._spilled:
            if self._settled is not None:
                yield self._settled
            return
        self._spill()
        assert self._folder is not None, "what is spilled lies in a folder"
        for number in range(1 << _RANGE_BITS):
            with contextlib.closing(_Runs(self._limit, self._folder.name, self._level + 1)) as runs:
                for path in self._spilled:
                    with pa.OSFile(str(path)) as file:
                        runs.add(_from_batch(pa.ipc.open_file(file).get_batch(number)))
                yield from runs.parts()

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def _settle(self) -> None:
        if self._waiting:
            self._settled = combine([*self._waiting, *([] if self._settled is None else [self._settled])])
            self._waiting, self._num_waiting = [], 0
            if _size(self._settled) > self._limit and self._level < _MAX_LEVEL:
                self._spill()

    def _spill(self) -> None:
        if self._settled is None:
            return
        batch = _to_batch(self._settled)
        shift = np.uint64(64 - _RANGE_BITS * (self._level + 1))
        ranges = (mixed(self._settled.keys) >> shift) & np.uint64((1 << _RANGE_BITS) - 1)
        bounds = np.searchsorted(ranges, np.arange((1 << _RANGE_BITS) + 1, dtype=np.uint64)).tolist()
        try:
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="recsys-counts-", dir=self._parent)
            path = pathlib.Path(self._folder.name, f"{len(self._spilled):06}.arrow")
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
                for first, last in itertools.pairwise(bounds):
                    writer.write_batch(batch.slice(first, last - first))
        except OSError as error:
            raise UserError(
                "Ids that are too many for memory cannot be put aside on disk while they are counted",
                received=str(error),
                fix="make room there, or set TMPDIR to a folder on a larger disk",
            ) from error
        self._spilled.append(path)
        self._settled = None


def _size(run: Run | None) -> int:
    """What a run counts towards a limit on ids."""
    if run is None:
        return 0
    return max(len(run.keys), 0 if run.texts is None else run.texts.nbytes // _TEXT_BYTES_PER_ID)


def _to_batch(run: Run) -> pa.RecordBatch:
    arrays = {"key": pa.array(run.keys), "count": pa.array(run.counts)}
    return pa.RecordBatch.from_pydict(arrays if run.texts is None else {**arrays, "text": run.texts})


def _from_batch(batch: pa.RecordBatch) -> Run:
    texts = batch.column(2) if batch.num_columns > 2 else None
    return Run(batch.column(0).to_numpy(), batch.column(1).to_numpy(), texts)


def collect(counts: IdCounts, *, message_bytes: int = _MESSAGE_BYTES) -> IdCounts | None:
    """Bring the counts of all ranks together, in messages of bounded size; every rank calls it.

    Args:
        counts: What this rank has counted. On rank 0 it is added to.
        message_bytes: Most that rank 0 receives at once; a message with a single longer text is that much longer.

    Returns:
        The counts of all ranks on rank 0, None on the others.

    Raises:
        UserError: Ranks have ids of different kinds, or one of them has no room on disk; on all ranks.
    """
    import torch.distributed as dist

    from recsys.distributed import agreed, gather

    about = gather((counts.kind, counts.missing))
    if len(about) == 1:
        return counts
    is_first = dist.get_rank() == 0
    if is_first:
        counts.missing = sum(missing for _, missing in about)
    messages = iter(()) if is_first else _messages(counts, message_bytes // len(about))
    while True:
        with agreed("counting ids"):
            message = next(messages, None)
        if not any(gather(message is not None)):
            return counts if is_first else None
        received: list[bytes | None] = [None] * len(about)
        dist.gather_object(message, received if is_first else None)
        with agreed("counting ids"):
            for data, (kind, _) in zip(received, about, strict=True):
                if data is not None:
                    counts.merge(_from_batch(pa.ipc.open_stream(data).read_next_batch()), kind)


def _messages(counts: IdCounts, num_bytes: int) -> Iterator[bytes]:
    for part in counts.parts():
        batch = _to_batch(part)
        sizes = np.full(len(part.keys), 16)
        if part.texts is not None:
            sizes += 8 + pc.binary_length(part.texts).to_numpy()
        bins = np.cumsum(sizes) // max(num_bytes, 1)
        starts = np.flatnonzero(np.diff(bins, prepend=-1)).tolist()
        for first, last in zip(starts, [*starts[1:], len(sizes)], strict=True):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch.slice(first, last - first))
            yield sink.getvalue().to_pybytes()
