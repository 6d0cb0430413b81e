"""Training on this machine: on its CPU cores or on one GPU."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from cachetools import LRUCache

from gluefl.accel.streams import moved
from gluefl.accel.threads import submit
from gluefl.clients.cohort import Cohort, Job, Outcome, Trainer
from gluefl.clients.rules import LocalRule
from gluefl.errors import DataError, UsageError
from gluefl.populations import Population, Samples, samples_of
from gluefl.randomness import stream

CPU = torch.device("cpu")


@dataclass(frozen=True)
class LocalEngine:
    """Looks up the data of a cohort, draws its batches and hands both to a trainer.

    On a GPU it keeps the data of the clients it used last, up to `cache_bytes`.
    """

    population: Population
    trainer: Trainer
    rule: LocalRule
    seed: int
    device: torch.device = CPU
    cache_bytes: int = 10**9
    prepared: dict[tuple[int, int], Job] = field(default_factory=dict, init=False, compare=False)  # round and client
    cache: LRUCache[int, Samples] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache", LRUCache(self.cache_bytes, getsizeof=lambda samples: samples.nbytes))

    def prepare(self, clients: Iterable[int], round: int) -> None:
        """On a GPU: fetch the data of likely clients, as long as the cache is not half full, and draw their batches."""
        if self.device.type == "cpu":
            return
        has_room = 2 * self.cache.currsize < self.cache.maxsize
        missing = [c for c in clients if (round, c) not in self.prepared and (has_room or c in self.cache)]
        try:
            samples = self._samples(missing)
        except Exception:  # a client's data may be damaged: `train` raises this again if the client trains
            return
        self.prepared.update({(round, c): self._job(c, round, own) for c, own in samples.items() if len(own)})

    def train(self, cohort: Cohort) -> Iterator[Outcome]:
        """One outcome per client."""
        round = cohort.round
        for key in [key for key in self.prepared if key[0] < round]:
            del self.prepared[key]
        # Prepared jobs stay until the next round: the same round may be trained again with other clients.
        jobs = {client: self.prepared[round, client] for client in cohort.clients if (round, client) in self.prepared}
        samples = self._samples([client for client in cohort.clients if client not in jobs])
        jobs |= {client: self._job(client, round, own) for client, own in samples.items()}
        yield from self.trainer.train(cohort, [jobs[client] for client in cohort.clients], self.rule)

    def work(self, client: int) -> int:
        """Steps times batch."""
        return self.rule.steps_for(self.population.size(client)) * self.rule.batch

    def _samples(self, clients: Sequence[int]) -> dict[int, Samples]:
        """The clients' samples. For a GPU, missing ones are produced on all cores, then copied and cached."""
        if self.device.type == "cpu":
            return {client: self._own(client) for client in clients}
        cached = {client: self.cache[client] for client in clients if client in self.cache}
        futures = {client: submit(self._own, client) for client in clients if client not in cached}
        return cached | {client: self._moved(client, future) for client, future in futures.items()}

    def _own(self, client: int) -> Samples:
        return samples_of(self.population.train(client), f"{type(self.population).__name__}.train({client})")

    def _moved(self, client: int, future: "Future[Samples]") -> Samples:
        samples = future.result()
        near = samples.each(lambda tensor: moved(tensor, self.device))
        with suppress(ValueError):  # larger than the cache
            self.cache[client] = near
        return near

    def _job(self, client: int, round: int, samples: Samples) -> Job:
        if not len(samples):
            raise DataError(f"client {client} has no samples to train on: leave it out of the population.")
        rng = stream(self.seed, "batches", round, client)
        batches = self.rule.batches(rng, len(samples))
        if batches.dim() != 2 or not batches.numel():
            raise UsageError(
                f"{type(self.rule).__name__} made batches of shape {tuple(batches.shape)} for client {client}; needed "
                "(steps, batch), both at least 1: check its steps, epochs and batch."
            )
        return Job(client, samples, batches, seed=int(rng.integers(2**31)))
