"""Passes over masked vectors: a kernel on a GPU, two or three operations of PyTorch elsewhere, the same bits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gluefl.accel import kernels
from gluefl.accel.graphs import largest_by_graph

PIECE = 1 << 14  # entries: so few stay in a core's cache, and no threads are started for them


def add_masked(total: Tensor, vectors: Sequence[Tensor], masks: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Add weighted vectors to a total, in place and one after the other, where their masks hold."""
    if kernels.serve(total) and _plain(total, *vectors):
        from gluefl.accel.kernels.add import add

        return add(total, vectors, masks, weights)
    for vector, mask, weight in zip(vectors, masks, weights):
        # Adding −0 changes nothing, not even the sign of a zero.
        total.add_((vector * weight).masked_fill_(~mask, -0.0))
    return total


def add_weighted(total: Tensor, vector: Tensor, weight: float) -> Tensor:
    """Add a weighted vector to a total, in place; on a CPU in pieces."""
    if not total.is_cpu:
        return total.add_(vector * weight)
    for part, of_vector in zip(torch.split(total, PIECE), torch.split(vector, PIECE)):
        part.add_(of_vector * weight)
    return total


def scaled_outside(vector: Tensor, mask: Tensor, weight: float) -> Tensor:
    """`weight` times a vector, zero where the mask holds."""
    if kernels.serve(vector) and _plain(vector):
        from gluefl.accel.kernels.add import rest

        return rest(vector, mask, weight)
    return (vector * weight).masked_fill_(mask, 0)


def clear_bits(words: Tensor, places: Sequence[int]) -> list[Tensor]:
    """For every place, where the bit of a vector of 64-bit words is 0; a kernel reads the words once."""
    if kernels.serve(words):
        from gluefl.accel.kernels.small import clear_bits as by_kernel

        return by_kernel(words, places)
    return [words >> place & 1 == 0 for place in places]


def largest(values: Tensor, keep: int, start: int, salt: int, among: Tensor | None) -> Tensor | None:
    """A mask of the largest magnitudes by a kernel, None where no kernel serves (`vectors.selection` has the twin)."""
    if not kernels.serve(values) or values.dtype != torch.float32:
        return None
    from gluefl.accel.kernels.largest import largest as by_kernels
    from gluefl.accel.kernels.largest import request

    by_graph = largest_by_graph(values, request(keep, start, salt), among)
    return by_kernels(values, keep, start, salt, among) if by_graph is None else by_graph


def _plain(total: Tensor, *vectors: Tensor) -> bool:
    return total.is_contiguous() and all(vector.dtype == torch.float32 for vector in (total, *vectors))
