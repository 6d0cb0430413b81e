"""What a round does beside the training, for a GPU: each is a few passes over the memory, and nobody waits for it.

Every module has its twin elsewhere, in NumPy or PyTorch, which is what runs without a GPU or without Triton.
(`training/kernels` are the layers.)
"""

import importlib.util
from functools import cache

from torch import Tensor


def serve(tensor: Tensor) -> bool:
    """Whether the kernels are for this tensor."""
    return tensor.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
