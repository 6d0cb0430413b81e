"""Conducting a study: its runs, its tables, `study.json`."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gluefl import files
from gluefl.errors import UsageError
from gluefl.experiments.grid import RunSpec, expand
from gluefl.experiments.processes import WorkerProcesses
from gluefl.experiments.runner import Executor, execute
from gluefl.experiments.runs import read_run
from gluefl.experiments.studies.catalogue import Choice, Study, configurations, seeds
from gluefl.experiments.studies.findings import AT_TARGET, Grid, findings

CHOOSABLE = ("model", "population", "rounds", "sets", "only", "seeds")


@dataclass(frozen=True)
class Outcome:
    """The result of a study."""

    study: Study
    heading: str  # scale, seeds and size in one line
    grids: tuple[Grid, ...]
    json: dict[str, Any]


def conduct(
    study: Study,
    choice: Choice,
    out: Path,
    executor: Executor | None = None,
    resume: bool = False,
    reuse: Path | None = None,
    at: float | None = None,
) -> Outcome:
    """Run what is not done yet, in `out` or below the folder `reuse`; then write the tables into `out/study.json`.

    The tables are computed at the accuracy `at` if it is given, otherwise at the targets of the study.
    """
    if at is not None and not AT_TARGET & set(study.measures):
        raise UsageError(f"--at {at}: no table of the study {study.name} is about an accuracy.")
    began = time.monotonic()
    variants = configurations(study, choice)
    used = seeds(study, choice)
    specs = expand(variants, used, out) if variants else []
    if not specs and (chosen := [name for name in CHOOSABLE if getattr(choice, name)]):
        raise UsageError(f"the study {study.name} trains nothing: there is nothing to choose by {', '.join(chosen)}.")
    execute(specs, executor or WorkerProcesses(), resume, reuse)
    grids = tuple(findings(study, [read_run(spec.folder) for spec in specs], at))
    heading = _heading(choice, specs, used)
    result: dict[str, Any] = {
        "study": study.name,
        "question": study.question,
        "paper": study.finding,
        "scale": choice.scale,
        "setting": _setting(choice, specs),
        "seeds": used if specs else [],
        "heading": heading,
        "tables": [grid.as_json() for grid in grids],
        "wall_s": time.monotonic() - began,
    }
    out.mkdir(parents=True, exist_ok=True)
    files.write(out / "study.json", json.dumps(result, indent=2, allow_nan=False) + "\n")
    return Outcome(study, heading, grids, result)


def _setting(choice: Choice, specs: Sequence[RunSpec]) -> str:
    """Scale, model and population in a few words."""
    if not specs:
        return "nothing is trained"
    config = specs[0].config
    return f"{choice.scale} scale, {config.model.name}, {config.population.name}"


def _heading(choice: Choice, specs: Sequence[RunSpec], used: Sequence[int]) -> str:
    if not specs:
        return "Nothing is trained."
    config, rounds = specs[0].config, max(spec.config.rounds for spec in specs)
    clients = config.population.clients or "all"
    return (
        f"Scale {choice.scale}: {config.population.name} with {clients} clients, {config.model.name}, "
        f"K = {config.sampling.cohort}, {rounds} rounds at most, seeds {', '.join(map(str, used))}."
    )
