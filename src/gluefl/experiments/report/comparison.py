"""Comparisons: runs grouped so that each group shares population, target and metric."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gluefl.experiments.runs import Run, find, read_run
from gluefl.scores import Score

# Runs that differ only in these keys are repetitions of the same experiment.
INCIDENTAL = ("seed", "rounds", "target", "evaluation.stop_at_target", "checkpoint.every", "training.trainer")
FAMILIES = ("fedavg", "stc", "apf", "gluefl", "lean")


@dataclass(frozen=True)
class Comparison:
    """Runs that can be compared with each other. `reason` says why they are not compared with the first group."""

    variants: dict[str, list[Run]]  # by label, in display order; each run has at least one line
    unread: list[Run]  # runs without a readable journal line
    reason: str = ""

    @property
    def runs(self) -> list[Run]:
        """All runs that have lines."""
        return [run for runs in self.variants.values() for run in runs]

    @property
    def score(self) -> Score:
        """How the metric that they share is named, written and compared."""
        return self.runs[0].score if self.variants else Score()

    @property
    def target(self) -> float | None:
        """The target that they share."""
        return self.runs[0].target if self.variants else None

    @property
    def unfinished(self) -> list[Run]:
        """The runs that go on or were stopped: while there is one, nothing is called the best."""
        return [run for run in [*self.runs, *self.unread] if not run.finished]

    @property
    def aim(self) -> float | None:
        """The accuracy at which costs are compared first: the target, or the common one if no run reached it."""
        if any(run.until(self.target) is not None for run in self.runs) and self.target is not None:
            return self.target
        return common_accuracy(self.runs) if len(self.variants) > 1 else None


def common_accuracy(runs: Sequence[Run]) -> float | None:
    """The best value that every run reached, as the paper chooses its targets; accuracies rounded down to 0.1%."""
    best = [run.best for run in runs if run.best is not None]
    if not runs or len(best) < len(runs):
        return None
    score = runs[0].score
    common = score.relaxed(score.worst(best) or 0.0)
    possible = common > 0 or not score.is_share
    return common if possible and all(run.until(common) is not None for run in runs) else None


def palette(labels: Iterable[str]) -> dict[str, int]:
    """The index of a colour for every label; strategies under their own name always have the same colour."""
    names = list(dict.fromkeys(labels))
    fixed = {family: i for i, family in enumerate(FAMILIES) if family in names}
    free = (i for i in itertools.count() if i not in fixed.values())
    return {name: fixed[name] if name in fixed else next(free) for name in names}


def read(folders: Iterable[Path]) -> list[Comparison]:
    """Read all runs in the given folders; the comparison with the most runs comes first."""
    return compare([read_run(path) for path in find(folders)])


def compare(runs: Sequence[Run]) -> list[Comparison]:
    """Group runs into comparisons, the largest first, and say why the others are separate."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(_conditions(run), sort_keys=True, default=str), []).append(run)
    ordered = sorted(groups.values(), key=lambda group: -sum(bool(run.lines) for run in group))
    result: list[Comparison] = []
    for group in ordered:
        variants: dict[str, list[Run]] = {}
        for run in sorted(_named([run for run in group if run.lines]), key=_order):
            variants.setdefault(run.label, []).append(run)
        reason = _reason(group[0], ordered[0][0]) if result else ""
        result.append(Comparison(variants, [run for run in group if not run.lines], reason))
    return result


def _conditions(run: Run) -> dict[str, Any]:
    """The settings that two runs must share to be compared."""
    population = {key: value for key, value in run.config.items() if key.split(".")[0] == "population"}
    held_out = {} if (by := run.config.get("evaluation.held_out")) is None else {"evaluation.held_out": by}
    return population | {"target": run.target, "metric": run.config.get("evaluation.metric")} | held_out


def _reason(run: Run, first: Run) -> str:
    own, other = _conditions(run), _conditions(first)
    if not run.config:
        return "their configuration is missing"
    differing = [key for key in sorted({**own, **other}) if own.get(key) != other.get(key)]
    return "; ".join(f"another {key}: {_text(own.get(key))} instead of {_text(other.get(key))}" for key in differing)


def _text(value: Any) -> str:
    return "none" if value is None else f"{value:.1%}" if isinstance(value, float) and value <= 1 else str(value)


def _named(runs: Sequence[Run]) -> list[Run]:
    """Make labels unique: where one label stands for different experiments, use the names of their folders."""
    result = list(runs)
    for length in range(3):
        settings: dict[str, set[str]] = {}
        for run in result:
            settings.setdefault(run.label, set()).add(json.dumps(_settings(run), sort_keys=True, default=str))
        repeated = Counter((run.label, run.seed) for run in result)
        clash = {label for label, kinds in settings.items() if len(kinds) > 1}
        clash |= {label for (label, _), count in repeated.items() if count > 1}
        result = [replace(run, label=_longer(run, length)) if run.label in clash else run for run in result]
    return result


def _longer(run: Run, length: int) -> str:
    path = run.path.resolve()
    name = path.name.removesuffix(f"-{run.seed}")
    return (name, f"{path.parent.name}/{name}", str(run.path))[length]


def _settings(run: Run) -> dict[str, Any]:
    return {key: value for key, value in run.config.items() if key not in INCIDENTAL}


def _order(run: Run) -> tuple[Any, ...]:
    """Sort key: FedAvg first, lean last of the known families; numbers in labels are compared as numbers."""
    family = str(run.config.get("strategy.name", run.summary.get("strategy")))
    parts = [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", run.label)]
    return FAMILIES.index(family) if family in FAMILIES else len(FAMILIES), parts, run.seed or 0
