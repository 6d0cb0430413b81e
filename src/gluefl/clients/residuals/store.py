"""A map from client to vector over three tiers: GPU, RAM, file."""

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gluefl.clients.residuals.file import KEPT, RecordFile
from gluefl.clients.residuals.tiers import DeviceTier, HostTier, Scaled


class Residuals:
    """A map from client to vector. Half precision keeps each vector's own scale, so that nothing underflows.

    >>> residuals[7] = vector
    >>> residuals.get(7)

    A vector that does not fit into the GPU's budget moves to RAM, one that does not fit there to the file, the least
    recently used first. Only the file survives the process; `checkpoint` completes it.
    """

    def __init__(
        self,
        size: int,
        folder: Path | None = None,
        memory_bytes: int = 3 * 10**8,
        half: bool = False,
        device_bytes: int = 0,
        keep: int = KEPT,
        forget_after: int | None = None,
    ):
        self.forget_after = forget_after  # rounds without use
        self.size, self.memory_bytes, self.half, self.device_bytes = size, memory_bytes, half, device_bytes
        self._temporary = tempfile.TemporaryDirectory(prefix="gluefl-residuals-") if folder is None else None
        self.folder = Path(self._temporary.name) if self._temporary else Path(folder or ".")
        self._on_device, self._in_ram = DeviceTier(), HostTier(size)
        self._file = RecordFile(self.folder, size, torch.float16 if half else torch.float32, keep)
        self._unsaved: set[int] = set()  # clients whose record in the file is outdated or missing
        self._round, self._used = 0, dict[int, int]()  # the round in which each vector was stored, oldest first

    @property
    def record_bytes(self) -> int:
        """The length of one vector in the file: its scale and its values."""
        return self._file.record_bytes

    def __contains__(self, client: int) -> bool:
        return client in self._on_device.held or client in self._in_ram.held or client in self._file.places

    def __len__(self) -> int:
        return len(self._on_device.held.keys() | self._in_ram.held.keys() | self._file.places.keys())

    def get(self, client: int, device: torch.device | str = "cpu") -> Tensor | None:
        """A client's vector, None if it has none. It must not be written to."""
        if client not in self:
            return None
        if client in self._on_device.held:
            scale, vector = self._on_device.held[client].scale, self._on_device.read(client, device)
        elif client in self._in_ram.held:
            scale, vector = self._in_ram.held[client].scale, self._in_ram.read(client, device)
        else:  # not kept in RAM: a residual that is read is replaced soon
            record = self._file.read(client)
            scale, vector = record.scale, record.values.to(device, torch.float32)
        return vector * scale if self.half else vector

    def __setitem__(self, client: int, vector: Tensor) -> None:
        scale = 1.0
        if self.half:
            scale = float(vector.abs().max()) or 1.0
            vector = (vector / scale).half()
        if vector.is_cuda and self.device_bytes >= self.record_bytes:
            if client in self._in_ram.held:
                self._in_ram.release(self._in_ram.pop(client))
            self._on_device.put(client, Scaled(scale, vector))
        else:
            self._on_device.held.pop(client, None)
            self._in_ram.put(client, Scaled(scale, vector))
        self._unsaved.add(client)
        self._used.pop(client, None)  # so that it comes last
        self._used[client] = self._round
        self._spill()

    def begin(self, round: int) -> int | None:
        """A round begins: vectors that were not stored in the last `forget_after` rounds are forgotten, in memory and
        in the file. Returns how many, None if nothing is ever forgotten.

        >>> Residuals(size, forget_after=10).begin(12)  # forgets what was last stored in round 1
        """
        self._round = round
        if self.forget_after is None:
            return None
        count = 0
        while self._used and round - next(iter(self._used.values())) > self.forget_after:
            self._forget(next(iter(self._used)))
            count += 1
        return count

    def checkpoint(self) -> dict[str, Any]:
        """Write everything to the file and say where it lies, as JSON can hold it. Vectors on a GPU are copied on
        another stream: they must have been computed when this is called."""
        for client in sorted(self._unsaved):
            tier = self._on_device if client in self._on_device.held else self._in_ram
            self._file.write(client, tier.held[client], self._in_ram.last_copy)
        self._unsaved.clear()
        return self._file.checkpoint(self._used)

    def check(self, saved: dict[str, Any]) -> None:
        """Raise `Damaged` unless everything that a checkpoint names is in the file as it was written."""
        self._file.flush()
        self._file.check(saved)

    def restore(self, saved: dict[str, Any], older: Sequence[dict[str, Any]] = ()) -> None:
        """Return to a checkpoint that was checked: what was stored later is forgotten, what older ones need stays."""
        self._file.flush()
        self._on_device.held.clear()
        self._in_ram.clear()
        self._unsaved.clear()
        used = self._file.restore(saved, older)
        self._used = dict(sorted(used.items(), key=lambda item: item[1]))

    def close(self) -> None:
        """Wait for the writes in progress, also after a failure."""
        self._file.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _forget(self, client: int) -> None:
        del self._used[client]
        self._unsaved.discard(client)
        self._on_device.held.pop(client, None)
        if client in self._in_ram.held:
            self._in_ram.release(self._in_ram.pop(client))
        self._file.forget(client)

    def _spill(self) -> None:
        on_device, in_ram = self._on_device.held, self._in_ram.held
        while len(on_device) > 1 and len(on_device) * self.record_bytes > self.device_bytes:
            client, vector = on_device.popitem(last=False)
            self._in_ram.put(client, vector)
        while len(in_ram) > 1 and len(in_ram) * self.record_bytes > self.memory_bytes:
            client = next(iter(in_ram))
            if client in self._unsaved:
                release = partial(self._in_ram.release, in_ram[client].values)
                self._file.write(client, in_ram[client], self._in_ram.last_copy, then=release)
                self._unsaved.discard(client)
                self._in_ram.pop(client)
            else:
                self._in_ram.release(self._in_ram.pop(client))


def room_on(device: torch.device, wanted_bytes: int | None = None) -> int:
    """Bytes that residuals may take on a device: on a GPU those wanted, or a third of the free ones; elsewhere none."""
    if device.type != "cuda":
        return 0
    if wanted_bytes is not None:
        return wanted_bytes
    free, total = torch.cuda.mem_get_info(device)
    get_share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)  # not in old PyTorch
    return min(free, int(get_share(device.index or 0) * total)) // 3
