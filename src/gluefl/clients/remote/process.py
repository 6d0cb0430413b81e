"""One worker process of `processes.Processes`.

`python -m gluefl.clients.remote.process SOCKET MEMORY BYTES DEVICE`: two file descriptors that it inherits.
"""

import pickle
import sys
from multiprocessing.connection import Connection

from gluefl.errors import UsageError


def main(socket: str, memory: str, size_bytes: str, device: str) -> None:
    """Answer slices until the server's process closes the socket or ends."""
    connection = Connection(int(socket))
    kit = connection.recv_bytes()  # before torch is imported, so that the other side need not wait
    from gluefl.accel.memory import keep_freed_memory
    from gluefl.clients.remote.block import Block
    from gluefl.clients.remote.messages import Broadcast, Failed, Ready
    from gluefl.clients.remote.worker import Worker

    keep_freed_memory()
    block = Block(int(memory), int(size_bytes))
    try:
        worker = Worker(_unpacked(kit), device)
    except Exception as error:
        connection.send(Failed.of(error))
        return
    connection.send(Ready())
    while True:
        (round, version, places), part = connection.recv()
        broadcast = Broadcast.from_arrays(round, version, block.read(places))
        connection.send(worker.answer(broadcast, part))


def _unpacked(data: bytes):  # type: ignore[no-untyped-def]
    try:
        return pickle.loads(data)  # noqa: S301 - from the process that started this one
    except (AttributeError, ImportError) as error:
        raise UsageError(
            f"a part of the run cannot be made in another process: {error}. What is defined in the script that was "
            "started, or in a notebook, exists there alone: move it to a module, or use the engines local or ray."
        ) from error


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (EOFError, ConnectionResetError, BrokenPipeError):  # the server's process has closed the socket or ended
        sys.exit(0)
