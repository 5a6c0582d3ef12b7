"""Raw id -> row of an embedding table: reserved codes, the stable hash, the policies. `docs/ids.md` is the contract.

Everything that a served model needs is plain torch on int64 tensors; only `string_keys`, which turns text into
keys on the host, is numpy.
"""

import contextlib

import numpy as np
import torch
from torch import Tensor, nn

from recsys.recipe import RESERVED_ROWS

PADDING = 0
"""Row of positions that are not there: never looked up, always masked."""
MISSING = 1
"""Row of a null, alone or inside a list. Trained like any other row."""
UNKNOWN = 2
"""Row of an id that its table does not know. Trained like any other row."""
FIRST_ROW = RESERVED_ROWS
"""Row of the first real id."""

HASH = "fnv1a64+splitmix64/2"
"""Name and version of the hash. Any change of a row that an id falls on needs a new version."""

_FNV_BASIS = np.uint64(0xCBF29CE484222325)
_FNV_PRIME = np.uint64(0x100000001B3)
_FEW_STRINGS = 16
"""Below this many strings a loop over Python integers beats numpy's cost per call."""


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number: torch has no wrap-around arithmetic on uint64."""
    return value - (1 << 64) if value >> 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def string_keys(data: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """FNV-1a, 64 bits, of many byte strings at once: work is per byte position, not per string.

    Args:
        data: uint8, the bytes of all strings.
        offsets: (n + 1,) integers; string i is `data[offsets[i]:offsets[i + 1]]`.

    Returns:
        (n,) int64 keys: the bits of the unsigned hash.
    """
    lengths = np.diff(offsets)
    order = np.argsort(-lengths, kind="stable")  # Longest first: those with a byte at position i are a prefix.
    starts = offsets[:-1][order].astype(np.int64)
    lengths = lengths[order]
    hashes = np.full(len(order), _FNV_BASIS)
    num_steps = int(lengths[_FEW_STRINGS]) if len(order) > _FEW_STRINGS else 0
    for num_live in np.searchsorted(-lengths, -np.arange(num_steps)).tolist():
        live, position = hashes[:num_live], starts[:num_live]
        live ^= data[position]
        live *= _FNV_PRIME
        position += 1
    for i in range(min(len(order), _FEW_STRINGS)):
        value = int(hashes[i])
        for byte in data[starts[i] : starts[i] + lengths[i] - num_steps].tolist():
            value = (value ^ byte) * int(_FNV_PRIME) & 0xFFFFFFFFFFFFFFFF
        hashes[i] = value
    keys = np.empty_like(hashes)
    keys[order] = hashes
    return keys.view(np.int64)


def mix(keys: Tensor) -> Tensor:
    """splitmix64: the first output of that generator when it is seeded with the key, as int64 of any shape."""
    z = keys + _GAMMA  # In place from here on: fresh memory for every step costs more than the arithmetic.
    z.bitwise_xor_(_shifted(z, 30)).mul_(_MULTIPLIER_1)
    z.bitwise_xor_(_shifted(z, 27)).mul_(_MULTIPLIER_2)
    return z.bitwise_xor_(_shifted(z, 31))


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own copies the sign bit."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def below(mixed: Tensor, limit: int) -> Tensor:
    """floor(z * limit / 2^64) for the unsigned z of an int64 tensor: as even as the remainder, without a division.

    Long multiplication with parts of z of 21, 21 and 22 bits: exact for 1 <= limit <= 2^40.
    """
    part = (1 << 21) - 1
    product = (mixed & part).mul_(limit).bitwise_right_shift_(21)
    product.add_((mixed >> 21).bitwise_and_(part).mul_(limit)).bitwise_right_shift_(21)
    return product.add_(_shifted(mixed, 42).mul_(limit)).bitwise_right_shift_(22)


def hashed_rows(keys: Tensor, num_rows: int, first: int = FIRST_ROW) -> Tensor:
    """Rows first .. first + num_rows - 1 for any int64 keys."""
    return below(mix(keys), num_rows).add_(first)


def crossed(keys: Tensor, others: Tensor) -> Tensor:
    """Keys of pairs of ids: mix(mix(key) + other). Another pair of the same two is another key."""
    return mix(mix(keys).add_(others))


def exact_rows(keys: Tensor, num_rows: int) -> Tensor:
    """Row FIRST_ROW + key for keys 0 .. num_rows - 1; UNKNOWN for all others, so that no lookup leaves the table."""
    return torch.where((keys >= 0) & (keys < num_rows), keys + FIRST_ROW, UNKNOWN)


class ExactIds(nn.Module):
    """Policy `exact`: ids 0 .. num_rows - 1 own their rows; any other is unknown, or with `clamp` the nearest one."""

    def __init__(self, num_rows: int, *, clamp: bool = False) -> None:
        super().__init__()
        self.num_rows, self.clamp = num_rows, clamp

    def forward(self, keys: Tensor) -> tuple[Tensor, None]:
        """(n,) int64 keys -> (n,) int64 rows."""
        return exact_rows(keys.clamp(0, self.num_rows - 1) if self.clamp else keys, self.num_rows), None


class HashedIds(nn.Module):
    """Policy `hashed`: all ids share num_rows rows."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.num_rows = num_rows

    def forward(self, keys: Tensor) -> tuple[Tensor, None]:
        """(n,) int64 keys -> (n,) int64 rows."""
        return hashed_rows(keys, self.num_rows), None


class HotColdIds(nn.Module):
    """Policy `hot_cold`: ids of the index own rows, all others share hashed ones.

    Rows: `hot` for the ids of the index, then `cold` shared ones, of which two hashes have a half each.

    Attributes:
        keys: (hot,) int64 sorted keys of the hot ids; INT64_MAX fills it up.
        rows: (hot,) int64 row of each; -1 where `keys` is filled up.
    """

    keys: Tensor
    rows: Tensor

    def __init__(self, hot: int, cold: int, num_hashes: int = 1) -> None:
        super().__init__()
        self.hot, self.cold, self.num_hashes = hot, cold, num_hashes
        self.register_buffer("keys", torch.full((hot,), torch.iinfo(torch.int64).max))
        self.register_buffer("rows", torch.full((hot,), -1))

    def forward(self, keys: Tensor) -> tuple[Tensor, Tensor | None]:
        """(n,) int64 keys -> (n,) int64 rows; with two hashes also (n,) second rows, -1 where the id is hot."""
        cold = keys.new_full(keys.shape, UNKNOWN)
        first_cold, first_half = FIRST_ROW + self.hot, -(-self.cold // self.num_hashes)
        if self.cold:
            cold = hashed_rows(keys, first_half, first_cold)
        hot = self._hot_rows(keys)
        rows = cold if hot is None else torch.where(hot < 0, cold, hot)
        if self.num_hashes == 1:
            return rows, None
        # The generator's second number: its state has moved on by _GAMMA once more.
        second = hashed_rows(keys + _GAMMA, self.cold - first_half, first_cold + first_half)
        return rows, second if hot is None else second.masked_fill_(hot >= 0, -1)

    def _hot_rows(self, keys: Tensor) -> Tensor | None:
        """(n,) rows of the ids of the index, -1 for others; None for an empty index."""
        if not self.hot:
            return None
        places = torch.searchsorted(self.keys, keys).clamp_(max=self.hot - 1)
        return torch.where(self.keys[places] == keys, self.rows[places], -1)


Policy = ExactIds | HashedIds | HotColdIds


class SmallIds:
    """Remembers the rows of ids 0 .. 2^22 - 1 of one policy, 4 bytes each: reading a row costs a tenth of finding it.

    For the host's hot path alone; what it answers is what the policy answers.
    """

    _LIMIT = 1 << 22

    def __init__(self, policy: Policy, dtype: torch.dtype) -> None:
        """Args: the policy, and an integer type that holds its rows."""
        self._policy, self._dtype = policy, dtype
        self._known: tuple[Tensor, Tensor | None] | None = None

    def forget(self) -> None:
        """Ask the policy again: its index has changed."""
        self._known = None

    def __call__(self, keys: Tensor) -> tuple[Tensor, Tensor | None]:
        """As the policy: rows, and second rows where it has two hashes; of either integer type."""
        known = self._known  # Another thread may replace it at any time.
        if known is not None:
            with contextlib.suppress(IndexError):  # The picking looks at the bounds anyway.
                return _picked(known, keys)
        low, high = (int(bound) for bound in torch.aminmax(keys)) if len(keys) else (-1, -1)
        if low < 0 or high >= self._LIMIT:
            return self._policy.forward(keys)  # not by a call: see `Encoder.encode_rows`
        rows, seconds = self._policy.forward(torch.arange(min(max(1 << high.bit_length(), 1024), self._LIMIT)))
        known = self._known = (rows.to(self._dtype), None if seconds is None else seconds.to(self._dtype))
        return _picked(known, keys)


def _picked(known: tuple[Tensor, Tensor | None], keys: Tensor) -> tuple[Tensor, Tensor | None]:
    rows, seconds = known
    return rows.index_select(0, keys), None if seconds is None else seconds.index_select(0, keys)
