"""The clients' memories of what they did not send: on the GPU up to a budget, in RAM up to another, then in a file.

2800 clients of 5.5M parameters are 61 GB. A checkpoint therefore never rewrites them: it appends what changed
since the last one, and notes where everything lies and how long the file is. What is appended after a checkpoint
is written again in its own place, and cut off when a run resumes from it.
"""

import mmap
import os
import tempfile
from collections import OrderedDict, deque
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gluefl.accel.streams import on_side_stream
from gluefl.accel.threads import submit
from gluefl.errors import GlueFLError

SLAB = 1 << 26  # bytes that are taken from the system at a time
WRITES = 4  # at a time, beside the training
GARBAGE, SPARE = 2.0, 2**20  # the file is compacted when it is so many times as long as needed, and some bytes


class Residuals:
    """A map from client to vector. Half precision keeps each vector's own scale, so that nothing underflows.

    >>> residuals[7] = vector
    >>> residuals.get(7)
    """

    def __init__(
        self,
        size: int,
        folder: Path | None = None,
        memory_bytes: int = 3 * 10**8,
        half: bool = False,
        device_bytes: int = 0,
    ):
        self.size, self.memory_bytes, self.half, self.device_bytes = size, memory_bytes, half, device_bytes
        self._temporary = tempfile.TemporaryDirectory(prefix="gluefl-residuals-") if folder is None else None
        self.folder = Path(self._temporary.name) if self._temporary else Path(folder or ".")
        # Least recently used first: on a GPU, where they were made there, and in RAM.
        self._near: OrderedDict[int, tuple[float, Tensor]] = OrderedDict()
        self._vectors: OrderedDict[int, tuple[float, Tensor]] = OrderedDict()
        self._writing: deque[tuple[int, Future[None]]] = deque()  # offsets, and when they are done
        self._free: list[Tensor] = []  # places in RAM that are not used any more
        self._unsaved: set[int] = set()
        self._offsets: dict[int, int] = {}
        self._kept: frozenset[int] = frozenset()  # offsets that the last checkpoint names
        self._generation, self._length = 0, 0
        # Copies between a GPU and RAM are not waited for, a round would stand still: this is when the last one is done.
        self._started: torch.cuda.Event | None = None

    @property
    def record_bytes(self) -> int:
        """The length of one vector in the file: its scale and its values."""
        return 8 + self.size * (2 if self.half else 4)

    def __contains__(self, client: int) -> bool:
        return client in self._near or client in self._vectors or client in self._offsets

    def __len__(self) -> int:
        return len(self._near.keys() | self._vectors.keys() | self._offsets.keys())

    def get(self, client: int, device: torch.device | str = "cpu") -> Tensor | None:
        """A client's vector, None if it has none. It is not to be written to."""
        if client not in self:
            return None
        if client in self._near:
            self._near.move_to_end(client)
            scale, vector = self._near[client]
            found = vector.to(device, torch.float32)
        elif client in self._vectors:
            self._vectors.move_to_end(client)
            scale, vector = self._vectors[client]
            found = self._copied(vector, device)  # places in RAM are used again
        else:
            scale, vector = self._read(client)  # not kept in RAM: what is asked for is about to be replaced
            found = vector.to(device, torch.float32)
        return found * scale if self.half else found

    def __setitem__(self, client: int, vector: Tensor) -> None:
        scale = 1.0
        if self.half:
            scale = float(vector.abs().max()) or 1.0
            vector = (vector / scale).half()
        near = vector.is_cuda and self.device_bytes >= self.record_bytes
        if near and client in self._vectors:
            self._free.append(self._vectors.pop(client)[1])
        elif not near:
            self._near.pop(client, None)
        tier = self._near if near else self._vectors
        if near and vector._base is not None:
            vector = vector.clone()  # a row of a matrix would keep the matrix
        tier[client] = (scale, vector if near else self._to_ram(vector, client))
        tier.move_to_end(client)
        self._unsaved.add(client)
        self._spill()

    def checkpoint(self) -> dict[str, Any]:
        """Bring everything to disk and say where it lies, as JSON can hold it. What a GPU is still to compute must not
        be among it: it is copied past what that is busy with."""
        held = len(self) * self.record_bytes
        if self._length > GARBAGE * max(held, self.record_bytes) + SPARE:
            self._compact()
        for client in sorted(self._unsaved):
            self._append(client)
        self._unsaved.clear()
        self._sync()
        self._kept = frozenset(self._offsets.values())
        return {
            "generation": self._generation,
            "length": self._length,
            "offsets": {str(client): offset for client, offset in sorted(self._offsets.items())},
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Go back to a checkpoint: what was appended after it is cut off."""
        self.flush()
        self._near.clear()
        self._free += [vector for _, vector in self._vectors.values()]
        self._vectors.clear()
        self._unsaved.clear()
        self._generation, self._length = saved["generation"], saved["length"]
        self._offsets = {int(client): offset for client, offset in saved["offsets"].items()}
        self._kept = frozenset(self._offsets.values())
        if self._length:
            found = self._path.stat().st_size if self._path.exists() else 0
            if found < self._length:
                raise GlueFLError(
                    f"{self._path} holds {found} bytes of residuals, the checkpoint needs {self._length}: "
                    "the file was damaged or removed. Start the run again."
                )
            os.truncate(self._path, self._length)
        for other in self.folder.glob("residuals-*.bin"):
            if other != self._path:
                other.unlink()

    @property
    def _path(self) -> Path:
        return self.folder / f"residuals-{self._generation}.bin"

    def _spill(self) -> None:
        while len(self._near) > 1 and len(self._near) * self.record_bytes > self.device_bytes:
            client, (scale, vector) = self._near.popitem(last=False)
            self._vectors[client] = (scale, self._to_ram(vector, client))
        # What is on disk already is only forgotten.
        while len(self._vectors) > 1 and len(self._vectors) * self.record_bytes > self.memory_bytes:
            client = next(iter(self._vectors))
            if client in self._unsaved:
                self._append(client)
                self._unsaved.discard(client)
                # Its place is free when it is written.
                place = self._vectors.pop(client)[1]
                self._writing[-1][1].add_done_callback(lambda _, place=place: self._free.append(place))  # type: ignore[misc]
            else:
                self._free.append(self._vectors.pop(client)[1])

    def _append(self, client: int) -> None:
        scale, vector = self._near[client] if client in self._near else self._vectors[client]
        self.folder.mkdir(parents=True, exist_ok=True)
        if len(self._writing) >= WRITES:
            self._writing.popleft()[1].result()
        offset = self._offsets.get(client)
        if offset is None or offset in self._kept:  # a checkpoint's record stays as it is
            offset = self._length
            self._length += self.record_bytes
        elif any(offset == other for other, _ in self._writing):
            self.flush()  # the older one first
        self._writing.append((offset, submit(_write, self._path, offset, scale, vector, self._started)))
        self._offsets[client] = offset

    def flush(self) -> None:
        """Wait until everything that was appended is in the file; what went wrong is raised here."""
        while self._writing:
            self._writing.popleft()[1].result()

    def close(self) -> None:
        """Wait for the writes under way, also after a failure: whoever resumes in this process must not find them
        in the file after having cut it."""
        wait([write for _, write in self._writing])
        self._writing.clear()

    def _read(self, client: int) -> tuple[float, Tensor]:
        self.flush()
        data = np.fromfile(self._path, np.uint8, self.record_bytes, offset=self._offsets[client])
        if data.size != self.record_bytes:
            raise GlueFLError(f"{self._path} is shorter than it should be: the residual of client {client} is lost.")
        values = data[8:].view(np.float16 if self.half else np.float32)
        return float(data[:8].view(np.float64)[0]), torch.from_numpy(values)

    def _compact(self) -> None:
        """Copy what is still needed into a new file. The old one goes once a checkpoint names the new one."""
        self.flush()
        old, offsets = self._path, self._offsets
        self._generation, self._length, self._offsets, self._kept = self._generation + 1, 0, {}, frozenset()
        with open(old, "rb") as source, open(self._path, "wb") as target:
            for client, offset in sorted(offsets.items()):
                if client not in self._unsaved:
                    source.seek(offset)
                    target.write(source.read(self.record_bytes))
                    self._offsets[client] = self._length
                    self._length += self.record_bytes

    def discard_old(self) -> None:
        """Delete files of earlier generations, after a checkpoint that no longer needs them was written."""
        for other in self.folder.glob("residuals-*.bin"):
            if other != self._path:
                other.unlink()

    def _sync(self) -> None:
        self.flush()
        if self._path.exists():
            with open(self._path, "rb") as file:
                os.fsync(file.fileno())

    def _to_ram(self, vector: Tensor, client: int) -> Tensor:
        """Copy a vector into a place of its own, a used one if there is one. Vectors that lie among what training
        allocates and frees would tear its memory into pieces too small to be used again: three times the memory."""
        if client in self._vectors:
            place = self._vectors[client][1]
        elif self._free:
            place = self._free.pop()
        else:
            self._free += _places(self.size, vector)
            place = self._free.pop()
        if vector.is_cuda:
            place.copy_(vector, non_blocking=True)
            self._started = _event()
            return place
        self._wait()  # a copy to the device may still read what was there
        return place.copy_(vector)

    def _copied(self, vector: Tensor, device: torch.device | str) -> Tensor:
        if torch.device(device).type != "cuda":
            self._wait()
            return vector.to(device, torch.float32, copy=True)
        found = vector.to(device, non_blocking=True).float()
        self._started = _event()
        return found

    def _wait(self) -> None:
        if self._started is not None:
            self._started.synchronize()
            self._started = None


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def room_on(device: torch.device, wanted_bytes: int | None = None) -> int:
    """Bytes that residuals may take on a device: on a GPU those wanted, or a third of the free ones; elsewhere none."""
    if device.type != "cuda":
        return 0
    if wanted_bytes is not None:
        return wanted_bytes
    free, total = torch.cuda.mem_get_info(device)
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(
        device.index or 0
    )  # not in old PyTorch
    return min(free, int(share * total)) // 3


def _places(size: int, like: Tensor) -> list[Tensor]:
    """Room for several vectors, in pages of their own; for those that come from a GPU in pinned ones."""
    count = min(256, max(1, SLAB // max(1, size * like.element_size())))
    if like.is_cuda:
        room = torch.empty(count * size, dtype=like.dtype, pin_memory=True)
    else:
        pages = mmap.mmap(-1, max(1, count * size * like.element_size()))
        room = torch.frombuffer(pages, dtype=like.dtype, count=count * size)
    return list(room.view(count, size))


def _write(path: Path, offset: int, scale: float, vector: Tensor, started: "torch.cuda.Event | None") -> None:
    if started is not None:
        started.synchronize()
    with on_side_stream(vector.device, "checkpoint"):
        vector = vector.cpu()
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=0) as file:
        file.seek(offset)
        for part in (np.array([scale], np.float64), vector.numpy()):
            rest = part.data.cast("B") if part.size else memoryview(b"")
            while rest:
                rest = rest[file.write(rest) :]
