"""A validation share of any population: samples, or clients, that take part in no training.

Targets are decided on them, while the test samples are used after the last round only.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gluefl.errors import DataError
from gluefl.parameters import OpenShare, Seed, checked
from gluefl.populations import Samples, inline, samples_of, together
from gluefl.randomness import stream

By = Literal["samples", "clients"]
SHARE = 0.1


@checked
@dataclass(frozen=True)
class HeldOut:
    """A population without its validation share, which `validation` returns.

    by "samples": `share` of the samples of every client, rounded up or down at random, so that it is right on
    average; every client keeps one sample at least. by "clients": all samples of `share` of the clients, which are
    then no clients any more; the others move up in their order.

    >>> train(model, HeldOut(population, by="clients", share=0.2), GlueFL())
    """

    population: Any
    by: By = "samples"
    share: OpenShare = SHARE
    seed: Seed = 0

    def problems(self) -> Iterator[str]:
        """There must be data to take a share of."""
        if not all(hasattr(self.population, name) for name in ("clients", "size", "train", "test", "transform")):
            yield f"population is a {type(self.population).__name__}, which is no population"
        elif hasattr(self.population, "validation"):
            yield "this population has validation samples already"
        elif self.by == "clients" and self.population.clients < 2:
            yield f"by 'clients' needs 2 clients at least; found {self.population.clients}"

    @property
    def clients(self) -> int:
        """The number of clients that train."""
        return len(self._kept) if self.by == "clients" else int(self.population.clients)

    @property
    def classes(self) -> int:
        """As the population."""
        return int(self.population.classes)

    @property
    def shape(self) -> tuple[int, ...]:
        """As the population."""
        return tuple(self.population.shape)

    def size(self, client: int) -> int:
        """The number of training samples of a client, without its validation share."""
        own = self._original(client)
        size = int(self.population.size(own))
        return size if self.by == "clients" else size - self._count(own, size)

    def train(self, client: int) -> Samples:
        """The training samples of a client, without its validation share."""
        own = self._original(client)
        samples = self._samples(own)
        return samples if self.by == "clients" else samples[self._split(own, len(samples))[0]]

    def validation(self) -> Samples:
        """What was held out. It is read from all clients it belongs to."""
        if self.by == "clients":
            kept = set(self._kept.tolist())
            parts = [self._samples(client) for client in range(self.population.clients) if client not in kept]
        else:
            parts = []
            for client in range(self.population.clients):
                if self._count(client, int(self.population.size(client))):
                    samples = self._samples(client)
                    parts.append(samples[self._split(client, len(samples))[1]])
        parts = [part for part in parts if len(part)]
        if not parts:
            raise DataError(f"a share of {self.share:g} of the {self.by} is none: raise held_out_share.")
        return together(parts)

    def test(self) -> Samples:
        """The test samples of the population."""
        return samples_of(self.population.test(), f"{type(self.population).__name__}.test()")

    def transform(self, inputs: Any) -> Any:
        """As the population."""
        return self.population.transform(inputs)

    def __repr__(self) -> str:
        return inline(self, name=f"HeldOut {self.share:g} of the {self.by} of {type(self.population).__name__}")

    @cached_property
    def _kept(self) -> NDArray[np.int64]:
        """The clients of the population that train."""
        total = int(self.population.clients)
        aside = min(total - 1, max(1, round(self.share * total)))
        return np.sort(stream(self.seed, "validation").permutation(total)[aside:])

    def _original(self, client: int) -> int:
        return int(self._kept[client]) if self.by == "clients" else client

    def _samples(self, client: int) -> Samples:
        return samples_of(self.population.train(client), f"{type(self.population).__name__}.train({client})")

    def _count(self, client: int, size: int) -> int:
        chance = stream(self.seed, "validation", client).random()
        return max(0, min(size - 1, math.floor(self.share * size + chance)))

    def _split(self, client: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The rows that train, and those that are held out."""
        count = self._count(client, size)
        order = stream(self.seed, "validation rows", client).permutation(size)
        return np.sort(order[count:]), np.sort(order[:count])
