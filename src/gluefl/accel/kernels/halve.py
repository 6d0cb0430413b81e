"""Half precision with a scale for every client: the mantissa of TF32 at half the bytes and twice the speed.

Hopper's tensor cores take operands that lie across the depth of a product only in sixteen bits. A half has ten bits
of mantissa, as TF32 has, but few exponents: every client's tensor is multiplied by the power of two that brings its
largest value near the largest half, and the product by its inverse. Values 2^28 times smaller lose bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _halve_kernel(x, y, largest, unscale, stride, size, BLOCK: tl.constexpr):
    client = tl.program_id(1).to(tl.int64)
    # The exponent of the largest value, by its bits; the scale is the power of two with the opposite one.
    exponent = (tl.load(largest + client).to(tl.int32, bitcast=True) >> 23) & 255
    up = tl.minimum(tl.maximum(268 - exponent, 1), 253)
    scale = (up << 23).to(tl.float32, bitcast=True)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + client * stride + at, mask=at < size, other=0.0)
    tl.store(y + client * size + at, (values * scale).to(tl.float16), mask=at < size)
    if tl.program_id(0) == 0:
        tl.store(unscale + client, ((254 - up) << 23).to(tl.float32, bitcast=True))


def halve(x: Tensor) -> tuple[Tensor, Tensor]:
    """(clients, …) in half precision, and for every client the factor that undoes its scale."""
    x = x if x[0].is_contiguous() else x.contiguous()  # rows of a matrix need not be adjacent
    size = x[0].numel()
    largest = torch.linalg.vector_norm(x.flatten(1), float("inf"), 1)
    y, unscale = torch.empty(x.shape, dtype=torch.float16, device=x.device), torch.empty_like(largest)
    _halve_kernel[(triton.cdiv(size, BLOCK), len(x))](x, y, largest, unscale, x.stride(0), size, BLOCK=BLOCK)
    return y, unscale
