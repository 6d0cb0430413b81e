"""A finished run from its folder: `gluefl.load`."""

from pathlib import Path
from typing import Any, NoReturn, get_args

from torch import Tensor, nn

from gluefl.clients.metrics import METRICS, Metric
from gluefl.config import Config, validated
from gluefl.config.raw import read
from gluefl.errors import Damaged, GlueFLError, UsageError
from gluefl.parameters import check
from gluefl.populations import Population
from gluefl.populations.held_out import By, HeldOut
from gluefl.populations.stored import restored
from gluefl.scores import Score
from gluefl.simulation.arguments import AnyPopulation, load_weights
from gluefl.simulation.build import build_model, build_population, held_out
from gluefl.simulation.result import Result
from gluefl.storage.journal import Journal
from gluefl.storage.names import CONFIG, JOURNAL, MODEL, SUMMARY
from gluefl.storage.results import check_result, read_summary
from gluefl.vectors.frozen import copied
from gluefl.watching.best import BEST, Best
from gluefl.watching.best import read as read_best


def load(
    folder: Path | str, *, model: nn.Module | None = None, population: Population | None = None, best: bool = False
) -> Result:
    """The result of a finished run: `gluefl.load("runs/mine").predict(pictures)`.

    A run that was made from a configuration needs nothing else. For one that was made in Python give a model of the
    same kind: a folder holds tensors and text, never code. It holds the transform of arrays and data sets; where that
    is code of your own, give the population, too; the validation share of the run is taken from it. A result whose
    data are not here predicts, but has no clients. A run of adapters leaves the frozen base out of its folder, so that
    the model must bring the same one; another is refused.

    With `best` its model is the one that `BestModel` kept; the summary has its round and value under `best`.
    """
    check(
        "load",
        folder=(Path | str, folder),
        model=(nn.Module | None, model),
        population=(AnyPopulation | None, population),
        best=(bool, best),
    )
    path = Path(folder)
    missing = [name for name in (CONFIG, JOURNAL, MODEL, SUMMARY) if not (path / name).exists()]
    if missing:
        raise UsageError(f"{path} holds no finished run: {', '.join(missing)} missing. Give the folder of a run.")
    summary = _summary(path, CONFIG, SUMMARY, *([] if best else [MODEL]))
    raw, text = read(path / CONFIG), (path / CONFIG).read_text(encoding="utf-8")
    config = validated(raw, str(path / CONFIG)) if isinstance(raw.get("population"), dict) else None
    population = _population(config, summary) if population is None else _as_trained(population, config, raw)
    if model is None and config is not None and population is not None:
        model = build_model(config, population.classes, population.shape)
    if model is None or population is None:
        raise _made_in_python(path, raw, "model=…" if population is not None else "model=…, population=…")
    module = copied(model)
    if best:
        kept = _best(path)
        summary["best"] = {"round": kept.round, "value": kept.value}
    load_weights(module, path / (BEST if best else MODEL))
    return Result(module.eval(), Journal(path / JOURNAL), summary, population, _metric(summary), text)


def _summary(path: Path, *names: str) -> dict[str, Any]:
    """The summary of a run whose files of these names are as they were written."""
    try:
        check_result(path, *names)
        return read_summary(path)
    except Damaged as error:
        raise Damaged(f"{error}. Copy the folder back from a backup, or run it again in another one.") from error


def _best(path: Path) -> Best:
    if not (path / BEST).exists():
        raise UsageError(
            f"{path} holds no best model: it is kept by Options(callbacks=[BestModel()]). "
            "Load the last one by gluefl.load(folder)."
        )
    return read_best(path / BEST)


def _made_in_python(path: Path, raw: dict[str, Any], needed: str) -> UsageError:
    return UsageError(
        f"{path} holds a run that was made in Python with the model {raw.get('model')} and the population "
        f"{raw.get('population')}: give what it does not hold, as in gluefl.load(folder, {needed})."
    )


def _population(config: Config | None, summary: dict[str, Any]) -> Population | None:
    """The population of a configuration; what the summary holds of it where its data are not here."""
    stored = None if summary.get("transform") is None else restored(summary["transform"])
    if config is None:
        return stored
    try:
        return held_out(build_population(config), config)
    except GlueFLError:
        if stored is None:
            raise
        return stored


def _as_trained(population: Population, config: Config | None, raw: dict[str, Any]) -> Population:
    """A given population without the validation share of the run, unless it has validation samples already."""
    if hasattr(population, "validation"):
        return population
    if config is not None:
        return held_out(population, config)
    table = raw.get("evaluation", {})
    if table.get("held_out") not in get_args(By):  # none, or samples of the population's own
        return population
    return HeldOut(population, table["held_out"], table["held_out_share"], table["held_out_seed"])


def _metric(summary: dict[str, Any]) -> Metric:
    """The metric of a run; one of the user's own is named, but its function has to be given again."""
    score = Score.of_summary({**summary, "evaluated_on": "test"})
    by_score = next((key for key, metric in METRICS.items() if metric.score == score), None)
    key = summary.get("metric_key", by_score)  # which older runs did not write
    return METRICS[key] if key in METRICS else _own(score)


def _own(score: Score) -> Metric:
    def function(outputs: Tensor, labels: Tensor) -> NoReturn:
        raise UsageError(
            f"the metric {score.name} of this run is a function of your own, which its folder does not hold: give it, "
            "as in result.client_accuracy(metric=…)."
        )

    return Metric(score.name, function, score.higher_is_better, score.format)
