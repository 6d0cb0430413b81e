"""`gluefl export`: the published grid of a lean run as small integers and scales, in a safetensors file.

A tensor NAME of whole numbers, its cells, has a float32 NAME.scale beside it, a power of two: value = cell · scale,
exactly. A tensor without a scale is stored as it is. `docs/wire-format.md` describes the metadata.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save
from torch import Tensor

from gluefl import files
from gluefl.clients.evaluation import Evaluator
from gluefl.clients.losses import LOSSES
from gluefl.clients.metrics import METRICS
from gluefl.config import Config, read, validated
from gluefl.errors import Damaged, GlueFLError, UsageError
from gluefl.experiments.console import volume
from gluefl.scores import SCORES
from gluefl.simulation.build import build_model, build_population
from gluefl.simulation.process import device_of
from gluefl.storage import checkpoint
from gluefl.storage.names import CHECKPOINT, CONFIG, MODEL, SUMMARY
from gluefl.storage.results import check_result
from gluefl.strategies import Space
from gluefl.vectors.layout import Layout, split

FORMAT, VERSION = "gluefl-cells", 1  # of the file
SCALE = ".scale"
AVERAGED = (
    f"{MODEL} is an average over versions, on no grid. The exported file is the last version, as clients have it."
)
TYPES = (np.int8, np.int16, np.int32, np.int64)


@dataclass(frozen=True)
class Published:
    """The model that clients held after a round: flat vectors of a checkpoint."""

    round: int
    weights: Tensor
    statistics: Tensor


@dataclass(frozen=True)
class Export:
    """An exported model beside the float32 model of the same run."""

    file: str
    round: int
    parameters: int
    bytes: int
    float32_bytes: int
    metric: str
    accuracy: float
    model_accuracy: float | None  # of model.safetensors, None if the run is not finished
    averaged: bool  # whether model.safetensors is an average over versions
    tensors: dict[str, int]  # how many have cells of each type

    @property
    def as_json(self) -> dict[str, Any]:
        """The fields, and how much smaller the file is."""
        return {**asdict(self), "ratio": self.float32_bytes / self.bytes}


def to_cells(values: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers of the smallest type, and the largest power of two of which all values are multiples.

    >>> to_cells(torch.tensor([0.5, -0.75]))  # ([2, -3], 0.25)
    """
    numbers = values.detach().cpu().numpy().astype(np.float64)
    if not np.isfinite(numbers).all():
        raise GlueFLError("a value that is not finite lies on no grid.")
    mantissas, exponents = np.frexp(numbers)
    digits = (mantissas * 2**24).astype(np.int64)  # exact: a float32 has 24 binary digits
    lowest = np.frexp((digits & -digits).astype(np.float64))[1] - 1 + exponents - 24
    exponent = int(lowest[digits != 0].min(initial=127)) if digits.any() else 0
    cells = np.asarray(np.ldexp(numbers, -exponent))  # of a scalar, too
    largest = np.abs(cells).max(initial=0)
    if largest >= 2.0**63:
        raise GlueFLError(
            f"values up to {np.abs(numbers).max():.4g} are no whole numbers of 64 bits in units of 2^{exponent}: the "
            "tensor lies on no grid."
        )
    kind = next(kind for kind in TYPES if largest <= np.iinfo(kind).max)
    return torch.from_numpy(cells.astype(kind)), torch.tensor(2.0**exponent)


def to_values(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The float32 tensors of an exported file by name, exactly those that were published."""
    scales = {name + SCALE for name in tensors} & tensors.keys()
    return {
        name: tensor.to(torch.float32) * tensors[name + SCALE] if name + SCALE in scales else tensor
        for name, tensor in tensors.items()
        if name not in scales
    }


def export(run: Path, out: Path, device: str = "cpu") -> Export:
    """Write the published grid of a run to a file and evaluate both models of the run."""
    config = _config(run)
    _check_file(out)
    published = _published(run)
    population = build_population(config)
    module = build_model(config, population.classes, population.shape).to(device_of(device))
    layout = Layout.of(module)
    _check_sizes(run, layout, published)
    named = layout.state_dict(module, published.weights, published.statistics)
    cells = dict(_cells(layout, published))
    constants = {name: tensor for name, tensor in named.items() if name not in cells}
    blob = save({**cells, **constants}, _notes(layout, published.round))

    evaluation = config.evaluation
    evaluator = Evaluator(
        module,
        layout,
        population,
        LOSSES[config.training.loss or "cross_entropy"],
        METRICS[evaluation.metric],
        evaluation.batch,
        device_of(device),
    )
    handed_over = _handed_over(run)
    accuracies = []
    for tensors in (to_values(load(blob)), handed_over):
        if tensors is not None:
            _fill(module, tensors, run)
            accuracies.append(evaluator(*layout.flatten(module)).accuracy)
    out.parent.mkdir(parents=True, exist_ok=True)
    files.write(out, blob)
    return Export(
        file=str(out),
        round=published.round,
        parameters=layout.size,
        bytes=len(blob),
        float32_bytes=len(save(named)),
        metric=evaluation.metric,
        accuracy=accuracies[0],
        model_accuracy=accuracies[1] if handed_over is not None else None,
        averaged=handed_over is not None and bool(config.server.average),
        tensors=_types(cells),
    )


def export_table(result: Export) -> Table:
    """The exported model beside the float32 model."""
    table = Table(title=f"The model published in round {result.round}", title_justify="left")
    table.add_column("model")
    score = SCORES[result.metric]
    for heading in ("size", "ratio", score.name):
        table.add_column(heading, justify="right")
    model_accuracy = "–" if result.model_accuracy is None else score.short(result.model_accuracy)
    table.add_row(f"{MODEL} (float32)", volume(result.float32_bytes), "1", model_accuracy)
    kinds = ", ".join(f"{count} × {kind}" for kind, count in result.tensors.items())
    if result.averaged:
        table.caption, table.caption_justify = AVERAGED, "left"
    ratio = f"{result.as_json['ratio']:.2f}"
    table.add_row(f"{result.file} (tensors: {kinds})", volume(result.bytes), ratio, score.short(result.accuracy))
    return table


def _config(run: Path) -> Config:
    if not (run / CONFIG).is_file():
        raise UsageError(f"{run} holds no {CONFIG}: give the folder of a run of `gluefl run`, `compare` or `demo`.")
    raw = read(run / CONFIG)
    strategy = raw.get("strategy", {})
    name = strategy.get("name", strategy.get("type", "gluefl")) if isinstance(strategy, dict) else strategy
    if str(name).lower() != "lean":
        raise UsageError(
            f"{run} is a run of {name}, whose weights are float32 and lie on no grid: its model is {run / MODEL}. "
            "Export a run of lean."
        )
    if "name" not in strategy:
        raise UsageError(
            f"{run} is a run that was made in Python: its {CONFIG} does not say how to build the model and the data. "
            "Export a run of the command line, or use gluefl.experiments.export.to_cells."
        )
    return validated(raw, str(run / CONFIG))


def _check_file(out: Path) -> None:
    if out.suffix != ".safetensors":
        raise UsageError(f"--out {out}: the name of the file must end in .safetensors.")
    if out.exists():
        raise UsageError(f"{out} exists already: choose another --out.")


def _published(run: Path) -> Published:
    """The model in the checkpoint; `model.safetensors` may be an average over versions, which lies on no grid."""
    folder = run / CHECKPOINT
    if not checkpoint.exists(folder):
        raise UsageError(
            f"{folder} holds no checkpoint, which would hold the published grid: repeat the run with `gluefl run` or "
            "`compare`, which leave a checkpoint at the end; the runs of a study may leave none."
        )
    found = checkpoint.find(folder)
    if found is None or found.unusable:  # an older model would be exported
        reasons = "; ".join(found.unusable) if found is not None else "it has no manifest"
        raise GlueFLError(f"the last checkpoint in {folder} is damaged ({reasons}). Resume the run, then export it.")
    tensors = load_file(folder / found.manifest["tensors"]["name"])
    return Published(found.round, tensors["weights"], tensors["statistics"])


def _check_sizes(run: Path, layout: Layout, published: Published) -> None:
    sizes = published.weights.numel(), published.statistics.numel()
    if sizes != (layout.size, layout.statistics_size):
        raise GlueFLError(
            f"the checkpoint of {run} has {sizes[0]} weights and {sizes[1]} statistics, the model of its {CONFIG} has "
            f"{layout.size} and {layout.statistics_size}: export it with the version of gluefl that wrote it."
        )


def _cells(layout: Layout, published: Published) -> Iterator[tuple[str, Tensor]]:
    for parts, vector in ((layout.weights, published.weights), (layout.statistics, published.statistics)):
        for name, values in split(parts, vector):
            cells, scale = to_cells(values)
            yield name, cells
            yield name + SCALE, scale


def _notes(layout: Layout, round: int) -> dict[str, str]:
    """The metadata of the file: one entry, because safetensors writes several in any order."""
    kinds = Space.of(layout).statistics
    names = [part.name for part, one in zip(layout.statistics, kinds, strict=True) if one.kind == "variance"]
    return {FORMAT: json.dumps({"version": VERSION, "round": round, "logarithmic": names})}


def _types(cells: Mapping[str, Tensor]) -> dict[str, int]:
    kinds = [str(tensor.dtype).removeprefix("torch.") for name, tensor in cells.items() if name + SCALE in cells]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds), key=lambda kind: int(kind.removeprefix("int")))}


def _handed_over(run: Path) -> dict[str, Tensor] | None:
    """The result of the run, None if it is not finished."""
    path = run / MODEL
    if not path.exists() or not (run / SUMMARY).exists():  # a run that goes on has the model of its earlier end
        return None
    try:
        check_result(run, MODEL)
        return load_file(path)
    except (Damaged, SafetensorError) as error:
        raise GlueFLError(f"{path} is damaged ({error}). Delete it to export the grid without it.") from error


def _fill(module: torch.nn.Module, tensors: dict[str, Tensor], run: Path) -> None:
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        raise GlueFLError(f"{run / MODEL} does not fit the model of {run / CONFIG}: {error}") from error
