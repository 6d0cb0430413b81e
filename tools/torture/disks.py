"""Full and read-only disks, limits on the size of files, and clocks that jump.

`python tools/torture disks [--count 20]`; a small disk is a tmpfs in a namespace of its own, where that is allowed.
"""

import ctypes
import os
import random
import resource
import shutil
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

from damage import EVERY, ROUNDS, stopped
from processes import STRATEGIES, Case, Setup, cases
from progress import Progress

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
TEN_YEARS_S = 10 * 365 * 86400


def can_mount() -> str | None:
    """None if a process can have a disk of its own, else the reason why not."""
    done = subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=64k", "none", "/mnt"],  # noqa: S607
        capture_output=True,
        text=True,
    )
    return None if done.returncode == 0 else f"no disk can be mounted here: {done.stderr.strip() or done.returncode}"


def disk(folder: Path, whole: Path, size: str, kept: Path, read_only: bool = False) -> Setup:
    """A set-up that puts a small disk with a copy of a run in the place of a folder.

    At the end of the process the disk is gone; what it holds is copied to `kept`.
    """

    def setup() -> None:
        user, group = os.getuid(), os.getgid()
        library = ctypes.CDLL(None, use_errno=True)
        if library.unshare(CLONE_NEWNS | CLONE_NEWUSER):
            raise OSError(ctypes.get_errno(), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
        subprocess.run(mount, check=True)
        shutil.copytree(whole, folder, dirs_exist_ok=True)
        if read_only:
            subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)  # noqa: S607
        leave = os._exit

        def left(status: int) -> None:
            shutil.copytree(folder, kept)
            leave(status)

        os._exit = left  # type: ignore[assignment]

    return setup


def limited(longest_bytes: int) -> Setup:
    """A set-up after which no file can be longer."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (longest_bytes, longest_bytes))


def jumping(seed: int) -> Setup:
    """A set-up after which the clock of the day jumps by up to ten years, back and forth, at every look at it."""

    def setup() -> None:
        rng, now, now_ns = random.Random(seed), time.time, time.time_ns  # noqa: S311 - jumps

        def jumped() -> float:
            return max(0.0, now() + rng.uniform(-TEN_YEARS_S, TEN_YEARS_S))

        time.time, time.time_ns = jumped, lambda: max(0, now_ns() + rng.randrange(-TEN_YEARS_S, TEN_YEARS_S) * 10**9)

    return setup


def scatter_times(folder: Path, rng: random.Random) -> None:
    """Give every file another time."""
    for path in folder.rglob("*"):
        at = time.time() + rng.uniform(-TEN_YEARS_S, TEN_YEARS_S)
        os.utime(path, (at, at))


class Trials:
    """Runs on bad disks and with bad clocks, and what became of them."""

    def __init__(self, work: Path, seed: int) -> None:
        self.work, self.rng = work, random.Random(seed)  # noqa: S311 - sizes
        self.counts, self.wrong = Counter[str](), list[str]()

    def hindered(self, case: Case, folder: Path, name: str, setup: Setup) -> None:
        """One process that ends, or fails with a message."""
        ended = case.start(folder, setup=setup).end()
        if ended.status and not ended.refused:
            self.wrong.append(f"{case.strategy}, {name}: exit {ended.status}: {ended.text[-600:]}")
        self.counts[f"{name}: {'refused with a message' if ended.status else 'the run ended'}"] += 1

    def resumed(self, case: Case, folder: Path, name: str) -> None:
        """The run without hindrance."""
        ended = case.start(folder).end()
        if ended.status or not case.is_right(folder):
            self.wrong.append(f"{case.strategy}, after {name}: exit {ended.status}: {ended.text[-600:]}")
        shutil.rmtree(folder, ignore_errors=True)

    def small_disk(self, case: Case, whole: Path, read_only: bool) -> None:
        """A disk with room for a part of the run, or none that can be written to."""
        name, folder, kept = "read-only disk" if read_only else "full disk", self.work / "disk", self.work / "kept"
        folder.mkdir(exist_ok=True)
        used_kb = sum(-(-path.stat().st_size // 4096) * 4 for path in whole.rglob("*")) + 8
        room_kb = used_kb + self.rng.randrange(0, 120, 4)
        setup = disk(folder, whole, f"{room_kb}k", kept, read_only)
        self.hindered(case, folder, name, setup)
        kept.rename(self.work / "resumed")
        self.resumed(case, self.work / "resumed", name)

    def short_files(self, case: Case, whole: Path) -> None:
        """A limit on the length of files."""
        folder = Path(shutil.copytree(whole, self.work / "limited"))
        longest = max(path.stat().st_size for path in whole.rglob("*") if path.is_file())
        self.hindered(case, folder, "file size limit", limited(self.rng.randrange(100, 2 * longest)))
        self.resumed(case, folder, "file size limit")

    def clocks(self, case: Case, whole: Path, number: int) -> None:
        """A clock that jumps, and files of any age."""
        folder = Path(shutil.copytree(whole, self.work / "clocked"))
        scatter_times(folder, self.rng)
        ended = case.start(folder, setup=jumping(number)).end()
        if ended.status or not case.is_right(folder):
            self.wrong.append(f"{case.strategy}, clock jumps: exit {ended.status}: {ended.text[-600:]}")
        self.counts["clock jumps: the same result"] += 1
        shutil.rmtree(folder)


def run(work: Path, disks: int, seed: int) -> dict[str, Any]:
    """Each kind of trial this many times, over the strategies in turn."""
    trials, reason = Trials(work, seed), can_mount()
    chosen = cases(work, ROUNDS, EVERY, STRATEGIES[:disks])
    wholes = [(case, stopped(case, work / f"{case.strategy}-killed")) for case in chosen]
    said = Progress("disks", disks)
    for number in range(disks):
        case, whole = wholes[number % len(wholes)]
        if reason is None:
            trials.small_disk(case, whole, read_only=False)
            trials.small_disk(case, whole, read_only=True)
        trials.short_files(case, whole)
        trials.clocks(case, whole, number)
        said.at(number + 1)
    skipped = {"full and read-only disks": f"skipped: {reason}"} if reason else {}
    return {"trials": sum(trials.counts.values()), **trials.counts, **skipped, "wrong": trials.wrong}
