"""The executor of grids: runs in this process or in worker processes, with the same rules for both.

A run that is done is not run again; a run that diverges is a result; any other error ends the grid; a signal stops
the runs in progress, each with a checkpoint.
"""

import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gluefl import files
from gluefl.config import to_toml
from gluefl.errors import Diverged, Interrupted, UsageError
from gluefl.experiments.grid import RunSpec, check
from gluefl.experiments.progress import GridProgress
from gluefl.storage.evaluations import unreachable
from gluefl.storage.names import CHECKPOINT, CONFIG, FAILURE, SUMMARY
from gluefl.watching import Callback

INCOMPLETE = ".half-"  # prefix of the folder of a run that is being copied


class Executor(Protocol):
    """Runs specs that are not done; `ThisProcess`, `processes.WorkerProcesses`, `cluster.ClusterRuns`."""

    def run(self, specs: Sequence[RunSpec], progress: GridProgress) -> None:
        """Run all specs. Divergence is recorded; `Interrupted` and other errors are raised."""
        ...


def execute(specs: Sequence[RunSpec], executor: Executor, resume: bool = False, reuse: Path | None = None) -> None:
    """Run what is not done yet, neither in the folders of the specs nor, with `reuse`, below that folder."""
    check(specs, resume)
    if reuse is not None:
        copy_done(specs, reuse)
    pending = [spec for spec in specs if not spec.is_done() or _is_damaged(spec.folder)]
    with GridProgress(len(specs), len(specs) - len(pending)) as progress:
        progress.warn(_unreachable(spec) for spec in pending)
        try:
            executor.run(pending, progress)
        except Interrupted as error:
            if len(specs) == 1 and str(error):
                raise  # the message names the round and the folder
            done = sum(spec.is_done() for spec in specs)
            raise Interrupted(f"interrupted: {done} of {len(specs)} runs are done. Go on with --resume.") from error


def _unreachable(spec: RunSpec) -> str | None:
    table = spec.config.evaluation
    return unreachable(spec.config.target, spec.config.rounds, table.every, table.average)


def _is_damaged(folder: Path) -> bool:
    """Whether journal or result of a run that has ended is damaged; it then goes on from its last checkpoint."""
    from gluefl.experiments.verify import damage_of_result  # torch comes with it

    damage = damage_of_result(folder)
    if damage is not None:
        warnings.warn(f"{folder}: {damage}; the run goes on from its last checkpoint", stacklevel=3)
    return damage is not None


@dataclass(frozen=True)
class ThisProcess:
    """One run after another in this process. Finished runs keep their checkpoint, so that rounds can be added."""

    device: str = "cpu"
    callbacks: Sequence[Callback] = ()
    carried_out: Mapping[str, Any] = field(default_factory=dict)  # other fields of `Options`: the engine

    def run(self, specs: Sequence[RunSpec], progress: GridProgress) -> None:
        """Run all specs."""
        from gluefl.simulation.build import run
        from gluefl.simulation.settings import Options

        for spec in specs:
            display = progress.start(spec)

            def show(line: Any, state: Any, display: Any = display) -> None:
                display.update()

            outcome = ""
            shown = (show, *self.callbacks)
            options = Options(spec.folder, True, shown, progress=False, device=self.device, **self.carried_out)
            try:
                run(spec.config, options)
            except Diverged as error:
                outcome = record_divergence(spec, str(error))
            display.finish(outcome)


def record_divergence(spec: RunSpec, message: str) -> str:
    """Write the message of a run that diverged into its folder; returns one word for the progress display."""
    files.write(spec.folder / FAILURE, message + "\n")
    return "diverged"


def copy_done(specs: Sequence[RunSpec], folder: Path) -> None:
    """Copy finished runs of the same configurations from below a folder: several figures of the paper share runs."""
    if not folder.is_dir() and not all(folder.resolve() in spec.folder.resolve().parents for spec in specs):
        raise UsageError(f"--reuse {folder}: there is no such folder.")
    sources: dict[str, Path] = {}
    for summary in sorted(folder.rglob(SUMMARY)):
        config = summary.with_name(CONFIG)
        if config.exists() and not summary.parent.name.startswith(INCOMPLETE):
            sources.setdefault(config.read_text(encoding="utf-8"), summary.parent)
    for spec in specs:
        source = sources.get(to_toml(spec.config))
        if source is not None and not spec.folder.exists() and not _is_damaged(source):
            # Copied under another name and renamed at the end: an interrupted copy must not look like a run.
            incomplete = spec.folder.with_name(f"{INCOMPLETE}{spec.folder.name}")
            shutil.rmtree(incomplete, ignore_errors=True)
            shutil.copytree(source, incomplete, ignore=shutil.ignore_patterns(CHECKPOINT))
            incomplete.rename(spec.folder)
