"""Evaluation of the global model: loss and accuracy on the test samples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from gluefl.clients.rules import Loss
from gluefl.errors import DataError
from gluefl.populations import Population, Samples
from gluefl.vectors.layout import Layout

Metric = Callable[[Tensor, Tensor], Tensor]  # (outputs, labels) → one number per sample, averaged later


def top_1(outputs: Tensor, labels: Tensor) -> Tensor:
    """Whether the best guess is right."""
    return (outputs.argmax(1) == labels).float()


def top_5(outputs: Tensor, labels: Tensor) -> Tensor:
    """Whether one of the five best guesses is right."""
    best = outputs.topk(min(5, outputs.shape[1]), dim=1).indices
    return (best == labels.unsqueeze(1)).any(1).float()


METRICS: dict[str, Metric] = {"top1": top_1, "top5": top_5}


@dataclass(frozen=True)
class Evaluation:
    """The quality of a model."""

    accuracy: float
    loss: float


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Evaluator:
    """Evaluates flat vectors on a population's test samples, in large batches."""

    module: nn.Module
    layout: Layout
    population: Population
    loss: Loss
    metric: Metric = top_1
    batch: int = 1000
    device: torch.device = CPU

    def __call__(self, weights: Tensor, statistics: Tensor) -> Evaluation:
        """Accuracy and loss on the test samples."""
        self._load(weights, statistics)
        return self._evaluate(self._test)

    def clients(self, weights: Tensor, statistics: Tensor, clients: Sequence[int]) -> list[float]:
        """The accuracy on the own samples of each of these clients."""
        self._load(weights, statistics)
        return [self._evaluate(self._moved(self.population.train(client))).accuracy for client in clients]

    def _load(self, weights: Tensor, statistics: Tensor) -> None:
        self.layout.fill(self.module, weights, statistics)
        self.module.eval()

    @torch.no_grad()
    def _evaluate(self, samples: Samples) -> Evaluation:
        right, loss = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        for at in range(0, len(samples), self.batch):
            labels = samples.labels[at : at + self.batch]
            outputs = self.module(self.population.transform(samples.inputs[at : at + self.batch]))
            right += self.metric(outputs, labels).sum()
            loss += self.loss(outputs, labels) * len(labels)
        return Evaluation(float(right) / len(samples), float(loss) / len(samples))

    @cached_property
    def _test(self) -> Samples:
        samples = self._moved(self.population.test())
        if not len(samples):
            raise DataError("the population has no test samples: there is nothing to evaluate the model on.")
        return samples

    def _moved(self, samples: Samples) -> Samples:
        return Samples(samples.inputs.to(self.device), samples.labels.to(self.device))
