"""Progress of a grid on standard error, from the journals of its runs."""

import time
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.progress import TaskID

from gluefl.experiments.grid import RunSpec
from gluefl.experiments.runs import JournalTail
from gluefl.scores import SCORES
from gluefl.storage.evaluations import Spacing
from gluefl.watching import Goal
from gluefl.watching.progress import bars, line_of
from gluefl.watching.status import Status


class GridProgress:
    """A bar for the grid, one for each run in progress, and a line for each run that ends.

    Without a terminal there are no bars, but a line for every evaluation.
    """

    def __init__(self, total: int, done: int) -> None:
        self.console = Console(stderr=True, soft_wrap=True)
        self.bars = bars(self.console)
        self._total, self._done = total, done
        self._runs: TaskID | None = None
        if total > 1:
            self._runs = self.bars.add_task("runs", total=total, completed=done, status="")

    def __enter__(self) -> "GridProgress":
        self.bars.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.bars.stop()

    def start(self, spec: RunSpec) -> "RunProgress":
        """The display of a run that starts now."""
        return RunProgress(self, spec)

    def warn(self, texts: Iterable[str | None]) -> None:
        """Print each different warning once."""
        for text in dict.fromkeys(texts):
            if text is not None:
                self.console.print(f"gluefl: warning: {text}", highlight=False, markup=False)

    def count(self) -> str:
        """Count a run that has ended: `2 of 8`."""
        self._done += 1
        if self._runs is not None:
            self.bars.update(self._runs, completed=self._done)
        return f"{self._done} of {self._total}"


class RunProgress:
    """The display of one run. It reads the run's journal, whichever process writes it."""

    def __init__(self, grid: GridProgress, spec: RunSpec) -> None:
        self._grid, self._spec, self._status = grid, spec, _status(spec)
        self._tail, self._began = JournalTail(spec.folder), time.monotonic()
        self._task = grid.bars.add_task(spec.name, total=spec.config.rounds, status="")

    def update(self) -> None:
        """Show the rounds that were journaled since the last update."""
        replaced, lines = self._tail.read()
        if replaced:
            self._status = _status(self._spec)
        for line in lines:
            if self._status.add(line) and not self._grid.console.is_terminal:
                self._print(line_of(self._spec.name, self._status, self._spec.config.rounds))
        if lines:
            self._grid.bars.update(self._task, completed=self._status.round, status=str(self._status))

    def finish(self, outcome: str = "") -> None:
        """Replace the bar by a line."""
        self.update()
        self._grid.bars.remove_task(self._task)
        seconds = time.monotonic() - self._began
        parts = (f"{self._status.round} rounds in {seconds:.0f} s", outcome, self._grid.count())
        self._print(f"{self._spec.name}: {'; '.join(part for part in parts if part)}")

    def print_lines(self, text: str) -> None:
        """Lines that the run wrote to standard error, each with its name."""
        for line in text.splitlines():
            self._print(f"{self._spec.name}: {line}")

    def _print(self, text: str) -> None:
        self._grid.console.print(text, highlight=False, markup=False)


def _status(spec: RunSpec) -> Status:
    table = spec.config.evaluation
    score = SCORES[table.metric].on("test" if table.held_out is None else "validation")
    spacing = Spacing(table.every, spec.config.rounds)
    return Status(Goal(score, spec.config.target, table.average, spacing))
