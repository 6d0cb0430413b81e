"""Vectors in a file, written asynchronously.

2800 clients of 5.5M parameters are 61 GB. A checkpoint therefore never rewrites the file: it appends what changed since
the last one, and notes the offset of every record and the length. Records appended after a checkpoint are overwritten
in place, and cut off when a run resumes from it.
"""

import os
from collections import deque
from collections.abc import Callable, Container
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gluefl.accel.streams import on_side_stream
from gluefl.accel.threads import submit
from gluefl.clients.residuals.tiers import Scaled
from gluefl.errors import GlueFLError

MOST_WRITES = 4  # at a time
# The file is compacted when it is longer than so many times what is needed, plus so many bytes.
GARBAGE_FACTOR, SPARE_BYTES = 2.0, 2**20


class RecordFile:
    """One record per client: a scale and `size` values. The first write creates the folder."""

    def __init__(self, folder: Path, size: int, dtype: torch.dtype, spare_bytes: int = SPARE_BYTES) -> None:
        self.folder, self.dtype, self.spare_bytes = folder, dtype, spare_bytes
        self.record_bytes = 8 + size * dtype.itemsize
        self.offsets: dict[int, int] = {}
        self.length = 0
        self._generation = 0
        self._checkpointed: frozenset[int] = frozenset()  # offsets that the last checkpoint names
        self._writes: deque[tuple[int, Future[None]]] = deque()  # by offset

    @property
    def path(self) -> Path:
        """The file of the current generation; compaction begins another."""
        return self.folder / f"residuals-{self._generation}.bin"

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
            self._writes.popleft()[1].result()
        offset = self.offsets.get(client)
        if offset is None or offset in self._checkpointed:  # a checkpoint's records are never overwritten
            offset = self.length
            self.length += self.record_bytes
        elif any(offset == other for other, _ in self._writes):
            self.flush()  # the older write of the same record first
        future = submit(write_record, self.path, offset, vector, after)
        if then is not None:
            future.add_done_callback(lambda _: then())
        self._writes.append((offset, future))
        self.offsets[client] = offset

    def read(self, client: int) -> Scaled:
        """The record of a client."""
        self.flush()
        data = np.fromfile(self.path, np.uint8, self.record_bytes, offset=self.offsets[client])
        if data.size != self.record_bytes:
            raise GlueFLError(f"{self.path} is shorter than it should be: the residual of client {client} is lost.")
        values = data[8:].view(np.float16 if self.dtype == torch.float16 else np.float32)
        return Scaled(float(data[:8].view(np.float64)[0]), torch.from_numpy(values))

    def flush(self) -> None:
        """Wait until every write is done; raises the error of one that failed."""
        while self._writes:
            self._writes.popleft()[1].result()

    def close(self) -> None:
        """Wait for the writes in progress, also after a failure: they must not reach the file after another store in
        this process has restored and truncated it."""
        wait([write for _, write in self._writes])
        self._writes.clear()

    def checkpoint(self) -> dict[str, Any]:
        """Make the file durable and describe it, as JSON can hold it."""
        self.flush()
        if self.path.exists():
            with open(self.path, "rb") as file:
                os.fsync(file.fileno())
        self._checkpointed = frozenset(self.offsets.values())
        return {
            "generation": self._generation,
            "length": self.length,
            "offsets": {str(client): offset for client, offset in sorted(self.offsets.items())},
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Return to a checkpoint: records appended after it are cut off."""
        self.flush()
        self._generation, self.length = saved["generation"], saved["length"]
        self.offsets = {int(client): offset for client, offset in saved["offsets"].items()}
        self._checkpointed = frozenset(self.offsets.values())
        if self.length:
            size_bytes = self.path.stat().st_size if self.path.exists() else 0
            if size_bytes < self.length:
                raise GlueFLError(
                    f"{self.path} holds {size_bytes} bytes of residuals, the checkpoint needs {self.length}: "
                    "the file was damaged or removed. Start the run again."
                )
            os.truncate(self.path, self.length)
        self.discard_old()

    def is_wasteful(self, clients: int) -> bool:
        """Whether the file is much longer than the records of so many clients."""
        return self.length > GARBAGE_FACTOR * max(clients, 1) * self.record_bytes + self.spare_bytes

    def compact(self, outdated: Container[int]) -> None:
        """Copy the records into a new file, except those of outdated clients. The old file stays until
        `discard_old`: the last checkpoint names it."""
        self.flush()
        old_path, old_offsets = self.path, self.offsets
        self._generation, self.length, self.offsets, self._checkpointed = self._generation + 1, 0, {}, frozenset()
        with open(old_path, "rb") as source, open(self.path, "wb") as target:
            for client, offset in sorted(old_offsets.items()):
                if client not in outdated:
                    source.seek(offset)
                    target.write(source.read(self.record_bytes))
                    self.offsets[client] = self.length
                    self.length += self.record_bytes

    def discard_old(self) -> None:
        """Delete the files of other generations, after a checkpoint was written that does not need them."""
        for other in self.folder.glob("residuals-*.bin"):
            if other != self.path:
                other.unlink()


def write_record(path: Path, offset: int, vector: Scaled, after: "torch.cuda.Event | None") -> None:
    """Write one record at an offset."""
    if after is not None:
        after.synchronize()
    with on_side_stream(vector.values.device, "checkpoint"):
        values: Tensor = vector.values.cpu()
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=0) as file:
        file.seek(offset)
        for part in (np.array([vector.scale], np.float64), values.numpy()):
            rest = part.data.cast("B") if part.size else memoryview(b"")
            while rest:
                rest = rest[file.write(rest) :]
