"""What the kernels share: how sizes are given to them."""

import math
from typing import Any

import torch
import triton.language as tl

# Programs per client: 30 of them keep a large GPU busy. Not by the number of clients: what is added up in which order,
# and so every bit of a client's result, must not depend on who else is in the stack.
PROGRAMS = 34
# A kernel is compiled once for all sizes, not for every layer anew: Triton is told not to look at these arguments.
ROWS_OF = ["rows_total", "rows_each", "splits"]
PIXELS_OF = ["height", "width", "out_height", "out_width", "rows", "stride", "padding", "dilation"]


def in_units(channels: int) -> dict[str, int]:
    """Channels for a kernel that multiplies them again: so Triton knows that four of them, or two, lie side by side and
    loads them at once. By itself it only looks whether a number is a multiple of sixteen."""
    unit = next(unit for unit in (4, 2, 1) if channels % unit == 0)
    return {"units": channels // unit, "UNIT": unit}


def wide(dtype: torch.dtype) -> Any:
    """In which type to add up."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def out_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """How many pixels a convolution leaves of so many."""
    return math.floor((size + 2 * padding - dilation * (kernel - 1) - 1) / stride) + 1
