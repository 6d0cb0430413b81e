"""Sets of positions, many at a time: how many they hold, and the gaps between them as varints (`wire.positions`).

A program counts a block of positions, a sum over the blocks says where each one's begin in a list, and a second pass
lists them. They are few: what is left to do is done on the list. Positions of a known set may be left out of the
numbering: nothing has to be compacted before.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # positions; two counts of a block share 32 bits
SHORT = 1024  # numbers of a list


@triton.jit
def _length(gap):
    """Bytes of a varint, the gap being below 2^31."""
    length = 1 + (gap >= 1 << 7).to(tl.int32) + (gap >= 1 << 14).to(tl.int32) + (gap >= 1 << 21).to(tl.int32)
    return length + (gap >= 1 << 28).to(tl.int32)


@triton.jit
def _holds(masks, known, at, ok, PRESENT: tl.constexpr, KNOWN: tl.constexpr):
    """Which positions are numbered, and which of them are in the set."""
    numbered = ok
    if KNOWN:
        numbered = numbered & (tl.load(known + at, mask=ok, other=0) == 0)
    held = tl.load(masks + at, mask=ok, other=0) != 0
    return numbered, numbered & (held == PRESENT)


@triton.jit(do_not_specialize=["size", "blocks"])
def _blocks_kernel(
    masks, known, counts, size, blocks, PRESENT: tl.constexpr, KNOWN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """By block: how many are numbered, and how many of them are in the set."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbered, held = _holds(masks + row * size, known, at, at < size, PRESENT, KNOWN)
    counts += (row * blocks + tl.program_id(0)) * 2
    tl.store(counts, tl.sum(numbered.to(tl.int32), 0))
    tl.store(counts + 1, tl.sum(held.to(tl.int32), 0))


@triton.jit(do_not_specialize=["total", "size", "blocks"])
def _list_kernel(
    masks, known, numbers, places, listed, total, size, blocks, PRESENT: tl.constexpr, KNOWN: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """The numbers of those in the set, in order, and −1 before the first of a row."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbered, held = _holds(masks + row * size, known, at, at < size, PRESENT, KNOWN)
    both = numbered.to(tl.int32) + (held.to(tl.int32) << 16)
    before = tl.cumsum(both, 0) - both  # in this block; one scan for both
    block = row * blocks + tl.program_id(0)
    place = tl.load(places + block)
    at = place + (before >> 16)
    tl.store(listed + at, tl.load(numbers + block) + (before & 0xFFFF), mask=held & (at < total))
    if tl.program_id(0) == 0:
        tl.store(listed + place - 1, -1)


@triton.jit
def _gap(listed, at, count):
    """The gap before a number, and the bytes of its varint: none for what is no number."""
    number = tl.load(listed + at, mask=at < count, other=-1)
    gap = number - tl.load(listed + at - 1, mask=(at > 0) & (at < count), other=-1) - 1
    return gap, tl.where(number >= 0, _length(gap), 0)


@triton.jit(do_not_specialize=["count"])
def _lengths_kernel(listed, lengths, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, length = _gap(listed, at, count)
    tl.store(lengths + at, length, mask=at < count)


@triton.jit(do_not_specialize=["count"])
def _write_kernel(listed, ends, data, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gap, length = _gap(listed, at, count)
    data += tl.load(ends + at, mask=at < count, other=0) - length
    for i in tl.static_range(5):
        byte = ((gap >> (7 * i)) & 0x7F) | ((length > i + 1).to(tl.int32) << 7)
        tl.store(data + i, byte.to(tl.uint8), mask=length > i)


@triton.jit(do_not_specialize=["size", "blocks"])
def _held_kernel(masks, known, counts, size, blocks, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = tl.load(masks + row * size + at, mask=at < size, other=0).to(tl.int32)
    both = held & tl.load(known + at, mask=at < size, other=0).to(tl.int32)
    counts += (row * blocks + tl.program_id(0)) * 2
    tl.store(counts, tl.sum(held, 0))
    tl.store(counts + 1, tl.sum(both, 0))


def counts(masks: Tensor, known: Tensor, block: int = BLOCK) -> tuple[list[int], list[int]]:
    """How many positions every row holds, and how many of them are known."""
    rows, size = masks.shape
    blocks = triton.cdiv(size, block)
    found = torch.empty(rows, blocks, 2, dtype=torch.int32, device=masks.device)
    sets, outside = masks.contiguous().view(torch.uint8), known.contiguous().view(torch.uint8)
    _held_kernel[(blocks, rows)](sets, outside, found, size, blocks, BLOCK=block)
    held, both = found.sum(1).t().tolist()
    return held, both


def gaps(
    masks: Tensor, known: Tensor | None, present: bool, listed: Sequence[int], block: int = BLOCK
) -> tuple[Tensor, list[int]]:
    """The varints of all rows, one after the other, and how many bytes each row has.

    Rows are sets of positions, of those that are True or, not `present`, of those that are False. What is `known` is
    in no set and has no number. `listed` is how many are in each set.
    """
    rows, size = masks.shape
    blocks = triton.cdiv(size, block)
    lasts = (
        torch.tensor(listed, device=masks.device).add_(1).cumsum(0).sub_(1)
    )  # first: a copy waits for what is started
    counts = torch.empty(rows, blocks, 2, dtype=torch.int32, device=masks.device)
    sets = masks.contiguous().view(torch.uint8)
    outside = sets if known is None else known.contiguous().view(torch.uint8)
    options = {"PRESENT": present, "KNOWN": known is not None, "BLOCK": block, "num_warps": 8}
    _blocks_kernel[(blocks, rows)](sets, outside, counts, size, blocks, **options)
    numbered, held = counts.unbind(2)
    numbers = numbered.cumsum(1, dtype=torch.int32) - numbered  # before each block
    starts = torch.arange(1, rows + 1, device=masks.device).unsqueeze(1)  # what is before a row's first, too
    places = (held.flatten().cumsum(0) - held.flatten()).view(rows, blocks) + starts
    total = sum(listed) + rows
    found = torch.empty(total, dtype=torch.int32, device=masks.device)
    _list_kernel[(blocks, rows)](sets, outside, numbers, places, found, total, size, blocks, **options)
    lengths = torch.empty_like(found)
    grid = (triton.cdiv(total, SHORT),)
    _lengths_kernel[grid](found, lengths, total, BLOCK=SHORT)
    ends = lengths.cumsum(0)
    row_ends = ends[lasts].tolist()
    data = torch.empty(row_ends[-1], dtype=torch.uint8, device=masks.device)
    _write_kernel[grid](found, ends, data, total, BLOCK=SHORT)
    return data, [end - start for start, end in zip([0, *row_ends], row_ends)]
