"""A part of a model on grids as bytes: positions and values together, both in Rice codes with parameters per tensor.

A value on a linear grid is a *cell*, a whole number, times 2^e; one on a logarithmic grid has a float32 pattern whose
lowest 20 bits are zero, and the upper 12 are its cell. Where both sides know version 0 of the model, cells are relative
to it. Zero is always +0: -0 is encoded as 0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gluefl.accel.streams import numbers_on
from gluefl.errors import GlueFLError, WireError
from gluefl.parameters import NonNegativeCount, checked
from gluefl.vectors.sparse import Listed, Masked, Sparse
from gluefl.wire import cell_values, rice
from gluefl.wire.cell_values import INFINITE, SHIFT

CELL_LIMIT = 2**30  # |cell| is below
LEAST_EXPONENT = -128
ZERO_EXPONENT = 128  # zero is a multiple of every power of two: this is above the exponent of any other number
LARGEST_GAP_PARAMETER = 15
LARGEST_CELL_PARAMETER = 30
ESCAPE = 7  # this cell parameter and larger ones take a byte of their own
STACKED = 2**26  # mask entries whose positions are listed at once on a GPU


@dataclass(frozen=True)
class Batch:
    """The positions of several updates of one vector; update r has its own at r * size and above."""

    updates: int
    size: int
    places: Tensor
    coordinates: Tensor  # places modulo size
    values: Tensor
    segments: type[rice.Segments]


def listed(update: Sparse) -> Batch:
    """One update."""
    positions = update.mask.positions if isinstance(update, Masked) else update.positions  # not kept by the update
    values = update.vector.index_select(0, positions) if isinstance(update, Masked) else update.values
    segments = rice.DeviceSegments if positions.is_cuda else rice.HostSegments
    return Batch(1, update.size, positions, positions, values, segments)


def stacked(updates: Sequence[Masked]) -> Batch:
    """Updates that mask the same vector, on any device."""
    places = torch.stack([update.mask.bits for update in updates]).view(-1).nonzero().squeeze(1)
    size, vector = updates[0].size, updates[0].vector
    coordinates = places % size
    return Batch(len(updates), size, places, coordinates, vector.index_select(0, coordinates), rice.DeviceSegments)


def _batches(updates: Sequence[Sparse]) -> Iterator[Batch]:
    def vector_of(update: Sparse) -> int | None:
        return id(update.vector) if isinstance(update, Masked) and update.vector.is_cuda else None

    for vector, group in groupby(updates, vector_of):
        if vector is None:
            yield from map(listed, group)
        else:
            masked = [update for update in group if isinstance(update, Masked)]
            step = max(1, STACKED // max(1, masked[0].size))
            yield from (stacked(masked[first : first + step]) for first in range(0, len(masked), step))


@dataclass(frozen=True)
class Plan:
    """What is written for the updates of a batch."""

    fields: Tensor  # those of `Table`, by update and tensor
    lengths: Tensor  # in bytes, by update
    gaps: Tensor  # by position, as the others
    codes: Tensor  # signed codes of the cells
    refused: Tensor  # whether a value is on no grid


class Table:
    """What is said of every tensor: how many positions are sent, the exponent, how gaps and cells are coded."""

    def __init__(self, fields: np.ndarray, sizes: Sequence[int]) -> None:
        self.counts, self.exponents, reordered, gap_parameters, cell_parameters = fields
        self.reordered, self.partial = reordered > 0, self.counts < np.array(sizes, dtype=np.int64)
        self.gaps = rice.Coded(self.counts * self.partial, gap_parameters)  # none where all positions are sent
        self.cells = rice.Coded(self.counts, cell_parameters)

    def by_position(self, by_tensor: np.ndarray) -> np.ndarray:
        """What holds for the tensor of every position."""
        return np.repeat(by_tensor, self.counts)


@checked
@dataclass(frozen=True)
class CellCodec:
    """Positions and cells of a vector of tensors, each on a linear or a logarithmic grid.

    >>> codec = CellCodec(tensors=(1000, 10), logarithmic=(False, True))
    >>> codec.decode(codec.encode(update, origin), origin)
    """

    tensors: tuple[NonNegativeCount, ...]
    logarithmic: tuple[bool, ...]
    code: ClassVar[int] = 6

    def problems(self) -> Iterator[str]:
        """What is wrong with the tensors together."""
        if len(self.tensors) != len(self.logarithmic):
            yield f"{len(self.tensors)} tensors need as many kinds of grids, found {len(self.logarithmic)}"
        if any(size >= rice.LARGEST for size in self.tensors):
            yield f"a tensor needs fewer than 2^31 entries, found {max(self.tensors)}"

    @property
    def size(self) -> int:
        """The length of the vector."""
        return sum(self.tensors)

    def measure(self, updates: Sequence[Sparse], origin: Tensor | None) -> list[int]:
        """The length of the encoding of every update, without encoding; masks of one vector on a GPU go together."""
        return [length for batch in _batches(updates) for length in self.measure_batch(batch, origin)]

    def measure_batch(self, batch: Batch, origin: Tensor | None) -> list[int]:
        """The length of the encoding of every update of a batch."""
        return self._lengths(self._plan(batch, origin), batch)

    def longest(self) -> int:
        """No encoding is longer: gaps take at most one bit for every entry of a tensor, cells at most 32 bits each."""
        return -(-len(self.tensors) // 8) + 8 * len(self.tensors) + -(-33 * self.size // 8)

    def encode(self, update: Sparse, origin: Tensor | None) -> bytes:
        """The bytes of an update. A value that is on no grid raises `GlueFLError`."""
        batch = listed(update)
        plan = self._plan(batch, origin)
        self._lengths(plan, batch)  # refuses values that are on no grid
        table = Table(plan.fields[:, 0].cpu().numpy(), self.tensors)
        gaps, codes = plan.gaps.cpu().numpy(), plan.codes.cpu().numpy()
        if not table.partial.all():
            gaps = gaps[table.by_position(table.partial)]
        codes = rice.reorder(codes, table.by_position(table.reordered))
        return self._written(table) + rice.encode_streams([(table.gaps, gaps), (table.cells, codes)])

    def decode(self, data: bytes | memoryview, origin: Tensor | None) -> Listed:
        """The update that was encoded, on a CPU, or `WireError`. Allocates in proportion to the data."""
        if len(data) > self.longest():
            raise WireError(f"cells take at most {self.longest()} bytes, {len(data)} were found")
        table, rest = self._read(memoryview(data))
        gaps, codes = rice.decode_streams([table.gaps, table.cells], rest)
        if codes.max(initial=0) > 2 * CELL_LIMIT - 2:
            raise WireError(f"a cell has the code {int(codes.max())}, {2 * CELL_LIMIT - 2} is the largest")
        known = None if origin is None else origin.cpu().numpy()
        positions, values = cell_values.fill(table, self.tensors, self.logarithmic, gaps, codes, known)
        return Listed(torch.from_numpy(positions), torch.from_numpy(values), self.size)

    def _plan(self, batch: Batch, origin: Tensor | None) -> Plan:
        places, values, device = batch.places, batch.values, batch.places.device
        if values.dtype != torch.float32 or batch.size != self.size:
            raise GlueFLError(f"needed {self.size} float32 values, found {batch.size} of {values.dtype}")
        sizes = numbers_on(device, self.tensors, torch.int64)
        ends = torch.arange(batch.updates, device=device)[:, None] * self.size + sizes.cumsum(0)
        starts = (ends - sizes).view(-1)
        bounds = torch.cat([starts, torch.full((1,), batch.updates * self.size, device=device)])
        segments = batch.segments(torch.searchsorted(places, bounds), places.numel())
        gaps = rice.gaps_of(places, starts, segments)
        exponents, codes, refused = self._codes(batch, origin, segments)
        gap_parameters, gap_bits = rice.best_parameters(gaps, segments, LARGEST_GAP_PARAMETER)
        cell_parameters, reordered, cell_bits = rice.best_signed_parameters(codes, segments, LARGEST_CELL_PARAMETER)
        fields = torch.stack([segments.counts, exponents, reordered.long(), gap_parameters, cell_parameters])
        fields = fields.view(len(fields), batch.updates, len(self.tensors))
        counts, partial = fields[0], fields[0] < sizes
        others = 2 - numbers_on(device, self.logarithmic, torch.int64) + (fields[4] >= ESCAPE)
        head = (rice.varint_bytes(counts * partial) + others) * (counts > 0)
        bits = gap_bits.view_as(counts) * partial + cell_bits.view_as(counts)
        lengths = -(-len(self.tensors) // 8) + head.sum(1) + (bits.sum(1) + 7) // 8
        return Plan(fields, lengths, gaps, codes, refused)

    def _codes(self, batch: Batch, origin: Tensor | None, segments: rice.Segments) -> tuple[Tensor, Tensor, Tensor]:
        """The exponent of every segment, the code of the cell of every position, and whether there is none."""
        values, base = batch.values + 0.0, torch.zeros(1, device=batch.values.device)  # -0 + 0 is 0
        if origin is not None:
            base = origin.to(values.device).index_select(0, batch.coordinates) + 0.0
        moved = values - base
        exact = (values - moved == base) & (moved + base == values)  # one of the two is computed without rounding
        lowest = _lowest_exponents(moved)
        exponents = segments.least(lowest, ZERO_EXPONENT)
        exponents = torch.where(exponents == ZERO_EXPONENT, 0, exponents).clamp(min=LEAST_EXPONENT).long()
        scaled = moved.double() * segments.expand((1023 - exponents << 52).view(torch.float64))
        refused = ~exact | (lowest < LEAST_EXPONENT) | (scaled.abs() >= CELL_LIMIT)
        cells = torch.where(refused, 0, scaled).int()
        if any(self.logarithmic):
            by_tensor = numbers_on(values.device, self.logarithmic, torch.bool).repeat(batch.updates)
            logarithmic, exponents = segments.expand(by_tensor), torch.where(by_tensor, 0, exponents)
            patterns, base_patterns = values.view(torch.int32), base.view(torch.int32)
            cells = torch.where(logarithmic, (patterns >> SHIFT) - (base_patterns >> SHIFT), cells)
            outside = (patterns < 0) | (patterns >> SHIFT >= INFINITE) | (base_patterns < 0)
            refused = torch.where(logarithmic, outside | (patterns & (1 << SHIFT) - 1 != 0), refused)
        return exponents, rice.signed_codes(cells), refused

    def _lengths(self, plan: Plan, batch: Batch) -> list[int]:
        """The lengths on the host, or `GlueFLError`."""
        *lengths, refused = torch.cat([plan.lengths, plan.refused.any().long()[None]]).tolist()
        if not refused:
            return lengths
        first = int(plan.refused.nonzero()[0, 0])
        raise GlueFLError(
            f"the value {float(batch.values[first])} at position {int(batch.coordinates[first])} is not on its grid: a "
            "linear one needs an exact difference to version 0 of fewer than 2^30 steps of 2^-128 or more, a "
            "logarithmic one a pattern >= 0 whose lowest 20 bits are zero. Round a model before it is published."
        )

    def _written(self, table: Table) -> bytes:
        """The head of an encoding."""
        head = bytearray(np.packbits(table.counts > 0, bitorder="little"))
        for i in np.flatnonzero(table.counts).tolist():
            head += rice.varint(int(table.gaps.counts[i]))
            exponent, parameter = int(table.exponents[i]) & 0xFF, int(table.cells.parameters[i])
            both = int(table.gaps.parameters[i]) << 4 | int(table.reordered[i]) << 3 | min(parameter, ESCAPE)
            head += bytes([exponent][self.logarithmic[i] :] + [both] + [parameter] * (parameter >= ESCAPE))
        return bytes(head)

    def _read(self, data: memoryview) -> tuple[Table, memoryview]:
        """The head of an encoding, checked, and what follows it."""
        tensors, at = len(self.tensors), -(-len(self.tensors) // 8)
        present = np.unpackbits(np.frombuffer(data[:at], np.uint8), bitorder="little")
        if len(data) < at or present[tensors:].any():
            raise WireError(f"{at} bytes need to say which of {tensors} tensors are sent; other ones were found")
        fields = np.zeros((5, tensors), np.int64)
        try:
            for i in np.flatnonzero(present).tolist():
                fields[:, i], at = self._read_tensor(i, data, at)
        except IndexError:
            raise WireError(f"the table of tensors is longer than the {len(data)} bytes that were found") from None
        return Table(fields, self.tensors), data[at:]

    def _read_tensor(self, i: int, data: memoryview, at: int) -> tuple[tuple[int, ...], int]:
        count, at = rice.read_varint(data, at)
        if count >= self.tensors[i]:
            raise WireError(f"{count} positions are announced for tensor {i}, needed fewer than {self.tensors[i]}")
        exponent = 0
        if not self.logarithmic[i]:
            exponent, at = (data[at] ^ 0x80) - 0x80, at + 1
        gap_parameter, reordered, cell_parameter, at = data[at] >> 4, data[at] >> 3 & 1, data[at] & ESCAPE, at + 1
        if cell_parameter == ESCAPE:
            cell_parameter, at = data[at], at + 1
        if cell_parameter > LARGEST_CELL_PARAMETER or (not count and gap_parameter):
            raise WireError(f"tensor {i} has the Rice parameters {gap_parameter} and {cell_parameter}")
        return (count or self.tensors[i], exponent, reordered, gap_parameter, cell_parameter), at


def _lowest_exponents(numbers: Tensor) -> Tensor:
    """The exponent of the largest power of two that divides each float32; `ZERO_EXPONENT` for zero."""
    patterns = numbers.view(torch.int32)
    exponents, mantissas = patterns >> 23 & 0xFF, patterns & 0x7FFFFF
    digits = torch.where(exponents > 0, mantissas | 0x800000, mantissas)
    lowest_bits = ((digits & -digits).float().view(torch.int32) >> 23) - 127
    return torch.where(digits == 0, ZERO_EXPONENT, exponents.clamp(min=1) - 150 + lowest_bits)
