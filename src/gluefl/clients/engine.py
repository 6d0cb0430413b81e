"""Training on this machine: on its CPU cores or on one GPU."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import torch

from gluefl.accel.streams import moved
from gluefl.accel.threads import submit
from gluefl.clients.cohort import Cohort
from gluefl.clients.rules import Job, LocalSGD, Outcome, Trainer
from gluefl.errors import DataError
from gluefl.populations import Population, Samples
from gluefl.populations.shelf import Shelf
from gluefl.randomness import stream

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
    ready: dict[tuple[int, int], Job] = field(default_factory=dict, compare=False)  # by round and client

    def prepare(self, clients: Iterable[int], round: int) -> None:
        """On a GPU: fetch their data, if it can be kept for another time, and draw their batches."""
        if self.device.type == "cpu":
            return
        room = 2 * self.near.bytes < self.near.limit
        some = [c for c in clients if (round, c) not in self.ready and (room or c in self.near)]
        try:
            found = self._samples(some)
        except Exception:  # what is wrong with a client's data is said if it trains
            return
        self.ready.update({(round, c): self._job(c, round, samples) for c, samples in found.items() if len(samples)})

    def train(self, cohort: Cohort) -> Iterator[Outcome]:
        """One outcome per client."""
        round, clients = cohort.round, cohort.clients
        weights, statistics, frozen = cohort.weights, cohort.statistics, cohort.frozen
        ready = {client: self.ready[round, client] for client in clients if (round, client) in self.ready}
        for key in [key for key in self.ready if key[0] < round]:  # of this one other clients may be trained yet
            del self.ready[key]
        samples = self._samples([client for client in clients if client not in ready])
        jobs = [ready.get(client) or self._job(client, round, samples[client]) for client in clients]
        yield from self.trainer.train(weights, statistics, jobs, self.sgd, self.sgd.rate(round), frozen)

    def work(self, client: int) -> int:
        """Samples that pass through the model: steps times batch."""
        return self.sgd.steps_for(self.population.size(client)) * self.sgd.batch

    def _samples(self, clients: Sequence[int]) -> dict[int, Samples]:
        """What the clients train on. Off the CPU it is brought there, made on all cores, and kept for the next time."""
        if self.device.type == "cpu":
            return {client: self.population.train(client) for client in clients}
        new = {client: submit(self.population.train, client) for client in clients if client not in self.near}
        return {client: self.near.get(client, partial(self._moved, new, client)) for client in clients}

    def _moved(self, new: Mapping[int, "Future[Samples]"], client: int) -> Samples:
        samples = new[client].result() if client in new else self.population.train(client)
        return Samples(*(moved(values, self.device) for values in (samples.inputs, samples.labels)))

    def _job(self, client: int, round: int, samples: Samples) -> Job:
        if not len(samples):
            raise DataError(f"client {client} has no samples to train on: leave it out of the population.")
        rng = stream(self.seed, "batches", round, client)
        return Job(client, samples, self.sgd.batches(rng, len(samples)), seed=int(rng.integers(2**31)))
