"""The cohort of a round, and who trains it: engines and trainers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from gluefl.clients.rules import Context, Final, LocalRule
from gluefl.populations import Samples
from gluefl.vectors.layout import Layout


@dataclass(frozen=True)
class Cohort:
    """The clients that train in a round, and what all of them start from."""

    round: int
    clients: tuple[int, ...]
    weights: Tensor
    statistics: Tensor  # of the module, then the second vector of the rule
    frozen: Tensor | None = None  # coordinates that must not move
    memories: Mapping[int, Tensor] = field(default_factory=dict)  # what clients kept, if the rule keeps anything

    def context(self, client: int, rule: LocalRule, layout: Layout) -> Context:
        """What the rule knows about one of the clients."""
        kept, exchanged = rule.kept(layout.size), rule.exchanged(layout.size)
        memory = self.memories.get(client, self.weights.new_zeros(kept)) if kept else None
        received = self.statistics[layout.tracked_size :] if exchanged else None
        return Context(self.weights, rule.rate(self.round), self.round, self.frozen, memory, received)


@dataclass(frozen=True)
class Job:
    """One client's work in one round."""

    client: int
    samples: Samples
    batches: Tensor  # indices of samples, (steps, batch)
    seed: int = 0  # of the random numbers that the model itself draws (dropout)


@dataclass(frozen=True)
class Outcome:
    """The result of local training: Δ_i, the statistics after it, the mean loss of its steps.

    On a GPU the tensors may still be computed when the outcome is returned.
    """

    client: int
    delta: Tensor
    statistics: Tensor  # of the module, then the second vector of the rule
    loss: float | Tensor  # from an asynchronous device a zero-dimensional tensor: float() synchronises
    memory: Tensor | None = None  # to be kept for this client if its update is used

    @classmethod
    def of(cls, job: Job, final: Final, statistics: Tensor, loss: float | Tensor) -> "Outcome":
        """The outcome of a rule; `statistics` are the module's."""
        if final.sent is not None:
            statistics = torch.cat([statistics, final.sent.to(statistics.dtype)])
        return cls(job.client, final.delta, statistics, loss, final.memory)


class Engine(Protocol):
    """Trains cohorts, on this machine or elsewhere.

    An engine may also have `prepare(clients, round)`, which fetches data before it is certain which of these clients
    will train.
    """

    def train(self, cohort: Cohort) -> Iterator[Outcome]:
        """One outcome per client, in any order. Nothing of it may be remembered: a round may be trained again, with
        other clients, and outcomes may be discarded."""
        ...

    def work(self, client: int) -> int:
        """How many samples pass through the model when this client trains in a round."""
        ...


def prefetch(engine: Engine, clients: Iterable[int], round: int) -> None:
    """Tell an engine that has `prepare` which clients are likely to train in a round."""
    prepare = getattr(engine, "prepare", None)
    if prepare is not None:
        prepare(clients, round)


class Trainer(Protocol):
    """Trains the jobs of a cohort; `Loop` is the reference. Outcomes may come in any order. While the caller holds
    one, it may fill and evaluate the module: the next outcome must not depend on what the module contains."""

    def train(self, cohort: Cohort, jobs: Sequence[Job], rule: LocalRule) -> Iterator[Outcome]:
        """Train every job from the weights of the cohort."""
        ...
