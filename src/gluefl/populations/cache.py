"""Decoded data in the user's cache folder: decoded once, then memory-mapped, so that resident memory grows with the
clients that are used. GLUEFL_CACHE names another folder; its content may be deleted at any time.

Every array has a checksum, which is compared whenever an entry is opened, in less than a second per gigabyte: damaged
data are never used."""

import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gluefl import files
from gluefl.errors import Damaged, DataError

INDEX = "index.json"  # names and checksums of the arrays
FORMAT = 2  # raise it when the same source is decoded to something else

Arrays = dict[str, NDArray[Any]]


def folder() -> Path:
    """The cache folder: GLUEFL_CACHE, or gluefl under XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("GLUEFL_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gluefl"


def cached(name: str, sources: Iterable[Path], options: Mapping[str, object], make: Callable[[], Arrays]) -> Arrays:
    """The result of `make()`, memory-mapped; computed only if the sources or the options have changed."""
    paths = [source.resolve() for source in sources]
    key = _digest([FORMAT, [str(path) for path in paths], dict(options)])
    place = folder() / f"{name}-{key}"
    home = place / _digest([_stamps(path) for path in paths])
    try:
        if (stored := _opened(home)) is not None:
            return stored
    except Damaged as error:
        warnings.warn(f"the cached data in {home} are damaged and are made again: {error}", stacklevel=2)
    arrays = make()
    try:
        _write(place, home, arrays)
    except OSError as error:
        raise DataError(
            f"cannot write the cache folder {place} ({error}): free some space, or set GLUEFL_CACHE to "
            "a folder that can be written"
        ) from error
    return _whole(home) or arrays


def _opened(home: Path) -> Arrays | None:
    """The arrays of one entry, None where there is none; `Damaged` unless every file is as it was written."""
    if not (home / INDEX).exists():
        return None
    try:
        checksums = json.loads((home / INDEX).read_text())
        if isinstance(checksums, list):  # of names, as earlier versions wrote it
            return None
        for name, checksum in checksums.items():
            if files.crc_of(home / f"{name}.npy") != checksum:
                raise Damaged(f"the checksum of {name}.npy differs")
        return {name: np.load(home / f"{name}.npy", mmap_mode="r") for name in checksums}
    except (OSError, EOFError, ValueError, AttributeError) as error:
        raise Damaged(str(error)) from error


def _write(place: Path, home: Path, arrays: Arrays) -> None:
    """A whole entry or none, also after a power failure: written under a temporary name, then renamed."""
    files.make_folder(place)
    temporary = Path(tempfile.mkdtemp(prefix="writing-", dir=place))
    try:
        for name, array in arrays.items():
            with files.replacing(temporary / f"{name}.npy") as file:
                np.save(file, array)
        files.write(temporary / INDEX, json.dumps({name: files.crc_of(temporary / f"{name}.npy") for name in arrays}))
        if _whole(home) is None:  # otherwise another process was faster, with the same content
            shutil.rmtree(home, ignore_errors=True)
            os.rename(temporary, home)
            files.sync_folder(place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old in place.iterdir():  # of an older version of the source; processes that have mapped it keep it
        if old != home and not old.name.startswith("writing-"):
            shutil.rmtree(old, ignore_errors=True)


def _whole(home: Path) -> Arrays | None:
    try:
        return _opened(home)
    except Damaged:
        return None


def _stamps(path: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of a file, or of every file below a folder."""
    if path.is_file():
        status = path.stat()
        return [(path.name, status.st_size, status.st_mtime_ns)]
    stamps, folders = [], [str(path)]
    while folders:
        with os.scandir(folders.pop()) as entries:  # os.walk would stat every file twice
            for entry in entries:
                if entry.is_dir():
                    folders.append(entry.path)
                else:
                    status = entry.stat()
                    stamps.append((entry.path, status.st_size, status.st_mtime_ns))
    return sorted(stamps)


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]
