"""What the server knows of every client, in a file that only grows: a checkpoint adds the clients that changed.

A process begins a file of its own, `clients-ROUND.bin`, at its first checkpoint, so that it never writes behind what a
killed one left. An entry takes eight bytes; the last one of a client counts. The file grows more slowly than a
journal that names the same clients.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from gluefl import files
from gluefl.core.register import VALUE_BITS, Register

NAME = re.compile(r"clients-(0|[1-9]\d*)\.bin")
ENTRY = np.dtype("<i8")
EMPTY = Register()


class ClientLog:
    """The file of one process. What it wrote last is remembered, so that it can tell what has changed."""

    def __init__(self) -> None:
        self._file: files.Growing | None = None
        self._saved = EMPTY

    def append(self, folder: Path, clients: Register, round: int) -> dict[str, Any]:
        """Write what has changed since the last call, and say where everything lies, as JSON can hold it."""
        self._file = self._file or files.Growing(folder / f"clients-{round}.bin")
        saved = self._file.append(clients.since(self._saved).astype(ENTRY).tobytes())
        self._saved = clients
        return saved


def check_clients(folder: Path, saved: dict[str, Any]) -> None:
    """Raise `Damaged` unless the file holds what a checkpoint wrote into it."""
    _read(folder, saved)


def read_clients(folder: Path, saved: dict[str, Any]) -> Register:
    """The register of a checkpoint."""
    entries = np.frombuffer(_read(folder, saved), ENTRY)
    clients = entries >> VALUE_BITS
    order = np.argsort(clients, kind="stable")
    last = np.append(clients[order[1:]] != clients[order[:-1]], [True] if len(order) else [])
    return Register.of(entries[order[last.astype(bool)]].astype(np.int64).tolist())


def discard(folder: Path, rounds: Iterable[int]) -> None:
    """Delete the files that the checkpoints of these rounds do not need: each needs the last one begun before it."""
    begun = {int(name[1]): path for path in folder.glob("clients-*") if (name := NAME.fullmatch(path.name))}
    needed = {max((start for start in begun if start <= round), default=None) for round in rounds}
    for start, path in begun.items():
        if start not in needed:
            path.unlink()
    for path in folder.glob(f"clients-*{files.TEMPORARY}"):
        path.unlink()


def _read(folder: Path, saved: dict[str, Any]) -> bytes:
    return files.read_growing(folder, saved, NAME, ENTRY.itemsize)
