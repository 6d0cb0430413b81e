"""Top-k by magnitude: the threshold is found digit by digit, from counts that never leave the GPU.

The bits of a magnitude are four digits of eight bits. One pass counts how often each first digit occurs, the next one
how often each second digit does among the values that begin like the threshold, and so on. Every program works out for
itself, from the counts of the passes before, how the threshold begins.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
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
def _count_kernel(
    values, among, counts, keep, size, LEVEL: tl.constexpr, AMONG: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits, eligible = _magnitudes(values, among, at, size, AMONG)
    need = keep
    begins = 0
    for level in tl.static_range(LEVEL):
        digit, need, _ = _find(counts + 256 * level, need)
        begins = begins * 256 + digit
    if LEVEL > 0:
        eligible = eligible & ((bits >> (32 - 8 * LEVEL)) == begins)
    found = _count((bits >> (24 - 8 * LEVEL)) & 255, eligible, BLOCK)
    at_count = counts + 256 * LEVEL + tl.arange(0, 256)
    tl.atomic_add(at_count, found, mask=found > 0, sem="relaxed")


@triton.jit(do_not_specialize=COUNTED)
def _ties_kernel(
    values, among, counts, last, keep, size, start, salt, AMONG: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The threshold, and the last turn of a tie that is taken: only where more tie than are needed is it looked for."""
    need = keep
    ties = keep
    threshold = 0
    for level in tl.static_range(4):
        digit, need, ties = _find(counts + 256 * level, need)
        threshold = threshold * 256 + digit
    begins = tl.zeros((), tl.uint32)
    if ties > need:
        for level in tl.static_range(4):
            found = tl.zeros((256,), tl.int32)
            for block in range(0, tl.cdiv(size, BLOCK)):
                at = block * BLOCK + tl.arange(0, BLOCK)
                bits, eligible = _magnitudes(values, among, at, size, AMONG)
                turn = _turn(at, start, salt)
                eligible = eligible & (bits == threshold)
                if level > 0:
                    eligible = eligible & ((turn >> (32 - 8 * level)) == begins)
                found += _count(((turn >> (24 - 8 * level)) & 255).to(tl.int32), eligible, BLOCK)
            tl.store(counts + 1024 + 256 * level + tl.arange(0, 256), found)
            tl.debug_barrier()
            digit, need, _ = _find(counts + 1024 + 256 * level, need)
            begins = begins * 256 + digit.to(tl.uint32)
    tl.store(last, threshold)
    tl.store(last + 1, begins.to(tl.int64))


@triton.jit(do_not_specialize=COUNTED)
def _mask_kernel(
    values, among, last, mask, size, start, salt, AMONG: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits, eligible = _magnitudes(values, among, at, size, AMONG)
    threshold = tl.load(last).to(tl.int32)
    first = _turn(at, start, salt).to(tl.int64) >= tl.load(last + 1)
    chosen = eligible & ((bits > threshold) | ((bits == threshold) & first))
    tl.store(mask + at, chosen.to(tl.uint8), mask=at < size)


def largest(values: Tensor, keep: int, start: int, salt: int, among: Tensor | None, block: int = BLOCK) -> Tensor:
    """A mask of the `keep` largest magnitudes of float32 values; among equals the lowest hash of `start` + position,
    salted, goes first. Where fewer are eligible all of them are taken. A value that is not a number is largest."""
    size = values.numel()
    mask = torch.empty(size, dtype=torch.bool, device=values.device)
    if keep <= 0 or not size:
        return mask.zero_()
    values = values.contiguous()
    counts = torch.zeros(2 * LEVELS * DIGITS, dtype=torch.int32, device=values.device)
    last = torch.empty(2, dtype=torch.int64, device=values.device)
    eligible = values if among is None else among.contiguous().view(torch.uint8)
    salt -= (salt >> 31) << 32  # the same bits, as a signed number
    options = {"AMONG": among is not None, "BLOCK": block, "num_warps": 8}
    grid = (triton.cdiv(size, block),)
    for level in range(LEVELS):
        _count_kernel[grid](values, eligible, counts, keep, size, LEVEL=level, **options)
    _ties_kernel[(1,)](values, eligible, counts, last, keep, size, start, salt, **options)
    _mask_kernel[grid](values, eligible, last, mask.view(torch.uint8), size, start, salt, **options)
    return mask
