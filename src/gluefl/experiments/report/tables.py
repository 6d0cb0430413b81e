"""The comparisons of a page as tables for the terminal, in the form in which `gluefl compare` prints them."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from gluefl.experiments.console import comparison_table
from gluefl.experiments.report.comparison import Comparison
from gluefl.experiments.runs import NAMED, Run


def tables(comparisons: Sequence[Comparison]) -> Iterator[Table | str]:
    """A table per comparison, and a line for everything that it does not show: runs in progress, failures, damage."""
    for comparison in comparisons:
        if comparison.reason:
            yield f"Not compared with the runs above: {comparison.reason}."
        rows = [_row(label, run) for label, runs in comparison.variants.items() for run in runs]
        if rows := [row for row in rows if row["mean_download_share"] is not None]:
            yield comparison_table(rows)
        for run in [*comparison.runs, *comparison.unread]:
            remarks = [f"in progress, {run.progress}"] if not run.finished else []
            yield from (f"{run.path}: {remark}" for remark in [*remarks, *run.marks])


def _row(label: str, run: Run) -> dict[str, Any]:
    """From the journal: a summary may be missing or damaged."""
    named = {key: run.summary[key] for key in NAMED if key in run.summary}
    return {**run.summarised(run.target), **named, "strategy": label, "seed": run.seed, "finished": run.finished}
