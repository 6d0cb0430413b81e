"""The folders of runs on a device: which one a task uses, and which old ones may be deleted.

A folder is this program's own only if it has the name of a run and a marker file. The marker holds a number: how many
runs had started on this device when the run was last used. No clock is read: one that is set back deletes nothing.
"""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from gluefl.errors import GlueFLError
from gluefl.flower.messages import RUN_ID
from gluefl.flower.node_store import NodeStore

if sys.platform != "win32":
    import fcntl

KEPT_RUNS = 8  # a run is deleted when so many others have started since its last use
MARKER = "gluefl-run"  # in the folder of a run; a task in progress holds a shared lock on it
LOCK = ".gluefl-lock"  # beside the folders; held while folders are made, counted or deleted
LONGEST_NUMBER = 12  # digits


@contextmanager
def opened(root: Path, run: str, client: int) -> Iterator[NodeStore]:
    """The folder of one node in one run. Nothing deletes it while the context is open.

    A run that is new on this device deletes those that no task uses and that `KEPT_RUNS` later runs have followed.
    """
    folder = root / run
    root.mkdir(parents=True, exist_ok=True)
    with open(root / LOCK, "ab") as lock:
        _lock(lock)
        is_new = not (folder / MARKER).is_file()
        folder.mkdir(exist_ok=True)
        if is_new and any(folder.iterdir()):  # the server chooses the name
            raise GlueFLError(f"{folder} has files but no marker of gluefl: give the mod another folder, gluefl-dir.")
        marker = open(folder / MARKER, "a+b")  # noqa: SIM115 - it stays open when the other lock is released
        (folder / f"node-{client}").mkdir(exist_ok=True)
        _lock(marker, shared=True)
        numbers = _numbers(root)
        newest = max(numbers.values(), default=0)
        _write(marker, newest + 1 if is_new else newest)
        if is_new:
            _delete_old(root, numbers | {run: newest + 1})
    with marker:
        yield NodeStore(folder / f"node-{client}")


def _numbers(root: Path) -> dict[str, int]:
    """The numbers of the runs on this device. One that cannot be read counts as used now, and is written anew."""
    numbers: dict[str, int] = {}
    unread: list[str] = []
    for path in root.iterdir():
        if RUN_ID.fullmatch(path.name) and (path / MARKER).is_file():
            with open(path / MARKER, "rb") as file:
                text = file.read(LONGEST_NUMBER + 1)
            if text.isdigit() and len(text) <= LONGEST_NUMBER:
                numbers[path.name] = int(text)
            else:
                unread.append(path.name)
    newest = max(numbers.values(), default=0)
    for name in unread:
        with open(root / name / MARKER, "r+b") as file:
            _write(file, newest)
    return numbers | dict.fromkeys(unread, newest)


def _delete_old(root: Path, numbers: dict[str, int]) -> None:
    newest = max(numbers.values())
    for name, number in numbers.items():
        # The second condition alone decides where a damaged marker has a number that is too large.
        later = sum(other > number for other in numbers.values())
        if newest - number >= KEPT_RUNS and later >= KEPT_RUNS:
            with open(root / name / MARKER, "rb") as marker:
                if _is_unused(marker):
                    shutil.rmtree(root / name, ignore_errors=True)


def _write(marker: IO[bytes], number: int) -> None:
    marker.seek(0)
    marker.truncate()
    marker.write(str(number).encode())
    marker.flush()


def _lock(file: IO[bytes], shared: bool = False) -> None:
    """Wait for a lock, which ends when the file is closed. Windows has none of this kind."""
    if sys.platform != "win32":
        fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


def _is_unused(marker: IO[bytes]) -> bool:
    if sys.platform != "win32":
        try:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True
