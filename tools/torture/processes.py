"""Tiny runs of `gluefl run` in processes of their own, that are killed, hindered and compared.

A process is forked from this one after the program was imported, so that it starts in milliseconds; from there on it
is one of its own.
"""

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import gluefl.experiments.commands
import gluefl.experiments.report.page
import gluefl.experiments.verify
import gluefl.populations.glyphs
import gluefl.simulation.build  # noqa: F401 - what every fork needs
from gluefl.cli import main
from gluefl.storage.journal import read

STRATEGIES = ("lean", "gluefl", "stc", "fedavg")  # few trials are made with the first of them
HANGS_AFTER_S = 120.0
CONFIG = """\
rounds = {rounds}
seed = 3
[population]
name = "glyphs"
clients = 24
test_samples = 40
[model]
name = "mlp"
hidden = 2
[sampling]
cohort = 3
{sampling}
[training]
steps = 1
batch = 4
[strategy]
name = "{strategy}"
[evaluation]
every = 4
[checkpoint]
every = {every}
[residuals]
memory_gb = 1e-9
[journal]
clients = "{clients}"
"""
STICKY = "sticky_size = 9\nsticky_cohort = 2\n"
Setup = Callable[[], None]


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit status, negative for a signal, and what it wrote."""

    status: int
    text: str

    @property
    def refused(self) -> bool:
        """Whether it ended with a message for the user."""
        return self.status == 1 and "gluefl: " in self.text and "Traceback" not in self.text


class Process:
    """The command line in a process of its own; `setup` runs there before."""

    def __init__(self, arguments: Sequence[object], log: Path, setup: Setup | None = None) -> None:
        self.log = log
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            _become([str(argument) for argument in arguments], log, setup)

    def wait(self, limit_s: float = HANGS_AFTER_S) -> Ended | None:
        """How it ended; None if it still runs after this time."""
        until = time.monotonic() + limit_s
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return Ended(os.waitstatus_to_exitcode(status), self.log.read_text("utf-8", "replace"))
            if time.monotonic() >= until:
                return None
            time.sleep(0.001)

    def end(self) -> Ended:
        """Wait; a process that hangs is killed and counts as one that ended by that signal."""
        ended = self.wait()
        if ended is None:
            self.kill()
            ended = Ended(-signal.SIGKILL, f"did not end within {HANGS_AFTER_S} s")
        return ended

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _become(arguments: list[str], log: Path, setup: Setup | None) -> None:
    """Turn this fork into the command; never returns."""
    status = 70
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        torch.set_num_threads(1)
        if setup is not None:
            setup()
        main(arguments, standalone_mode=True)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


@dataclass(frozen=True)
class Case:
    """A configuration, and what its run gives when nothing disturbs it."""

    strategy: str
    config: Path
    outcome: str
    seconds: float

    def start(self, out: Path, resume: bool = True, setup: Setup | None = None, log: Path | None = None) -> Process:
        """`gluefl run`, into a folder."""
        arguments = ["run", self.config, "--out", out, *(["--resume"] if resume else [])]
        return Process(arguments, log or out.with_suffix(".log"), setup)

    def is_right(self, out: Path) -> bool:
        """Whether the folder holds the result of the undisturbed run."""
        return outcome(out) == self.outcome


def outcome(folder: Path) -> str:
    """A digest of journal, with its clients in any form, and model; times of the wall clock are left out."""
    journal, model = folder / "journal.jsonl", folder / "model.safetensors"
    lines, damaged = read(journal) if journal.exists() else ([], True)
    if damaged or not model.exists():
        return "damaged or unfinished"
    timeless = [{key: value for key, value in line.items() if key != "wall_s"} for line in lines]
    text = json.dumps(timeless, sort_keys=True).encode()
    return hashlib.sha256(text + model.read_bytes()).hexdigest()


def cases(work: Path, rounds: int = 12, every: int = 1, strategies: Sequence[str] = STRATEGIES) -> list[Case]:
    """One undisturbed run for every strategy."""
    found = []
    for strategy in strategies:
        config, out = work / f"{strategy}.toml", work / f"{strategy}-undisturbed"
        sampling = STICKY if strategy in ("gluefl", "lean") else ""
        clients = "columns" if strategy == "gluefl" else "lines"  # both forms of the journal
        values = {"strategy": strategy, "sampling": sampling, "clients": clients}
        config.write_text(CONFIG.format(rounds=rounds, every=every, **values))
        began = time.monotonic()
        ended = Process(["run", config, "--out", out], out.with_suffix(".log")).end()
        if ended.status:
            raise RuntimeError(f"the undisturbed run of {strategy} ended with {ended.status}: {ended.text}")
        found.append(Case(strategy, config, outcome(out), time.monotonic() - began))
    return found
