"""What a person sees in the terminal: progress while runs go on, a table when they are done."""

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from gluefl.experiments.theory.planning import Plan

GB = 10**9


def console() -> Console:
    """Standard output; tables keep their width when it is a file."""
    return Console(width=None if sys.stdout.isatty() else 120)


class RunProgress:
    """A bar per run on standard error: rounds, accuracy, bytes, time left."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )

    def __enter__(self) -> "RunProgress":
        self._progress.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.stop()

    @contextmanager
    def run(self, name: str, rounds: int, target: float | None) -> Iterator[Callable[[Any, Any], None]]:
        """The callback of one run; without a terminal, a line for every tenth of it."""
        task = self._progress.add_task(name, total=rounds, status="")
        down_bytes, accuracy = 0, None

        def show(line: Any, state: Any) -> None:
            nonlocal down_bytes, accuracy
            down_bytes += line["down_bytes"]
            accuracy = line["accuracy"] if line["accuracy"] is not None else accuracy
            seen = (
                "" if accuracy is None else f"  accuracy {accuracy:.1%}" + (f" of {percent(target)}" if target else "")
            )
            status = f"round {line['round']}{seen}  downloaded {volume(down_bytes)}"
            self._progress.update(task, completed=line["round"], status=status)
            if not self._console.is_terminal and line["round"] % max(1, rounds // 10) == 0:
                self._console.print(f"{name}: {status}", highlight=False)

        yield show
        self._progress.update(task, total=self._progress.tasks[task].completed or 1)


def volume(size_bytes: float) -> str:
    """Bytes as a person reads them: 1 GB is 10^9 bytes."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size_bytes >= factor:
            return (
                f"{size_bytes / factor:.3g} {unit}"
                if size_bytes < 999.5 * factor
                else f"{size_bytes / factor:.0f} {unit}"
            )
    return f"{size_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Seconds as a person reads them."""
    if seconds >= 3600:
        return f"{seconds / 3600:.2f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"


def percent(share: float) -> str:
    """A target as people write it: 80%, 73.3%."""
    return f"{share:.1%}".replace(".0%", "%")


def comparison_table(runs: Sequence[dict[str, Any]]) -> Table:
    """One row per strategy, means over its seeds; ratios to the first row. Values are those at the target."""
    target = runs[0]["target"]
    timed = all(run["total_s"] is not None for run in runs)
    title = f"To {percent(target)} accuracy" if target is not None else "After the last round"
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("strategy")
    for heading in (
        "rounds",
        "accuracy",
        "download",
        "ratio",
        "total",
        "ratio",
        "model per client\nand round",
    ):
        table.add_column(heading, justify="right")
    for heading in ("download\ntime", "total\ntime") if timed else ():
        table.add_column(heading, justify="right")
    by_label: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        by_label.setdefault(run["strategy"], []).append(run)
    first = next(iter(by_label.values()))
    missed = False
    for label, some in by_label.items():
        reached = [run["reached_round"] for run in some]
        missed |= target is not None and None in reached
        cells = [
            label,
            _spread([run["reached_round"] or run["rounds"] for run in some], "{:.0f}")
            + ("*" if target is not None and None in reached else ""),
            _spread([run["accuracy"] for run in some], "{:.1%}"),
            volume(_mean(some, "down_bytes")),
            f"{_mean(some, 'down_bytes') / _mean(first, 'down_bytes'):.2f}",
            volume(_mean(some, "total_bytes")),
            f"{_mean(some, 'total_bytes') / _mean(first, 'total_bytes'):.2f}",
            _spread([run["mean_download_share"] for run in some], "{:.1%}"),
        ]
        if timed:
            cells += [duration(_mean(some, "download_s")), duration(_mean(some, "total_s"))]
        table.add_row(*cells)
    if missed:
        table.caption = "* did not reach the target in every run: the figures are those at its last round"
    return table


def plan_tables(plan: Plan) -> list[Table | str]:
    """What sizes will do, the cheapest others, and why."""
    table = Table(show_header=False, title=f"S = {plan.sticky_size}, C = {plan.sticky_cohort}", title_justify="left")
    returns = ", ".join(f"{chance:.1%}" for chance in plan.resample_probability)
    table.add_row("comes back after 1, 2, … rounds", f"{returns} (uniform {plan.uniform_probability:.2%})")
    table.add_row(
        "likelier than uniform up to", f"{plan.horizon} rounds; back after {plan.mean_return_rounds:.1f} on average"
    )
    table.add_row("variance factor A", f"{plan.variance_factor:.2f}")
    table.add_row("effective cohort K/A", f"{plan.effective_cohort:.1f} of {plan.cohort}")
    uniform = f"(uniform sampling {plan.uniform_download_share:.1%})"
    table.add_row("model downloaded per client and round", f"{plan.expected_download_share:.1%} {uniform}")
    if plan.down_bytes is not None:
        table.add_row("one download", volume(plan.down_bytes))
    if plan.download_s is not None:
        median, tenth = plan.download_s
        table.add_row("time of one download", f"{duration(median)} (median), one in ten above {duration(tenth)}")
    others = Table(title="The cheapest sizes", title_justify="left")
    for heading in ("S", "C", "A", "model per client\nand round", "download until a target,\nFedAvg = 1"):
        others.add_column(heading, justify="right")
    for found in plan.candidates[:8]:
        cells = (f"{found.variance_factor:.2f}", f"{found.download_share:.1%}", f"{found.cost:.2f}")
        others.add_row(str(found.sticky_size), str(found.sticky_cohort), *cells)
    return [table, others, plan.reason]


def nested_table(found: dict[str, Any]) -> Table:
    """Nested figures as rows: what a benchmark found."""
    table = Table(show_header=False)

    def add(tree: dict[str, Any], path: tuple[str, ...]) -> None:
        for key, value in tree.items():
            if isinstance(value, dict):
                add(value, (*path, key))
            else:
                table.add_row(" ".join((*path, key)), f"{value:.4g}" if isinstance(value, float) else str(value))

    add(found, ())
    return table


def _mean(runs: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.fmean(run[key] for run in runs)


def _spread(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    text = form.format(statistics.fmean(known))
    return f"{text} ± {form.format(statistics.stdev(known))}" if len(known) > 1 else text
