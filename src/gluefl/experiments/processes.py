"""Runs in worker processes: one process per run, each on its own cores."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

from gluefl.config import to_toml
from gluefl.errors import GlueFLError, Interrupted, UsageError
from gluefl.experiments.grid import RunSpec
from gluefl.experiments.progress import GridProgress, RunProgress
from gluefl.experiments.runner import record_divergence
from gluefl.experiments.worker import DIVERGED, failure
from gluefl.simulation.process import interruptible

POLL_S = 0.2


@dataclass(frozen=True)
class WorkerProcesses:
    """Up to `jobs` runs at a time: by default one per core on a CPU, and one on a GPU."""

    device: str = "cpu"
    jobs: int | None = None

    def __post_init__(self) -> None:
        if self.jobs is not None and self.jobs < 1:
            raise UsageError(f"--jobs {self.jobs}: at least one run at a time is needed.")

    def run(self, specs: Sequence[RunSpec], progress: GridProgress) -> None:
        """Run all specs. The first error lets the runs in progress finish and starts no others."""
        waiting, cores = list(specs), self.core_sets(len(specs))
        share = 1 / max(1, min(len(cores), len(waiting)))  # of the GPU's memory
        workers: list[_Worker] = []
        ended: GlueFLError | None = None
        with interruptible(second_ends=False) as received:
            try:
                while workers or (waiting and not received and ended is None):
                    while waiting and cores and not received and ended is None:
                        spec = waiting.pop(0)
                        workers.append(_start(spec, (self.device, cores.pop(0), str(share)), progress.start(spec)))
                    if received:
                        for worker in workers:
                            worker.stop()
                    for worker in [worker for worker in workers if worker.has_ended()]:
                        workers.remove(worker)
                        cores.append(worker.cores)
                        ended = ended or worker.finish()
                    for worker in workers:
                        worker.display.update()
                    time.sleep(POLL_S)
            finally:
                for worker in workers:  # left only by an exception in the loop
                    worker.stop()
        if received:
            raise Interrupted
        if ended is not None:
            raise ended

    def core_sets(self, runs: int) -> list[str]:
        """The cores of each run at a time: one on a CPU; runs that share a GPU divide all cores among them."""
        own = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        count = min(self.jobs or (len(own) if self.device == "cpu" else 1), max(1, runs))
        if self.device != "cpu" and count <= len(own):
            return [",".join(map(str, own[i::count])) for i in range(count)]
        return [str(own[i % len(own)]) for i in range(count)]


@dataclass
class _Worker:
    spec: RunSpec
    process: "subprocess.Popen[str]"
    stderr: TextIO
    cores: str
    display: RunProgress
    stopping: bool = False

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def stop(self) -> None:
        """Ask the run to write a checkpoint and end. Only once: a second signal would end it without a checkpoint."""
        if not self.stopping:
            self.stopping = True
            self.process.send_signal(signal.SIGTERM)

    def finish(self) -> GlueFLError | None:
        """Record the outcome; returns an error if the grid has to end because of it."""
        self.stderr.seek(0)
        message = self.stderr.read().strip()
        self.stderr.close()
        code = self.process.returncode
        diverged = code == DIVERGED
        self.display.finish(record_divergence(self.spec, message) if diverged else "" if code == 0 else "stopped")
        if code == 0 and message:  # warnings
            self.display.print_lines(message)
        if code == 0 or diverged or self.stopping:
            return None
        return failure(self.spec.name, code, message or f"exit code {code}")


def _start(spec: RunSpec, placement: tuple[str, str, str], display: RunProgress) -> _Worker:
    stderr = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed when the run has ended
    process = subprocess.Popen(  # noqa: S603 - a module of our own, without a shell
        [sys.executable, "-m", "gluefl.experiments.worker", str(spec.folder), *placement],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        text=True,
        encoding="utf-8",
        start_new_session=True,  # Ctrl-C reaches this process only, which then signals every worker once
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as pipe:  # a worker that has ended says why on standard error
        pipe.write(to_toml(spec.config))
    return _Worker(spec, process, stderr, placement[1], display)
