"""Training on this machine: on its CPU cores or on one GPU."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
        jobs = [self._job(client, round) for client in clients]
        yield from self.trainer.train(weights, statistics, jobs, self.sgd, self.sgd.rate(round), frozen)

    def work(self, client: int) -> int:
        """Samples that pass through the model: steps times batch."""
        return self.sgd.steps_for(self.population.size(client)) * self.sgd.batch

    def _job(self, client: int, round: int) -> Job:
        samples = self._samples(client)
        if not len(samples):
            raise DataError(f"client {client} has no samples to train on: leave it out of the population.")
        rng = stream(self.seed, "batches", round, client)
        return Job(client, samples, self.sgd.batches(rng, len(samples)), seed=int(rng.integers(2**31)))

    def _samples(self, client: int) -> Samples:
        if self.device.type == "cpu":
            return self.population.train(client)

        def move() -> Samples:
            samples = self.population.train(client)
            return Samples(samples.inputs.to(self.device), samples.labels.to(self.device))

        return self.near.get(client, move)
