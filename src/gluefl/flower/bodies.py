"""What stands in for a simulation's channel and engine when messages and training are real."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from flwr.app import Array
from torch import Tensor

from gluefl import wire
from gluefl.clients.cohort import Cohort, Outcome
from gluefl.errors import GlueFLError
from gluefl.flower import content
from gluefl.flower.arrays import Table
from gluefl.simulation.channel import Parcel, remembered_hash


@dataclass(frozen=True)
class Elsewhere:
    """The engine of a federation: training happens on the nodes."""

    def train(self, cohort: Cohort) -> Iterator[Outcome]:
        """Not here."""
        raise GlueFLError("the nodes of a federation train; the server does not")

    def work(self, client: int) -> int:
        """Unknown to the server."""
        return 0


@dataclass(frozen=True)
class Bodies:
    """The channel of a federation: a header for every node, one body for all that hold the same version."""

    table: Table
    hashes: dict[int, bytes]  # of every version so far
    encoded: dict[tuple[int, int | None, int], tuple[bytes, Array]] = field(default_factory=dict)

    def hash(self, version: int | None, weights: Tensor, statistics: Tensor) -> bytes:
        """Computed when a version is first sent, remembered for the nodes that hold it."""
        return remembered_hash(self.hashes, version, weights, statistics)

    def send(self, header: wire.Header, body: wire.Body) -> Parcel:
        """The parcel holds the header alone; the body is in `encoded`."""
        if header.base is not None:
            header = replace(header, base_hash=self.hashes.get(header.base, wire.NO_HASH))
        layout, key = self.table.layout, (header.version, header.base, body.shared.packed.count)
        if key not in self.encoded:
            encoded = wire.encode_body(body)
            self.encoded[key] = encoded, content.to_array(encoded)
        data = wire.encode(header, self.encoded[key][0], layout.size, layout.statistics_size)
        return Parcel(header, len(data), body.update.density, data[: wire.HEADER_BYTES])

    def deliver(self, client: int, parcel: Parcel) -> None:
        """Flower does."""

    def receive(self, header: wire.Header, body: wire.Body) -> wire.Body:
        """Replies are read elsewhere."""
        raise GlueFLError("uploads of a federation arrive as Flower messages")
