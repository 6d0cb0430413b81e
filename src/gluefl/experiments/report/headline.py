"""The main table, like Table 2 of the paper: volumes and times to a target, ratios to FedAvg, the best in bold."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gluefl.experiments.report import wording
from gluefl.experiments.report.comparison import INCIDENTAL, Comparison, common_accuracy
from gluefl.experiments.report.summaries import Summaries
from gluefl.experiments.units import TIMES, VOLUMES, Units, places, times, unit

METRIC = "mean_accuracy"  # the key under which summaries hold the metric


@dataclass(frozen=True)
class SummaryColumn:
    """A column of the table: a key of the summaries."""

    key: str
    heading: str
    meaning: str
    units: Units = ()  # none for a share or a count
    unit_by: str = ""  # the key whose numbers choose the unit: columns of the same kind share it
    has_ratio: bool = False


COLUMNS = (
    SummaryColumn("down_bytes", "Download", "all invited clients", VOLUMES, "down_bytes", has_ratio=True),
    SummaryColumn("total_bytes", "Volume", "download and upload", VOLUMES, "down_bytes", has_ratio=True),
    SummaryColumn("total_s", "Time", "simulated", TIMES, "total_s", has_ratio=True),
    SummaryColumn("download_s", "Download time", "part of it", TIMES, "total_s", has_ratio=True),
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
    window: str = ""  # whether the result changes with the window
    legend: str = ""

    @property
    def uneven(self) -> bool:
        """Whether the rows have different numbers of seeds."""
        return len({row.seeds for row in self.rows}) > 1


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


def headline(comparison: Comparison, target: float | None, why: str = "") -> Headline:
    """One table. Without a target, or if no run reached it, the numbers are those at the last round."""
    table = Summaries.of(comparison, target)
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
        title=wording.title(table, why),
        columns=tuple(columns),
        rows=rows,
        finding=wording.finding(table),
        note=wording.note(table),
        window=wording.window_remark(table),
        legend=wording.legend(table),
    )


def _column(table: Summaries, measure: SummaryColumn) -> tuple[str, dict[str, Cell]]:
    """Heading and cells by label; the best are marked."""
    means, key = table.means(measure.key), measure.key
    factor, name = unit(measure.units, table.means(measure.unit_by).values() if measure.unit_by else ())
    cells: dict[str, Cell] = {}
    for label in table.runs:
        at_least = "> " if table.any_reached and not table.reached(label) and measure.units else ""
        ratio = ""
        comparable = table.reached(table.base) or (not table.any_reached and not table.unfinished)
        if measure.has_ratio and label in means and means.get(table.base) and comparable and label != table.base:
            ratio = times(means[label] / means[table.base], at_least=bool(at_least))
        values = [value / factor for value in table.values(label, key)]
        cells[label] = _cell(values, _form(table, key, values), at_least, ratio)
    best = {cells[label].text for label in _best(table, measure, means)}  # cells that look the same are equally good
    heading = f"{measure.heading} ({name})" if name else measure.heading
    return heading, {label: replace(cell, best=cell.text in best) for label, cell in cells.items()}


def _form(table: Summaries, key: str, values: Sequence[float]) -> str:
    """How the numbers of a cell are written."""
    if key in (METRIC, "test_accuracy"):
        return table.score.pattern
    if key in ("rounds", "mean_download_share"):
        return "{:.0f}" if key == "rounds" else "{:.1%}"
    return f"{{:.{places(statistics.fmean(values) if values else 0)}f}}"


def _best(table: Summaries, measure: SummaryColumn, means: dict[str, float]) -> set[str]:
    """The labels with the best mean. Costs are compared only between runs that reached the same target or round."""
    if table.unfinished:
        return set()
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
