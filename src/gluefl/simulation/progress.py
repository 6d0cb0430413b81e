"""Progress of one run on standard error."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from gluefl.scores import Score
from gluefl.simulation.settings import Callback
from gluefl.storage.journal import ACCURACY


@contextmanager
def progress(rounds: int, shown: bool | None = None, score: Score = ACCURACY) -> Iterator[list[Callback]]:
    """Callbacks that show a bar; by default only in a terminal."""
    console = Console(stderr=True)
    if not (console.is_terminal if shown is None else shown):
        yield []
        return
    columns = (
        TextColumn("round {task.completed}/{task.total}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[seen]}"),
    )
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task, down_bytes, accuracy = bar.add_task("", total=rounds, seen=""), 0, ""

        def show(line: dict, state: object) -> None:  # type: ignore[type-arg]
            nonlocal down_bytes, accuracy
            down_bytes += line["down_bytes"]
            if line["accuracy"] is not None:
                accuracy = f"{score.name} {score.text(line['accuracy'])}  "
            bar.update(task, completed=line["round"], seen=f"{accuracy}{down_bytes / 1e6:.3g} MB down")

        yield [show]
