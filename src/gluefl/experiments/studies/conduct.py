"""A whole study: its runs, its tables, `study.json`."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gluefl.errors import UsageError
from gluefl.experiments.grid import planned
from gluefl.experiments.studies.catalogue import Choice, Study, configurations, seeds
from gluefl.experiments.studies.findings import AT_TARGET, Grid, findings
from gluefl.experiments.studies.measures import Run
from gluefl.experiments.studies.runner import execute


@dataclass(frozen=True)
class Outcome:
    """A study that is over."""

    study: Study
    heading: str  # scale, seeds and size in one line
    grids: tuple[Grid, ...]
    json: dict[str, Any]


def conduct(
    study: Study,
    choice: Choice,
    out: Path,
    chosen_seeds: Sequence[int] | None = None,
    device: str = "cpu",
    jobs: int | None = None,
    resume: bool = False,
    reuse: Path | None = None,
    at: float | None = None,
) -> Outcome:
    """Run what is not done yet, here or below the folder `reuse`, measure, at the accuracy `at` if one is given, and
    write `out/study.json`."""
    if at is not None and not AT_TARGET & set(study.measures):
        raise UsageError(f"--at {at}: no table of the study {study.name} is about an accuracy.")
    began = time.monotonic()
    variants = configurations(study, choice)
    used = list(chosen_seeds or seeds(study, choice))
    plan = planned(variants, used, out) if variants else []
    execute(plan, device, jobs, resume, reuse)
    runs = [Run.read(item) for item in plan]
    grids = tuple(findings(study, runs, at))
    heading = _heading(choice, runs, used)
    found: dict[str, Any] = {
        "study": study.name,
        "question": study.question,
        "paper": study.found,
        "scale": choice.scale,
        "seeds": used,
        "heading": heading,
        "tables": [grid.as_json() for grid in grids],
        "wall_s": time.monotonic() - began,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "study.json").write_text(json.dumps(found, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return Outcome(study, heading, grids, found)


def _heading(choice: Choice, runs: Sequence[Run], used: Sequence[int]) -> str:
    if not runs:
        return "Nothing is trained."
    config = runs[0].config
    clients = config.population.clients or "all"
    return (
        f"Scale {choice.scale}: {config.population.name} with {clients} clients, {config.model.name}, "
        f"K = {config.sampling.cohort}, {config.rounds} rounds at most, seeds {', '.join(map(str, used))}."
    )
