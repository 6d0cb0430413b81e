"""Many independent runs at once: a process per run, each on a core of its own; what is done is not run again."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from gluefl.config import to_toml
from gluefl.errors import GlueFLError, UsageError
from gluefl.experiments.grid import Planned, check

POLL_S = 0.2
HALF = ".half-"  # before the name of a run that is being copied
FAILED = "failed.txt"  # in the folder of a run that diverged: its last words


def is_done(run: Planned) -> bool:
    """Whether a run of exactly this configuration is over: finished, or diverged as it would again."""
    return run.is_this() and ((run.folder / "summary.json").exists() or (run.folder / FAILED).exists())


def execute(
    runs: Sequence[Planned],
    device: str = "cpu",
    jobs: int | None = None,
    resume: bool = False,
    reuse: Path | None = None,
) -> None:
    """Carry out what is not done yet. A run that diverges is a result; anything else that fails ends the study."""
    check(runs, resume)
    if reuse is not None:
        _copy_done(runs, reuse)
    waiting = [run for run in runs if not is_done(run)]
    cores = _cores(device, jobs)
    share = 1 / max(1, min(len(cores), len(waiting)))  # of a GPU's memory
    running: list[_Running] = []
    failure: str | None = None
    with _Progress(len(runs), len(runs) - len(waiting)) as progress, _signals() as stopped:
        try:
            while running or (waiting and not stopped and failure is None):
                while waiting and cores and not stopped and failure is None:
                    running.append(_start(waiting.pop(0), device, cores.pop(0), share, progress))
                if stopped:
                    for process in running:
                        process.stop()
                for process in [process for process in running if process.ended()]:
                    running.remove(process)
                    cores.append(process.core)
                    failure = failure or process.settle(stopped=bool(stopped))
                    progress.finish(process.task, process.run.name, process.began)
                for process in running:
                    progress.update(process.task, process.rounds())
                time.sleep(POLL_S)
        finally:
            for process in running:  # only after an error of our own
                process.stop()
    if stopped:
        done = sum(is_done(run) for run in runs)
        raise GlueFLError(f"interrupted: {done} of {len(runs)} runs are done. Go on with --resume.")
    if failure is not None:
        raise GlueFLError(failure)


@dataclass
class _Running:
    run: Planned
    process: "subprocess.Popen[str]"
    words: TextIO  # what it writes to standard error
    core: str
    task: TaskID
    began: float
    stopping: bool = False

    def ended(self) -> bool:
        return self.process.poll() is not None

    def rounds(self) -> int:
        """Rounds done, by the lines of its journal."""
        try:
            return (self.run.folder / "journal.jsonl").read_bytes().count(b"\n")
        except OSError:
            return 0

    def stop(self) -> None:
        """Ask it once to leave a checkpoint and end; asked twice it would end at once."""
        if not self.stopping:
            self.stopping = True
            self.process.send_signal(signal.SIGTERM)

    def settle(self, stopped: bool) -> str | None:
        """Why the study has to end, if it has to."""
        self.words.seek(0)
        said = self.words.read().strip()
        self.words.close()
        if self.process.returncode == 0 or stopped:
            return None
        if "diverged" in said:
            (self.run.folder / FAILED).write_text(said + "\n", encoding="utf-8")
            return None
        return f"the run {self.run.name} failed:\n{said or f'exit code {self.process.returncode}'}"


def _start(run: Planned, device: str, core: str, share: float, progress: "_Progress") -> _Running:
    (run.folder / FAILED).unlink(missing_ok=True)  # of another configuration
    words = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed when the run has ended
    process = subprocess.Popen(
        [sys.executable, "-m", "gluefl.experiments.studies.worker", str(run.folder), device, core, str(share)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=words,
        text=True,
        encoding="utf-8",
        start_new_session=True,  # Ctrl-C reaches this process alone, which then asks every run once
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as pipe:  # it has ended already: its last words say why
        pipe.write(to_toml(run.config))
    return _Running(run, process, words, core, progress.start(run.name, run.config.rounds), time.monotonic())


def _copy_done(runs: Sequence[Planned], folder: Path) -> None:
    """Copy runs of the same configuration that are done below a folder: most figures of the paper share one run."""
    if not folder.is_dir() and not all(folder.resolve() in run.folder.resolve().parents for run in runs):
        raise UsageError(f"--reuse {folder}: there is no such folder.")
    done: dict[str, Path] = {}
    for summary in sorted(folder.rglob("summary.json")):
        config = summary.with_name("config.toml")
        if config.exists() and not summary.parent.name.startswith(HALF):
            done.setdefault(config.read_text(encoding="utf-8"), summary.parent)
    for run in runs:
        found = done.get(to_toml(run.config))
        if found is not None and not run.folder.exists():
            # Under its own name only when it is whole.
            half = run.folder.with_name(f"{HALF}{run.folder.name}")
            shutil.rmtree(half, ignore_errors=True)
            shutil.copytree(found, half, ignore=shutil.ignore_patterns("checkpoint"))
            half.rename(run.folder)


def _cores(device: str, jobs: int | None) -> list[str]:
    """The cores of every run that goes on at a time: one on a CPU; runs that share a GPU share out all of them."""
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs {jobs}: at least one run at a time is needed.")
    own = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    count = jobs or (len(own) if device == "cpu" else 1)
    if device != "cpu" and count <= len(own):
        return [",".join(map(str, own[i::count])) for i in range(count)]
    return [str(own[i % len(own)]) for i in range(count)]


@contextmanager
def _signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM end the study, with a checkpoint in every run."""
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    try:
        previous = {number: signal.signal(number, lambda n, frame: received.append(n)) for number in numbers}
    except ValueError:  # not the main thread: signals are somebody else's
        previous = {}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Progress:
    """A bar for the study and one for each run that goes on; without a terminal, a line for each that is done."""

    def __init__(self, total: int, done: int) -> None:
        self._console = Console(stderr=True)
        columns = (TextColumn("{task.description:<24}"), BarColumn(bar_width=24), MofNCompleteColumn())
        shown = self._console.is_terminal
        self._progress = Progress(*columns, TimeElapsedColumn(), console=self._console, disable=not shown)
        self._all = self._progress.add_task("runs", total=total, completed=done)
        self._total, self._done = total, done

    def __enter__(self) -> "_Progress":
        self._progress.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.stop()

    def start(self, name: str, rounds: int) -> TaskID:
        return self._progress.add_task(name, total=rounds)

    def update(self, task: TaskID, rounds: int) -> None:
        self._progress.update(task, completed=rounds)

    def finish(self, task: TaskID, name: str, began: float) -> None:
        self._done += 1
        self._progress.remove_task(task)
        self._progress.update(self._all, completed=self._done)
        if not self._console.is_terminal:
            seconds = time.monotonic() - began
            self._console.print(f"{name}: {seconds:.0f} s ({self._done} of {self._total})", highlight=False)
