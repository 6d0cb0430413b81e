"""Mean and deviation of raw inputs, and normalisation by them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gluefl.populations.inputs import each

MEASURED = 10_000  # samples over which mean and deviation are measured, at most
VALUES = 2 * 10**8  # numbers, at most: they are read whenever a population is opened
CHUNK = 2**16  # values that are converted to float64 at a time


def standardised(x: Tensor, mean: Sequence[float], std: Sequence[float], axis: int) -> Tensor:
    """(x − mean) / std per channel, with Python numbers, which need no copy to the device."""
    if len(mean) == 1:
        return (x - mean[0]) / std[0]
    parts = torch.split(x, 1, dim=axis)
    return torch.cat([(part - m) / s for part, m, s in zip(parts, mean, std)], dim=axis)


def transformed(
    inputs: Any, shape: Sequence[int], mean: Sequence[float], std: Sequence[float], adds_channel: bool
) -> Any:
    """Raw inputs as a population gives them to a model: normalised float32 of this shape, with any leading dimensions.

    Without a mean, floats as float32 and whole numbers as int64.
    """
    if not mean:
        return each(_plain, inputs)
    x, rank = inputs.float(), len(shape)
    x = x.unsqueeze(-rank) if adds_channel else x
    x = standardised(x, mean, std, axis=-rank)
    return x.expand(*x.shape[: x.dim() - rank], *shape)


def _plain(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        return tensor.float()
    return tensor if tensor.dtype == torch.bool else tensor.long()


def moments(inputs: NDArray[Any], rows: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and deviation of the raw inputs in these rows, those that train, per channel for colour.

    Of many rows every n-th is measured: at most `MEASURED` samples and `VALUES` numbers.
    """
    most = max(1, min(MEASURED, VALUES // max(1, math.prod(inputs.shape[1:]))))
    sample = np.sort(rows)[:: max(1, math.ceil(len(rows) / most))]  # in the order in which they lie on a disk
    mean = _average(inputs, sample, lambda x: x)
    # Two passes: the sum of squares alone would lose the deviation of inputs far from zero to rounding.
    std = np.sqrt(_average(inputs, sample, lambda x: np.square(x - mean)))
    return mean.reshape(-1), np.where(std > 0, std, 1.0).reshape(-1)


def _average(
    inputs: NDArray[Any], rows: NDArray[np.int64], of: Callable[[NDArray[np.float64]], NDArray[np.float64]]
) -> NDArray[np.float64]:
    """The average of a function of every value, per channel for colour, in a shape that fits the inputs.

    In chunks: only one chunk at a time is held as float64, eight times the size of bytes.
    """
    axes = (0, 2, 3) if inputs.ndim == 4 else tuple(range(inputs.ndim))
    step = max(1, CHUNK // max(1, math.prod(inputs.shape[1:])))
    chunks = (np.asarray(inputs[rows[start : start + step]], np.float64) for start in range(0, len(rows), step))
    sums = [of(chunk).sum(axis=axes, keepdims=True) for chunk in chunks]
    return np.asarray(np.sum(sums, axis=0) / (len(rows) * math.prod(inputs.shape[axis] for axis in axes if axis)))
