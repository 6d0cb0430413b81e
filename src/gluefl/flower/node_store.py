"""What a node writes to its disk: its replica of the model, version 0 if it was sent, and what its uploads left out.

Every file carries a hash or a checksum. A damaged file counts as lost: the server then sends the whole model, and the
residual starts from zero.
"""

import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from gluefl import files, wire
from gluefl.core.replica import Replica
from gluefl.errors import WireError
from gluefl.flower.arrays import Table
from gluefl.strategies import Space, Strategy
from gluefl.vectors.layout import Layout
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import part_of, whole

REPLICA, RESIDUAL, PENDING = "replica.safetensors", "residual.safetensors", "pending.safetensors"
ORIGIN = "origin.safetensors"  # version 0


@dataclass(frozen=True)
class Cells:
    """A model on a grid takes a small part of its float32 bytes: it lies on the disk as a package would bring it."""

    codec: wire.BodyCodec
    origin: Tensor | None  # version 0, if what differs from it is written, else None

    def encode(self, replica: Replica) -> Tensor:
        """The bytes of a replica."""
        vector = torch.cat([replica.weights, replica.statistics])
        update = whole(vector) if self.origin is None else part_of(vector, Mask(vector != self.origin))
        shared = wire.Shared(Mask.uniform(replica.weights.numel(), False, vector.device))
        data = self.codec.encode(wire.Body(update, vector[:0], shared, True, self.codec, self.origin))
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)

    def decode(self, data: Tensor, size: int, statistics: int) -> tuple[Tensor, Tensor]:
        """Weights and statistics, or `WireError`."""
        update = self.codec.decode(memoryview(data.numpy().tobytes()), self.origin)
        if update.size != size + statistics or (self.origin is None and update.count != update.size):
            raise WireError(f"{update.count} cells of {update.size} were found, {size + statistics} were expected")
        vector = torch.zeros(update.size) if self.origin is None else self.origin.clone()
        vector[update.positions] = update.values
        return vector[:size], vector[size:]


def cells_of(strategy: Strategy, layout: Layout, origin: Tensor | None) -> Cells | None:
    """How replicas of a strategy lie on the disk: as cells if its packages are cells, else, with None, in float32."""
    traits = strategy.traits(Space.of(layout))
    if traits.covers != "everything" or not isinstance(traits.package_codec, wire.BodyCodec):
        return None
    return Cells(traits.package_codec, origin)


@dataclass(frozen=True)
class NodeStore:
    """The folder of one node in one run."""

    folder: Path

    def table(self) -> Table | None:
        """The names of the arrays of the model this node holds, None if it holds none."""
        try:
            return Table.from_json(_notes(self.folder / REPLICA)["table"])
        except (KeyError, WireError):
            return None

    def replica(self, strategy: Strategy | None = None, origin: Tensor | None = None) -> tuple[Replica, Table] | None:
        """The model this node holds and the names of its arrays, None if it holds none.

        Cells are read with the codec of the strategy, relative to `origin` if the run's packages are.
        """
        return _read_model(self.folder / REPLICA, strategy, origin)

    def origin(self, strategy: Strategy | None = None) -> tuple[Replica, Table] | None:
        """Version 0, None if it was not written."""
        return _read_model(self.folder / ORIGIN, strategy, None)

    def write_replica(self, replica: Replica, table: Table, cells: Cells | None = None) -> None:
        """Hold this version from now on."""
        _write_model(self.folder / REPLICA, replica, table, cells)

    def write_origin(self, replica: Replica, table: Table, cells: Cells | None = None) -> None:
        """Hold version 0 beside the replica."""
        _write_model(self.folder / ORIGIN, replica, table, cells)

    def commit_residual(self, accepted: str | None) -> Tensor | None:
        """The residual as of the upload that the server used last: the pending one counts only if it is of that."""
        pending, residual = self.folder / PENDING, self.folder / RESIDUAL
        if accepted is not None and _notes(pending).get("upload") == accepted:
            os.replace(pending, residual)
        pending.unlink(missing_ok=True)
        tensors, notes = _load(residual)
        values = tensors.get("residual")
        return values if values is not None and notes.get("checksum") == _checksum(values) else None

    def write_pending(self, round: int, upload: str, residual: Tensor) -> None:
        """What an upload left out. It counts once the server says that this upload was used."""
        path = self.folder / PENDING
        if int(_notes(path).get("round", -1)) > round:
            return  # the task of an older round has ended only now
        _save(path, {"residual": residual}, {"round": str(round), "upload": upload, "checksum": _checksum(residual)})


def _read_model(path: Path, strategy: Strategy | None, origin: Tensor | None) -> tuple[Replica, Table] | None:
    tensors, notes = _load(path)
    try:
        table = Table.from_json(notes["table"])
        sizes = table.layout.size, table.layout.statistics_size
        cells = cells_of(strategy, table.layout, origin) if strategy is not None and "cells" in tensors else None
        model = cells.decode(tensors["cells"], *sizes) if cells else (tensors["weights"], tensors["statistics"])
        replica = Replica(*model, int(notes["version"]))
    except (KeyError, ValueError, IndexError, WireError):
        return None
    fits = (replica.weights.numel(), replica.statistics.numel()) == sizes
    return (replica, table) if fits and replica.hash.hex() == notes.get("hash") else None


def _write_model(path: Path, replica: Replica, table: Table, cells: Cells | None) -> None:
    tensors = {"weights": replica.weights, "statistics": replica.statistics}
    notes = {"version": str(replica.version), "table": table.to_json(), "hash": replica.hash.hex()}
    _save(path, {"cells": cells.encode(replica)} if cells else tensors, notes)


def _save(path: Path, tensors: dict[str, Tensor], notes: dict[str, str]) -> None:
    files.write(path, to_bytes({name: tensor.contiguous() for name, tensor in tensors.items()}, notes))


def _load(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
            return tensors, dict(file.metadata() or {})
    except (OSError, SafetensorError):
        return {}, {}


def _notes(path: Path) -> dict[str, str]:
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError):
        return {}


def _checksum(values: Tensor) -> str:
    # Against damage, not against forgery: the disk is the node's own.
    return f"{zlib.crc32(values.contiguous().numpy().data):08x}"
