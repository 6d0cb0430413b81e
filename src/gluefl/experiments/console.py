"""Tables and numbers for the terminal."""

import statistics
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from gluefl.experiments.theory.planning import Plan
from gluefl.experiments.windows import remark, window
from gluefl.scores import Score
from gluefl.watching.status import percent as percent
from gluefl.watching.status import volume as volume


def console() -> Console:
    """Standard output; 120 columns wide when it is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else 120)


def duration(seconds: float) -> str:
    """Seconds with a unit."""
    if seconds >= 3600:
        return f"{seconds / 3600:.2f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"


def comparison_table(runs: Sequence[dict[str, Any]]) -> Table:
    """One row per strategy, means over its seeds; ratios to the first row. Values are those at the target."""
    target, score = runs[0]["target"], Score.of_summary(runs[0])
    timed = all(run["total_s"] is not None for run in runs)
    title = f"To {score.aim(target)}" if target is not None else "After the last round"
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("strategy")
    for heading in (
        "rounds",
        score.name,
        *(["test"] if tested(runs) else []),
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
    for label, repetitions in by_label.items():
        table.add_row(label, *_comparison_cells(repetitions, first, timed))
    notes = [f"{score.title}: {window(runs)}.", remark(by_label) if target is not None else ""]
    if target is not None and any(run["reached_round"] is None for run in runs):
        notes.append("* not every run reached the target: the figures are those at its last round.")
    if tested(runs):
        notes.append(f"Test: {runs[0]['metric']} of the final model on the test samples.")
    table.caption = "\n".join(note for note in notes if note)
    return table


def tested(runs: Sequence[dict[str, Any]]) -> bool:
    """Whether targets were decided on validation samples, and the test samples used for the final models only."""
    return all(run.get("test_accuracy") is not None for run in runs)


def _comparison_cells(runs: Sequence[dict[str, Any]], first: Sequence[dict[str, Any]], timed: bool) -> list[str]:
    form = Score.of_summary(first[0]).pattern
    missed = runs[0]["target"] is not None and any(run["reached_round"] is None for run in runs)
    cells = [
        _spread([run["reached_round"] or run["rounds"] for run in runs], "{:.0f}") + ("*" if missed else ""),
        _spread([run["mean_accuracy"] for run in runs], form),
        *([_spread([run["test_accuracy"] for run in runs], form)] if tested([*runs, *first]) else []),
        volume(_mean(runs, "down_bytes")),
        f"{_mean(runs, 'down_bytes') / _mean(first, 'down_bytes'):.2f}",
        volume(_mean(runs, "total_bytes")),
        f"{_mean(runs, 'total_bytes') / _mean(first, 'total_bytes'):.2f}",
        _spread([run["mean_download_share"] for run in runs], "{:.1%}"),
    ]
    return cells + ([duration(_mean(runs, "download_s")), duration(_mean(runs, "total_s"))] if timed else [])


def plan_tables(plan: Plan) -> list[Table | str]:
    """The effect of the chosen sizes, the cheapest other sizes, and the reason."""
    table = Table(show_header=False, title=f"S = {plan.sticky_size}, C = {plan.sticky_cohort}", title_justify="left")
    returns = ", ".join(f"{chance:.1%}" for chance in plan.resample_probability)
    table.add_row("probability of return after 1, 2, … rounds", f"{returns} (uniform {plan.uniform_probability:.2%})")
    table.add_row(
        "more likely than uniform up to", f"{plan.horizon} rounds; mean return: {plan.mean_return_rounds:.1f} rounds"
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
    for pair in plan.candidates[:8]:
        cells = (f"{pair.variance_factor:.2f}", f"{pair.download_share:.1%}", f"{pair.cost:.2f}")
        others.add_row(str(pair.sticky_size), str(pair.sticky_cohort), *cells)
    return [table, others, plan.reason]


def nested_table(results: dict[str, Any]) -> Table:
    """Nested numbers as rows: the result of a benchmark."""
    table = Table(show_header=False)

    def add(tree: dict[str, Any], path: tuple[str, ...]) -> None:
        for key, value in tree.items():
            if isinstance(value, dict):
                add(value, (*path, key))
            else:
                table.add_row(" ".join((*path, key)), f"{value:.4g}" if isinstance(value, float) else str(value))

    add(results, ())
    return table


def _mean(runs: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.fmean(run[key] for run in runs)


def _spread(values: Sequence[float | None], form: str) -> str:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "–"
    text = form.format(statistics.fmean(numbers))
    return f"{text} ± {form.format(statistics.stdev(numbers))}" if len(numbers) > 1 else text
