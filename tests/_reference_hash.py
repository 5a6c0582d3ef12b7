"""The hash of docs/ids.md in plain Python integers: the independent reference of the tests."""

WORD = 1 << 64


def fnv1a(data: bytes) -> int:
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % WORD
    return value


def splitmix64(seed: int) -> int:
    z = (seed + 0x9E3779B97F4A7C15) % WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    return z ^ (z >> 31)
