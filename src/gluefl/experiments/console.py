"""Tables and numbers for the terminal."""

import statistics
import sys
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gluefl.experiments.doctor import Finding
from gluefl.experiments.theory.planning import Plan
from gluefl.experiments.units import TIMES, VOLUMES, places
from gluefl.experiments.units import unit as common_unit
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
    """One row per strategy, means over its seeds, beside the first row. Values are those at the target."""
    target, timed = runs[0]["target"], all(run["total_s"] is not None for run in runs)
    score = Score.of_summary(runs[0])
    by_label: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        by_label.setdefault(run["strategy"], []).append(run)
    volumes, seconds = (
        common_unit(
            kind, [_mean(repetitions, key) for repetitions in by_label.values()] if timed or kind is VOLUMES else ()
        )
        for kind, key in ((VOLUMES, "down_bytes"), (TIMES, "total_s"))
    )
    # With this frame the table of the demo fits into 80 columns.
    table = Table(title=_title(runs), box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.title_justify = table.caption_justify = "left"
    first = next(iter(by_label.values()))
    less = "times\nless"
    percent_sign = "\n%" if score.is_share else ""
    headings = ["rounds", score.name + percent_sign, *(["test" + percent_sign] if tested(runs) else [])]
    headings += [f"download\n{volumes[1]}", less, f"total\n{volumes[1]}", less, "share\n%"]
    headings += [f"time\n{seconds[1]}", f"down\n{seconds[1]}"] if timed else []
    table.add_column("strategy")
    for heading in headings:
        table.add_column(heading, justify="right")
    reached = {label: (_reached(repetitions), _finished(repetitions)) for label, repetitions in by_label.items()}
    for label, repetitions in by_label.items():
        # A part of a run costs less than all of another.
        even = reached[label] == reached[first[0]["strategy"]] and (_reached(repetitions) or _finished(repetitions))
        cells = _comparison_cells(repetitions, first if even else (), volumes[0], tested(runs))
        cells += [_number(_mean(repetitions, key) / seconds[0]) for key in ("total_s", "download_s")] if timed else []
        table.add_row(label, *cells)
    notes = [f"{score.title}: {window(runs)}.", remark(by_label) if target is not None else ""]
    notes += [f"Times less: than {first[0]['strategy']}."] if len(by_label) > 1 else []
    notes += ["Share: of the model, downloaded per client and round."]
    notes += ["Time: simulated; down: the part of it that is download."] if timed else []
    if target is not None and any(run["reached_round"] is None for run in runs):
        notes.append("* not every run reached the target: the figures are those at its last round.")
    if len({ended for ended, _ in reached.values()}) > 1:
        notes.append("–: one of the two reached the target and the other did not.")
    if not _finished(runs):
        notes.append("Not finished: nothing is compared with runs in progress.")
    if tested(runs):
        notes.append(f"Test: {runs[0]['metric']} of the final model on the test samples.")
    table.caption = "\n".join(note for note in notes if note)
    return table


def tested(runs: Sequence[dict[str, Any]]) -> bool:
    """Whether targets were decided on validation samples, and the test samples used for the final models only."""
    return all(run.get("test_accuracy") is not None for run in runs)


def _title(runs: Sequence[dict[str, Any]]) -> str:
    """What the numbers belong to. A target is named as reached only if a run reached it."""
    target, last = runs[0]["target"], "After the last round" if _finished(runs) else "So far"
    if target is None:
        return last
    if all(run["reached_round"] is None for run in runs):
        return f"{last}: no run reached {Score.of_summary(runs[0]).aim(target)}"
    return f"To {Score.of_summary(runs[0]).aim(target)}"


def _finished(runs: Sequence[dict[str, Any]]) -> bool:
    return all(run.get("finished", True) for run in runs)


def _reached(runs: Sequence[dict[str, Any]]) -> bool:
    return all(run["reached_round"] is not None for run in runs)


def _comparison_cells(
    runs: Sequence[dict[str, Any]], first: Sequence[dict[str, Any]], volume_factor: float, with_test: bool
) -> list[str]:
    """The cells of one row; without `first`, it is compared with nothing."""
    missed = runs[0]["target"] is not None and not _reached(runs)
    factor, form = (100, "{:.1f}") if Score.of_summary(runs[0]).is_share else (1, "{:.4g}")

    def values(key: str) -> list[float | None]:
        return [None if run[key] is None else factor * run[key] for run in runs]

    cells = [
        _spread([run["reached_round"] or run["rounds"] for run in runs], "{:.0f}") + ("*" if missed else ""),
        _spread(values("mean_accuracy"), form),
        *([_spread(values("test_accuracy"), form)] if with_test else []),
    ]
    for key in ("down_bytes", "total_bytes"):
        own = _mean(runs, key)
        cells += [_number(own / volume_factor), _factor(_mean(first, key) / own) if own and first else "–"]
    shares = [run["mean_download_share"] for run in runs if run["mean_download_share"] is not None]
    return [*cells, f"{100 * statistics.fmean(shares):.1f}" if shares else "–"]


def _factor(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}"


def _number(value: float) -> str:
    return f"{value:.{min(3, places(value))}f}"


def plan_tables(plan: Plan) -> list[Table | str]:
    """The effect of the chosen sizes, the cheapest other sizes, and the reason."""
    title = f"GlueFL with S = {plan.sticky_size}, C = {plan.sticky_cohort} (--strategy lean plans lean)"
    table = Table(show_header=False, title=title, title_justify="left")
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


def findings_table(findings: Sequence[Finding]) -> Table:
    """What `gluefl doctor` found: one row per part, advice where something is missing or wrong."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("part", "state", "found", "to do"):
        table.add_column(heading, overflow="fold")
    for one in findings:
        table.add_row(one.part, one.state, escape(one.detail), escape(one.advice))
    return table


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
