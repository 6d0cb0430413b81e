"""Sets of positions, many at a time: how many they hold, their bitmaps, and the gaps between them as varints
(`wire.positions`).

For gaps a program counts a block of positions, a sum over the blocks says where each one's begin in a list, and a
second pass lists them. They are few: what is left to do is done on the list. Positions of a known set may be left out
of the numbering: nothing has to be compacted before. And nothing is asked of the GPU meanwhile: how long all varints
can become together is known.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # positions; two counts of a block share 32 bits
SHORT = 1024  # numbers of a list, or bytes of a bitmap
LONG_GAP = 127  # a second byte is for a gap above this; gaps add up to less than the size, so that they are few


@triton.jit
def _length(gap):
    """Bytes of a varint, the gap being below 2^31."""
    length = 1 + (gap >= 1 << 7).to(tl.int32) + (gap >= 1 << 14).to(tl.int32) + (gap >= 1 << 21).to(tl.int32)
    return length + (gap >= 1 << 28).to(tl.int32)


@triton.jit
def _holds(masks, shared, at, ok, PRESENT: tl.constexpr, SHARED: tl.constexpr):
    """Which positions are numbered, and which of them are in the set."""
    numbered = ok
    if SHARED:
        numbered = numbered & (tl.load(shared + at, mask=ok, other=0) == 0)
    held = tl.load(masks + at, mask=ok, other=0) != 0
    return numbered, numbered & (held == PRESENT)


@triton.jit(do_not_specialize=["size", "blocks"])
def _blocks_kernel(
    masks, shared, counts, size, blocks, PRESENT: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """By block: how many are numbered, and how many of them are in the set."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbered, held = _holds(masks + row * size, shared, at, at < size, PRESENT, SHARED)
    counts += row * 2 * blocks + tl.program_id(0)
    tl.store(counts, tl.sum(numbered.to(tl.int32), 0))
    tl.store(counts + blocks, tl.sum(held.to(tl.int32), 0))


@triton.jit(do_not_specialize=["size", "blocks", "room"])
def _list_kernel(
    masks, shared, ends, listed, size, blocks, room, PRESENT: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The numbers of those in the set, in order."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbered, held = _holds(masks + row * size, shared, at, at < size, PRESENT, SHARED)
    both = numbered.to(tl.int32) + (held.to(tl.int32) << 16)
    before = tl.cumsum(both, 0) - both  # in this block; one scan for both
    ends += row * 2 * blocks + tl.program_id(0) - 1  # where the block before ends
    number = tl.load(ends, mask=tl.program_id(0) > 0, other=0) + (before & 0xFFFF)
    place = tl.load(ends + blocks, mask=tl.program_id(0) > 0, other=0) + (before >> 16)
    tl.store(listed + row * room + place, number, mask=held & (place < room))


@triton.jit
def _gap(listed, ends, blocks, room, BLOCK: tl.constexpr):
    """The gaps before some numbers of a row, and the bytes of their varints: none where the list has ended."""
    row = tl.program_id(1).to(tl.int64)
    count = tl.minimum(tl.load(ends + (row + 1) * 2 * blocks - 1), room)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    listed += row * room + at
    number = tl.load(listed, mask=at < count, other=0)
    gap = number - tl.load(listed - 1, mask=(at > 0) & (at < count), other=-1) - 1
    return gap, tl.where(at < count, _length(gap), 0)


@triton.jit(do_not_specialize=["blocks", "room", "shorts"])
def _lengths_kernel(listed, ends, lengths, blocks, room, shorts, BLOCK: tl.constexpr):
    _, length = _gap(listed, ends, blocks, room, BLOCK)
    tl.store(lengths + tl.program_id(1) * shorts + tl.program_id(0), tl.sum(length, 0))


@triton.jit(do_not_specialize=["blocks", "room", "shorts", "longest"])
def _write_kernel(listed, ends, byte_ends, data, blocks, room, shorts, longest, BLOCK: tl.constexpr):
    gap, length = _gap(listed, ends, blocks, room, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    before = tl.load(byte_ends + row * shorts + tl.program_id(0) - 1, mask=tl.program_id(0) > 0, other=0)
    place = before + tl.cumsum(length, 0) - length
    for i in tl.static_range(5):
        byte = ((gap >> (7 * i)) & 0x7F) | ((length > i + 1).to(tl.int32) << 7)
        tl.store(data + row * longest + place + i, byte.to(tl.uint8), mask=(length > i) & (place + i < longest))


@triton.jit(do_not_specialize=["size", "count", "length"])
def _bits_kernel(masks, outside, data, size, count, length, SHARED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    byte = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    packed = tl.zeros((BLOCK,), tl.int32)
    for bit in tl.static_range(8):
        at = byte * 8 + bit
        ok = at < count
        if SHARED:
            at = tl.load(outside + at, mask=ok, other=0).to(tl.int32)
        packed |= (tl.load(masks + row * size + at, mask=ok, other=0) != 0).to(tl.int32) << bit
    tl.store(data + row * length + byte, packed.to(tl.uint8), mask=byte < length)


@triton.jit(do_not_specialize=["size", "blocks"])
def _held_kernel(masks, shared, counts, size, blocks, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = tl.load(masks + row * size + at, mask=at < size, other=0).to(tl.int32)
    both = held & tl.load(shared + at, mask=at < size, other=0).to(tl.int32)
    counts += (row * blocks + tl.program_id(0)) * 2
    tl.store(counts, tl.sum(held, 0))
    tl.store(counts + 1, tl.sum(both, 0))


def counts(masks: Tensor, shared: Tensor, block: int = BLOCK) -> Tensor:
    """How many positions every row holds and, in a second row, how many of them are shared."""
    rows, size = masks.shape
    blocks = triton.cdiv(size, block)
    counted = torch.empty(rows, blocks, 2, dtype=torch.int32, device=masks.device)
    sets, outside = masks.contiguous().view(torch.uint8), shared.contiguous().view(torch.uint8)
    _held_kernel[(blocks, rows)](sets, outside, counted, size, blocks, BLOCK=block)
    return counted.sum(1).t()


def bitmaps(masks: Tensor, outside: Tensor | None, block: int = SHORT) -> Tensor:
    """A row of bytes for every row, the first position in the lowest bit; of those `outside` alone, if given."""
    rows, size = masks.shape
    count = size if outside is None else outside.numel()
    data = torch.empty(rows, -(-count // 8), dtype=torch.uint8, device=masks.device)
    sets = masks.contiguous().view(torch.uint8)
    _bits_kernel[(triton.cdiv(data.shape[1], block), rows)](
        sets, sets if outside is None else outside, data, size, count, data.shape[1], SHARED=outside is not None,
        BLOCK=block,
    )  # fmt: skip
    return data


def absent(mask: Tensor, count: int, block: int = BLOCK) -> Tensor:
    """The increasing positions at which a mask does not hold, of which there are `count`."""
    return _list(mask.unsqueeze(0), None, False, max(1, count), block)[0][0, :count]


def gaps(
    masks: Tensor, shared: Tensor | None, present: bool, listed: Sequence[int], block: int = BLOCK, short: int = SHORT
) -> tuple[Tensor, Tensor]:
    """The varints of all rows, a row each, and how many bytes each has.

    Rows are sets of positions, of those that are True or, not `present`, of those that are False. What is `shared` is
    in no set and has no number. `listed` is how many are in each set.
    """
    rows, size = masks.shape
    blocks, room = triton.cdiv(size, block), max(1, *listed)
    shorts, longest = triton.cdiv(room, short), room + size // LONG_GAP + 1
    numbers, ends = _list(masks, shared, present, room, block)
    lengths = torch.empty(rows, shorts, dtype=torch.int32, device=masks.device)
    data = torch.empty(rows, longest, dtype=torch.uint8, device=masks.device)
    _lengths_kernel[(shorts, rows)](numbers, ends, lengths, blocks, room, shorts, BLOCK=short)
    byte_ends = lengths.cumsum(1, dtype=torch.int32)
    _write_kernel[(shorts, rows)](numbers, ends, byte_ends, data, blocks, room, shorts, longest, BLOCK=short)
    return data, byte_ends[:, -1]


def _list(masks: Tensor, shared: Tensor | None, present: bool, room: int, block: int) -> tuple[Tensor, Tensor]:
    """The numbers in each set, in rows of `room`; how many are numbered, and in the set, by the end of each block."""
    rows, size = masks.shape
    blocks = triton.cdiv(size, block)
    counts = torch.empty(rows, 2, blocks, dtype=torch.int32, device=masks.device)
    numbers = torch.empty(rows, room, dtype=torch.int32, device=masks.device)
    sets = masks.contiguous().view(torch.uint8)
    outside = sets if shared is None else shared.contiguous().view(torch.uint8)
    options = {"PRESENT": present, "SHARED": shared is not None, "BLOCK": block, "num_warps": 8}
    _blocks_kernel[(blocks, rows)](sets, outside, counts, size, blocks, **options)
    ends = counts.cumsum(2, dtype=torch.int32)
    _list_kernel[(blocks, rows)](sets, outside, ends, numbers, size, blocks, room, **options)
    return numbers, ends
