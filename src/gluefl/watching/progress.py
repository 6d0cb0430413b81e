"""Progress of runs: a bar in a terminal, an element in a notebook, otherwise a line per evaluation.

It goes to standard error, so that results on standard output can be piped.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from gluefl.watching import AfterRound, Watched
from gluefl.watching.status import Status

NAME_COLUMNS = 14  # of a run; all columns together fit into 80 characters


class Remaining(ProgressColumn):
    """The remaining time in five characters: 07:30, 12h05, 30d."""

    def render(self, task: Task) -> Text:
        """What the speed so far suggests."""
        if task.time_remaining is None:
            return Text("--:--")
        minutes, seconds = divmod(int(task.time_remaining), 60)
        hours, minutes = divmod(minutes, 60)
        if hours >= 100:
            return Text(f"{hours // 24}d")
        return Text(f"{hours}h{minutes:02}" if hours else f"{minutes:02}:{seconds:02}")


def bars(console: Console) -> Progress:
    """Bars of runs: name, bar, rounds, remaining time, status. The status is cut where a line would be too long."""

    def fixed(width: int | None = None) -> Column:
        return Column(no_wrap=True, min_width=width, max_width=width, overflow="ellipsis")

    columns: tuple[ProgressColumn, ...] = (
        TextColumn("{task.description}", table_column=fixed(NAME_COLUMNS)),
        BarColumn(bar_width=6, table_column=fixed(6)),
        MofNCompleteColumn(table_column=fixed()),
        Remaining(table_column=fixed(5)),
        TextColumn("{task.fields[status]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal, expand=True)


@dataclass(frozen=True)
class Display:
    """Shows one run, unless `progress` is off."""

    progress: bool = True

    @contextmanager
    def watch(self, run: Watched) -> Iterator[AfterRound]:
        """Show every round, and at the end why a run ended early."""
        if not self.progress:
            yield lambda line, state: None
            return
        console = Console(stderr=True, soft_wrap=True)
        status = Status(run.goal)
        for line in run.played():
            status.add(line)
        display = _in_notebook() or (_in_terminal if console.is_terminal else _as_lines)
        with display(run, status, console) as show:

            def after_round(line: Any, state: Any) -> None:
                show(status.add(line))

            yield after_round
        for reason in run.reasons:
            console.print(f"{run.name}: stopped after round {status.round}: {reason}", highlight=False, markup=False)


@contextmanager
def _in_terminal(run: Watched, status: Status, console: Console) -> Iterator[Any]:
    with bars(console) as shown:
        task = shown.add_task(run.name, total=run.rounds, completed=status.round, status=str(status))
        yield lambda evaluated: shown.update(task, completed=status.round, status=str(status))


@contextmanager
def _as_lines(run: Watched, status: Status, console: Console) -> Iterator[Any]:
    def show(evaluated: bool) -> None:
        if evaluated:
            console.print(line_of(run.name, status, run.rounds), highlight=False, markup=False)

    yield show


def line_of(name: str, status: Status, rounds: int) -> str:
    """One line about a run: `gluefl, seed 1: round 20/100  accuracy 81.2%  down 12.3 MB`."""
    return f"{name}: round {status.round}/{rounds}  {status}"


def _in_notebook() -> Any:
    """The display of a notebook, if this program runs in one: only then IPython is loaded and has a kernel."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:
        return None
    import importlib

    show_object = importlib.import_module("IPython.display").display

    @contextmanager
    def display(run: Watched, status: Status, console: Console) -> Iterator[Any]:
        handle = show_object(Element(run, status), display_id=True)
        yield lambda evaluated: handle.update(Element(run, status))

    return display


@dataclass(frozen=True)
class Element:
    """The progress of a run as an element of a page."""

    run: Watched
    status: Status

    def __repr__(self) -> str:
        return line_of(self.run.name, self.status, self.run.rounds)

    def _repr_html_(self) -> str:
        bar = f"<progress value='{self.status.round}' max='{self.run.rounds}'></progress>"
        return f"<div>{bar} {escape(repr(self))}</div>"
