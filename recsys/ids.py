"""Raw id -> row of an embedding table: reserved codes, the stable hash, exact ids. `docs/ids.md` is the contract.

Everything that a served model needs is plain torch on int64 tensors; only `string_keys`, which turns text into
keys on the host, is numpy.
"""

import numpy as np
import torch
from torch import Tensor

from recsys.recipe import RESERVED_ROWS

PADDING = 0
"""Row of positions that are not there: never looked up, always masked."""
MISSING = 1
"""Row of a null, alone or inside a list. Trained like any other row."""
UNKNOWN = 2
"""Row of an id that its table does not know. Trained like any other row."""
FIRST_ROW = RESERVED_ROWS
"""Row of the first real id."""

HASH = "fnv1a64+splitmix64/1"
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


def hashed_rows(keys: Tensor, num_rows: int) -> Tensor:
    """Rows FIRST_ROW .. FIRST_ROW + num_rows - 1 for any int64 keys: mix(key), read as unsigned, modulo num_rows."""
    mixed = mix(keys)
    # A negative x stands for x + 2^64: the remainder of 2^64 is added, and one subtraction brings it below num_rows.
    rows = torch.remainder(mixed, num_rows)
    rows.add_((mixed >> 63).bitwise_and_((1 << 64) % num_rows)).sub_(num_rows)
    return rows.add_((rows >> 63).bitwise_and_(num_rows)).add_(FIRST_ROW)


def exact_rows(keys: Tensor, num_rows: int) -> Tensor:
    """Row FIRST_ROW + key for keys 0 .. num_rows - 1; UNKNOWN for all others, so that no lookup leaves the table."""
    return torch.where((keys >= 0) & (keys < num_rows), keys + FIRST_ROW, UNKNOWN)
