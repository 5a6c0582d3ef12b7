"""Parquet -> a stream of Arrow rows: one share per rank, shuffled by rows, in bounded memory.

The order of an epoch is a pure function of the files' metadata, the seed and the epoch: it can be told, and resumed
in the middle, without reading data, and no rank ever waits for another because its share ended first.
"""

import collections
import contextlib
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import pyarrow as pa

from recsys.data.encoded import ArrowRows
from recsys.data.epoch import Epoch, Share, cut
from recsys.data.parquet import Decoder, ParquetData, Piece, decoded
from recsys.errors import UserError, nearest

__all__ = ["ParquetData", "Prefetcher", "Reader"]

_WINDOW_ROWS = 65_536
"""Rows of a window where nothing is shuffled."""
_POLL_S = 0.1
"""How long a background thread takes to notice that nobody wants its items any more."""

T = TypeVar("T")
R = TypeVar("R", bound="_Rows")


class _Rows(Protocol):
    """Rows that can be shuffled: `ArrowRows`, `EncodedRows`."""

    @property
    def num_rows(self) -> int: ...

    def take(self, indices: np.ndarray) -> Any: ...

    def slice(self, start: int, stop: int) -> Any: ...

    @classmethod
    def concat(cls, parts: Sequence[Any]) -> Any: ...


class _Window(NamedTuple):
    """Rows `start` to `end` of a stream, held in memory together; without `key` they keep the files' order.

    Of the rows in the order in which they leave the window, `low` to `high` are used.
    """

    start: int
    end: int
    pieces: Sequence[Piece]
    key: tuple[int, ...] | None
    low: int
    high: int

    @property
    def num_rows(self) -> int:
        """Rows that are held."""
        return self.end - self.start

    def permutation(self) -> np.ndarray | None:
        """In which order rows leave the window; None: as they lie in the files."""
        return None if self.key is None else _permutation(self.num_rows, self.key)

    def positions(self) -> np.ndarray:
        """Position in the data set of each row that is used, in the order in which rows leave the window."""
        rows = np.concatenate([np.arange(p.position, p.position + p.num_rows) for p in self.pieces])
        order = self.permutation()
        return (rows if order is None else rows[order])[self.low : self.high]


class Reader:
    """One rank's share of a data set, epoch by epoch.

    The shares are contiguous ranges that differ by at most one row. Every rank makes the same number of steps and
    spreads its rows evenly over them, so that no step is much smaller than the others.

    Attributes:
        num_rows: Rows of this rank.
        shares: Rows of each rank.
        num_steps: Steps of an epoch, the same on all ranks.
        depth: Steps to be prepared ahead, about two decoded blocks: rows come in bursts of one.
        schema: Schema of the tables that `iterate` yields.
    """

    def __init__(
        self,
        data: ParquetData,
        columns: Sequence[str],
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle_rows: int = 0,
        seed: int = 0,
    ) -> None:
        """Plan the reading; nothing is read yet.

        Args:
            data: The data set.
            columns: Columns to read, in this order.
            batch_size: Most rows of one rank in one step.
            rank: Whose share.
            world_size: Number of ranks.
            shuffle_rows: Most rows that are held in memory and shuffled together; 0 keeps the files' order.
            seed: Decides, with the epoch, the shuffled order.

        Raises:
            UserError: A column is not there, or stands twice.
        """
        for name in columns:
            if len(data.schema.get_all_field_indices(name)) != 1:
                raise UserError(
                    f"{str(data.path)!r} does not have the column {name!r} once",
                    allowed=f"{data.schema.names}.{nearest(name, data.schema.names)}",
                )
        self.data, self.rank, self.world_size, self.batch_size = data, rank, world_size, batch_size
        self.shuffle_rows, self.seed = shuffle_rows, seed
        self.schema = pa.schema([decoded(data.schema.field(name)) for name in columns])
        whole = self.epoch(0)
        self.num_rows, self.num_steps = whole.rows_of(whole.shares[rank]), whole.num_steps
        self.depth = max(2, 2 * _WINDOW_ROWS * self.num_steps // max(self.num_rows, 1))

    def epoch(self, number: int, position: Mapping[str, Any] | None = None) -> Epoch:
        """An epoch, or what is left of it.

        Args:
            number: Of the epoch.
            position: Where it stands, from `Epoch.position`; the number of ranks may have been another one then.
        """
        if position is None:
            return Epoch.whole(number, self.data.num_rows, self.world_size, self.batch_size)
        assert position["epoch"] == number, "a position belongs to its epoch"
        return Epoch.going_on(position, self.data.num_rows, self.world_size, self.batch_size)

    def order(self, epoch: int | Epoch) -> Iterator[np.ndarray]:
        """Positions in the data set of this rank's rows as `iterate` yields them, window by window; reads nothing."""
        epoch = self.epoch(epoch) if isinstance(epoch, int) else epoch
        for window in self._windows(epoch, epoch.shares[self.rank]):
            yield window.positions()

    def iterate(self, epoch: int | Epoch) -> Iterator[ArrowRows]:
        """The steps of an epoch: rows, and the position of each in the data set.

        Windows that lie wholly before its first step are not read. A step in which this rank has no rows yields a
        table without rows.

        Raises:
            UserError: A file cannot be read to its end.
        """
        for step in self.steps(epoch, lambda table, positions: ArrowRows(table, positions)):
            yield step.rows()

    def steps(
        self, epoch: int | Epoch, encode: Callable[[pa.Table, np.ndarray], R]
    ) -> Generator["Step[R]", None, None]:
        """As `iterate`, with rows encoded before they are shuffled, as they come from the files.

        What a step yields tells which rows it has; picking them out of their windows is left to its `rows`, which
        another thread may call.

        Args:
            epoch: Decides the order.
            encode: Table and positions of at most 65536 rows -> the same rows, encoded.
        """
        epoch = self.epoch(epoch) if isinstance(epoch, int) else epoch
        share = epoch.shares[self.rank]
        rest = tuple(cut(share, epoch.before(share, epoch.start_step), None))
        with contextlib.closing(Decoder(self.data, self.schema)) as decoder:
            windows = self._windows(epoch, rest)
            blocks = ((window, encode(*block)) for window in windows for block in _decoded(decoder, window))
            stream = _Stream(blocks, encode(self.schema.empty_table(), np.zeros(0, dtype=np.int64)))
            for step in range(epoch.start_step, epoch.num_steps):
                yield stream.take(epoch.rows_by_rank(step)[self.rank])

    def _windows(self, epoch: Epoch, share: Share) -> Iterator[_Window]:
        """The windows of a share's segments."""
        for segment in share:
            for window in self._stream(epoch.number, segment.first, segment.last):
                low, high = max(segment.begin, window.start), min(segment.end, window.end)
                if low < high:
                    yield window._replace(low=low - window.start, high=high - window.start)

    def _stream(self, epoch: int, first: int, last: int) -> Iterator[_Window]:
        """Row groups of a range one after another, in shuffled order when shuffling, cut into equal windows.

        The rows of a row group stay in order until windows are permuted, so that each group is decoded only once.
        """
        pieces = [
            Piece(group, max(first - group.start, 0), num_rows)
            for group in self.data.row_groups
            if (num_rows := min(last, group.start + group.num_rows) - max(first, group.start)) > 0
        ]
        keys = ((self.seed, epoch, first, last, number) for number in itertools.count())
        if self.shuffle_rows:
            pieces = [pieces[i] for i in _permutation(len(pieces), next(keys))]
        num_windows = -(-(last - first) // (self.shuffle_rows or _WINDOW_ROWS))
        rest = collections.deque(pieces)
        for number in range(num_windows):
            start, end = ((last - first) * n // num_windows for n in (number, number + 1))
            parts, missing = [], end - start
            while missing:
                piece = rest.popleft()
                num_rows = min(missing, piece.num_rows)
                parts.append(piece._replace(num_rows=num_rows))
                if num_rows < piece.num_rows:
                    rest.appendleft(piece._replace(skip=piece.skip + num_rows, num_rows=piece.num_rows - num_rows))
                missing -= num_rows
            yield _Window(start, end, parts, next(keys) if self.shuffle_rows else None, 0, end - start)


def _permutation(length: int, key: tuple[int, ...]) -> np.ndarray:
    """Raw bits of PCG64, sorted: numpy promises that these never change, unlike those of its shuffles."""
    # The low bits make room for the places: sorting the bits with them is much quicker than finding their order.
    mask = np.uint64((1 << length.bit_length()) - 1)
    drawn = (np.random.PCG64(np.random.SeedSequence(key)).random_raw(length) & ~mask) | np.arange(
        length, dtype=np.uint64
    )
    drawn.sort()
    return (drawn & mask).astype(np.int64)


def _decoded(decoder: Decoder, window: _Window) -> Iterator[tuple[pa.Table, np.ndarray]]:
    """The rows of a window and their positions, in the order of the files."""
    for piece in window.pieces:
        position = piece.position
        for table in decoder.read(piece):
            yield table, np.arange(position, position + table.num_rows)
            position += table.num_rows


class _Shuffled(Generic[R]):
    """The rows of a window. They are put together and ordered when first asked for, by whichever thread asks."""

    def __init__(self, blocks: list[R], permutation: Callable[[], np.ndarray | None]) -> None:
        self._blocks, self._permutation = blocks, permutation
        self._ordered: tuple[R, np.ndarray | None] | None = None
        self.num_rows = sum(block.num_rows for block in blocks)

    def rows(self, start: int, stop: int) -> R:
        """The rows that leave the window from number `start` to `stop`; one thread may ask at a time."""
        if self._ordered is None:
            self._ordered = type(self._blocks[0]).concat(self._blocks), self._permutation()
            self._blocks = []
        rows, order = self._ordered
        return cast(R, rows.slice(start, stop) if order is None else rows.take(order[start:stop]))


class Step(Generic[R]):
    """The rows of one step, by their windows and places in them."""

    def __init__(self, parts: Sequence[tuple[_Shuffled[R], int, int]]) -> None:
        self._parts = parts

    def rows(self) -> R:
        """The rows themselves, in their order; the steps of a reader are asked by one thread at a time."""
        found = [window.rows(start, stop) for window, start, stop in self._parts]
        return type(found[0]).concat(found)


class _Stream(Generic[R]):
    """Rows in the order of their windows' permutations, out of blocks in the order of the files.

    While one window is used up, the next is filled at the same pace, so that no step waits for a whole window. Three
    windows are the most that is held: when one is put together of its blocks, the next has begun to fill.

    Args:
        blocks: All blocks of all windows, each with its window.
        nothing: No rows.
    """

    def __init__(self, blocks: Iterator[tuple[_Window, R]], nothing: R) -> None:
        self._blocks = blocks
        self._nothing = _Shuffled([nothing], lambda: None)
        self._current = self._nothing
        self._num_gone = self._num_used = (
            0  # of the current rows: those before it have gone, those behind it are left out
        )
        self._window: _Window | None = None  # The window that is filled ...
        self._filled: list[R] = []  # ... with these blocks ...
        self._num_filled = 0  # ... of so many rows.

    def take(self, num_rows: int) -> Step[R]:
        """The next rows of the stream."""
        parts: list[tuple[_Shuffled[R], int, int]] = []
        while num_rows:
            if self._num_gone == self._num_used:
                self._turn()
            stop = min(self._num_gone + num_rows, self._num_used)
            parts.append((self._current, self._num_gone, stop))
            num_rows -= stop - self._num_gone
            self._num_gone = stop
            self._fill(self._num_gone / self._num_used)
        return Step(parts or [(self._nothing, 0, 0)])

    def _turn(self) -> None:
        """Go on to the next window."""
        self._current = self._nothing  # It goes before the next one is put together.
        self._fill(1.0)
        assert self._window is not None, "there are as many rows as the files' footers tell"
        self._current = _Shuffled(self._filled, self._window.permutation)
        self._num_gone, self._num_used = self._window.low, self._window.high
        self._window, self._filled, self._num_filled = None, [], 0

    def _fill(self, share: float) -> None:
        """Read ahead until this share of the next window is there."""
        while self._window is None or self._num_filled < share * self._window.num_rows:
            found = next(self._blocks, None)
            if found is None:
                return
            self._window = found[0]
            self._filled.append(found[1])
            self._num_filled += found[1].num_rows


_END = object()


class Prefetcher(Generic[T]):
    """Runs an iterable in one background thread, `depth` items ahead.

    Exceptions come out unchanged where the item would have come out. The thread ends with the iterable, on `close`,
    or when the prefetcher is forgotten.

    Args:
        iterable: What to run.
        finish: Turns an item into what the consumer gets, in the consumer's thread; None leaves it as it is.
        depth: Most items that wait.

    Attributes:
        waited_s: Seconds that the consumer has waited for items so far.
    """

    def __init__(self, iterable: Iterable[Any], finish: Callable[[Any], T] | None = None, depth: int = 2) -> None:
        self.waited_s = 0.0
        self._finish = finish
        self._items: queue.Queue[tuple[object, BaseException | None]] = queue.Queue(depth)
        stop = threading.Event()
        # The thread must not know this object, or it would keep it alive for ever.
        self._thread = threading.Thread(target=_produce, args=(iterable, self._items, stop), daemon=True)
        self._stop = weakref.finalize(self, stop.set)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if not self._stop.alive:
            raise StopIteration
        start_s = time.perf_counter()
        item, error = self._items.get()
        self.waited_s += time.perf_counter() - start_s
        if error is not None or item is _END:
            self.close()
            raise error or StopIteration
        return self._finish(item) if self._finish else cast(T, item)

    def close(self) -> None:
        """Stop the thread and wait until it has ended."""
        self._stop()
        self._thread.join()


def _produce(
    iterable: Iterable[T], items: "queue.Queue[tuple[object, BaseException | None]]", stop: threading.Event
) -> None:
    def put(item: object, error: BaseException | None = None) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                return items.put((item, error), timeout=_POLL_S)

    try:
        for item in iterable:
            put(item)
            if stop.is_set():
                break
        put(_END)
    except BaseException as error:
        put(_END, error)
    finally:
        if isinstance(iterable, Generator):  # Its clean-up runs now, in the thread that ran it.
            iterable.close()
