"""The catalogue of studies: their files, and the configurations of their runs at both scales."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gluefl.config import Config, merged, variants, with_sets
from gluefl.errors import UsageError, nearest

Scale = Literal["small", "paper"]
SHARED, CLAIMS = "settings", "claims"


class Study(BaseModel):
    """A study's file: the question, the finding of the paper, and the differences between the runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    question: str
    finding: str  # of the paper
    measures: tuple[str, ...] = ()  # columns of the main table
    ratios: tuple[str, ...] = ()  # measures that are also shown as a ratio to the baseline
    baseline: str | None = None
    tables: tuple[str, ...] = ()  # further tables, by name
    compare: dict[str, Any] = Field(default_factory=dict)  # the runs, as in the file of `gluefl compare`
    config: dict[str, Any] = Field(default_factory=dict)  # at both scales
    paper: dict[str, Any] = Field(default_factory=dict)
    small: dict[str, Any] = Field(default_factory=dict)
    model: dict[str, Any] = Field(default_factory=dict)  # settings by model


@dataclass(frozen=True)
class Choice:
    """Options of a study."""

    scale: Scale = "small"
    population: str | None = None
    model: str | None = None
    rounds: int | None = None
    sets: tuple[str, ...] = ()
    only: tuple[str, ...] = ()  # labels of the runs to make, all if empty
    seeds: tuple[int, ...] = ()  # those of the scale if empty


def names() -> list[str]:
    """All studies, tables before figures, as the paper numbers them."""
    stems = [entry.name.removesuffix(".toml") for entry in files(__package__).iterdir() if entry.name.endswith(".toml")]

    def order(name: str) -> tuple[int, int, str]:
        kind = next((i for i, prefix in enumerate(("table", "figure")) if name.startswith(prefix)), 2)
        number = "".join(c for c in name if c.isdigit())
        return kind, int(number or 0), name

    return sorted((name for name in stems if name not in (SHARED, CLAIMS)), key=order)


def load(name: str) -> Study:
    """A study by its name."""
    if name not in names():
        raise UsageError(f"there is no study '{name}'{nearest(name, names())}; there are {', '.join(names())}.")
    try:
        return Study.model_validate({"name": name, **_file(name)})
    except ValidationError as error:
        raise UsageError(f"the file of the study {name} cannot be used: {error}") from error


def seeds(study: Study, choice: Choice) -> list[int]:
    """The chosen seeds, or those of the study at this scale."""
    return list(choice.seeds or getattr(study, choice.scale).get("seeds", _file(SHARED)[choice.scale]["seeds"]))


def configurations(study: Study, choice: Choice) -> dict[str, Config]:
    """The configuration of every run by its label; empty for a study that trains nothing."""
    if not study.compare:
        return {}
    configs = variants(raw(study, choice), f"the study {study.name}")
    if unknown := [label for label in choice.only if label not in configs]:
        raise UsageError(f"the study {study.name} has no run '{unknown[0]}'; it has {', '.join(configs)}.")
    return {label: config for label, config in configs.items() if not choice.only or label in choice.only}


def raw(study: Study, choice: Choice) -> dict[str, Any]:
    """The study as a configuration for `gluefl compare`; later layers override earlier ones, options come last."""
    shared = _file(SHARED)
    scale: Mapping[str, Any] = getattr(study, choice.scale)
    own = [study.config, {"compare": study.compare}, _without_seeds(scale)]
    tree = _layered([shared["config"], _without_seeds(shared[choice.scale]), *own])
    model = choice.model or str(tree["model"]["name"])
    # Layered again, because the settings of a model have a lower priority than those of the study.
    tree = _layered(
        [
            shared["config"],
            _without_seeds(shared[choice.scale]),
            _fitting(shared["model"].get(model, {}), study),
            *own,
            study.model.get(model, {}),
        ]
    )
    if choice.model:
        tree["model"] = {"name": model}
    if choice.population and choice.population != tree["population"]["name"]:
        # Options of a population do not apply to another one; the number of clients does.
        tree["population"] = {"name": choice.population}
        if choice.scale == "small":
            tree["population"]["clients"] = shared["small"]["population"]["clients"]
        else:
            tree = merged(tree, shared["population"].get(choice.population, {}))
    if choice.rounds is not None:  # also of runs for which the study has another number
        tree |= {
            "rounds": choice.rounds,
            "compare": {key: _without_rounds(own) for key, own in tree["compare"].items()},
        }
    return with_sets(tree, choice.sets)


def _fitting(settings: Mapping[str, Any], study: Study) -> dict[str, Any]:
    """The settings of a model without parameters that none of the study's strategies has."""
    from gluefl.config.tables import parameters_of  # torch comes with it
    from gluefl.strategies.registry import ROWS

    labels = study.compare.get("strategies", [])
    strategies = {study.compare.get(label, {}).get("strategy", {}).get("name", label) for label in labels}
    known = set().union(*(parameters_of(name) for name in strategies if name in ROWS))
    own = {key: value for key, value in settings.get("strategy", {}).items() if key in known or not labels}
    rest = {key: value for key, value in settings.items() if key != "strategy"}
    return {**rest, "strategy": own} if own else rest


def _layered(trees: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for tree in trees:
        result = merged(result, tree)
    return result


def _without_rounds(own: Any) -> Any:
    return {key: value for key, value in own.items() if key != "rounds"} if isinstance(own, dict) else own


def _without_seeds(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != "seeds"}


def _file(name: str) -> dict[str, Any]:
    return tomllib.loads((files(__package__) / f"{name}.toml").read_text(encoding="utf-8"))
