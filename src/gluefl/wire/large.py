"""Large uploads wait as bytes for their turn in the sum: a cohort of them never lies in memory as vectors."""

from dataclasses import dataclass, replace

from torch import Tensor

from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import Sparse, Support
from gluefl.wire.bodies import Body, BodyCodec

LARGE = 1 << 24  # coordinates, 64 MiB as float32


@dataclass(frozen=True)
class Stored:
    """An update of all positions as its codec wrote it. It is decoded whenever it is read, and not kept."""

    data: bytes
    codec: BodyCodec
    support: Support
    size: int
    covers: Mask | None = None
    is_whole: bool = True

    @property
    def decoded(self) -> Sparse:
        """The update itself."""
        return self.codec.decode(memoryview(self.data), None)

    @property
    def count(self) -> int:
        """How many positions are present: all."""
        return self.size

    @property
    def density(self) -> float:
        """Share of the positions that are present: all."""
        return 1.0

    @property
    def positions(self) -> Tensor:
        """All positions."""
        return self.decoded.positions

    @property
    def values(self) -> Tensor:
        """A value for every position."""
        return self.decoded.values

    @property
    def mask(self) -> Mask:
        """The positions as a mask."""
        return self.decoded.mask

    def dense(self) -> Tensor:
        """The vector."""
        return self.decoded.dense()

    def add_to(self, vector: Tensor, weight: float = 1.0) -> Tensor:
        """Add `weight` times this to a vector, in place, and return it."""
        return self.decoded.add_to(vector, weight)

    def set_in(self, vector: Tensor, value: float) -> Tensor:
        """Set all entries of a vector, in place, and return it."""
        return vector.fill_(value)

    def rest_of(self, vector: Tensor, weight: float = 1.0) -> Tensor:
        """`weight` times a vector, zero at all positions."""
        return self.decoded.rest_of(vector, weight)

    def finite(self) -> Tensor:
        """Whether all values are finite."""
        return self.decoded.finite()

    def with_values(self, values: Tensor) -> Sparse:
        """Other values at the same positions."""
        return self.decoded.with_values(values)


def stored(body: Body) -> Body:
    """A large upload with its update as bytes; others, and those that cannot be encoded, as they are.

    On a GPU updates stay where they are: there memory is for them, and a copy would synchronise.
    """
    update = body.update
    if not isinstance(body.codec, BodyCodec) or update.size < LARGE or not update.is_whole or update.values.is_cuda:
        return body
    if not update.finite():
        return body
    return replace(body, update=Stored(body.codec.encode(body), body.codec, update.support, update.size))
