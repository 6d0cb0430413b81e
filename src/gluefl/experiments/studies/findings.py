"""The results of a study as tables of estimates, which are then printed or written as JSON."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gluefl.experiments.runs import Run
from gluefl.experiments.studies.catalogue import Study
from gluefl.experiments.studies.intervals import Estimate, estimate
from gluefl.experiments.studies.measures import MEASURES, Form, common_target
from gluefl.experiments.windows import remark, window
from gluefl.fleet import Fleet
from gluefl.scores import Score
from gluefl.storage.journal import clients_of

AT_TARGET = {"rounds", "download", "total", "download_time", "total_time"}  # measures up to the target
SKIPPED = ((1, 1), (2, 2), (3, 5), (6, 10), (11, 20), (21, 50), (51, None))  # rounds since the last download


@dataclass(frozen=True)
class Column:
    """A column: one measure."""

    name: str
    heading: str
    form: Form


@dataclass(frozen=True)
class Grid:
    """A table: rows by label; cells may be empty."""

    title: str
    corner: str
    columns: tuple[Column, ...]
    rows: Mapping[str, Mapping[str, Estimate | None]]
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The values, rows by label and columns by name."""
        rows = {
            label: {name: cell.as_json() if cell else None for name, cell in cells.items()}
            for label, cells in self.rows.items()
        }
        columns = [asdict(column) for column in self.columns]
        return {"title": self.title, "corner": self.corner, "columns": columns, "rows": rows, "notes": [*self.notes]}

    @classmethod
    def of_json(cls, table: Mapping[str, Any]) -> "Grid":
        """The table that was written as JSON."""
        rows = {
            label: {name: Estimate.of_json(cell) if cell else None for name, cell in cells.items()}
            for label, cells in table["rows"].items()
        }
        columns = tuple(Column(**column) for column in table["columns"])
        return cls(table["title"], table["corner"], columns, rows, tuple(table["notes"]))


def findings(study: Study, runs: Sequence[Run], at: float | None = None) -> list[Grid]:
    """The tables of a study, at the accuracy `at` if it is given, otherwise at the targets of the study."""
    targets = [at] if at is not None else _targets(study, runs)
    grids = [main_table(study, runs, target) for target in targets] if study.measures else []
    return grids + [TABLES[name](runs) for name in study.tables]


def _targets(study: Study, runs: Sequence[Run]) -> list[float | None]:
    """The configured target; if a run missed it, also the highest accuracy that all runs reached."""
    configured = {run.target for run in runs}
    common, target = common_target(runs), configured.pop() if len(configured) == 1 else None
    if target is None:
        return [common]
    missed = any(run.until(target) is None for run in runs if run.failure is None)
    return [target, common] if AT_TARGET & set(study.measures) and missed and common else [target]


def main_table(study: Study, runs: Sequence[Run], target: float | None) -> Grid:
    """A row per variant, means over the seeds. Ratios are taken per seed: runs of one seed share start and data."""
    by_label, score = _by_label(runs), runs[0].score if runs else Score()
    base = {run.seed: run for run in by_label.get(study.baseline or "", [])}
    columns, rows = list[Column](), {label: dict[str, Estimate | None]() for label in by_label}
    for name in study.measures:
        measure = MEASURES[name]
        columns.append(_column(name, score))
        for label, repetitions in by_label.items():
            rows[label][name] = estimate([measure.of(run, target) for run in repetitions])
        if name in study.ratios and base:
            columns.append(Column(f"{name}_ratio", f"to {study.baseline}", "number"))
            for label, repetitions in by_label.items():
                ratios = [
                    _ratio(measure.of(run, target), _of(base.get(run.seed), measure.of, target)) for run in repetitions
                ]
                rows[label][f"{name}_ratio"] = estimate(ratios)
    at_target = AT_TARGET & set(study.measures)
    title = "Over all rounds"
    if at_target and target is not None:
        reached = any(run.until(target) is not None for run in runs)
        title = f"{'At' if reached else 'No run reached'} {score.aim(target)}"
    notes = _notes(runs, target if at_target else None)
    at = {label: [run.at(target) for run in repetitions] for label, repetitions in by_label.items()}
    about = (f"{score.title}: {window([summary for summaries in at.values() for summary in summaries])}.",)
    depends = remark(at) if at_target and target is not None else ""
    return Grid(title, "run", tuple(columns), rows, (*about, *((depends,) if depends else ()), *notes))


def by_skipped_rounds(runs: Sequence[Run]) -> Grid:
    """Figure 2b: the share of the model a client downloads by the rounds since its last download."""
    by_label = _by_label(runs)
    rows = {}
    for first, last in SKIPPED:
        label = "51 or more" if last is None else str(first) if first == last else f"{first}–{last}"
        rows[label] = {
            name: estimate([_downloaded(run, first, last) for run in repetitions])
            for name, repetitions in by_label.items()
        }
    columns = tuple(Column(name, name, "percent") for name in by_label)
    return Grid("Share of the model downloaded", "rounds since the last download", columns, rows)


def bandwidths(runs: Sequence[Run] = (), clients: int = 100_000) -> Grid:
    """Figure 1: quantiles of the networks in Mbit/s, and the share of clients at 10 Mbit/s or below."""
    columns = [Column(f"p{p}", f"{p}%", "speed") for p in (5, 10, 25, 50, 75, 90, 95)]
    rows = {}
    for network in ("edge", "5g", "cloud"):
        speeds = Fleet(network, "always", seed=1).speeds(np.arange(clients))
        for direction, mbps in (("down", speeds.down_mbps), ("up", speeds.up_mbps)):
            cells = {column.name: _exact(np.quantile(mbps, int(column.name[1:]) / 100)) for column in columns}
            rows[f"{network} {direction}"] = {**cells, "slow": _exact((mbps <= 10).mean())}
    slow = Column("slow", "at most 10 Mbit/s", "percent")
    return Grid(f"Mbit/s of {clients:,} clients, quantiles", "network", (*columns, slow), rows)


TABLES: dict[str, Callable[[Sequence[Run]], Grid]] = {
    "by_skipped_rounds": by_skipped_rounds,
    "bandwidths": bandwidths,
}


def _downloaded(run: Run, first: int, last: int | None) -> float | None:
    shares = [
        size / run.model_bytes
        for line in run.lines
        for age, size in zip(clients_of(line)["staleness"], clients_of(line)["down_bytes"])
        if age is not None and age >= first and (last is None or age <= last)
    ]
    return statistics.fmean(shares) if shares else None


def _by_label(runs: Sequence[Run]) -> dict[str, list[Run]]:
    result: dict[str, list[Run]] = {}
    for run in runs:
        result.setdefault(run.label, []).append(run)
    return result


def _of(run: Run | None, of: Callable[[Run, float | None], float | None], target: float | None) -> float | None:
    return None if run is None else of(run, target)


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def _best(run: Run) -> str:
    return run.score.text(0.0 if run.best is None else run.best)


def _column(name: str, score: Score) -> Column:
    """A measure; those of the metric bear its name."""
    measure = MEASURES[name]
    if name not in ("accuracy", "best"):
        return Column(name, measure.heading, measure.form)
    return Column(name, measure.heading.replace("accuracy", score.name), "percent" if score.is_share else "number")


def _exact(value: Any) -> Estimate:
    return Estimate(float(value), None, (float(value),))


def _notes(runs: Sequence[Run], target: float | None) -> tuple[str, ...]:
    notes = [f"{run.label}, seed {run.seed}, diverged after round {len(run.lines)}." for run in runs if run.failure]
    if target is not None:
        missed = [run for run in runs if not run.failure and run.until(target) is None]
        aim = runs[0].score.short(target)
        notes += [f"{run.label}, seed {run.seed}, did not reach {aim} (best {_best(run)})." for run in missed]
    return tuple(notes)
