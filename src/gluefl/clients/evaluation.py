"""Evaluation of the global model: loss and metric on the test samples, or on those that are held out for it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from gluefl.clients.metrics import IGNORED, TOP_1, Metric, weight
from gluefl.clients.rules import Loss
from gluefl.errors import DataError
from gluefl.populations import Population, Samples, samples_of
from gluefl.populations.inputs import applied
from gluefl.vectors.layout import Layout


@dataclass(frozen=True)
class Evaluation:
    """The quality of a model."""

    accuracy: float  # the value of the metric, whatever it measures
    loss: float


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Evaluator:
    """Evaluates flat vectors in large batches: on a population's validation samples if it has any, else on its test
    samples. The loss is a mean over labels that are not −100, and so is a metric that is one number per label."""

    module: nn.Module
    layout: Layout
    population: Population
    loss: Loss
    metric: Metric = TOP_1
    batch: int = 1000
    device: torch.device = CPU

    @property
    def decides_on(self) -> str:
        """The samples on which targets are decided: "validation" or "test"."""
        return "validation" if hasattr(self.population, "validation") else "test"

    def check(self) -> None:
        """Refuse a population without samples for the evaluations of a run, before anything is trained."""
        self._usable(self._deciding, self.decides_on)
        if self.decides_on != "test":
            self._usable(self.population.test(), "test")

    def __call__(self, weights: Tensor, statistics: Tensor) -> Evaluation:
        """Metric and loss on the samples on which targets are decided."""
        self._load(weights, statistics)
        return self._evaluate(self._deciding)

    def test(self, weights: Tensor, statistics: Tensor) -> Evaluation:
        """Metric and loss on the test samples."""
        self._load(weights, statistics)
        return self._evaluate(self._usable(self.population.test(), "test"))

    def clients(self, weights: Tensor, statistics: Tensor, clients: Sequence[int]) -> list[float]:
        """The metric on the own samples of each of these clients, without those on whose samples it is undefined."""
        self._load(weights, statistics)
        own = [self._evaluate(self._moved(self.population.train(client), "train")).accuracy for client in clients]
        return [accuracy for accuracy in own if not math.isnan(accuracy)]

    def _load(self, weights: Tensor, statistics: Tensor) -> None:
        self.layout.fill(self.module, weights, statistics)
        self.module.eval()

    @torch.no_grad()
    def _evaluate(self, samples: Samples) -> Evaluation:
        metric, loss = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        count, labelled = metric.double(), metric.double()
        for at in range(0, len(samples), self.batch):
            batch = samples[at : at + self.batch].copied()
            outputs = applied(self.module, self.population.transform(batch.inputs))
            known = weight(batch.labels)
            # Where all labels of a batch are −100, there is no mean loss.
            loss += torch.where(known > 0, self.loss(outputs, batch.labels) * known, 0)
            labelled += known
            if self.metric.function is not None:
                total, divisor = self.metric.sums(outputs, batch.labels)
                metric += total
                count += divisor
        mean_loss = _ratio(loss, labelled)
        mean = mean_loss if self.metric.function is None else _ratio(metric, count)
        return Evaluation(math.nan if math.isnan(mean) else self.metric.final(mean), mean_loss)

    @cached_property
    def _deciding(self) -> Samples:
        return self._usable(getattr(self.population, self.decides_on)(), self.decides_on)

    def _usable(self, given: object, kind: str) -> Samples:
        samples = self._moved(given, kind)
        if not len(samples):
            raise DataError(f"the population has no {kind} samples: there is nothing to evaluate the model on.")
        if not weight(samples.labels):
            raise DataError(f"all labels of the {kind} samples are {IGNORED}, which means unknown: give others.")
        return samples

    def _moved(self, given: object, member: str) -> Samples:
        return samples_of(given, f"{type(self.population).__name__}.{member}()").to(self.device)


def _ratio(total: Tensor, count: Tensor) -> float:
    """Not a number where there is nothing to divide by."""
    divisor = float(count)
    return float(total) / divisor if divisor else math.nan
