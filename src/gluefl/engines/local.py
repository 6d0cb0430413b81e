"""Training on this machine: on its CPU cores or on one GPU."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from gluefl.cores import beside
from gluefl.errors import DataError
from gluefl.populations import Population, Samples
from gluefl.populations.shelf import Shelf
from gluefl.randomness import stream
from gluefl.training import Job, LocalSGD, Outcome, Trainer

CPU = torch.device("cpu")


@dataclass(frozen=True)
class LocalEngine:
    """Looks up the data of a cohort, draws its batches and hands both to a trainer."""

    population: Population
    trainer: Trainer
    sgd: LocalSGD
    seed: int
    device: torch.device = CPU
    near: Shelf = field(default_factory=lambda: Shelf(10**9))  # GPU only: data stays there, up to so many bytes

    def train(
        self, weights: Tensor, statistics: Tensor, clients: Sequence[int], round: int, frozen: Tensor | None
    ) -> Iterator[Outcome]:
        """One outcome per client."""
        if self.device.type != "cpu":
            self._fetch(clients)
        jobs = [self._job(client, round) for client in clients]
        yield from self.trainer.train(weights, statistics, jobs, self.sgd, self.sgd.rate(round), frozen)

    def work(self, client: int) -> int:
        """Samples that pass through the model: steps times batch."""
        return self.sgd.steps_for(self.population.size(client)) * self.sgd.batch

    def _fetch(self, clients: Sequence[int]) -> None:
        """Bring what is not on the GPU there. To make or to read it takes longer than to train: on all cores."""
        new = [client for client in clients if client not in self.near]
        for client, samples in [(client, beside(self.population.train, client)) for client in new]:
            self.near.get(client, partial(self._moved, samples.result()))

    def _moved(self, samples: Samples) -> Samples:
        return Samples(samples.inputs.to(self.device), samples.labels.to(self.device))

    def _job(self, client: int, round: int) -> Job:
        samples = self._samples(client)
        if not len(samples):
            raise DataError(f"client {client} has no samples to train on: leave it out of the population.")
        rng = stream(self.seed, "batches", round, client)
        return Job(client, samples, self.sgd.batches(rng, len(samples)), seed=int(rng.integers(2**31)))

    def _samples(self, client: int) -> Samples:
        if self.device.type == "cpu":
            return self.population.train(client)
        return self.near.get(client, lambda: self._moved(self.population.train(client)))
