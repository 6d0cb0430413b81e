"""Top-k by magnitude: the threshold is found digit by digit, from counts that never leave the GPU.

The bits of a magnitude are four digits of eight bits. One pass counts how often each first digit occurs, the next one
how often each second digit does among the values that begin like the threshold, and so on. Every program works out for
itself, from the counts of the passes before, how the threshold begins.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
TILES = 2  # blocks that one program goes through: each has to find out how the threshold begins
DIGITS = 256
LEVELS = 4
COUNTED = ["keep", "size", "start", "salt"]


@triton.jit
def _find(counts, need):
    """The digit of the `need`-th largest: how many are still needed among those that have it, and how many do."""
    digit = tl.arange(0, 256)
    found = tl.load(counts + digit)
    above = tl.sum(found, 0) - tl.cumsum(found, 0)  # how many have a larger one
    chosen = tl.max(tl.where(above + found >= need, digit, 0), 0)  # where too few are eligible: all, down to zero
    return chosen, need - tl.sum(tl.where(digit > chosen, found, 0), 0), tl.sum(tl.where(digit == chosen, found, 0), 0)


@triton.jit
def _count(digit, eligible, BLOCK: tl.constexpr):
    """How often each digit occurs among the eligible."""
    counts = tl.histogram(tl.where(eligible, digit, 0), 256)
    return counts - tl.where(tl.arange(0, 256) == 0, BLOCK - tl.sum(eligible.to(tl.int32), 0), 0)


@triton.jit
def _magnitudes(values, among, at, size, AMONG: tl.constexpr):
    bits = tl.load(values + at, mask=at < size, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    eligible = at < size
    if AMONG:
        eligible = eligible & (tl.load(among + at, mask=at < size, other=0) != 0)
    return bits, eligible


@triton.jit
def _turn(at, start, salt):
    """The order among ties: the largest goes first. `selection.tie_break`, whose lowest goes first, upside down."""
    x = (at + start).to(tl.uint32) ^ salt.to(tl.uint32)
    x = x ^ (x >> 16)
    x = x * tl.full((), 0x85EBCA6B, tl.uint32)
    x = x ^ (x >> 16)
    x = x * tl.full((), 0xC2B2AE35, tl.uint32)
    x = x ^ (x >> 16)
    return ~x


@triton.jit(do_not_specialize=COUNTED)
def _digits_kernel(
    values, among, counts, keep, size, LEVEL: tl.constexpr, AMONG: tl.constexpr, BLOCK: tl.constexpr,
    TILES: tl.constexpr
):  # fmt: skip
    need = keep
    begins = 0
    for level in tl.static_range(LEVEL):
        first, need, _ = _find(counts + 256 * level, need)
        begins = begins * 256 + first
    counts += 256 * LEVEL
    found = tl.zeros((256,), tl.int32)
    for tile in range(TILES):
        at = (tl.program_id(0) * TILES + tile) * BLOCK + tl.arange(0, BLOCK)
        bits, eligible = _magnitudes(values, among, at, size, AMONG)
        if LEVEL > 0:
            eligible = eligible & ((bits >> (32 - 8 * LEVEL)) == begins)
        digit = (bits >> (24 - 8 * LEVEL)) & 255
        if LEVEL < 2:
            found += _count(digit, eligible, BLOCK)
        else:  # few begin like the threshold
            tl.atomic_add(counts + digit, 1, mask=eligible, sem="relaxed")
    if LEVEL < 2:
        tl.atomic_add(counts + tl.arange(0, 256), found, mask=found > 0, sem="relaxed")


@triton.jit(do_not_specialize=COUNTED)
def _ties_kernel(
    values, among, counts, found, ties, keep, size, start, salt, AMONG: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The threshold, how many that have it are needed and how many do; where those are more, the turns of all of them,
    in whatever order."""
    need = keep
    tied = keep
    threshold = 0
    for level in tl.static_range(4):
        digit, need, tied = _find(counts + 256 * level, need)
        threshold = threshold * 256 + digit
    if tl.program_id(0) == 0:
        tl.store(found, threshold)
        tl.store(found + 1, need)
        tl.store(found + 2, tied)
    if tied > need:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        bits, eligible = _magnitudes(values, among, at, size, AMONG)
        tie = (eligible & (bits == threshold)).to(tl.int32)
        here = tl.sum(tie, 0)
        if here > 0:
            place = tl.atomic_add(found + 3, here, sem="relaxed") + tl.cumsum(tie, 0) - tie
            tl.store(ties + place, _turn(at, start, salt).to(tl.int32, bitcast=True), mask=tie > 0)


@triton.jit
def _last_kernel(counts, found, ties, BLOCK: tl.constexpr):
    """The last turn of a tie that is taken. By one program: ties are few, and where nearly all are alike it takes some
    milliseconds."""
    need = tl.load(found + 1)
    tied = tl.load(found + 2)
    begins = tl.zeros((), tl.uint32)
    if tied > need:
        for level in tl.static_range(4):
            count = tl.zeros((256,), tl.int32)
            for block in range(0, tl.cdiv(tied, BLOCK)):
                at = block * BLOCK + tl.arange(0, BLOCK)
                turn = tl.load(ties + at, mask=at < tied, other=0).to(tl.uint32, bitcast=True)
                eligible = at < tied
                if level > 0:
                    eligible = eligible & ((turn >> (32 - 8 * level)) == begins)
                count += _count(((turn >> (24 - 8 * level)) & 255).to(tl.int32), eligible, BLOCK)
            tl.store(counts + 256 * level + tl.arange(0, 256), count)
            tl.debug_barrier()
            digit, need, _ = _find(counts + 256 * level, need)
            begins = begins * 256 + digit.to(tl.uint32)
    tl.store(found + 4, begins.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=COUNTED)
def _mask_kernel(
    values, among, found, mask, size, start, salt, AMONG: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits, eligible = _magnitudes(values, among, at, size, AMONG)
    threshold = tl.load(found)
    taken = _turn(at, start, salt) >= tl.load(found + 4).to(tl.uint32, bitcast=True)
    chosen = eligible & ((bits > threshold) | ((bits == threshold) & taken))
    tl.store(mask + at, chosen.to(tl.uint8), mask=at < size)


def largest(
    values: Tensor, keep: int, start: int, salt: int, among: Tensor | None, block: int = BLOCK, tiles: int = TILES
) -> Tensor:
    """A mask of the `keep` largest magnitudes of float32 values; among equals the lowest hash of `start` + position,
    salted, goes first. Where fewer are eligible all of them are taken. A value that is not a number is largest."""
    size = values.numel()
    mask = torch.empty(size, dtype=torch.bool, device=values.device)
    if keep <= 0 or not size:
        return mask.zero_()
    values = values.contiguous()
    counts = torch.zeros(2 * LEVELS * DIGITS + 5, dtype=torch.int32, device=values.device)
    digits, turns, found = counts.split([LEVELS * DIGITS, LEVELS * DIGITS, 5])
    ties = torch.empty(size, dtype=torch.int32, device=values.device)
    eligible = values if among is None else among.contiguous().view(torch.uint8)
    salt -= (salt >> 31) << 32  # the same bits, as a signed number
    options = {"AMONG": among is not None, "BLOCK": block, "num_warps": 8}
    grid = (triton.cdiv(size, block),)
    tiled = (triton.cdiv(size, block * tiles),)
    for level in range(LEVELS):
        _digits_kernel[tiled](values, eligible, digits, keep, size, LEVEL=level, TILES=tiles, **options)
    _ties_kernel[grid](values, eligible, digits, found, ties, keep, size, start, salt, **options)
    _last_kernel[(1,)](turns, found, ties, BLOCK=block)
    _mask_kernel[grid](values, eligible, found, mask.view(torch.uint8), size, start, salt, **options)
    return mask
