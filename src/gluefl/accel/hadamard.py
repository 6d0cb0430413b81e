"""Random rotations in blocks: y = H·D₂·H·D₁·x, two stages of random signs (`philox`) and a Hadamard transform.

H is Sylvester's matrix over √B. One stage is not enough: a block that is sparse, or dominated by one entry, keeps so
much structure that its signs are biased estimates. The factor 1/B of both stages is a power of two and exact.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gluefl.accel import kernels
from gluefl.accel.philox import Rotation, sign_bits, sign_bytes

PIECE, PIECE_ON_GPU = 1 << 17, 1 << 24  # entries transformed at a time: they stay in a core's cache, or in bounds
LARGEST_FACTOR = 16  # a block of 4096 entries is a cube: the larger the factors, the more additions
SHORTEST_IN_KERNEL, LONGEST_IN_KERNEL = 1 << 8, 1 << 14  # entries of a block that a program keeps in registers


def _sylvester(size: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


FACTORS = [_sylvester(1 << log) for log in range(LARGEST_FACTOR.bit_length())]  # by the logarithm of the size
SIGNS_OF_BYTES = 1 - 2 * torch.from_numpy(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.float32)
)


@dataclass(frozen=True)
class Blocks:
    """A vector of `size` entries as `count` blocks of `entries`, of which the first `sent` are sent once rotated."""

    size: int
    count: int
    entries: int
    sent: int

    def of(self, vector: Tensor, rows: slice) -> Tensor:
        """Some blocks of a vector, the last one padded with zeros."""
        part = vector[rows.start * self.entries : rows.stop * self.entries]
        missing = (rows.stop - rows.start) * self.entries - part.numel()
        return (
            torch.nn.functional.pad(part, (0, missing)).view(-1, self.entries)
            if missing
            else part.view(-1, self.entries)
        )


@dataclass(frozen=True)
class Levels:
    """A quantiser: the value of each code, and the boundaries between the cells of adjacent codes."""

    values: tuple[float, ...]
    boundaries: tuple[float, ...] = ()


def pieces(blocks: Blocks, rotation: Rotation, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """All blocks, some at a time, with their signs as ±1 in float32: (blocks, 2 stages, entries)."""
    on_cpu = device.type == "cpu"
    packed = torch.from_numpy(sign_bytes(rotation, blocks.count, blocks.entries)) if on_cpu else None
    step = max(1, (PIECE if on_cpu else PIECE_ON_GPU) // blocks.entries)
    for first in range(0, blocks.count, step):
        rows = slice(first, min(first + step, blocks.count))
        count = rows.stop - rows.start
        if packed is not None:
            signs = SIGNS_OF_BYTES.index_select(0, packed[rows].flatten().int()).view(count, 2, blocks.entries)
        else:
            signs = 1 - 2 * sign_bits(rotation, first, count, blocks.entries, device).float()
        yield rows, signs


def rotate(rows: Tensor, signs: Tensor) -> Tensor:
    """Rotate blocks, the rows of a matrix, by their signs."""
    return _transform(_transform(rows * signs[:, 0], 1 / rows.shape[1]).mul_(signs[:, 1]), 1)


def rotate_back(rows: Tensor, signs: Tensor) -> Tensor:
    """The inverse of `rotate`."""
    return _transform(_transform(rows, 1 / rows.shape[1]).mul_(signs[:, 1]), 1).mul_(signs[:, 0])


def _transform(rows: Tensor, factor: float) -> Tensor:
    """Sylvester's matrix times every row, times a power of two."""
    if not rows.is_cpu:
        return butterflies(rows) * factor
    first, *others = _factors(rows.shape[1])
    products, after = rows.reshape(-1, len(first)) @ (first * factor), len(first)
    for matrix in others:
        products = torch.matmul(matrix, products.view(-1, len(matrix), after))
        after *= len(matrix)
    return products.view(rows.shape)


def _factors(entries: int) -> list[Tensor]:
    """The matrices whose Kronecker product is Sylvester's for so many entries, of nearly equal sizes; the last index
    first."""
    log, most = entries.bit_length() - 1, LARGEST_FACTOR.bit_length() - 1
    count = -(-log // most)
    return [FACTORS[(log + i) // count] for i in range(count)]


def butterflies(rows: Tensor) -> Tensor:
    """Sylvester's matrix times every row by additions alone: a matrix product may round to TF32 on a GPU."""
    for _ in range(rows.shape[1].bit_length() - 1):
        even, odd = rows[:, 0::2], rows[:, 1::2]
        rows = torch.cat((even + odd, even - odd), 1)
    return rows


def served(tensor: Tensor, blocks: Blocks) -> bool:
    """Whether the kernels can rotate blocks of this length on the device of a tensor."""
    return kernels.serve(tensor) and SHORTEST_IN_KERNEL <= blocks.entries <= LONGEST_IN_KERNEL


def quantised(vector: Tensor, blocks: Blocks, rotation: Rotation, levels: Levels) -> Tensor | None:
    """Codes and scales of a rotated vector by a kernel, None where none serves (`vectors.rotation` has the twin)."""
    if not served(vector, blocks):
        return None
    from gluefl.accel.kernels.rotate import quantise

    return quantise(vector, blocks, rotation, levels)


def add_rotated_back(
    total: Tensor,
    coded: Sequence[Tensor],
    blocks: Blocks,
    rotations: Sequence[Rotation],
    levels: Levels | None,
    weights: Sequence[float],
) -> None:
    """Add the weighted vectors that codes and scales stand for to a total, in place and in their order, by a kernel.

    Without levels, `coded` holds the first `sent` entries of each rotated block themselves. The rotations are those of
    one seed and round.
    """
    from gluefl.accel.kernels.rotate import add_back

    add_back(total, coded, blocks, rotations, levels, weights)
