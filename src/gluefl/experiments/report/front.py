"""The first figure: what each strategy costs until the target, in download and in time."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gluefl.experiments.report.chart import Axis, Figure, Series
from gluefl.experiments.report.comparison import Comparison
from gluefl.experiments.report.summaries import settled

APART = 6  # costs that are further apart than this factor need a logarithmic axis


def front(comparison: Comparison) -> Figure:
    """Download against time until the target of the first table; against rounds where no time was simulated.

    Without such a target there is nothing to compare, and with a single strategy nobody to compare it with.
    """
    target = comparison.aim
    timed = bool(comparison.runs) and all(run.timed for run in comparison.runs)
    x = "total_s" if timed else "reached_round"
    costs = {label: [run.at(target) for run in settled(runs, target)] for label, runs in comparison.variants.items()}
    series = list[Series]()
    if target is not None and len(costs) > 1 and any(_reached(runs) for runs in costs.values()):
        for label, runs in costs.items():
            series += _points(label, runs, x)
    means = [one for one in series if one.kind == "mean"]
    best = [] if comparison.unfinished else _undominated([one for one in means if not one.unreached])
    across = _axis("simulated time", "seconds", means, 0) if timed else _axis("rounds", "count", means, 0)
    aim = "" if target is None else comparison.score.aim(target)
    return Figure(
        key="front",
        title=f"Download and {'time' if timed else 'rounds'} until {aim}",
        caption=_caption(comparison, means, len(best)),
        x=across,
        y=_axis("downloaded by all clients", "bytes", means, 1),
        series=tuple(series),
        points=True,
        front=tuple(best),
    )


def _reached(runs: Iterable[Mapping[str, Any]]) -> bool:
    return all(summary["reached_round"] is not None for summary in runs)


def _points(label: str, runs: Sequence[Mapping[str, Any]], key: str) -> list[Series]:
    """The mean over the seeds, and every seed."""
    across = [float(summary["rounds"] if summary[key] is None else summary[key]) for summary in runs]
    down = [float(summary["down_bytes"]) for summary in runs]
    mean = Series(label, "mean", (statistics.fmean(across),), (statistics.fmean(down),), unreached=not _reached(runs))
    return [mean, *([Series(label, "seed", tuple(across), tuple(down))] if len(runs) > 1 else [])]


def _undominated(means: Sequence[Series]) -> list[str]:
    """The labels that no other one beats in both costs, by their first cost."""

    def beaten(one: Series) -> bool:
        own = (one.x[0], one.y[0])
        others = [(other.x[0], other.y[0]) for other in means]
        return any(x <= own[0] and y <= own[1] and (x, y) != own for x, y in others)

    return [one.label for one in sorted(means, key=lambda one: (one.x[0], -one.y[0])) if not beaten(one)]


def _axis(title: str, unit: Any, means: Sequence[Series], place: int) -> Axis:
    values = [(one.x, one.y)[place][0] for one in means]
    return Axis(title, unit, log=bool(values) and max(values) > APART * min(values) > 0)


def _caption(comparison: Comparison, means: Sequence[Series], best: int) -> str:
    notes = ["Each strategy until it reached the target; further down and further left is better."]
    if any(len(runs) > 1 for runs in comparison.variants.values()):
        notes.append("Large dots: means over the seeds; small dots: seeds.")
    if any(one.unreached for one in means):
        notes.append("Hollow: not reached by every seed, so that the target costs more.")
    if best > 1:
        notes.append("Dashed: the front; no strategy is better than those on it in both costs.")
    return " ".join(notes)
