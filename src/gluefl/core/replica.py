"""A client's copy of the model: what it holds, and how a package brings it to the next version."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from gluefl import wire
from gluefl.errors import WireError


@dataclass(frozen=True)
class Replica:
    """The model a client holds. A new client holds version None and needs the whole of it."""

    weights: Tensor
    statistics: Tensor
    version: int | None = None

    @cached_property
    def hash(self) -> bytes:
        """What the client reports, so that the server sees whether both hold the same."""
        return wire.replica_hash(self.weights, self.statistics) if self.version is not None else wire.NO_HASH

    def apply(self, header: wire.Header, body: wire.Body) -> "Replica":
        """Patch the replica with a package; refuses one that does not fit, and leaves the old one untouched."""
        if header.base is not None and header.base != self.version:
            raise WireError(f"the package starts from version {header.base}, this replica holds {self.version}")
        if header.base is not None and header.base_hash not in (wire.NO_HASH, self.hash):
            raise WireError(f"the package starts from a version {header.base} that is not the one held here")
        if header.base is None and body.update.count != body.update.size:
            raise WireError("a package without a base must hold the whole model")
        patched = replace(self, **self._patched(body), version=header.version)
        if header.hash not in (wire.NO_HASH, patched.hash):
            raise WireError(
                f"after the package the replica's hash is {patched.hash.hex()}, {header.hash.hex()} was announced"
            )
        return patched

    def _patched(self, body: wire.Body) -> dict[str, Tensor]:
        """Weights and statistics after a package, whose update covers the weights or both."""
        size = self.weights.numel()
        both = body.update.size > size
        vector = torch.cat([self.weights, self.statistics]) if both else self.weights.clone()
        vector[body.update.positions] = body.update.values
        return {"weights": vector[:size], "statistics": vector[size:] if both else body.statistics}


def remembered_hash(hashes: dict[int, bytes], version: int, weights: Tensor, statistics: Tensor) -> bytes:
    """The hash of a version of the model, from `hashes` if it is there, and there afterwards."""
    if version not in hashes:
        hashes[version] = wire.replica_hash(weights, statistics)
    return hashes[version]
