"""What a study is: its file, and the configurations of its runs at either scale."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gluefl.config import Config, merged, variants, with_sets
from gluefl.errors import UsageError, nearest

Scale = Literal["small", "paper"]
SHARED = "settings"


class Study(BaseModel):
    """A study's file: the question, what the paper found, and what differs between the runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    question: str
    found: str  # by the paper
    measures: tuple[str, ...] = ()  # columns of the main table
    ratios: tuple[str, ...] = ()  # those that are also shown as a ratio to the baseline
    baseline: str | None = None
    tables: tuple[str, ...] = ()  # further tables, by name
    compare: dict[str, Any] = Field(default_factory=dict)  # the runs, as in the file of `gluefl compare`
    config: dict[str, Any] = Field(default_factory=dict)  # at either scale
    paper: dict[str, Any] = Field(default_factory=dict)
    small: dict[str, Any] = Field(default_factory=dict)
    model: dict[str, Any] = Field(default_factory=dict)  # what goes with a model


@dataclass(frozen=True)
class Choice:
    """What the user chose of a study."""

    scale: Scale = "small"
    population: str | None = None
    model: str | None = None
    rounds: int | None = None
    sets: tuple[str, ...] = ()
    only: tuple[str, ...] = ()  # some of its runs


def names() -> list[str]:
    """All studies, tables before figures, as the paper numbers them."""
    found = [entry.name.removesuffix(".toml") for entry in files(__package__).iterdir() if entry.name.endswith(".toml")]

    def order(name: str) -> tuple[int, int, str]:
        kind = next((i for i, prefix in enumerate(("table", "figure")) if name.startswith(prefix)), 2)
        number = "".join(c for c in name if c.isdigit())
        return kind, int(number or 0), name

    return sorted((name for name in found if name != SHARED), key=order)


def load(name: str) -> Study:
    """A study by its name."""
    if name not in names():
        raise UsageError(f"there is no study '{name}'{nearest(name, names())}; there are {', '.join(names())}.")
    try:
        return Study.model_validate({"name": name, **_file(name)})
    except ValidationError as error:
        raise UsageError(f"the file of the study {name} cannot be used: {error}") from error


def seeds(study: Study, choice: Choice) -> list[int]:
    """The seeds of a study at a scale."""
    return list(getattr(study, choice.scale).get("seeds", _file(SHARED)[choice.scale]["seeds"]))


def configurations(study: Study, choice: Choice) -> dict[str, Config]:
    """The configuration of every run by its label; empty for a study that trains nothing."""
    if not study.compare:
        return {}
    found = variants(raw(study, choice), f"the study {study.name}")
    if unknown := [label for label in choice.only if label not in found]:
        raise UsageError(f"the study {study.name} has no run '{unknown[0]}'; it has {', '.join(found)}.")
    return {label: config for label, config in found.items() if not choice.only or label in choice.only}


def raw(study: Study, choice: Choice) -> dict[str, Any]:
    """The study as a configuration for `gluefl compare`: general settings first, what was chosen last."""
    shared = _file(SHARED)
    scale: Mapping[str, Any] = getattr(study, choice.scale)
    own = [study.config, {"compare": study.compare}, _without_seeds(scale)]
    tree = _layered([shared["config"], _without_seeds(shared[choice.scale]), *own])
    model = choice.model or str(tree["model"]["name"])
    # Once more from the start: what goes with the model lies below what the study says.
    tree = _layered(
        [
            shared["config"],
            _without_seeds(shared[choice.scale]),
            shared["model"].get(model, {}),
            *own,
            study.model.get(model, {}),
        ]
    )
    if choice.model:
        tree["model"] = {"name": model}
    if choice.population and choice.population != tree["population"]["name"]:
        # Its own options mean nothing to another population; the number of clients does.
        tree["population"] = {"name": choice.population}
        if choice.scale == "small":
            tree["population"]["clients"] = shared["small"]["population"]["clients"]
        else:
            tree = merged(tree, shared["population"].get(choice.population, {}))
    if choice.rounds is not None:
        tree["rounds"] = choice.rounds
    return with_sets(tree, choice.sets)


def _layered(trees: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for tree in trees:
        result = merged(result, tree)
    return result


def _without_seeds(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != "seeds"}


def _file(name: str) -> dict[str, Any]:
    return tomllib.loads((files(__package__) / f"{name}.toml").read_text(encoding="utf-8"))
