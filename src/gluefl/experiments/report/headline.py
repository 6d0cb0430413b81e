"""The table on top, as the paper's Table 2: volumes and times to a target, ratios to FedAvg, the best in bold."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gluefl.experiments.console import percent
from gluefl.experiments.report.reading import INCIDENTAL, Comparison, Run
from gluefl.storage.journal import reached_round

VOLUMES = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "B"))
TIMES = ((3600, "h"), (60, "min"), (1, "s"))
# Key of a summary, heading, what it means, units (none: a share or a count), whether a ratio is shown.
COLUMNS: tuple[tuple[str, str, str, Any, bool], ...] = (
    ("down_bytes", "DV", "download volume", VOLUMES, True),
    ("total_bytes", "TV", "total volume", VOLUMES, True),
    ("download_s", "DT", "download time", TIMES, True),
    ("total_s", "TT", "total time", TIMES, True),
    ("rounds", "Rounds", "played until then", None, False),
    ("accuracy", "Accuracy", "mean of the last evaluations", None, False),
    ("mean_download_share", "Share", "of the model downloaded per client and round", None, False),
)


@dataclass(frozen=True)
class Cell:
    """A number as it is shown: mean ± spread over the seeds."""

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
    """A table; `finding` is what it says in one sentence, `note` what a reader must know."""

    title: str
    columns: tuple[tuple[str, str], ...]  # heading, meaning
    rows: tuple[Row, ...]
    finding: str = ""
    note: str = ""
    legend: str = ""


def headlines(comparison: Comparison) -> list[Headline]:
    """The table to the target; where it was not reached by all, one to the accuracy that all of them reached too."""
    if not comparison.variants:
        return []
    tables = [headline(comparison, comparison.target)]
    reached = [run.at(comparison.target)["reached_round"] is not None for run in comparison.runs]
    common = common_accuracy(comparison.runs)
    if all(reached) or common is None or len(comparison.variants) < 2:
        return tables
    shared = headline(comparison, common, "the highest that all of them reached")
    return [*tables, shared] if any(reached) else [shared, *tables]


def common_accuracy(runs: Sequence[Run]) -> float | None:
    """The highest accuracy that every run reached, as the paper chooses its targets; rounded down to 0.1%."""
    best = []
    for run in runs:
        seen = [line["accuracy"] for line in run.lines if line["accuracy"] is not None]
        means = [math.fsum(seen[i - run.average : i]) / run.average for i in range(run.average, len(seen) + 1)]
        if not means:
            return None
        best.append(max(means))
    floor = math.floor(min(best) * 1000) / 1000
    reached = floor > 0 and all(reached_round(run.lines, floor, run.average) for run in runs)
    return floor if reached else None


def headline(comparison: Comparison, target: float | None, why: str = "") -> Headline:
    """One table. Without a target, or where nobody reached it, the numbers are those at the last round."""
    found = {label: [run.at(target) for run in runs] for label, runs in comparison.variants.items()}
    reached = {label: all(one["reached_round"] is not None for one in some) for label, some in found.items()}
    somebody = any(one["reached_round"] is not None for some in found.values() for one in some)
    for some in found.values():
        some[:] = [one | {"rounds": one["reached_round"] or one["rounds"]} for one in some]
    base = baseline(comparison)
    equal_rounds = len({one["rounds"] for some in found.values() for one in some}) == 1
    columns, cells = [], []
    for key, heading, meaning, units, has_ratio in COLUMNS:
        values = {label: [one[key] for one in some if one[key] is not None] for label, some in found.items()}
        if not any(values.values()):
            continue
        means = {label: statistics.fmean(some) for label, some in values.items() if some}
        factor, unit = _unit(units, means.values())
        columns.append((f"{heading} ({unit})" if unit else heading, meaning))
        # A cost can be the best only among those that paid for the same thing.
        rivals = {label: mean for label, mean in means.items() if reached[label] or (target is None and equal_rounds)}
        if key in ("rounds", "mean_download_share") or (key == "accuracy" and somebody):
            rivals = {}
        elif key == "accuracy":
            rivals = means
        best = _best(rivals, highest=key == "accuracy")
        places = _places(mean / factor for mean in means.values())
        column: dict[str, Cell] = {}
        for label in found:
            at_least = "> " if somebody and not reached[label] and units else ""
            ratio = ""
            if has_ratio and label in means and means.get(base) and (reached[base] or not somebody):
                ratio = f"{at_least}{means[label] / means[base]:.2f}×"
            column[label] = _cell(key, values[label], factor, places, at_least, ratio)
        shown = {column[label].text for label in best}  # what looks the same is equally good
        cells.append({label: replace(cell, best=cell.text in shown) for label, cell in column.items()})
    rows = tuple(
        Row(label, len(some), tuple(column[label] for column in cells), reached[label]) for label, some in found.items()
    )
    return Headline(
        title=_title(target, why, somebody),
        columns=tuple(columns),
        rows=rows,
        finding=_finding(found, reached, base) if somebody else "",
        note=_note(target, found, somebody),
        legend=_legend(found, base),
    )


def baseline(comparison: Comparison) -> str:
    """What ratios refer to: FedAvg, or the first variant."""
    plain = [
        label for label, runs in comparison.variants.items() if runs[0].config.get("strategy.name", label) == "fedavg"
    ]
    return "fedavg" if "fedavg" in comparison.variants else (plain or list(comparison.variants))[0]


def differences(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """The settings in which the variants differ: key, and its value for each of them."""
    first = [runs[0].config for runs in comparison.variants.values()]
    keys = sorted({key for config in first for key in config if key not in INCIDENTAL})
    table = [(key, [_say(config.get(key)) for config in first]) for key in keys]
    return [(key, values) for key, values in table if len(set(values)) > 1]


def _say(value: Any) -> str:
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _cell(key: str, values: Sequence[float], factor: float, places: int, at_least: str, ratio: str) -> Cell:
    if not values:
        return Cell("–")
    percent = key in ("accuracy", "mean_download_share")
    form = "{:.1%}" if percent else "{:.0f}" if key == "rounds" else f"{{:.{places}f}}"
    spread = form.format(statistics.stdev(values) / factor) if len(values) > 1 else ""
    return Cell(at_least + form.format(statistics.fmean(values) / factor), spread, ratio)


def _unit(units: Any, means: Any) -> tuple[float, str]:
    """One unit for a column: the largest in which its smallest number is not below 1."""
    if units is None:
        return 1, ""
    smallest = min((mean for mean in means if mean > 0), default=1)
    return next(((factor, unit) for factor, unit in units if smallest >= factor), units[-1])


def _places(means: Any) -> int:
    """Decimals that give the smallest number three digits."""
    smallest = min((mean for mean in means if mean > 0), default=1)
    return max(0, 2 - math.floor(math.log10(smallest)))


def _best(means: dict[str, float], highest: bool) -> set[str]:
    if len(means) < 2:
        return set()
    best = max(means.values()) if highest else min(means.values())
    return {label for label, mean in means.items() if mean == best}


def _title(target: float | None, why: str, somebody: bool) -> str:
    if target is None:
        return "After the last round"
    aim = f"{percent(target)} accuracy"
    if not somebody:
        return f"After the last round: no run reached {aim}"
    return f"To {aim}" + (f", {why}" if why else "")


def _finding(found: dict[str, list[dict[str, Any]]], reached: dict[str, bool], base: str) -> str:
    means = {
        label: statistics.fmean(one["down_bytes"] for one in some) for label, some in found.items() if reached[label]
    }
    if base not in means or len(means) < 2:
        return ""
    best = min(means, key=lambda label: means[label])
    if best == base:
        return f"No other strategy reached it with less download than {base}."
    factor, unit = _unit(VOLUMES, means.values())
    amounts = f"{means[best] / factor:.3g} {unit} instead of {means[base] / factor:.3g} {unit}"
    return f"With {best}, clients downloaded {1 - means[best] / means[base]:.0%} less than with {base}: {amounts}."


def _note(target: float | None, found: dict[str, list[dict[str, Any]]], somebody: bool) -> str:
    missed = {label: sum(one["reached_round"] is None for one in some) for label, some in found.items()}
    if target is None or not any(missed.values()):
        return ""
    if not somebody:
        return "These are the numbers at each run's last round: what was paid, not what the target costs."
    who = ", ".join(f"{label} ({count} of {len(found[label])})" for label, count in missed.items() if count)
    return f"Not reached by {who}: they count with what they had paid by then, so reaching it costs more (>)."


def _legend(found: dict[str, list[dict[str, Any]]], base: str) -> str:
    notes = [f"Ratios (×) are to {base}."] if len(found) > 1 else []
    if any(len(some) > 1 for some in found.values()):
        notes.append("± is the standard deviation over seeds.")
    notes.append("DV counts every byte sent to invited clients, also to those not used; TV adds what the used upload.")
    if any(one["total_s"] is not None for some in found.values() for one in some):
        notes.append("DT and TT are sums over rounds, each lasting until the last of the used clients has arrived.")
    return " ".join(notes)
