"""A finished run from its folder: `gluefl.load`."""

import json
from pathlib import Path
from typing import Any

from torch import nn

from gluefl import populations
from gluefl.clients.metrics import METRICS, TOP_1
from gluefl.config import Config, validated
from gluefl.config.raw import read
from gluefl.errors import UsageError
from gluefl.populations import Population
from gluefl.simulation.arguments import load_weights
from gluefl.simulation.build import build_model, held_out
from gluefl.simulation.folder import CONFIG, JOURNAL, MODEL, SUMMARY
from gluefl.simulation.result import Result
from gluefl.storage.journal import Journal
from gluefl.vectors.frozen import copied
from gluefl.watching.best import BEST, Best
from gluefl.watching.best import read as read_best


def load(
    folder: Path | str, *, model: nn.Module | None = None, population: Population | None = None, best: bool = False
) -> Result:
    """The result of a finished run: `gluefl.load("runs/mine").predict(pictures)`.

    A run that was made from a configuration needs nothing else, except the data where its population reads files. For
    one that was made in Python give a model of the same kind and the population, whose transform belongs to the model:
    a folder holds tensors and text, never code. A run of adapters leaves the frozen base out of its folder, so that the
    model must bring the same one; another is refused. With `best` its model is the one that `BestModel` kept, and the
    summary has its round and value under `best`.
    """
    path = Path(folder)
    missing = [name for name in (CONFIG, JOURNAL, MODEL, SUMMARY) if not (path / name).exists()]
    if missing:
        raise UsageError(f"{path} holds no finished run: {', '.join(missing)} missing. Give the folder of a run.")
    raw, metric = read(path / CONFIG), TOP_1
    if model is None or population is None:
        config = _configuration(raw, path)
        population = population or _population(config)
        metric = METRICS[config.evaluation.metric]
        model = model or build_model(config, population.classes, population.shape)
    module = copied(model)
    summary = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
    if best:
        kept = _best(path)
        summary["best"] = {"round": kept.round, "value": kept.value}
    load_weights(module, path / (BEST if best else MODEL))
    return Result(module.eval(), Journal(path / JOURNAL), summary, population, metric)


def _best(path: Path) -> Best:
    if not (path / BEST).exists():
        raise UsageError(
            f"{path} holds no best model: it is kept by Options(callbacks=[BestModel()]). "
            "Load the last one by gluefl.load(folder)."
        )
    return read_best(path / BEST)


def _configuration(raw: dict[str, Any], path: Path) -> Config:
    if not isinstance(raw.get("population"), dict):  # a run made in Python names types only
        raise UsageError(
            f"{path} holds a run that was made in Python with the model {raw.get('model')} and the population "
            f"{raw.get('population')}: give both, as in gluefl.load(folder, model=…, population=…)."
        )
    return validated(raw, str(path / CONFIG))


def _population(config: Config) -> Population:
    table = config.population
    return held_out(populations.build(table.name, table.clients, table.seed, **(table.model_extra or {})), config)
