"""Sets of positions, many at a time: how many they hold, and the gaps between them as varints (`wire.positions`).

A program counts a block of positions, a few sums over the blocks say where each one's bytes begin, and a second pass
writes them. Positions of a known set may be left out of the numbering: nothing has to be compacted before.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # positions


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


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


@triton.jit
def _in_block(masks, known, size, PRESENT: tl.constexpr, KNOWN: tl.constexpr, BLOCK: tl.constexpr):
    """For every position of a block: whether it is numbered, whether it is in the set, its number, and the number of
    the last one before it that is in the set, −1 if that is not in this block."""
    begin = tl.program_id(0) * BLOCK
    at = begin + tl.arange(0, BLOCK)
    numbered, held = _holds(masks, known, at, at < size, PRESENT, KNOWN)
    number = tl.cumsum(numbered.to(tl.int32), 0) - numbered.to(tl.int32)
    _, held_before = _holds(masks, known, at - 1, (at > begin) & (at <= size), PRESENT, KNOWN)
    last = tl.associative_scan(tl.where(held_before, number - 1, -1), 0, _larger)
    return numbered, held, number, last


@triton.jit(do_not_specialize=["size", "blocks"])
def _blocks_kernel(
    masks, known, counts, size, blocks, PRESENT: tl.constexpr, KNOWN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """By block: how many are numbered, the first and last number in the set, the bytes of all gaps but the first."""
    row = tl.program_id(1).to(tl.int64)
    numbered, held, number, last = _in_block(masks + row * size, known, size, PRESENT, KNOWN, BLOCK)
    counts += (row * blocks + tl.program_id(0)) * 4
    follows = held & (last >= 0)
    tl.store(counts, tl.sum(numbered.to(tl.int32), 0))
    tl.store(counts + 1, tl.min(tl.where(held, number, BLOCK), 0))
    tl.store(counts + 2, tl.max(tl.where(held, number, -1), 0))
    tl.store(counts + 3, tl.sum(tl.where(follows, _length(number - last - 1), 0), 0))


@triton.jit(do_not_specialize=["size", "blocks"])
def _write_kernel(
    masks, known, before, starts, data, size, blocks, PRESENT: tl.constexpr, KNOWN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    _, held, number, last = _in_block(masks + row * size, known, size, PRESENT, KNOWN, BLOCK)
    block = row * blocks + tl.program_id(0)
    gap = number - tl.where(last >= 0, last, tl.load(before + block)) - 1
    length = tl.where(held, _length(gap), 0)
    data += tl.load(starts + block) + tl.cumsum(length, 0) - length
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


def gaps(masks: Tensor, known: Tensor | None, present: bool, block: int = BLOCK) -> tuple[Tensor, list[int]]:
    """The varints of all rows, one after the other, and how many bytes each row has.

    Rows are sets of positions, of those that are True or, not `present`, of those that are False. What is `known` is
    in no set and has no number.
    """
    rows, size = masks.shape
    blocks = triton.cdiv(size, block)
    counts = torch.empty(rows, blocks, 4, dtype=torch.int32, device=masks.device)
    sets = masks.contiguous().view(torch.uint8)
    outside = sets if known is None else known.contiguous().view(torch.uint8)
    options = {"PRESENT": present, "KNOWN": known is not None, "BLOCK": block, "num_warps": 8}
    _blocks_kernel[(blocks, rows)](sets, outside, counts, size, blocks, **options)
    numbered, first, last, length = counts.unbind(2)
    numbers = numbered.cumsum(1, dtype=torch.int32) - numbered  # before each block
    reached = torch.where(last >= 0, numbers + last, -1).cummax(1).values
    before = torch.nn.functional.pad(reached[:, :-1], (1, 0), value=-1) - numbers
    first_length = sum(((first - before - 1) >= 1 << bits).int() for bits in (7, 14, 21, 28)) + 1
    length = (length + torch.where(last >= 0, first_length, 0)).long()
    ends = length.flatten().cumsum(0)
    in_rows = length.sum(1).tolist()
    data = torch.empty(sum(in_rows), dtype=torch.uint8, device=masks.device)
    _write_kernel[(blocks, rows)](sets, outside, before, ends - length.flatten(), data, size, blocks, **options)
    return data, in_rows
