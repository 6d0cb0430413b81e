"""Adding parts of vectors to another, and what is left of a vector without a part."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
SHORT = 1024  # what one vector is best gone through in
TOGETHER = 8  # parts that one pass adds


# Rows of a matrix are aligned or not, and a kernel for every pattern of eight would be compiled.
@triton.jit(do_not_specialize=["vectors", "masks", "weights", "size"])
def _add_kernel(total, vectors, masks, weights, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(total + at, mask=at < size)
    for i in tl.static_range(len(vectors)):
        held = tl.load(masks[i] + at, mask=at < size, other=0) != 0
        product = tl.load(vectors[i] + at, mask=at < size) * weights[i]
        found = tl.where(held, found + product, found)
    tl.store(total + at, found, mask=at < size)


@triton.jit(do_not_specialize=["weight", "size"])
def _rest_kernel(vector, mask, found, weight, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = tl.load(mask + at, mask=at < size, other=0) != 0
    product = tl.load(vector + at, mask=at < size) * weight
    tl.store(found + at, tl.where(held, 0.0, product), mask=at < size)


def add(total: Tensor, vectors: Sequence[Tensor], masks: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Add weighted vectors to a total, in place, where their masks hold; the same bits as a product, then a sum, one
    after the other."""
    size = total.numel()
    for some in (slice(at, at + TOGETHER) for at in range(0, len(vectors), TOGETHER)):
        _add_kernel[(triton.cdiv(size, BLOCK),)](
            total, tuple(vector.contiguous() for vector in vectors[some]),
            tuple(mask.contiguous().view(torch.uint8) for mask in masks[some]),
            tuple(float(weight) for weight in weights[some]), size, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return total


def rest(vector: Tensor, mask: Tensor, weight: float) -> Tensor:
    """`weight` times a vector, zero where a mask holds."""
    size, found = vector.numel(), torch.empty_like(vector, memory_format=torch.contiguous_format)
    sets = mask.contiguous().view(torch.uint8)
    _rest_kernel[(triton.cdiv(size, SHORT),)](vector.contiguous(), sets, found, weight, size, BLOCK=SHORT)
    return found
