"""Rounding to eight-bit floats, tensor by tensor, and masks from the bits of integers: one launch instead of many."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gluefl.accel.streams import numbers_on

BLOCK = 1024


@triton.jit
def _magnitudes(values, i, last):
    """The bits of magnitudes, whose order is that of the magnitudes, and those of the signs."""
    bits = tl.load(values + i, mask=i < last, other=0.0).to(tl.int32, bitcast=True)
    return bits & 0x7FFFFFFF, bits & -0x80000000


@triton.jit(do_not_specialize=["least", "most"])
def _round_kernel(values, bounds, result, maximum, least, most, BLOCK: tl.constexpr):
    tensor = tl.program_id(0)
    first = tl.load(bounds + tensor)
    last = tl.load(bounds + tensor + 1)
    highest = tl.zeros((BLOCK,), tl.int32)
    for start in range(first, last, BLOCK):
        magnitudes, _ = _magnitudes(values, start + tl.arange(0, BLOCK), last)
        highest = tl.maximum(highest, tl.where(magnitudes < 0x7F800000, magnitudes, 0))
    largest = tl.max(highest, 0)
    ratio = tl.div_rn(largest.to(tl.float32, bitcast=True), maximum).to(tl.int32, bitcast=True)
    exponent = (ratio >> 23) - 127 + ((ratio & 0x7FFFFF) != 0).to(tl.int32)  # rounded up
    exponent = tl.where(largest > 0, tl.minimum(tl.maximum(exponent, least), most), 0)
    scale = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    for start in range(first, last, BLOCK):
        i = start + tl.arange(0, BLOCK)
        magnitudes, signs = _magnitudes(values, i, last)
        x = magnitudes.to(tl.float32, bitcast=True) * inverse
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)  # ties to even
        subnormal = ((x * 512.0 + 12582912.0) - 12582912.0) * (1.0 / 512)  # whole numbers of 2^-9: 1.5 · 2^23 rounds
        rounded = tl.minimum(tl.where(x >= 0.015625, normal, subnormal), maximum) * scale
        kept = tl.where(magnitudes < 0x7F800000, rounded.to(tl.int32, bitcast=True), magnitudes)
        tl.store(result + i, (kept | signs).to(tl.float32, bitcast=True), mask=i < last)


def round_tensors(values: Tensor, bounds: Tensor, maximum: float, least: int, most: int) -> Tensor:
    """E4M3 · 2^exponent for every value, with an exponent for every tensor; what is not finite stays so.

    `bounds` are where the tensors begin, and where the last one ends.
    """
    values, result = values.contiguous(), torch.empty(values.numel(), dtype=torch.float32, device=values.device)
    if bounds.numel() > 1:
        _round_kernel[(bounds.numel() - 1,)](
            values, bounds, result, maximum, least, most, BLOCK=BLOCK, enable_fp_fusion=False
        )
    return result


@triton.jit(do_not_specialize=["count", "size"])
def _clear_kernel(words, places, rows, count, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + at, mask=at < size, other=0)
    for row in range(count):
        clear = ((word >> tl.load(places + row)) & 1) == 0
        tl.store(rows + row * size.to(tl.int64) + at, clear.to(tl.uint8), mask=at < size)


def clear_bits(words: Tensor, places: Sequence[int]) -> list[Tensor]:
    """For every place, where the bit of a vector of 64-bit words is 0."""
    size, words = words.numel(), words.contiguous()
    rows = torch.empty(len(places), size, dtype=torch.uint8, device=words.device)
    if places and size:
        _clear_kernel[(triton.cdiv(size, BLOCK),)](
            words, numbers_on(words.device, places, torch.int64), rows, len(places), size, BLOCK=BLOCK
        )
    return list(rows.view(torch.bool).unbind())
