"""Adding a part of a vector to another, and what is left of a vector without a part."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit(do_not_specialize=["weight", "size"])
def _add_kernel(total, vector, mask, weight, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = tl.load(total + at, mask=at < size)
    held = tl.load(mask + at, mask=at < size, other=0) != 0
    product = tl.load(vector + at, mask=at < size) * weight
    tl.store(total + at, tl.where(held, before + product, before), mask=at < size)


@triton.jit(do_not_specialize=["weight", "size"])
def _rest_kernel(vector, mask, found, weight, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = tl.load(mask + at, mask=at < size, other=0) != 0
    product = tl.load(vector + at, mask=at < size) * weight
    tl.store(found + at, tl.where(held, 0.0, product), mask=at < size)


def add(total: Tensor, vector: Tensor, mask: Tensor, weight: float) -> Tensor:
    """Add `weight` times a vector to a total, in place, where a mask holds; the same bits as product, then sum."""
    size = total.numel()
    _add_kernel[(triton.cdiv(size, BLOCK),)](
        total, vector.contiguous(), mask.contiguous().view(torch.uint8), weight, size, BLOCK=BLOCK,
        enable_fp_fusion=False,
    )  # fmt: skip
    return total


def rest(vector: Tensor, mask: Tensor, weight: float) -> Tensor:
    """`weight` times a vector, zero where a mask holds."""
    size, found = vector.numel(), torch.empty_like(vector, memory_format=torch.contiguous_format)
    sets = mask.contiguous().view(torch.uint8)
    _rest_kernel[(triton.cdiv(size, BLOCK),)](vector.contiguous(), sets, found, weight, size, BLOCK=BLOCK)
    return found
