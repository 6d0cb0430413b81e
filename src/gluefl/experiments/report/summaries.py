"""The numbers of a table: summaries of all runs at one target."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gluefl.experiments.report.comparison import Comparison
from gluefl.experiments.runs import Run
from gluefl.scores import Score


@dataclass(frozen=True)
class Summaries:
    """Summaries of all runs at one target, by label."""

    target: float | None
    runs: dict[str, list[dict[str, Any]]]
    base: str  # the label that ratios refer to
    score: Score  # how the metric is named, written and compared
    unfinished: tuple[str, ...] = ()  # labels with a run that goes on or was stopped

    @classmethod
    def of(cls, comparison: Comparison, target: float | None) -> "Summaries":
        """The summaries of a comparison at a target."""
        runs = {
            label: [dict(run.at(target)) for run in settled(runs, target)]
            for label, runs in comparison.variants.items()
        }
        for summary in (summary for repetitions in runs.values() for summary in repetitions):
            summary["rounds"] = summary["reached_round"] or summary["rounds"]
        unfinished = tuple(dict.fromkeys(run.label for run in comparison.unfinished))
        return cls(target, runs, baseline(comparison), comparison.score, unfinished)

    @property
    def all(self) -> list[dict[str, Any]]:
        """The summaries of all labels."""
        return [summary for runs in self.runs.values() for summary in runs]

    @property
    def any_reached(self) -> bool:
        """Whether a run reached the target."""
        return any(summary["reached_round"] is not None for summary in self.all)

    def reached(self, label: str) -> bool:
        """Whether every seed reached the target."""
        return all(summary["reached_round"] is not None for summary in self.runs[label])

    def values(self, label: str, key: str) -> list[float]:
        """A number of every seed that has it."""
        return [summary[key] for summary in self.runs[label] if summary.get(key) is not None]

    def means(self, key: str) -> dict[str, float]:
        """Its mean over the seeds, by label."""
        return {label: statistics.fmean(values) for label in self.runs if (values := self.values(label, key))}


def settled(runs: Sequence[Run], target: float | None) -> Sequence[Run]:
    """Without the seeds that go on before the target, where another seed has an answer: no mean mixes both."""
    answered = [run for run in runs if run.finished or (target is not None and run.until(target) is not None)]
    return answered or runs


def baseline(comparison: Comparison) -> str:
    """The label that ratios refer to: FedAvg, or the first variant."""
    plain = [
        label for label, runs in comparison.variants.items() if runs[0].config.get("strategy.name", label) == "fedavg"
    ]
    return "fedavg" if "fedavg" in comparison.variants else (plain or list(comparison.variants))[0]
