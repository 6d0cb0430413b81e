"""The main table, like Table 2 of the paper: volumes and times to a target, ratios to FedAvg, the best in bold."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gluefl.experiments.report.comparison import INCIDENTAL, Comparison
from gluefl.experiments.runs import Run
from gluefl.experiments.windows import remark, window
from gluefl.scores import Score

VOLUMES = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "B"))
METRIC = "mean_accuracy"  # the key under which summaries hold the metric
TIMES = ((3600, "h"), (60, "min"), (1, "s"))


@dataclass(frozen=True)
class SummaryColumn:
    """A column of the table: a key of the summaries."""

    key: str
    heading: str
    meaning: str
    units: tuple[tuple[int, str], ...] = ()  # none for a share or a count
    has_ratio: bool = False


COLUMNS = (
    SummaryColumn("down_bytes", "DV", "download volume", VOLUMES, has_ratio=True),
    SummaryColumn("total_bytes", "TV", "total volume", VOLUMES, has_ratio=True),
    SummaryColumn("download_s", "DT", "download time", TIMES, has_ratio=True),
    SummaryColumn("total_s", "TT", "total time", TIMES, has_ratio=True),
    SummaryColumn("rounds", "Rounds", "until then"),
    SummaryColumn(METRIC, "Accuracy", "mean over the window"),
    SummaryColumn("test_accuracy", "Test", "of the final model, on the test samples"),
    SummaryColumn("mean_download_share", "Share", "of the model downloaded per client and round"),
)


@dataclass(frozen=True)
class Cell:
    """A formatted number: mean ± spread over the seeds."""

    text: str
    spread: str = ""
    ratio: str = ""
    best: bool = False


@dataclass(frozen=True)
class Row:
    """A variant in the table."""

    label: str
    seeds: int
    cells: tuple[Cell, ...]
    reached: bool  # by every seed


@dataclass(frozen=True)
class Headline:
    """A table; `finding` is its main result in one sentence, `note` a caveat."""

    title: str
    columns: tuple[tuple[str, str], ...]  # heading, meaning
    rows: tuple[Row, ...]
    finding: str = ""
    note: str = ""
    legend: str = ""


def headlines(comparison: Comparison) -> list[Headline]:
    """The table at the target; if a run missed it, also one at the best value that all runs reached."""
    if not comparison.variants:
        return []
    tables = [headline(comparison, comparison.target)]
    reached = [run.at(comparison.target)["reached_round"] is not None for run in comparison.runs]
    common = common_accuracy(comparison.runs)
    if all(reached) or common is None or len(comparison.variants) < 2:
        return tables
    best = "highest" if comparison.score.higher_is_better else "lowest"
    shared = headline(comparison, common, f"the {best} that all of them reached")
    return [*tables, shared] if any(reached) else [shared, *tables]


def common_accuracy(runs: Sequence[Run]) -> float | None:
    """The best value that every run reached, as the paper chooses its targets; accuracies rounded down to 0.1%."""
    best = [run.best for run in runs if run.best is not None]
    if len(best) < len(runs):
        return None
    score = runs[0].score
    common = score.relaxed(score.worst(best) or 0.0)
    possible = common > 0 or not score.is_share
    return common if possible and all(run.until(common) is not None for run in runs) else None


def headline(comparison: Comparison, target: float | None, why: str = "") -> Headline:
    """One table. Without a target, or if no run reached it, the numbers are those at the last round."""
    table = _Summaries.of(comparison, target)
    columns, cells = [], []
    for measure in COLUMNS:
        if any(table.values(label, measure.key) for label in table.runs):
            heading, column = _column(table, measure)
            columns.append((table.score.title if measure.key == METRIC else heading, measure.meaning))
            cells.append(column)
    rows = tuple(
        Row(label, len(runs), tuple(column[label] for column in cells), table.reached(label))
        for label, runs in table.runs.items()
    )
    return Headline(
        title=_title(table, why),
        columns=tuple(columns),
        rows=rows,
        finding=_finding(table) if table.any_reached else "",
        note=_note(table),
        legend=_legend(table),
    )


@dataclass(frozen=True)
class _Summaries:
    """Summaries of all runs at one target, by label."""

    target: float | None
    runs: dict[str, list[dict[str, Any]]]
    base: str  # the label that ratios refer to
    score: Score

    @classmethod
    def of(cls, comparison: Comparison, target: float | None) -> "_Summaries":
        runs = {label: [dict(run.at(target)) for run in runs] for label, runs in comparison.variants.items()}
        for summary in (summary for repetitions in runs.values() for summary in repetitions):
            summary["rounds"] = summary["reached_round"] or summary["rounds"]
        return cls(target, runs, baseline(comparison), comparison.score)

    @property
    def all(self) -> list[dict[str, Any]]:
        return [summary for runs in self.runs.values() for summary in runs]

    @property
    def any_reached(self) -> bool:
        return any(summary["reached_round"] is not None for summary in self.all)

    def reached(self, label: str) -> bool:
        """Whether every seed reached the target."""
        return all(summary["reached_round"] is not None for summary in self.runs[label])

    def values(self, label: str, key: str) -> list[float]:
        return [summary[key] for summary in self.runs[label] if summary.get(key) is not None]

    def means(self, key: str) -> dict[str, float]:
        return {label: statistics.fmean(values) for label in self.runs if (values := self.values(label, key))}


def _column(table: _Summaries, measure: SummaryColumn) -> tuple[str, dict[str, Cell]]:
    """Heading and cells by label; the best are marked."""
    means, key = table.means(measure.key), measure.key
    factor, unit = _unit(measure.units, means.values())
    places = _places(mean / factor for mean in means.values())
    cells: dict[str, Cell] = {}
    for label in table.runs:
        at_least = "> " if table.any_reached and not table.reached(label) and measure.units else ""
        ratio = ""
        comparable = table.reached(table.base) or not table.any_reached
        if measure.has_ratio and label in means and means.get(table.base) and comparable:
            ratio = f"{at_least}{means[label] / means[table.base]:.2f}×"
        form = f"{{:.{places}f}}"
        if key in (METRIC, "test_accuracy"):
            form = table.score.pattern
        elif key in ("rounds", "mean_download_share"):
            form = "{:.0f}" if key == "rounds" else "{:.1%}"
        cells[label] = _cell([value / factor for value in table.values(label, key)], form, at_least, ratio)
    best = {cells[label].text for label in _best(table, measure, means)}  # cells that look the same are equally good
    heading = f"{measure.heading} ({unit})" if unit else measure.heading
    return heading, {label: replace(cell, best=cell.text in best) for label, cell in cells.items()}


def _best(table: _Summaries, measure: SummaryColumn, means: dict[str, float]) -> set[str]:
    """The labels with the best mean. Costs are compared only between runs that reached the same target or round."""
    if measure.key == METRIC:
        rivals = {} if table.any_reached else means
    elif measure.has_ratio:
        equal_rounds = len({summary["rounds"] for summary in table.all}) == 1
        without_target = table.target is None and equal_rounds
        rivals = {label: mean for label, mean in means.items() if table.reached(label) or without_target}
    else:
        rivals = {}
    if len(rivals) < 2:
        return set()
    best = table.score.best(rivals.values()) if measure.key == METRIC else min(rivals.values())
    return {label for label, mean in rivals.items() if mean == best}


def baseline(comparison: Comparison) -> str:
    """The label that ratios refer to: FedAvg, or the first variant."""
    plain = [
        label for label, runs in comparison.variants.items() if runs[0].config.get("strategy.name", label) == "fedavg"
    ]
    return "fedavg" if "fedavg" in comparison.variants else (plain or list(comparison.variants))[0]


def differences(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """The settings in which the variants differ: key, and its value for each of them."""
    first = [runs[0].config for runs in comparison.variants.values()]
    keys = sorted({key for config in first for key in config if key not in INCIDENTAL})
    table = [(key, [_text(config.get(key)) for config in first]) for key in keys]
    return [(key, values) for key, values in table if len(set(values)) > 1]


def _text(value: Any) -> str:
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _cell(values: Sequence[float], form: str, at_least: str, ratio: str) -> Cell:
    if not values:
        return Cell("–")
    spread = form.format(statistics.stdev(values)) if len(values) > 1 else ""
    return Cell(at_least + form.format(statistics.fmean(values)), spread, ratio)


def _unit(units: tuple[tuple[int, str], ...], means: Iterable[float]) -> tuple[float, str]:
    """One unit for a column: the largest in which its smallest number is not below 1."""
    if not units:
        return 1, ""
    smallest = min((mean for mean in means if mean > 0), default=1)
    return next(((factor, unit) for factor, unit in units if smallest >= factor), units[-1])


def _places(means: Iterable[float]) -> int:
    """Decimals that give the smallest number three digits."""
    smallest = min((mean for mean in means if mean > 0), default=1)
    return max(0, 2 - math.floor(math.log10(smallest)))


def _title(table: _Summaries, why: str) -> str:
    if table.target is None:
        return "After the last round"
    aim = table.score.aim(table.target)
    if not table.any_reached:
        return f"After the last round: no run reached {aim}"
    return f"To {aim}" + (f", {why}" if why else "")


def _finding(table: _Summaries) -> str:
    means = {label: mean for label, mean in table.means("down_bytes").items() if table.reached(label)}
    base = table.base
    if base not in means or len(means) < 2:
        return ""
    best = min(means, key=lambda label: means[label])
    if best == base:
        return f"No other strategy reached it with less download than {base}."
    factor, unit = _unit(VOLUMES, means.values())
    amounts = f"{means[best] / factor:.3g} {unit} instead of {means[base] / factor:.3g} {unit}"
    return f"With {best}, clients downloaded {1 - means[best] / means[base]:.0%} less than with {base}: {amounts}."


def _note(table: _Summaries) -> str:
    missed = {
        label: sum(summary["reached_round"] is None for summary in runs)
        for label, runs in table.runs.items()
        if not table.reached(label)
    }
    if table.target is None or not missed:
        return ""
    if not table.any_reached:
        return "These are the numbers at each run's last round: what was paid, not what the target costs."
    names = ", ".join(f"{label} ({count} of {len(table.runs[label])})" for label, count in missed.items())
    return f"Not reached by {names}: their costs are those at the last round, so reaching it costs more (>)."


def _legend(table: _Summaries) -> str:
    notes = [f"Ratios (×) are to {table.base}."] if len(table.runs) > 1 else []
    if any(len(runs) > 1 for runs in table.runs.values()):
        notes.append("± is the standard deviation over seeds.")
    notes.append(f"{table.score.title}: {window(table.all)}.")
    notes.append(remark(table.runs) if table.target is not None else "")
    notes.append("DV counts every byte sent to invited clients, used or not; TV adds the uploads of used clients.")
    if any(summary["total_s"] is not None for summary in table.all):
        notes.append("DT and TT are sums over rounds; a round ends when the last used client has arrived.")
    return " ".join(note for note in notes if note)
