"""Vectors in a file, written asynchronously.

2800 clients of 5.5M parameters are 61 GB. A checkpoint therefore never rewrites the file: it writes what changed since
the last one, and notes offset and checksum of every record. The records of the last few checkpoints stay; places
that only an older checkpoint needed are used again, so that the file does not grow from checkpoint to checkpoint.
"""

import os
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gluefl import files
from gluefl.accel.streams import on_side_stream
from gluefl.accel.threads import submit
from gluefl.clients.residuals.tiers import Scaled
from gluefl.errors import Damaged, GlueFLError

MOST_WRITES = 4  # at a time
NAME = "residuals.bin"
KEPT = 2  # checkpoints
AGAIN = "Resume the run: it then goes back to a checkpoint that is whole, if there is one."


class RecordFile:
    """One record per client: a scale and `size` values. The first write creates the folder."""

    def __init__(self, folder: Path, size: int, dtype: torch.dtype, keep: int = KEPT) -> None:
        self.folder, self.path, self.dtype = folder, folder / NAME, dtype
        self.record_bytes = 8 + size * dtype.itemsize
        self.offsets: dict[int, int] = {}
        self.length = 0
        self._checksums: dict[int, int] = {}  # of records whose write is done
        self._kept: deque[frozenset[int]] = deque(maxlen=keep)  # offsets of the last checkpoints
        self._free: list[int] = []  # offsets that neither a checkpoint nor a client needs
        self._writes: deque[tuple[int, int, Future[int]]] = deque()  # by client and offset

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
        offset = self.offsets.get(client)
        if offset is None or self._is_kept(offset):  # a checkpoint's records are never overwritten
            offset = self._new_offset()
        elif any(offset == other for _, other, _ in self._writes):
            self.flush()  # the older write of the same record first
        future = submit(write_record, self.path, offset, vector, after)
        if then is not None:
            future.add_done_callback(lambda _: then())
        self._writes.append((client, offset, future))
        self.offsets[client] = offset

    def read(self, client: int) -> Scaled:
        """The record of a client."""
        self.flush()
        data = np.fromfile(self.path, np.uint8, self.record_bytes, offset=self.offsets[client])
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

    def checkpoint(self) -> dict[str, Any]:
        """Make the file durable and describe it, as JSON can hold it."""
        self.flush()
        if self.path.exists():
            files.sync(self.path)
            files.sync_folder(self.folder)
        self._keep([*self._kept, frozenset(self.offsets.values())])
        return {
            "length": self.length,
            "record_bytes": self.record_bytes,
            "offsets": {str(client): offset for client, offset in sorted(self.offsets.items())},
            "checksums": {str(client): self._checksums[client] for client in sorted(self.offsets)},
        }

    def check(self, saved: dict[str, Any]) -> None:
        """Raise `Damaged` unless the file holds every record of a checkpoint as it was written."""
        check_records(self.folder, saved)

    def restore(self, saved: dict[str, Any], older: Sequence[dict[str, Any]] = ()) -> None:
        """Return to a checkpoint that was checked: what was written after it is lost, what older ones need stays."""
        if saved["record_bytes"] != self.record_bytes:
            raise GlueFLError(
                f"{self.folder} holds records of {saved['record_bytes']} bytes, this configuration has "
                f"{self.record_bytes}: resume with the model and the precision of residuals that the run started with."
            )
        self.flush()
        self.length = saved["length"]
        self.offsets = {int(client): offset for client, offset in saved["offsets"].items()}
        self._checksums = {int(client): checksum for client, checksum in saved["checksums"].items()}
        self._keep([frozenset(one["offsets"].values()) for one in (*older, saved)])
        if self.length:
            os.truncate(self.path, self.length)

    def _is_kept(self, offset: int) -> bool:
        return any(offset in offsets for offsets in self._kept)

    def _keep(self, checkpoints: Sequence[frozenset[int]]) -> None:
        """Keep the records of the last of these checkpoints; places that only older ones needed are free."""
        self._kept.clear()
        self._kept.extend(checkpoints)
        needed = frozenset(self.offsets.values()).union(*self._kept)
        self._free = [at for at in range(0, self.length, self.record_bytes) if at not in needed]

    def _new_offset(self) -> int:
        if self._free:
            return self._free.pop()
        self.length += self.record_bytes
        return self.length - self.record_bytes

    def _finish_write(self) -> None:
        client, _, write = self._writes.popleft()
        self._checksums[client] = write.result()


def check_records(folder: Path, saved: dict[str, Any]) -> None:
    """Raise `Damaged` unless a file of records holds all that a checkpoint names; also without the run of the file."""
    path = folder / NAME
    size_bytes = path.stat().st_size if path.exists() else 0
    if size_bytes < saved["length"]:
        raise Damaged(
            f"{path.name} holds {size_bytes} bytes of residuals, the checkpoint needs {saved['length']}: "
            "the file was damaged or removed"
        )
    if not saved["offsets"]:
        return
    with open(path, "rb") as file:
        for client, offset in sorted(saved["offsets"].items(), key=lambda item: int(item[1])):
            file.seek(offset)
            if zlib.crc32(file.read(saved["record_bytes"])) != saved["checksums"][client]:
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
