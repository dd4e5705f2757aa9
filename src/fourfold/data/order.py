"""The global sample order: a keyed permutation, computed where it is asked for and stored nowhere.

It depends on (seed, epoch, position) alone, so every rank of every layout computes its own part of one order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

import numpy as np
import xxhash
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Words = NDArray[np.uint64]

LARGEST = 2**62  # samples: the grid below then has sides under 2**32, and positions fit int64

_SMALL = 1024  # up to here the order is sorted from random keys: exactly uniform, and 8 KiB at most
_ROUNDS = 12
_CHUNK = 1 << 14  # positions computed at a time, so that the arrays between stay in the cache

# Multipliers and shifts of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def mix(words: Words, key: int) -> Words:
    """SplitMix64's output function on (words + key): uint64 of any shape to uint64, well mixed in every bit."""
    mixed = (words + np.uint64(key)) * _GOLDEN
    mixed ^= mixed >> np.uint64(30)
    mixed *= _FIRST
    mixed ^= mixed >> np.uint64(27)
    mixed *= _SECOND
    mixed ^= mixed >> np.uint64(31)
    return mixed


def key_of(*parts: int | str) -> int:
    """A 64-bit key for a named stream; parts of any size."""
    return int(xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode()))


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The order of `samples` samples in every epoch; `shuffle=False` keeps them as they lie."""

    samples: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= LARGEST:
            raise ValueError(f"an order needs 1 to {LARGEST} samples, not {self.samples}")

    def ids(self, epoch: int, positions: Ids) -> Ids:
        """The sample at each position of the epoch's order: int64 [n], 0 <= position < samples, to int64 [n].

        Every epoch's order is a bijection. Memory is O(n): it does not depend on `samples`.
        Raises IndexError for a position outside the epoch.
        """
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size and (positions.min() < 0 or positions.max() >= self.samples):
            raise IndexError(f"positions lie in 0 … {self.samples - 1}")
        if not self.shuffle:
            return positions.copy()
        if self.samples <= _SMALL:
            return _sorted_order(self.samples, self.seed, epoch)[positions]
        ids = np.empty_like(positions)
        keys = _round_keys(self.seed, epoch)
        for start in range(0, len(positions), _CHUNK):
            part = slice(start, start + _CHUNK)
            ids[part] = _walk(positions[part].astype(np.uint64), self.samples, keys)
        return ids


@lru_cache(maxsize=8)
def _sorted_order(samples: int, seed: int, epoch: int) -> Ids:
    """Samples sorted by random 64-bit keys: every permutation equally likely."""
    keys = mix(np.arange(samples, dtype=np.uint64), key_of("order", seed, epoch))
    return np.argsort(keys, kind="stable").astype(np.int64)


@lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(key_of("order", seed, epoch, number) for number in range(_ROUNDS))


def _walk(words: Words, samples: int, keys: tuple[int, ...]) -> Words:
    """Permute 0 … samples - 1: permute a slightly larger grid, again for what falls outside (cycle walking).

    Black and Rogaway, Ciphers with Arbitrary Finite Domains (2002), sections 3 and 4. The walk ends, as the cycle
    that a value inside lies on comes back inside. Under one in sqrt(samples) values falls outside.
    """
    height = isqrt(samples - 1) + 1
    width = -(-samples // height)
    words = _feistel(words, height, width, keys)
    outside = np.flatnonzero(words >= samples)
    while outside.size:
        words[outside] = _feistel(words[outside], height, width, keys)
        outside = outside[words[outside] >= samples]
    return words


def _feistel(words: Words, height: int, width: int, keys: tuple[int, ...]) -> Words:
    """A keyed permutation of 0 … height * width - 1: row and column are shifted by a hash of each other in turn."""
    row, column = np.divmod(words, np.uint64(width))
    for row_key, column_key in zip(keys[::2], keys[1::2], strict=True):
        row = _shifted(row, column, row_key, height)
        column = _shifted(column, row, column_key, width)
    return row * np.uint64(width) + column


def _shifted(place: Words, by: Words, key: int, size: int) -> Words:
    """(place + hash of `by`) modulo size, for place < size < 2**32."""
    shift = mix(by, key)
    shift >>= np.uint64(32)
    shift *= np.uint64(size)
    shift >>= np.uint64(32)
    shift += place
    # Below size, subtracting it wraps round to a huge number: the smaller of the two is the remainder.
    shifted: Words = np.minimum(shift, shift - np.uint64(size))
    return shifted
