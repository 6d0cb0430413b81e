"""How messages get from one side to the other in a simulation: measured, or really encoded and decoded.

Both charge the same bytes. `Encoded` is what a federation does, every message of it, and checks on the way that
every client's replica is the server's model bit for bit; `Measured` skips the values and is much faster.
"""

from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from gluefl import wire
from gluefl.core.records import Parcel
from gluefl.core.replica import Replica, remembered_hash
from gluefl.core.server import Core
from gluefl.errors import GlueFLError
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import Listed


class Channel(Protocol):
    """Carries packages down and uploads up."""

    def hash(self, version: int, weights: Tensor, statistics: Tensor) -> bytes:
        """The hash of a version of the model, computed once, or zeros where it is not checked."""
        ...

    def send(self, header: wire.Header, body: wire.Body, encoding: wire.Encoding) -> Parcel:
        """Encode or measure a package."""
        ...

    def deliver(self, client: int, parcel: Parcel) -> None:
        """The client finished this download."""
        ...

    def receive(self, header: wire.Header, loss: float | Tensor, body: wire.Body, encoding: wire.Encoding) -> wire.Body:
        """What arrives of an upload. The loss is apart from the header: on an asynchronous device reading it waits."""
        ...


@dataclass(frozen=True)
class Measured:
    """Every message is measured, none is made."""

    def hash(self, version: int, weights: Tensor, statistics: Tensor) -> bytes:
        """Not checked."""
        return wire.NO_HASH

    def send(self, header: wire.Header, body: wire.Body, encoding: wire.Encoding) -> Parcel:
        """The size alone."""
        return Parcel(header, wire.message_bytes(encoding), encoding.support.density)

    def deliver(self, client: int, parcel: Parcel) -> None:
        """Nothing to do: the ledger knows."""

    def receive(self, header: wire.Header, loss: float | Tensor, body: wire.Body, encoding: wire.Encoding) -> wire.Body:
        """The upload as it is."""
        return body


@dataclass(frozen=True)
class Encoded:
    """Every message is encoded and decoded, and every touched client keeps a replica: for checks, not for speed."""

    core: Core
    replicas: dict[int, Replica] = field(default_factory=dict)
    hashes: dict[int, bytes] = field(default_factory=dict)

    def hash(self, version: int, weights: Tensor, statistics: Tensor) -> bytes:
        """Computed when a version is first sent, remembered for the clients that hold it."""
        return remembered_hash(self.hashes, version, weights, statistics)

    def send(self, header: wire.Header, body: wire.Body, encoding: wire.Encoding) -> Parcel:
        """The true bytes."""
        if header.base is not None:
            header = replace(header, base_hash=self.hashes.get(header.base, wire.NO_HASH))
        data = self._encode(header, body, encoding)
        return Parcel(header, len(data), encoding.support.density, data)

    def deliver(self, client: int, parcel: Parcel) -> None:
        """Decode the package and patch the client's replica; `apply` compares the hashes."""
        assert parcel.data is not None
        held = self.replicas.get(client) or self._first(parcel.header.base)
        weights = torch.zeros(self.core.layout.size) if held is None else held.weights
        header, body = wire.decode(parcel.data, self.core.expected(wire.PACKAGE).holding(weights))
        if held is not None:
            self.replicas[client] = held.apply(header, body)

    def _first(self, base: int | None) -> Replica | None:
        """What a client holds that was not synchronised in this process; None if it was before the run was resumed."""
        core, layout = self.core, self.core.layout
        if base is None:
            return Replica(torch.zeros(layout.size), torch.zeros(layout.statistics_size))
        if base != 0 or core.initial != "known":
            return None
        weights, statistics = core.parts(core.first[1], core.statistics)
        return Replica(weights.cpu(), statistics.cpu(), 0)

    def receive(self, header: wire.Header, loss: float | Tensor, body: wire.Body, encoding: wire.Encoding) -> wire.Body:
        """Encode as the client does, decode as the server does."""
        data = self._encode(replace(header, loss=float(loss)), body, encoding)
        if len(data) != wire.message_bytes(encoding):
            raise GlueFLError(f"a message was measured as {wire.message_bytes(encoding)} bytes and has {len(data)}")
        shared = wire.Shared(Mask(body.shared.mask.bits.cpu()))  # messages are read on a CPU, wherever the model is
        received = wire.decode(data, self.core.expected(wire.UPLOAD, shared))[1]
        return on_device(body.statistics.device, received, body.shared)

    def _encode(self, header: wire.Header, body: wire.Body, encoding: wire.Encoding) -> bytes:
        layout = self.core.layout
        data = wire.encode_body(body, encoding)
        return wire.encode(header, data, layout.size, layout.statistics_size, body.codec)


def on_device(device: torch.device, body: wire.Body, shared: wire.Shared) -> wire.Body:
    """A body that was read on a CPU, on the device of the model."""
    update = body.update
    if isinstance(update, Listed):
        update = Listed(update.positions.to(device), update.values.to(device), update.size)
    else:
        update = update.with_values(update.values.to(device))
    return replace(body, update=update, statistics=body.statistics.to(device), shared=shared)
