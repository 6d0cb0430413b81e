"""Sizes and shapes, as the kernels take them."""

import math
from typing import Any

import torch
import triton.language as tl

# Programs per client: with 30 clients they occupy a large GPU. Independent of the number of clients: the order of
# summation, and so every bit of a client's result, must not depend on the other clients of the stack.
PROGRAMS = 34
# Arguments that Triton does not specialise on: a kernel is compiled once, not once per layer.
ROWS_OF = ["rows_total", "rows_each", "splits"]
PIXELS_OF = ["height", "width", "out_height", "out_width", "rows", "stride", "padding", "dilation"]


def in_units(channels: int) -> dict[str, int]:
    """Channels as a product of two arguments, of which the compiler knows one: it then vectorises loads of four or two
    channels. Triton alone only detects multiples of sixteen."""
    unit = next(unit for unit in (4, 2, 1) if channels % unit == 0)
    return {"units": channels // unit, "UNIT": unit}


def wide(dtype: torch.dtype) -> Any:
    """The type of sums."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def out_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """The output pixels of a convolution along one axis."""
    return math.floor((size + 2 * padding - dilation * (kernel - 1) - 1) / stride) + 1
