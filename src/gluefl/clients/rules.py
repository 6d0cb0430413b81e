"""Local SGD for a whole cohort. `loop` is the reference; every other trainer gives the same deltas."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gluefl.parameters import Count, Decay, NonNegative, Positive, Share, checked
from gluefl.populations import Samples

Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs, labels) → mean loss of the batch


@checked
@dataclass(frozen=True)
class LocalSGD:
    """How a client trains: SGD with a momentum that starts fresh every round, for some steps or epochs."""

    steps: Count | None = None  # E; 10 where neither steps nor epochs is given
    epochs: Positive | None = None  # passes over the client's samples, instead of steps
    batch: Count = 20
    lr: Positive = 0.01  # γ
    momentum: Decay = 0.9
    weight_decay: NonNegative = 0.0
    proximal: NonNegative = 0.0  # FedProx's μ
    lr_decay: Share = 0.98
    lr_decay_every: Count = 10
    lr_min: NonNegative = 0.0

    def __post_init__(self) -> None:
        if self.steps is None and self.epochs is None:
            object.__setattr__(self, "steps", 10)

    def problems(self) -> Iterator[str]:
        """Steps and epochs are two units of one length."""
        if self.steps is not None and self.epochs is not None:
            yield "give steps or epochs, not both"

    def rate(self, round: int) -> float:
        """The learning rate of a round: lowered by `lr_decay` after every `lr_decay_every` rounds."""
        return max(self.lr_min, self.lr * self.lr_decay ** ((round - 1) // self.lr_decay_every))

    def steps_for(self, samples: int) -> int:
        """How many batches a client with this many samples trains on."""
        if self.steps is not None:
            return self.steps
        return max(1, math.ceil((self.epochs or 1) * samples / self.batch))

    def batches(self, rng: np.random.Generator, samples: int) -> Tensor:
        """Indices of (steps, batch): consecutive slices of concatenated permutations, so that every batch is
        full and every sample is seen once a pass."""
        steps = self.steps_for(samples)
        passes = -(-steps * self.batch // samples)
        order = np.concatenate([rng.permutation(samples) for _ in range(passes)])
        return torch.from_numpy(order[: steps * self.batch].reshape(steps, self.batch))


@dataclass(frozen=True)
class Job:
    """One client's work in one round."""

    client: int
    samples: Samples
    batches: Tensor
    seed: int = 0  # of whatever the model itself draws (dropout)


@dataclass(frozen=True)
class Outcome:
    """What local training gave: Δ_i, the statistics after it, the mean loss over its steps. On a GPU all of it may
    still be under way."""

    client: int
    delta: Tensor
    statistics: Tensor
    loss: float | Tensor  # a tensor is one number: to make it a float is to wait for it


class Trainer(Protocol):
    """Trains a cohort. Outcomes may come in any order; between two of them somebody may evaluate the same module."""

    def train(
        self,
        weights: Tensor,
        statistics: Tensor,
        jobs: Sequence[Job],
        sgd: LocalSGD,
        lr: float,
        frozen: Tensor | None,
    ) -> Iterator[Outcome]:
        """Train every job from the same weights; `frozen` coordinates do not move."""
        ...
