"""Vectors in a file, written asynchronously.

2800 clients of 5.5M parameters are 61 GB. A checkpoint therefore never rewrites the file: it writes what changed since
the last one, and notes place and checksum of these records in the index. The records of the last few checkpoints stay;
places that only an older checkpoint needed are used again, so that the file does not grow from checkpoint to
checkpoint. What a checkpoint costs depends on what changed, not on how many records there are.
"""

import contextlib
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gluefl import files
from gluefl.accel.streams import on_side_stream
from gluefl.accel.threads import submit
from gluefl.clients.residuals.index import NOWHERE, Entries, Index, discard, entries_of, read_index
from gluefl.clients.residuals.tiers import Scaled
from gluefl.errors import Damaged, GlueFLError

MOST_WRITES = 4  # at a time
NAME = "residuals.bin"
KEPT = 2  # checkpoints
AGAIN = "Resume the run: it then goes back to a checkpoint that is whole, if there is one."


class RecordFile:
    """One record per client: a scale and `size` values. The first write creates the folder."""

    def __init__(self, folder: Path, size: int, dtype: torch.dtype, keep: int = KEPT) -> None:
        self.folder, self.path, self.dtype, self.keep = folder, folder / NAME, dtype, keep
        self.record_bytes = 8 + size * dtype.itemsize
        self.places: dict[int, int] = {}  # by client, in records from the beginning of the file
        self._count = 0  # of places
        self._checksums: dict[int, int] = {}  # of records whose write is done
        self._changed: set[int] = set()  # clients whose record was written or dropped since the last checkpoint
        self._new: set[int] = set()  # places in use that the last checkpoint does not need
        # Places that were given up after each of the last checkpoints, which still needs them.
        self._given_up: deque[list[int]] = deque([[]])
        self._free: list[int] = []  # places that neither a checkpoint nor a client needs
        self._writes: deque[tuple[int, int, Future[int]]] = deque()  # by client and place
        self._index = Index(folder)
        self._indices: deque[dict[str, Any] | None] = deque(maxlen=keep)  # of the last checkpoints

    def write(
        self,
        client: int,
        vector: Scaled,
        after: "torch.cuda.Event | None" = None,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Write a record asynchronously: once the event has passed; `then` is called when the vector was written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if len(self._writes) >= MOST_WRITES:
            self._finish_write()
        place = self.places.get(client)
        if place is None or place not in self._new:  # a checkpoint's records are never overwritten
            self._give_up(client)
            place = self._new_place()
        elif any(place == other for _, other, _ in self._writes):
            self.flush()  # the older write of the same record first
        future = submit(write_record, self.path, place * self.record_bytes, vector, after)
        if then is not None:
            future.add_done_callback(lambda _: then())
        self._writes.append((client, place, future))
        self.places[client] = place
        self._changed.add(client)

    def read(self, client: int) -> Scaled:
        """The record of a client."""
        self.flush()
        data = np.fromfile(self.path, np.uint8, self.record_bytes, offset=self.places[client] * self.record_bytes)
        if data.size != self.record_bytes:
            raise Damaged(f"{self.path} is shorter than it should be: the residual of client {client} is lost. {AGAIN}")
        if zlib.crc32(data.data) != self._checksums[client]:
            raise Damaged(f"{self.path}: the residual of client {client} is damaged, its checksum differs. {AGAIN}")
        values = data[8:].view(np.float16 if self.dtype == torch.float16 else np.float32)
        return Scaled(float(data[:8].view(np.float64)[0]), torch.from_numpy(values))

    def flush(self) -> None:
        """Wait until every write is done; raises the error of one that failed."""
        while self._writes:
            self._finish_write()

    def close(self) -> None:
        """Wait for the writes in progress, also after a failure: they must not reach the file after another store in
        this process has restored and truncated it."""
        wait([write for _, _, write in self._writes])
        self._writes.clear()

    def checkpoint(self, used: Mapping[int, int]) -> dict[str, Any]:
        """Make the file durable and describe it, as JSON can hold it; `used` is the last round of every client."""
        self.flush()
        if self._changed and self.path.exists():
            files.sync(self.path)
            files.sync_folder(self.folder)
        # What the checkpoints so far need stays: the new one does not count before its manifest is written.
        discard(self.folder, self._indices)

        def entries(clients: Iterable[int]) -> Entries:
            nowhere = (NOWHERE, 0)
            found = ((c, (self.places[c], self._checksums[c]) if c in self.places else nowhere) for c in clients)
            return entries_of((c, place, checksum, used.get(c, 0)) for c, (place, checksum) in found)

        changed = entries(sorted(self._changed))
        self._indices.append(self._index.append(changed, len(self.places), lambda: entries(sorted(self.places))))
        self._changed.clear()
        self._new.clear()
        self._given_up.append([])
        while len(self._given_up) > self.keep:
            self._free += self._given_up.popleft()
        return {
            "length": self._count * self.record_bytes,
            "record_bytes": self.record_bytes,
            "records": len(self.places),
            "index": self._indices[-1],
        }

    def check(self, saved: dict[str, Any]) -> None:
        """Raise `Damaged` unless the file holds every record of a checkpoint as it was written."""
        check_records(self.folder, saved)

    def restore(self, saved: dict[str, Any], older: Sequence[dict[str, Any]] = ()) -> dict[int, int]:
        """Return to a checkpoint that was checked: what was written after it is lost, what older ones need stays.

        Returns the last round of every client."""
        if saved["record_bytes"] != self.record_bytes:
            raise GlueFLError(
                f"{self.folder} holds records of {saved['record_bytes']} bytes, this configuration has "
                f"{self.record_bytes}: resume with the model and the precision of residuals that the run started with."
            )
        self.flush()
        entries = read_index(self.folder, saved["index"])
        clients = entries["client"].tolist()
        self.places = dict(zip(clients, entries["place"].tolist()))
        self._checksums = dict(zip(clients, entries["checksum"].tolist()))
        self._count = saved["length"] // self.record_bytes
        self._index = Index(self.folder)
        self._changed.clear()
        self._new.clear()
        self._keep([*older, saved])
        if self._count:
            os.truncate(self.path, saved["length"])
        return dict(zip(clients, entries["used"].tolist()))

    def forget(self, client: int) -> None:
        """Drop the record of a client, if it has one; its place is used again when no checkpoint needs it."""
        if any(client == other for other, _, _ in self._writes):
            self.flush()
        if client in self.places:
            self._give_up(client)
            del self.places[client], self._checksums[client]
            self._changed.add(client)

    def _keep(self, checkpoints: Sequence[dict[str, Any]]) -> None:
        """Give up the places that only older checkpoints than the last one need, each with the last that needs it."""
        kept = checkpoints[-self.keep :]
        self._indices.clear()
        self._given_up.clear()
        needed = set(self.places.values())
        for saved in reversed(kept):
            places = set[int]()
            with contextlib.suppress(Damaged):  # of an older checkpoint, which cannot be gone back to then
                places = set(read_index(self.folder, saved["index"])["place"].tolist())
            self._indices.appendleft(saved["index"])
            self._given_up.appendleft(sorted(places - needed))
            needed |= places
        self._free = [place for place in range(self._count) if place not in needed]
        discard(self.folder, self._indices)

    def _give_up(self, client: int) -> None:
        place = self.places.get(client)
        if place is None:
            return
        if place in self._new:
            self._new.remove(place)
            self._free.append(place)
        else:
            self._given_up[-1].append(place)

    def _new_place(self) -> int:
        if not self._free:
            self._free.append(self._count)
            self._count += 1
        place = self._free.pop()
        self._new.add(place)
        return place

    def _finish_write(self) -> None:
        client, _, write = self._writes.popleft()
        self._checksums[client] = write.result()


def check_records(folder: Path, saved: dict[str, Any]) -> None:
    """Raise `Damaged` unless a file of records holds all that a checkpoint names; also without the run of the file."""
    path = folder / NAME
    entries = read_index(folder, saved["index"])
    size_bytes = path.stat().st_size if path.exists() else 0
    if size_bytes < saved["length"]:
        raise Damaged(
            f"{path.name} holds {size_bytes} bytes of residuals, the checkpoint needs {saved['length']}: "
            "the file was damaged or removed"
        )
    if len(entries) != saved["records"]:
        raise ValueError(f"{saved['records']} records, the index has {len(entries)}")
    if not len(entries):
        return
    with open(path, "rb") as file:
        for entry in np.sort(entries, order="place"):
            file.seek(int(entry["place"]) * saved["record_bytes"])
            if zlib.crc32(file.read(saved["record_bytes"])) != entry["checksum"]:
                client = entry["client"]
                raise Damaged(f"{path.name} is damaged: the checksum of the residual of client {client} differs")


def write_record(path: Path, offset: int, vector: Scaled, after: "torch.cuda.Event | None") -> int:
    """Write one record at an offset; returns its checksum."""
    if after is not None:
        after.synchronize()
    with on_side_stream(vector.values.device, "checkpoint"):
        values: Tensor = vector.values.cpu()
    checksum = 0
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=0) as file:
        file.seek(offset)
        for part in (np.array([vector.scale], np.float64), values.numpy()):
            rest = part.data.cast("B") if part.size else memoryview(b"")
            checksum = zlib.crc32(rest, checksum)
            while rest:
                rest = rest[file.write(rest) :]
    return checksum
