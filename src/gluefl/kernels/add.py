"""Adding a part of a vector to another."""

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


def add(total: Tensor, vector: Tensor, mask: Tensor, weight: float) -> Tensor:
    """Add `weight` times a vector to a total, in place, where a mask holds; the same bits as product, then sum."""
    size = total.numel()
    _add_kernel[(triton.cdiv(size, BLOCK),)](
        total, vector.contiguous(), mask.contiguous().view(torch.uint8), weight, size, BLOCK=BLOCK,
        enable_fp_fusion=False,
    )  # fmt: skip
    return total
