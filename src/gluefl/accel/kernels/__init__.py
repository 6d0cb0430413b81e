"""Triton kernels. The functions of `gluefl.accel` choose between a kernel and its form in NumPy or PyTorch."""

import importlib.util

from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None


def serve(tensor: Tensor) -> bool:
    """Whether the kernels can work on this tensor."""
    return tensor.is_cuda and HAS_TRITON
