"""How files are written: whole or not at all, and on the disk when a call returns; and who may write into a folder."""

import contextlib
import hashlib
import os
import re
import sys
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from gluefl.errors import Damaged, GlueFLError

if sys.platform != "win32":
    import fcntl

TEMPORARY = ".tmp"  # ends the name of a file that is being written
DIGEST_BYTES = 16
PART_BYTES = 2**20  # that are read at once


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Write a file beside the old one, which it then replaces in one step; both steps outlast a power failure."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error  # a full disk does not say which file
        raise


def write(path: Path, data: bytes | str) -> None:
    """Replace the contents of a file in one step."""
    with replacing(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents; their names outlast a power failure."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def sync(path: Path) -> None:
    """Let what was written into a file outlast a power failure."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Let the names of a folder's files outlast a power failure."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(data: bytes) -> str:
    """A checksum of some bytes, against damage."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def digest_of(path: Path) -> str:
    """The checksum of a file, read in parts."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES)).hexdigest()


def crc_of(path: Path) -> str:
    """The CRC-32 of a file: in a quarter of the time, for gigabytes that are checked whenever they are opened."""
    crc = 0
    with open(path, "rb") as file:
        while part := file.read(PART_BYTES):
            crc = zlib.crc32(part, crc)
    return f"{crc:08x}"


class Growing:
    """A file that only grows, each time by whole entries; every length that it ever had has a checksum.

    Its process writes it from the first byte on, so that nothing is written behind what a killed process left.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.size_bytes = path, 0
        self._digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._exists = False

    def append(self, data: bytes) -> dict[str, Any]:
        """Add entries, on the disk when the call returns, and say how to find them, as JSON can hold it."""
        if not self._exists:
            write(self.path, data)
        elif data:
            with open(self.path, "r+b") as file:
                file.seek(self.size_bytes)
                file.write(data)
                file.truncate()  # an earlier attempt may have failed half-way
                file.flush()
                os.fsync(file.fileno())
        self._digest.update(data)
        self._exists, self.size_bytes = True, self.size_bytes + len(data)
        return {"name": self.path.name, "bytes": self.size_bytes, "digest": self._digest.hexdigest()}


def read_growing(folder: Path, saved: dict[str, Any], name: re.Pattern[str], entry_bytes: int) -> bytes:
    """What `Growing.append` said how to find; raises `Damaged` unless it is as it was written."""
    length_bytes = saved["bytes"]
    if not name.fullmatch(saved["name"]) or not isinstance(length_bytes, int) or length_bytes % entry_bytes:
        raise ValueError(f"{length_bytes!r} bytes of {saved['name']!r} are not whole entries of such a file")
    path = folder / saved["name"]
    if not path.exists():
        raise Damaged(f"{path.name} is missing")
    if (size_bytes := path.stat().st_size) < length_bytes:
        raise Damaged(f"{path.name} is damaged: it has {size_bytes} bytes, {length_bytes} were written")
    with open(path, "rb") as file:
        data = file.read(length_bytes)
    if digest(data) != saved["digest"]:
        raise Damaged(f"{path.name} is damaged: its checksum differs")
    return data


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Be the only one that writes into a folder. The system takes the lock back when the process ends, however."""
    if sys.platform == "win32":  # without such locks
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise GlueFLError(
                f"another process is writing into {folder}: wait until it has ended, stop it, or choose another folder."
            ) from error
        except OSError as error:
            warnings.warn(
                f"{folder} cannot be locked on this file system ({error.strerror}): make sure that no other process "
                "writes into it",
                stacklevel=3,
            )
        yield
    finally:
        os.close(descriptor)
