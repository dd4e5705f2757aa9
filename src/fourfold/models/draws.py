"""Randomness by arithmetic: every draw is a function of (seed, step, name, logical index), never of the layout.

A draw is a hash of its own address, so no generator is advanced and none has to be saved: the same element gets the
same value on any number of ranks, in any microbatch and in any dtype.  The hash is the finaliser of SplitMix64
(Steele, Lea & Flood, OOPSLA 2014, section 5; constants "Mix13" of D. Stafford) over counters that step by its golden
gamma.  torch has no unsigned 64-bit arithmetic on every device; int64 wraps the same way, and a logical right shift
is an arithmetic one with the copies of the sign masked off.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fourfold.collectives.context import Context
from fourfold.models.boxes import box_of
from fourfold.spec.boxes import Box


def _signed(value: int) -> int:
    """The int64 with the bits of a 64-bit unsigned number."""
    return value - (1 << 64) if value >> 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)

_LANES = 4  # draws of 16 bits in one hash
_LEVELS = 1 << 16
_WORDS = 3  # hashes of one normal value: 12 uniform integers
_CHUNK = 1 << 16  # initial values made at a time: temporaries stay inside a core's cache


@lru_cache(maxsize=4096)
def _key(*parts: int | str) -> int:
    """A 64-bit start, as int64, for the stream that `parts` name."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _constant(name: str) -> int:
    return _key(name)


_constant._dynamo_marked_constant = True  # type: ignore[attr-defined]  # compiled code has the result


def draw_key(name: str) -> Tensor:
    """What a module of that name may hand to `Draws` in place of its name: 0-dim int64, on the CPU.

    A tensor is an input of compiled code, and a name a constant in it: with keys one code serves all blocks alike.
    """
    return torch.tensor(_key(name), device="cpu")


def _key_of(name: str | Tensor) -> int | Tensor:
    if isinstance(name, Tensor):
        return name
    return _constant(name)


def _mix_(x: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place on int64."""
    shifted = torch.empty_like(x)
    for shift, multiplier in ((30, _MULTIPLIER_1), (27, _MULTIPLIER_2)):
        torch.bitwise_right_shift(x, shift, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1)).mul_(multiplier)
    torch.bitwise_right_shift(x, 31, out=shifted)
    return x.bitwise_xor_(shifted.bitwise_and_((1 << 33) - 1))


def _dropped_levels(p: float) -> int:
    """`p` in steps of 2**-16; what is asked to drop at all drops at least one step."""
    return min(max(round(p * _LEVELS), 1), _LEVELS - 1) if p > 0 else 0


class Draws:
    """The draws of one forward: row `rows[b]` of the global batch has the same ones wherever it is computed.

    seed  of the run
    step  optimizer step
    rows  int64 [B]: each row's place in the global batch; the draws live on its device
    context  None, or where the tokens stand that are here of each row: then what is drawn for is [B, t, ...]
    """

    def __init__(self, seed: int, step: int, rows: Tensor, context: Context | None = None) -> None:
        self._rows = _mix_((rows * _GAMMA).add_(_key("dropout", seed, step))).unsqueeze(1)
        self._context = context
        self._gamma = torch.tensor(_GAMMA, device="cpu")
        self._counters: dict[tuple[int, int], Tensor] = {}

    def keep(self, name: str | Tensor, p: float, shape: Sequence[int]) -> Tensor:
        """Which elements dropout keeps.

        name   of the module whose output it is, or its `draw_key`; other names give other draws
        p      share to drop, taken to the nearest multiple of 2**-16
        shape  [B, ...]; an element's logical index is its flat index within the row

        Element i of a row is 16-bit lane i % 4 (lowest first) of the row's hash i // 4, which makes the cost a
        quarter of a hash per element.  Returns bool of `shape`.
        """
        return self._kept_here(name, _dropped_levels(p), shape).bool()

    def dropout(self, x: Tensor, p: float, name: str | Tensor) -> Tensor:
        """`x` [B, ...] with a share `p` set to zero and the rest scaled so that the expectation stays.

        Source: Srivastava et al., JMLR 15 (2014), scaled in training.  The mask is the same for every dtype.
        """
        levels = _dropped_levels(p)
        if not levels:
            return x
        if isinstance(x, DTensor):
            return self._dropout_of_box(x, name, levels)
        return x * self._kept_here(name, levels, x.shape) * (_LEVELS / (_LEVELS - levels))

    def _dropout_of_box(self, x: DTensor, name: str | Tensor, levels: int) -> Tensor:
        """The same where this rank has a box of `x`."""
        kept = self._kept_here(name, levels, x.shape, box_of(x))
        own = x.to_local() * kept * (_LEVELS / (_LEVELS - levels))
        return DTensor.from_local(
            own, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
        )

    def _kept_here(
        self, name: str | Tensor, levels: int, shape: Sequence[int], box: Box | None = None
    ) -> Tensor:
        """See `_kept`; `shape` and `box` are of the tokens that are here."""
        if self._context is None:
            return self._kept(name, levels, shape, box)
        size, offset = (shape, (0,) * len(shape)) if box is None else (box.size, box.offset)
        whole = (shape[0], self._context.length, *shape[2:])
        parts = []
        begin, end = offset[1], offset[1] + size[1]
        for first, beyond in self._context.runs:  # each begins here where the one before ended
            low, high = max(begin, 0), min(end, beyond - first)
            if low < high:
                place = Box((offset[0], first + low, *offset[2:]), (size[0], high - low, *size[2:]))
                parts.append(self._kept(name, levels, whole, place))
            begin, end = begin - (beyond - first), end - (beyond - first)
        return (
            torch.cat(parts, 1) if parts else torch.empty(size, dtype=torch.int16, device=self._rows.device)
        )

    def _kept(self, name: str | Tensor, levels: int, shape: Sequence[int], box: Box | None = None) -> Tensor:
        """1 where kept, else 0: as int16, for a CPU makes and multiplies bool several times slower.

        box: the part of `shape` that is wanted.
        """
        assert shape[0] == self._rows.shape[0], "one row of draws for each row of the batch"
        rows, start, elements = self._rows, 0, math.prod(shape[1:])
        if box is not None:
            rows = rows[box.slices[0]]
            cuts = [dim for dim in range(1, len(shape)) if box.size[dim] != shape[dim]]
            cut = cuts[0] if cuts else len(shape) - 1
            if len(cuts) > 1 or math.prod(shape[1:cut]) > 1:  # not one run of elements: a part of all of them
                return self._kept(name, levels, shape)[box.slices].contiguous()
            start = box.offset[cut] * math.prod(shape[cut + 1 :])
            elements = math.prod(box.size[1:])
            shape = box.size
        first = start // _LANES
        counter = self._counter(first, -(-(start + elements) // _LANES))
        hashes = _mix_(counter + (rows + _key_of(name)))
        lanes = hashes.view(torch.int16)[:, start - first * _LANES :][:, :elements]
        return lanes.ge_(levels - _LEVELS // 2).reshape(*shape)

    def _counter(self, first: int, stop: int) -> Tensor:
        if torch.compiler.is_compiling():
            # By a tensor: torch 2.13 takes places times a number for places, too, and gets those beyond 2**31 wrong.
            return torch.arange(first, stop, device=self._rows.device).mul_(self._gamma)
        if (first, stop) not in self._counters:
            self._counters[first, stop] = torch.arange(first, stop, device=self._rows.device).mul_(_GAMMA)
        return self._counters[first, stop]


def normal(
    seed: int,
    name: str,
    shape: Sequence[int],
    std: float,
    dtype: torch.dtype,
    offset: Sequence[int] | None = None,
    full_shape: Sequence[int] | None = None,
) -> Tensor:
    """Initial values of a parameter, or of the box of it that starts at `offset` of `full_shape`; on the CPU.

    Each is the sum of twelve 16-bit uniform integers (Irwin-Hall: variance 12 × (2**32 - 1) / 12, nothing beyond 6
    standard deviations), centred and times one fp64 constant: integers and one IEEE product, hence the same bits on
    every machine.  Narrower dtypes are the fp64 value rounded once.  It is a function of (seed, name, flat index in
    `full_shape`).
    """
    values = torch.empty(math.prod(shape), dtype=dtype, device="cpu")
    key = _key("normal", seed, name)
    words = torch.arange(_WORDS, device="cpu").mul_(_GAMMA).add_(key).unsqueeze(1)
    scale = std / math.sqrt(2**32 - 1)
    for start in range(0, values.numel(), _CHUNK):
        stop = min(start + _CHUNK, values.numel())
        index = _logical_index(torch.arange(start, stop, device="cpu"), shape, offset, full_shape)
        hashes = _mix_(index.mul_(_WORDS).mul_(_GAMMA) + words)
        values[start:stop] = (_lane_sum(hashes) - 6 * (_LEVELS - 1)).double().mul_(scale)
    return values.view(*shape)


def _logical_index(
    flat: Tensor, shape: Sequence[int], offset: Sequence[int] | None, full_shape: Sequence[int] | None
) -> Tensor:
    """Flat indices in `shape`, as flat indices in `full_shape` of the box at `offset`."""
    if offset is None and full_shape is None:
        return flat
    assert offset is not None, "a box needs its offset and the full shape"
    assert full_shape is not None, "a box needs its offset and the full shape"
    index = torch.zeros_like(flat)
    stride = 1
    for size, start, full in zip(reversed(shape), reversed(offset), reversed(full_shape), strict=True):
        index += (flat % size + start) * stride
        flat = flat // size
        stride *= full
    return index


def _lane_sum(hashes: Tensor) -> Tensor:
    """Sum over dim 0 of all unsigned 16-bit lanes: int64 [words, n] -> [n]."""
    even = 0x0000FFFF0000FFFF
    pairs = ((hashes & even) + ((hashes >> 16) & even)).sum(0)
    return (pairs & 0xFFFFFFFF) + (pairs >> 32)
