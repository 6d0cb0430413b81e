"""Progress of a grid on standard error, from the journals of its runs."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from gluefl.experiments.console import volume
from gluefl.experiments.grid import RunSpec
from gluefl.experiments.runs import JournalTail
from gluefl.scores import SCORES, Score

LINES = 10  # per run, where standard error is not a terminal


class GridProgress:
    """A bar for the grid, one for each run in progress, and a line for each run that ends.

    Without a terminal there are no bars, but a line for every tenth of a run.
    """

    def __init__(self, total: int, done: int) -> None:
        self.console = Console(stderr=True)
        self.bars = Progress(
            TextColumn("{task.description:<16}"),
            BarColumn(bar_width=10),  # all columns fit into 80 characters
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
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

    def count(self) -> str:
        """Count a run that has ended: `2 of 8`."""
        self._done += 1
        if self._runs is not None:
            self.bars.update(self._runs, completed=self._done)
        return f"{self._done} of {self._total}"


class RunProgress:
    """The display of one run: rounds, accuracy, download. It reads the run's journal, whichever process writes it."""

    def __init__(self, grid: GridProgress, spec: RunSpec) -> None:
        self._grid, self._spec = grid, spec
        self._tail, self._began = JournalTail(spec.folder), time.monotonic()
        self._task = grid.bars.add_task(spec.name, total=spec.config.rounds, status="")
        self._round, self._down_bytes = 0, 0
        self._accuracies: list[float] = []  # of the window

    def update(self) -> None:
        """Show the rounds that were journaled since the last update."""
        replaced, lines = self._tail.read()
        if replaced:
            self._round, self._down_bytes, self._accuracies = 0, 0, []
        tenth = max(1, self._spec.config.rounds // LINES)
        passed = self._round // tenth
        for line in lines:
            self._round, self._down_bytes = line["round"], self._down_bytes + line["down_bytes"]
            if line["accuracy"] is not None:
                self._accuracies = [*self._accuracies, line["accuracy"]][-self._spec.config.evaluation.average :]
        if lines:
            self._grid.bars.update(self._task, completed=self._round, status=self._status())
            if not self._grid.console.is_terminal and self._round // tenth > passed:
                self._print(f"round {self._round}  {self._status()}")

    def finish(self, outcome: str = "") -> None:
        """Replace the bar by a line."""
        self.update()
        self._grid.bars.remove_task(self._task)
        seconds = time.monotonic() - self._began
        parts = (f"{self._round} rounds in {seconds:.0f} s", outcome, self._grid.count())
        self._print("; ".join(part for part in parts if part))

    def _status(self) -> str:
        """The last accuracy; with a target the mean that is compared with it, or how many evaluations it lacks."""
        score = _score(self._spec)
        target, window, known = self._spec.config.target, self._spec.config.evaluation.average, len(self._accuracies)
        accuracy = f"{score.name} {score.text(self._accuracies[-1])}" if known else ""
        if known and target is not None and window > 1:
            mean = f"mean of {window}: {score.text(sum(self._accuracies) / known)} of {score.short(target)}"
            accuracy += f" ({mean})" if known == window else f" ({known} of {window} evaluations)"
        elif known and target is not None:
            accuracy += f" of {score.short(target)}"
        return f"{accuracy}{'  ' if known else ''}down {volume(self._down_bytes)}"

    def _print(self, text: str) -> None:
        self._grid.console.print(f"{self._spec.name}: {text}", highlight=False)


def _score(spec: RunSpec) -> Score:
    table = spec.config.evaluation
    return SCORES[table.metric].on("test" if table.held_out is None else "validation")
