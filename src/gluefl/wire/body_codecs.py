"""Codecs of whole bodies: packages of cells, and rotated uploads with the statistics after them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gluefl.errors import WireError
from gluefl.vectors.sparse import Sparse, whole
from gluefl.wire.bodies import Body
from gluefl.wire.cells import CellCodec
from gluefl.wire.floats8 import Floats8
from gluefl.wire.positions import entropy_bytes
from gluefl.wire.rotated import RotatedCodec

CELL_BITS = 2.5  # of a cell in a package, about


@dataclass(frozen=True)
class CellBodies:
    """Packages: the cells of a published model that a client misses, relative to version 0 where it is known."""

    cells: CellCodec
    code: ClassVar[int] = CellCodec.code
    fixed_bytes: ClassVar[int | None] = None

    def measure(self, bodies: Sequence[Body]) -> list[int]:
        """The exact lengths, without encoding anything."""
        return self.cells.measure([body.update for body in bodies], bodies[0].origin) if bodies else []

    def estimate(self, update: Sparse) -> int:
        """The entropy of the positions, and a few bits for every cell."""
        return entropy_bytes(update.count, update.size) + round(update.count * CELL_BITS / 8)

    def longest(self, size: int) -> int:
        """The bound of the cells."""
        return self.cells.longest()

    def encode(self, body: Body) -> bytes:
        """Positions and cells."""
        return self.cells.encode(body.update, body.origin)

    def decode(self, data: memoryview, origin: Tensor | None) -> Sparse:
        """Positions and values."""
        return self.cells.decode(data, origin)


@dataclass(frozen=True)
class RotatedBodies:
    """Uploads: codes and scales of a rotated update, then the change of the statistics, eight bits each."""

    rotated: RotatedCodec
    statistics: Floats8
    code: ClassVar[int] = RotatedCodec.code

    @property
    def fixed_bytes(self) -> int:
        """All uploads of a run have this length."""
        return self.rotated.measure() + self.statistics.length

    @property
    def split(self) -> int:
        """How many entries of the vector belong to the rotated update."""
        return self.rotated.codes + self.rotated.blocks

    def measure(self, bodies: Sequence[Body]) -> list[int]:
        """A constant."""
        return [self.fixed_bytes] * len(bodies)

    def estimate(self, update: Sparse) -> int:
        """A constant."""
        return self.fixed_bytes

    def longest(self, size: int) -> int:
        """A constant."""
        return self.fixed_bytes

    def encode(self, body: Body) -> bytes:
        """The two parts, one after the other."""
        values = body.update.values
        return self.rotated.encode(values[: self.split]) + self.statistics.encode(values[self.split :])

    def decode(self, data: memoryview, origin: Tensor | None) -> Sparse:
        """The vector, exactly."""
        if len(data) != self.fixed_bytes:
            raise WireError(f"{self.fixed_bytes} bytes of an upload were expected, {len(data)} were found")
        rotated, statistics = data[: self.rotated.measure()], data[self.rotated.measure() :]
        return whole(torch.cat([self.rotated.decode(rotated), self.statistics.decode(statistics)]))
