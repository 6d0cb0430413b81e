"""What a node writes to its disk: its replica of the model, and what its uploads left out.

Every file is written beside the old one, which it then replaces in one step; it carries a hash or a checksum. A
damaged file counts as lost: the server then sends the whole model, and the residual starts from zero.
"""

import os
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from gluefl.core.replica import Replica
from gluefl.errors import WireError
from gluefl.flower.arrays import Table
from gluefl.storage.checkpoint import write_tensors

KEPT_RUNS = 2  # the folders of earlier runs are deleted
MARKER = "gluefl-run"  # an empty file in the folder of a run: nothing without it is deleted
RUN_ID = re.compile("[0-9a-f]{16}")
REPLICA, RESIDUAL, PENDING = "replica.safetensors", "residual.safetensors", "pending.safetensors"


@dataclass(frozen=True)
class NodeStore:
    """The folder of one node in one run."""

    folder: Path

    @classmethod
    def open(cls, root: Path, run: str, client: int) -> "NodeStore":
        """Make the folder if it does not exist, and then delete those of old runs."""
        folder = root / run / f"node-{client}"
        if not folder.exists():
            folder.mkdir(parents=True, exist_ok=True)
            (root / run / MARKER).touch()
            others = [path for path in _runs(root) if path.name != run]
            for old in sorted(others, key=_last_use_s, reverse=True)[KEPT_RUNS - 1 :]:
                shutil.rmtree(old, ignore_errors=True)
        os.utime(root / run)
        return cls(folder)

    def replica(self) -> tuple[Replica, Table] | None:
        """The model this node holds and the names of its arrays, None if it holds none."""
        tensors, notes = _load(self.folder / REPLICA)
        try:
            table = Table.from_json(notes["table"])
            replica = Replica(tensors["weights"], tensors["statistics"], int(notes["version"]))
        except (KeyError, ValueError, WireError):
            return None
        sizes = replica.weights.numel(), replica.statistics.numel()
        fits = sizes == (table.layout.size, table.layout.statistics_size)
        return (replica, table) if fits and replica.hash.hex() == notes.get("hash") else None

    def write_replica(self, replica: Replica, table: Table) -> None:
        """Hold this version from now on."""
        tensors = {"weights": replica.weights, "statistics": replica.statistics}
        notes = {"version": str(replica.version), "table": table.to_json(), "hash": replica.hash.hex()}
        _save(self.folder / REPLICA, tensors, notes)

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


def _runs(root: Path) -> list[Path]:
    """The folders that this program made below a folder, which may hold other files of its user."""
    return [path for path in root.iterdir() if RUN_ID.fullmatch(path.name) and (path / MARKER).is_file()]


def _last_use_s(run: Path) -> float:
    try:
        return run.stat().st_mtime
    except OSError:  # another process has just deleted it
        return 0.0


def _save(path: Path, tensors: dict[str, Tensor], notes: dict[str, str]) -> None:
    temporary = path.with_suffix(".tmp")
    write_tensors(temporary, {name: tensor.contiguous() for name, tensor in tensors.items()}, notes)
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


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
