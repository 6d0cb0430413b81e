"""Which record of the file belongs to which client, in a file that only grows: a checkpoint adds what has changed.

An entry takes 20 bytes; the last one of a client counts. A process begins a file of its own, `residuals-N.index`, and
another one when most entries are outdated, so that the file grows with the clients that have a record, not with the
rounds.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gluefl import files

NAME = re.compile(r"residuals-([1-9]\d*)\.index")
ENTRY = np.dtype([("client", "<i8"), ("place", "<u4"), ("checksum", "<u4"), ("used", "<u4")])
NOWHERE = 2**32 - 1  # the place of a client whose record was dropped
SPARE = 1024  # outdated entries that are not worth a new file

Entries = NDArray[np.void]


class Index:
    """The index as one process writes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: files.Growing | None = None

    def append(self, changed: Entries, count: int, everything: Callable[[], Entries]) -> dict[str, Any] | None:
        """Write the entries that changed, and say how to find all `count` of them, as JSON can hold it.

        None if there never was an entry.
        """
        if self._file is None and not count:
            return None
        length = 0 if self._file is None else self._file.size_bytes // ENTRY.itemsize
        if self._file is None or length + len(changed) > 2 * count + SPARE:
            self._file, changed = files.Growing(self.folder / f"residuals-{self._last() + 1}.index"), everything()
        return self._file.append(changed.tobytes())

    def _last(self) -> int:
        return max((int(name[1]) for path in self.folder.iterdir() if (name := NAME.match(path.name))), default=0)


def entries_of(rows: Iterable[tuple[int, int, int, int]]) -> Entries:
    """Client, place, checksum and the round in which the client was last used, as entries."""
    return np.array(list(rows), ENTRY)


def read_index(folder: Path, saved: dict[str, Any] | None) -> Entries:
    """The entries of a checkpoint, one per client that has a record, by client; raises `Damaged` if they cannot be."""
    if saved is None:
        return np.empty(0, ENTRY)
    written: Entries = np.frombuffer(files.read_growing(folder, saved, NAME, ENTRY.itemsize), ENTRY)
    newest_first = written[::-1]
    entries = newest_first[np.unique(newest_first["client"], return_index=True)[1]]
    present: Entries = entries[entries["place"] != NOWHERE]
    return present


def discard(folder: Path, needed: Sequence[dict[str, Any] | None]) -> None:
    """Delete the index files that none of these checkpoints names."""
    if not folder.exists():
        return
    names = {saved["name"] for saved in needed if saved is not None}
    for path in folder.glob("residuals-*.index*"):
        if path.name not in names and NAME.match(path.name):
            path.unlink()
