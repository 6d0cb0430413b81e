"""Workers as processes of this machine: one per GPU, or one per core.

The model of a round lies in shared memory. Everything else travels through a socket between this process and a worker
that it started itself; what arrives there is unpickled, and nothing else can write to it.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait

from gluefl.clients.remote.block import Block, room_for
from gluefl.clients.remote.messages import Broadcast, Ended, Event, Kit, Slice
from gluefl.errors import UsageError

PATIENCE_S = 600  # without any event
END_S = 5  # for a worker to end


class Processes:
    """A transport to processes, one for each of the given devices."""

    ahead = 0  # a worker that sends a reply reads nothing: a second slice could block both sides

    def __init__(self, kit: bytes, devices: Sequence[str], block: Block) -> None:
        self.devices, self._block, self._kit = tuple(devices), block, kit
        self._places: object = None
        self._workers: list[tuple[subprocess.Popen[bytes], Connection]] = []
        try:
            for device in devices:
                self._workers.append(self._started(device))
        except BaseException:
            self.close()
            raise

    @classmethod
    def of(cls, kit: Kit, devices: Sequence[str]) -> "Processes":
        """Start the workers of a run."""
        weights, statistics = kit.layout.flatten(kit.module)
        vectors = Broadcast(0, 0, weights, statistics, weights.bool(), weights.bool()).arrays()
        message = packed(kit)  # which may refuse it, before there is anything to close
        return cls(message, devices, Block.of_size(room_for(vectors) + kit.layout.statistics_size * 8))

    @property
    def count(self) -> int:
        """One per device."""
        return len(self.devices)

    @property
    def ids(self) -> list[int]:
        """The process numbers of the workers."""
        return [process.pid for process, _ in self._workers]

    def publish(self, broadcast: Broadcast) -> None:
        """Write the vectors of a round into shared memory."""
        places = self._block.write(broadcast.arrays())
        self._places = (broadcast.round, broadcast.version, places)

    def send(self, worker: int, part: Slice) -> None:
        """Send a slice. A worker that has died is noticed by `events`."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._workers[worker][1].send((self._places, part))

    def events(self) -> list[tuple[int, Event]]:
        """What the workers have sent."""
        by_connection = {connection: number for number, (_, connection) in enumerate(self._workers)}
        ready = wait(list(by_connection), PATIENCE_S)
        return [(number, self._event(number)) for number in sorted(by_connection[one] for one in ready)]  # type: ignore[index]

    def _event(self, worker: int) -> Event:
        process, connection = self._workers[worker]
        try:
            event: Event = connection.recv()
            return event
        except (EOFError, ConnectionResetError):
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            return Ended(_reason(process.returncode))

    def replace(self, worker: int) -> None:
        """Start another process in place of a worker."""
        _end(*self._workers[worker])
        self._workers[worker] = self._started(self.devices[worker])

    def close(self) -> None:
        """End all workers."""
        for process, connection in self._workers:
            _end(process, connection)
        self._workers = []
        self._block.close()

    def _started(self, device: str) -> "tuple[subprocess.Popen[bytes], Connection]":
        ours, theirs = socket.socketpair()
        descriptors = (theirs.fileno(), self._block.descriptor)
        command = [sys.executable, "-m", "gluefl.clients.remote.process", *map(str, descriptors)]
        process = subprocess.Popen(  # noqa: S603 - a module of our own, without a shell
            [*command, str(self._block.size_bytes), device],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            start_new_session=True,  # Ctrl-C reaches this process only
        )
        theirs.close()
        connection = Connection(ours.detach())
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.send_bytes(self._kit)
        return process, connection


def packed(kit: Kit) -> bytes:
    """A kit as bytes; refuses one that cannot be sent."""
    for name, part in vars(kit).items():
        try:
            pickle.dumps(part)
        except Exception as error:
            kind = getattr(part, "__qualname__", type(part).__name__)
            raise UsageError(
                f"the {name} ({kind}) cannot be sent to other processes: {error}. Define it at the top level of a "
                "module that can be imported, without lambdas, open files or locks; or use the local engine."
            ) from error
    return pickle.dumps(kit)


def _end(process: "subprocess.Popen[bytes]", connection: Connection) -> None:
    connection.close()  # ends a worker that waits
    process.kill()  # and one that trains: it holds nothing that has to be saved
    process.wait()


def _reason(code: int | None) -> str:
    if code is None:
        return "a closed connection"
    return f"signal {-code}, {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
