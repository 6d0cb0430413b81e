"""Uploads of about one bit per coordinate, unbiased and without state on the client.

DRIVE (Vargaftik et al., NeurIPS 2021) and EDEN (ICML 2022): the vector is rotated at random, in blocks, and every
entry of the rotated vector is rounded to a few levels. `accel.hadamard` has the rotation, `accel.philox` its signs.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from gluefl.accel.hadamard import Blocks, Levels, add_rotated_back, pieces, quantised, rotate, rotate_back, served
from gluefl.accel.philox import SHARED, Rotation
from gluefl.parameters import Count, Share, checked
from gluefl.randomness import stream

SHORTEST, LONGEST = 64, 65536  # blocks
MOST_CLIENTS = SHARED  # of a run: the numbers of its clients are smaller
TOGETHER = 1 << 28  # entries that a kernel adds in one pass
# The positive half of the Lloyd-Max quantisers of a standard normal variable (Max, 1960), by bits. The level of one
# bit, √(2/π) there, is 1: the scale of a block makes up for it.
CENTROIDS = {
    1: (1.0,),
    2: (0.4528, 1.510),
    3: (0.2451, 0.7560, 1.344, 2.152),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733),
}


@checked
@dataclass(frozen=True)
class Rotated:
    """A compressor. What it sends is float32: the codes of all blocks, 0 … 2^bits − 1, then one scale per block.

    `nearest` sends for every entry y of a rotated block the level nearest to y / (‖y‖/√B), and the scale
    S = Σ y² / Σ y·level, so that the estimate S·level, rotated back, has the right length along the vector. Its bias
    vanishes with the length of the block; at 4096 it is far below 1%.

    `stochastic` has 2^bits equidistant levels from −m to m, the largest magnitude of the rotated block and the scale
    that is sent, and rounds up or down at random. The mean over the draws is the vector, whatever the rotation, if
    share is 1. The error is much larger than that of `nearest` (13.7 ‖x‖² against 0.57 ‖x‖² with one bit).

    With a share p below 1 only the first ⌈p·B⌉ entries of every rotated block are sent; the sums are over these, and
    S is divided by their share. The estimate is then unbiased over rotations, not for a fixed one.

    >>> rotated = Rotated()
    >>> estimate = rotated.decompress(rotated.compress(delta, seed, round, client), len(delta), seed, round, client)
    """

    bits: Annotated[Count, Field(le=4)] = 1
    share: Share = 1.0  # p
    block: Count = 4096  # B; a vector shorter than this is one block
    rounding: Literal["nearest", "stochastic"] = "nearest"
    rotation: Literal["client", "round"] = "client"  # of every client, or shared by all clients of a round

    def problems(self) -> Iterator[str]:
        """What is wrong with the length of a block."""
        yield from self.problems_of_block(self.block)

    @staticmethod
    def problems_of_block(block: int) -> Iterator[str]:
        """A Hadamard matrix has a power of two of rows; very long blocks need too much memory at once."""
        if not SHORTEST <= block <= LONGEST or block & (block - 1):
            yield f"block must be a power of two from {SHORTEST} to {LONGEST}; found {block}"

    def blocks(self, d: int) -> Blocks:
        """How a vector of d entries is divided."""
        entries = min(self.block, max(SHORTEST, 1 << (d - 1).bit_length()))
        return Blocks(d, -(-d // entries), entries, math.ceil(self.share * entries))

    def size(self, d: int) -> int:
        """The length of what `compress` returns for d entries."""
        blocks = self.blocks(d)
        return blocks.count * (blocks.sent + 1)

    @property
    def levels(self) -> Levels:
        """The values of the codes in units of the scale, and the boundaries where the nearest is taken."""
        if self.rounding == "stochastic":
            last = 2**self.bits - 1
            return Levels(tuple(2 * code / last - 1 for code in range(last + 1)))
        half = CENTROIDS[self.bits]
        values = (*(-value for value in reversed(half)), *half)
        return Levels(values, tuple((low + high) / 2 for low, high in pairwise(values)))

    def compress(self, delta: Tensor, seed: int, round: int, client: int) -> Tensor:
        """Codes and scales of a flat vector. A block that holds a number that is not finite has the scale NaN."""
        blocks, rotation, levels = self.blocks(delta.numel()), self._rotation(seed, round, client), self.levels
        vector = delta.detach().to(torch.float32).contiguous()
        if self.rounding == "nearest":
            coded = quantised(vector, blocks, rotation, levels)
            if coded is not None:
                return coded
        coded = torch.empty(self.size(delta.numel()), device=delta.device)
        codes, scales = _parts(coded, blocks)
        draws = stream(seed, "rounding", round, client)
        for rows, signs in pieces(blocks, rotation, delta.device):
            rotated = rotate(blocks.of(vector, rows), signs)
            if self.rounding == "nearest":
                scales[rows] = _nearest(rotated, levels, codes[rows])
            else:
                codes[rows], scales[rows] = _stochastic(rotated, blocks.sent, len(levels.values), draws)
        return coded

    def decompress(self, sent: Tensor, d: int, seed: int, round: int, client: int) -> Tensor:
        """The estimate of the vector of d entries that `compress` was given."""
        return self.combine([sent], [1.0], d, seed, round, [client])

    def length(self, sent: Tensor, d: int) -> float:
        """The Euclidean length of the estimate, with what a last block has beyond d; nothing is rotated back."""
        blocks = self.blocks(d)
        codes, scales = _parts(sent, blocks)
        if self.bits == 1:  # all levels have the magnitude 1
            lengths = torch.full_like(scales, math.sqrt(blocks.sent))
        else:
            lengths = torch.linalg.vector_norm(_decoded(codes, self.levels), dim=1)
        return self._factor(blocks) * float(torch.linalg.vector_norm(scales.double() * lengths))

    def _factor(self, blocks: Blocks) -> float:
        """1/p, where the scale does not make up for entries that are not sent."""
        return blocks.entries / blocks.sent if self.rounding == "stochastic" else 1.0

    def combine(
        self, sent: Iterable[Tensor], weights: Sequence[float], d: int, seed: int, round: int, clients: Sequence[int]
    ) -> Tensor:
        """The sum of weight · estimate over clients, in the given order. A shared rotation is inverted only once;
        otherwise what was sent is read one by one, or as much as a kernel adds in one pass."""
        blocks, factors = self.blocks(d), [self._factor(self.blocks(d)) * weight for weight in weights]
        if self.rotation == "round":
            all_sent = [self._checked(one, d) for one in sent]
            total = torch.zeros(d, device=all_sent[0].device if all_sent else None)
            if all_sent:
                self._add_shared(total, all_sent, factors, self._rotation(seed, round, SHARED), blocks)
            return total
        total = torch.zeros(0)
        waiting: list[tuple[Tensor, float, Rotation]] = []
        for one, weight, client in zip(sent, factors, clients, strict=True):
            if not waiting and not total.numel():
                total = torch.zeros(d, device=one.device)  # made there: a copy to a GPU would synchronise
            waiting.append((self._checked(one, d), weight, self._rotation(seed, round, client)))
            if not served(total, blocks) or len(waiting) * d >= TOGETHER:
                self._add(total, waiting, blocks)
                waiting.clear()
        self._add(total, waiting, blocks)
        return total

    def _checked(self, sent: Tensor, d: int) -> Tensor:
        if sent.shape != (self.size(d),):
            raise ValueError(
                f"the compressed vector has the shape {tuple(sent.shape)}, {self.size(d)} numbers were expected for "
                f"{d} entries; use the options with which it was compressed"
            )
        return sent

    def _rotation(self, seed: int, round: int, client: int) -> Rotation:
        if self.rotation == "round":
            return Rotation(seed, round, SHARED)
        if client == SHARED:
            raise ValueError(f"client {client} stands for a rotation that all clients share; use a lower number")
        return Rotation(seed, round, client)

    def _add(self, total: Tensor, parts: Sequence[tuple[Tensor, float, Rotation]], blocks: Blocks) -> None:
        """Add what was sent, with its weight and under its own rotation, to a total."""
        if parts and served(total, blocks):
            sent, weights, rotations = zip(*parts)
            return add_rotated_back(total, sent, blocks, rotations, self.levels, weights)
        for one, weight, rotation in parts:
            self._add_rows(total, [one], [weight], rotation, blocks)

    def _add_shared(
        self, total: Tensor, sent: Sequence[Tensor], weights: Sequence[float], rotation: Rotation, blocks: Blocks
    ) -> None:
        """Add what was sent under one rotation to a total."""
        if served(total, blocks):
            rotated = self._sum(sent, weights, blocks, slice(0, blocks.count))
            return add_rotated_back(total, [rotated.flatten()], blocks, [rotation], None, [1.0])
        self._add_rows(total, sent, weights, rotation, blocks)

    def _add_rows(
        self, total: Tensor, sent: Sequence[Tensor], weights: Sequence[float], rotation: Rotation, blocks: Blocks
    ) -> None:
        missing = blocks.entries - blocks.sent
        for rows, signs in pieces(blocks, rotation, total.device):
            rotated = torch.nn.functional.pad(self._sum(sent, weights, blocks, rows), (0, missing))
            part = total[rows.start * blocks.entries : rows.stop * blocks.entries]
            part += rotate_back(rotated, signs).flatten()[: part.numel()]

    def _sum(self, sent: Sequence[Tensor], weights: Sequence[float], blocks: Blocks, rows: slice) -> Tensor:
        """The entries of some rotated blocks that were sent, summed with their weights."""
        total = torch.zeros((), device=sent[0].device)
        for one, weight in zip(sent, weights, strict=True):
            codes, scales = _parts(one, blocks)
            total = total + _decoded(codes[rows], self.levels).mul_((scales[rows] * weight).unsqueeze(1))
        return total


def _parts(coded: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Codes, a row per block, and scales; views."""
    count = blocks.count * blocks.sent
    return coded[:count].view(blocks.count, blocks.sent), coded[count:]


def _decoded(codes: Tensor, levels: Levels) -> Tensor:
    """The levels that codes stand for."""
    if len(levels.values) == 2:  # −1 and 1: arithmetic is faster than a table
        return codes.mul(2).sub_(1)
    values = torch.tensor(levels.values, device=codes.device)
    return values.index_select(0, codes.flatten().int()).view(codes.shape)


def _nearest(rotated: Tensor, levels: Levels, codes: Tensor) -> Tensor:
    """Write the code of the nearest level for the first entries of every block; return the scales."""
    norms = torch.linalg.vector_norm(rotated, dim=1, dtype=torch.float64)  # squares of a float32 can overflow
    kept = rotated[:, : codes.shape[1]]
    if len(levels.values) == 2:
        torch.ge(kept, 0, out=codes)
        products = kept.abs()
    else:
        deviations = (norms / math.sqrt(rotated.shape[1])).to(torch.float32)
        units = kept * torch.where(deviations > 0, 1 / deviations, 0).unsqueeze(1)
        above = torch.zeros(kept.shape, dtype=torch.uint8, device=kept.device)
        for boundary in levels.boundaries:
            above += (units >= boundary).view(torch.uint8)
        codes.copy_(above)
        products = kept * _decoded(codes, levels)
    product = products.sum(1, dtype=torch.float64)
    # Of a part of the block, its own length stands for that of the whole: the ratio of the whole to a part whose
    # entries happen to be near 0 has no bound.
    sent, entries = kept.shape[1], rotated.shape[1]
    lengths = norms if sent == entries else torch.linalg.vector_norm(kept, dim=1, dtype=torch.float64)
    return torch.where(product == 0, 0, lengths * lengths * entries / (product * sent))


def _stochastic(rotated: Tensor, sent: int, levels: int, draws: np.random.Generator) -> tuple[Tensor, Tensor]:
    scales = rotated.abs().amax(1)
    heights = (rotated[:, :sent] / scales.unsqueeze(1) + 1).mul_((levels - 1) / 2).nan_to_num_(0)
    floors = heights.floor()
    uniform = torch.from_numpy(draws.random(tuple(heights.shape), dtype=np.float32)).to(rotated.device)
    codes = floors + (uniform < heights.sub_(floors))
    return codes, torch.where(scales.isfinite(), scales, torch.nan)
