"""How messages get from one side to the other in a simulation: measured, or really encoded and decoded.

Both charge the same bytes. `Encoded` is what a federation does, every message of it, and checks on the way that
every client's replica is the server's model bit for bit; `Measured` skips the values and is much faster.
"""

from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from gluefl import wire
from gluefl.core.replica import Replica
from gluefl.errors import GlueFLError
from gluefl.vectors.layout import Layout
from gluefl.vectors.selection import Sparse


@dataclass(frozen=True)
class Parcel:
    """A message on its way down: its size, and its bytes where they were made."""

    header: wire.Header
    size_bytes: int
    density: float  # share of the model it holds
    data: bytes | None = None


class Channel(Protocol):
    """Carries packages down and uploads up."""

    def hash(self, version: int | None, weights: Tensor, statistics: Tensor) -> bytes:
        """The hash of a version of the model, computed once, or zeros where nobody checks it."""
        ...

    def send(self, header: wire.Header, body: wire.Body) -> Parcel:
        """Encode or measure a package."""
        ...

    def deliver(self, client: int, parcel: Parcel) -> None:
        """The client finished this download."""
        ...

    def receive(self, header: wire.Header, body: wire.Body) -> wire.Body:
        """What arrives of an upload; its length is `wire.measure(body)`."""
        ...


@dataclass(frozen=True)
class Measured:
    """Every message is measured, none is made."""

    def hash(self, version: int | None, weights: Tensor, statistics: Tensor) -> bytes:
        """Nobody checks it."""
        return wire.NO_HASH

    def send(self, header: wire.Header, body: wire.Body) -> Parcel:
        """The size alone; a body that is sent to many is measured once."""
        return Parcel(header, wire.measure(body), body.update.density)

    def deliver(self, client: int, parcel: Parcel) -> None:
        """Nothing to do: the ledger knows."""

    def receive(self, header: wire.Header, body: wire.Body) -> wire.Body:
        """The upload as it is."""
        return body


@dataclass(frozen=True)
class Encoded:
    """Every message is encoded and decoded, and every touched client keeps a replica: for checks, not for speed."""

    layout: Layout
    run: bytes
    replicas: dict[int, Replica] = field(default_factory=dict)
    hashes: dict[int, bytes] = field(default_factory=dict)

    def hash(self, version: int | None, weights: Tensor, statistics: Tensor) -> bytes:
        """Computed when a version is first sent, remembered for the clients that hold it."""
        return remembered_hash(self.hashes, version, weights, statistics)

    def send(self, header: wire.Header, body: wire.Body) -> Parcel:
        """The true bytes."""
        if header.base is not None:
            header = replace(header, base_hash=self.hashes.get(header.base, wire.NO_HASH))
        data = wire.encode(header, wire.encode_body(body), self.layout.size, self.layout.statistics_size)
        return Parcel(header, len(data), body.update.density, data)

    def deliver(self, client: int, parcel: Parcel) -> None:
        """Decode the package and patch the client's replica; `apply` compares the hashes."""
        assert parcel.data is not None
        header, body = wire.decode(parcel.data, self._expected(wire.PACKAGE, None))
        if header.base is not None and client not in self.replicas:
            return  # it was synchronised before the run was resumed: its replica went with the old process
        held = self.replicas.get(client) or Replica(
            body.update.values.new_zeros(self.layout.size),
            body.statistics.new_zeros(self.layout.statistics_size),
        )
        self.replicas[client] = held.apply(header, body)

    def receive(self, header: wire.Header, body: wire.Body) -> wire.Body:
        """Encode as the client does, decode as the server does."""
        data = wire.encode(header, wire.encode_body(body), self.layout.size, self.layout.statistics_size)
        if len(data) != wire.measure(body):
            raise GlueFLError(f"a message was measured as {wire.measure(body)} bytes and has {len(data)}")
        known = wire.Shared(body.shared.mask.cpu())  # messages are read on a CPU, wherever the model is
        received = wire.decode(data, self._expected(wire.UPLOAD, known))[1]
        return _on(body.statistics.device, received, body.shared)

    def _expected(self, kind: int, shared: wire.Shared | None) -> wire.Expected:
        layout = self.layout
        return wire.Expected(self.run, layout.fingerprint, layout.size, layout.statistics_size, kind, shared)


def remembered_hash(hashes: dict[int, bytes], version: int | None, weights: Tensor, statistics: Tensor) -> bytes:
    """The hash of a version of the model, from `hashes` if it is there, and there afterwards."""
    if version is None:
        return wire.NO_HASH
    if version not in hashes:
        hashes[version] = wire.replica_hash(weights, statistics)
    return hashes[version]


def _on(device: torch.device, body: wire.Body, shared: wire.Shared) -> wire.Body:
    update = Sparse(body.update.positions.to(device), body.update.values.to(device), body.update.size)
    return wire.Body(update, body.statistics.to(device), shared, body.sends_mask)
