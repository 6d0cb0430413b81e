"""What a run gives back: the trained model, which predicts from raw inputs, and its journal."""

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from gluefl import files
from gluefl.clients.metrics import TOP_1, Metric, metric_of
from gluefl.errors import Damaged, MissingExtra, UsageError
from gluefl.populations import Population, samples_of
from gluefl.populations.inputs import KINDS, applied, each, parts, problem
from gluefl.scores import Score
from gluefl.storage.journal import Journal, Line
from gluefl.storage.names import CONFIG, JOURNAL
from gluefl.storage.results import write_result
from gluefl.storage.sealed import seal
from gluefl.vectors.layout import writable

PERCENTILES = (5, 10, 25, 50, 75, 90, 95)
BATCH = 1000  # samples


@dataclass(frozen=True)
class Result:
    """The trained module, the journal and its summary; the population brings the transform of its inputs."""

    module: nn.Module
    written: Journal
    summary: dict[str, Any]
    population: Population
    metric: Metric = TOP_1  # of the run; `accuracy` in the journal holds its values

    configuration: str = field(default="", repr=False)  # the text of config.toml

    @cached_property
    def journal(self) -> list[Line]:
        """The lines of the journal; those of a run with a folder are read from there when they are first used."""
        lines, rounds = self.written.lines, self.summary["rounds"]
        if len(lines) < rounds:
            raise Damaged(
                f"{self.written.path} holds {len(lines)} whole lines, the result is of round {rounds}: the journal is "
                "damaged, or of an older version. Copy the folder back from a backup, or run it again in another one."
            )
        return lines

    @property
    def score(self) -> Score:
        """How the values of the metric are named, written and compared."""
        return Score.of_summary(self.summary)

    @torch.no_grad()
    def predict(self, inputs: ArrayLike | Tensor | Mapping[str, Any] | tuple[Any, ...]) -> Tensor:
        """The outputs of the model for raw inputs, as the population stores them: `result.predict(pictures).argmax(1)`.

        The module itself, `result.module`, expects inputs that `population.transform` has made.
        """
        raw = each(_tensor, inputs if isinstance(inputs, Mapping | tuple) else _tensor(inputs))
        if found := problem(raw):
            raise UsageError(f"predict needs raw inputs as {KINDS}, with a row per sample; found {found}.")
        count = len(parts(raw)[0])
        if not count:
            raise UsageError("predict needs at least one input, found none.")
        device = next(self.module.parameters()).device
        self.module.eval()
        outputs = []
        for start in range(0, count, BATCH):
            batch = each(lambda tensor: tensor[start : start + BATCH].to(device, copy=True), raw)  # noqa: B023 - used at once
            outputs.append(applied(self.module, self.population.transform(batch)))
        return torch.cat(outputs)

    def client_accuracy(self, clients: Iterable[int] | None = None, metric: Any = None) -> dict[int, float]:
        """The metric of the run, or another, on the own samples of every client, or of these, by client.

        A client on whose samples it is undefined, such as one without samples, is left out.
        """
        chosen: Metric = self.metric if metric is None else metric_of(metric)
        numbers = range(self.population.clients) if clients is None else clients
        accuracies = {}
        for client in numbers:
            samples = samples_of(self.population.train(client), "train")
            if len(samples):
                total, count = chosen.sums(self.predict(samples.inputs), samples.labels)
                if count:
                    accuracies[client] = chosen.final(float(total) / float(count))
        return accuracies

    def frame(self) -> Any:
        """The journal as a data frame of pandas, one row per round; lists per client are left out."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise MissingExtra("analysis", "Result.frame") from error
        rows = [{key: value for key, value in line.items() if not isinstance(value, dict)} for line in self.journal]
        return pandas.DataFrame(rows).set_index("round") if rows else pandas.DataFrame()

    def save(self, folder: Path | str) -> None:
        """Write the result of a run without a folder into one, which `gluefl.load` reads."""
        path = Path(folder)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UsageError(f"{path} is not an empty folder: choose another one for the result.")
        named = self.module.state_dict().items()
        model = to_bytes({name: writable(value) for name, value in named if isinstance(value, Tensor)})
        files.make_folder(path)
        files.write(path / CONFIG, self.configuration)
        with files.replacing(path / JOURNAL) as file:
            file.writelines(seal(line) for line in self.journal)
        write_result(path, self.configuration, model, self.summary)

    def plot(self) -> Any:
        """A figure of matplotlib: the metric against what was downloaded."""
        try:
            figures = importlib.import_module("matplotlib.figure")
        except ImportError as error:
            raise MissingExtra("report", "Result.plot") from error
        figure = figures.Figure(figsize=(5, 3), layout="constrained")
        axes, (megabytes, accuracies) = figure.subplots(), self._curve()
        axes.plot(megabytes, accuracies, marker=".")
        axes.set(xlabel="download, MB", ylabel=self.score.name, title=self.summary["strategy"])
        axes.grid(alpha=0.3)
        return figure

    def _curve(self) -> tuple[list[float], list[float]]:
        downloaded = np.cumsum([line["down_bytes"] for line in self.journal]) / 1e6
        points = [(at, line["accuracy"]) for at, line in zip(downloaded, self.journal) if line["accuracy"] is not None]
        return [float(x) for x, _ in points], [y for _, y in points]

    def __repr__(self) -> str:
        summary, value = self.summary, self.summary["mean_accuracy"]
        reached = "" if value is None else f", {self.score.name} {self.score.text(value)}"
        return (
            f"Result({summary['strategy']}: {summary['rounds']} rounds{reached}, {summary['down_bytes']:,} bytes down)"
        )

    def _repr_png_(self) -> bytes | None:
        """The plot, in a notebook."""
        try:
            figure, io = self.plot(), importlib.import_module("io")
        except MissingExtra:
            return None
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=150)
        return bytes(buffer.getvalue())


def _tensor(values: Any) -> Any:
    return values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))


def percentiles(accuracies: Sequence[float]) -> dict[str, float] | None:
    """The distribution of a metric over clients: {"p5": …, "p50": …, "p95": …}; None without clients."""
    if not accuracies:
        return None
    return {f"p{p}": float(np.percentile(accuracies, p)) for p in PERCENTILES}
