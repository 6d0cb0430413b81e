"""What a plan for lean assumes, from the arguments of `gluefl.plan`: the model, and how its cells move."""

from collections.abc import Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from gluefl import models
from gluefl.errors import UsageError
from gluefl.experiments.runs import Run, read_run
from gluefl.experiments.theory.lean import Model, Movement, model_of, movement_of
from gluefl.experiments.theory.lean_plan import LeanPlan, LeanScenario, plan_lean
from gluefl.storage.names import JOURNAL
from gluefl.strategies import Space
from gluefl.strategies.lean import Lean
from gluefl.vectors.layout import Layout

Sizes = tuple[int | None, int | None, int | None]  # K, S, C
OF_MODEL = ("model", "parameters", "statistics", "tensors")
OF_MOVEMENT = tuple(field.name for field in fields(Movement))
OF_SCENARIO = tuple(field.name for field in fields(LeanScenario) if field.name not in ("clients", "model", "movement"))
OF_STRATEGY = ("step", "upload_share")
EVERY = (*OF_MODEL, *OF_MOVEMENT, *OF_SCENARIO, *OF_STRATEGY, "run")


def planned(clients: int, sizes: Sizes, assumptions: Mapping[str, Any]) -> LeanPlan:
    """A plan for lean from the arguments of `gluefl.plan`."""
    given = {name: value for name, value in assumptions.items() if value is not None}
    if unknown := [name for name in given if name not in EVERY]:
        near = get_close_matches(unknown[0], EVERY, 1)
        hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(EVERY)}."
        raise UsageError(f"a plan for lean has no {', '.join(unknown)}. {hint}")
    run = _run(Path(given["run"])) if "run" in given else None
    model = _model({name: given[name] for name in OF_MODEL if name in given}, run)
    movement = Movement() if run is None else _at_defaults(movement_of(run.lines, model, run.stops), run)
    movement = replace(movement, **{name: given[name] for name in OF_MOVEMENT if name in given})
    scenario = LeanScenario(clients, model, movement, **{name: given[name] for name in OF_SCENARIO if name in given})
    return plan_lean(scenario, sizes, **{name: given[name] for name in OF_STRATEGY if name in given})


def built(name: str) -> Model:
    """The numbers of a model of the project, with 62 classes."""
    space = Space.of(Layout.of(models.build(name)), torch.device("cpu"))
    statistics = [statistic.size for statistic in space.statistics]
    return Model(space.size, sum(statistics), len(space.tensors) + len(statistics))


def _model(given: Mapping[str, Any], run: Run | None) -> Model:
    if "model" in given and len(given) > 1:
        raise UsageError(f"model = {given['model']} has its own parameters, statistics and tensors: give one or other.")
    if "model" in given:
        return built(given["model"])
    if "parameters" in given:
        return Model(given["parameters"], given.get("statistics", 0), given.get("tensors", Model.tensors))
    if run is None:
        raise UsageError("a plan for lean needs a model: its name, its number of parameters, or a run.")
    if "parameters" not in run.summary:
        raise UsageError(f"{run.path} has no summary.json yet: give the model, or its number of parameters.")
    return model_of(run.summary, given.get("tensors", Model.tensors))


def _run(path: Path) -> Run:
    if not (path / JOURNAL).exists():
        raise UsageError(f"run = {path}: needed the folder of a run, with its {JOURNAL}.")
    run = read_run(path)
    if (strategy := run.config.get("strategy.name", run.summary.get("strategy"))) not in (None, "lean"):
        raise UsageError(f"{path} is a run of {strategy}: how cells move is only in the journal of a run of lean.")
    return run


def _at_defaults(movement: Movement, run: Run) -> Movement:
    """Movement of a run as it would be with s = 0.5 and p = 1."""
    step, share = run.config.get("strategy.step", Lean.step), run.config.get("strategy.upload_share", Lean.upload_share)
    return movement.with_step(Lean.step / step).with_share(1 / share)
