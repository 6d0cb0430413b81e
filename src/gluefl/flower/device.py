"""What a node keeps on its own disk: its replica of the model, and what it did not send yet.

Every file is written beside the old one and switched to in one step; it carries the hash of what it holds. A file
that was damaged counts as lost: the server then sends the whole model, and the residual starts from nothing.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gluefl import wire
from gluefl.errors import WireError
from gluefl.flower.arrays import Table
from gluefl.replica import Replica

KEPT_RUNS = 2  # a node forgets the runs before these


@dataclass(frozen=True)
class Device:
    """The folder of one node in one run."""

    folder: Path

    @classmethod
    def of(cls, root: Path, run: str, client: int) -> "Device":
        """Open the folder, and forget runs that are long over."""
        folder = root / run / f"node-{client}"
        if not folder.exists():
            folder.mkdir(parents=True)
            runs = sorted(root.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
            for old in [path for path in runs if path.name != run][KEPT_RUNS - 1 :]:
                shutil.rmtree(old, ignore_errors=True)
        os.utime(root / run)
        return cls(folder)

    def replica(self) -> tuple[Replica, Table] | None:
        """The model this node holds and what its parts are called, None if it holds none."""
        found = _load(self.folder / "replica.safetensors")
        if found is None:
            return None
        tensors, notes = found
        try:
            table = Table.from_json(notes["table"])
            replica = Replica(tensors["weights"], tensors["statistics"], int(notes["version"]))
        except (KeyError, ValueError, WireError):
            return None
        fits = (replica.weights.numel(), replica.statistics.numel()) == (
            table.layout.size,
            table.layout.statistics_size,
        )
        return (replica, table) if fits else None

    def keep(self, replica: Replica, table: Table) -> None:
        """Hold this version from now on."""
        tensors = {"weights": replica.weights, "statistics": replica.statistics}
        notes = {"version": str(replica.version), "table": table.to_json()}
        _save(self.folder / "replica.safetensors", tensors, notes)

    def settle(self, accepted: str | None) -> Tensor | None:
        """Commit what the last upload left over if that is the one that was used, else drop it; what is left now."""
        pending, residual = self.folder / "pending.safetensors", self.folder / "residual.safetensors"
        found = _load(pending)
        if found is not None and accepted is not None and found[1].get("upload") == accepted:
            os.replace(pending, residual)
        elif pending.exists():
            pending.unlink()
        committed = _load(residual)
        return committed[0].get("residual") if committed else None

    def leave(self, round: int, upload: str, residual: Tensor) -> None:
        """What an upload leaves over: it counts once the server says that this upload was used."""
        found = _load(self.folder / "pending.safetensors")
        if found is not None and int(found[1].get("round", -1)) > round:
            return  # a straggler of an older round has just ended
        _save(self.folder / "pending.safetensors", {"residual": residual}, {"round": str(round), "upload": upload})


def _save(path: Path, tensors: dict[str, Tensor], notes: dict[str, str]) -> None:
    temporary = path.with_suffix(".tmp")
    save_file({name: t.contiguous() for name, t in tensors.items()}, temporary, {**notes, "hash": _hash(tensors)})
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _load(path: Path) -> tuple[dict[str, Tensor], dict[str, str]] | None:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
            notes = dict(file.metadata() or {})
    except (OSError, SafetensorError):
        return None
    return (tensors, notes) if notes.get("hash") == _hash(tensors) else None


def _hash(tensors: dict[str, Tensor]) -> str:
    first, second = (tensors.get(name, torch.zeros(0)) for name in ("weights", "statistics"))
    return wire.replica_hash(tensors.get("residual", first), second).hex()
