"""Adding parts of vectors to another, and what is left of a vector without a part."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
SHORT = 1024  # block length for one vector
TOGETHER = 8  # parts that one pass adds


@triton.jit
def _added(result, vector, mask, weight, at, size):
    held = tl.load(mask + at, mask=at < size, other=0) != 0
    product = tl.load(vector + at, mask=at < size) * weight
    return tl.where(held, result + product, result)


# Rows of a matrix are aligned or not, and a kernel for each pattern of eight would be compiled: none is declared.
PARTS = [f"{name}{i}" for i in range(TOGETHER) for name in ("vector", "mask", "weight")]


@triton.jit(do_not_specialize=[*PARTS, "size"])
def _add_kernel(
    total, vector0, mask0, weight0, vector1, mask1, weight1,
    vector2, mask2, weight2, vector3, mask3, weight3,
    vector4, mask4, weight4, vector5, mask5, weight5,
    vector6, mask6, weight6, vector7, mask7, weight7,
    size, COUNT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    result = _added(tl.load(total + at, mask=at < size), vector0, mask0, weight0, at, size)
    if COUNT > 1:
        result = _added(result, vector1, mask1, weight1, at, size)
    if COUNT > 2:
        result = _added(result, vector2, mask2, weight2, at, size)
    if COUNT > 3:
        result = _added(result, vector3, mask3, weight3, at, size)
    if COUNT > 4:
        result = _added(result, vector4, mask4, weight4, at, size)
    if COUNT > 5:
        result = _added(result, vector5, mask5, weight5, at, size)
    if COUNT > 6:
        result = _added(result, vector6, mask6, weight6, at, size)
    if COUNT > 7:
        result = _added(result, vector7, mask7, weight7, at, size)
    tl.store(total + at, result, mask=at < size)


@triton.jit(do_not_specialize=["weight", "size"])
def _rest_kernel(vector, mask, result, weight, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = tl.load(mask + at, mask=at < size, other=0) != 0
    product = tl.load(vector + at, mask=at < size) * weight
    tl.store(result + at, tl.where(held, 0.0, product), mask=at < size)


def add(total: Tensor, vectors: Sequence[Tensor], masks: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Add weighted vectors to a total, in place, where their masks hold; the same bits as a product, then a sum, one
    after the other."""
    size = total.numel()
    parts = [
        (vector.contiguous(), mask.contiguous().view(torch.uint8), float(weight))
        for vector, mask, weight in zip(vectors, masks, weights)
    ]
    for batch in (parts[at : at + TOGETHER] for at in range(0, len(parts), TOGETHER)):
        padded = batch + batch[:1] * (TOGETHER - len(batch))  # parts beyond COUNT are not read
        _add_kernel[(triton.cdiv(size, BLOCK),)](
            total, *(one for part in padded for one in part), size, COUNT=len(batch), BLOCK=BLOCK, num_warps=8,
            enable_fp_fusion=False,
        )  # fmt: skip
    return total


def rest(vector: Tensor, mask: Tensor, weight: float) -> Tensor:
    """`weight` times a vector, zero where a mask holds."""
    size, result = vector.numel(), torch.empty_like(vector, memory_format=torch.contiguous_format)
    sets = mask.contiguous().view(torch.uint8)
    _rest_kernel[(triton.cdiv(size, SHORT),)](vector.contiguous(), sets, result, weight, size, BLOCK=SHORT)
    return result
