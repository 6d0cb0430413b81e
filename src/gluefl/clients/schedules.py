"""Learning rates as functions of the round: `LocalSGD(schedule=Falling("cosine", lr=0.1, rounds=200, warmup=5))`.

In a configuration: `[training] schedule = "cosine"`, with `lr`, `lr_min`, `schedule_rounds` and `warmup`. Any function
of the round's number is a schedule, too: `LocalSGD(schedule=lambda round: 0.1 / round)`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gluefl.parameters import Count, NonNegative, NonNegativeCount, Positive, checked

Shape = Literal["cosine", "linear"]


@checked
@dataclass(frozen=True)
class Falling:
    """A rate that rises in equal steps for `warmup` rounds and then falls from `lr` towards `lr_min`."""

    shape: Shape
    lr: Positive
    rounds: Count  # up to which it falls; later rounds have the last rate
    warmup: NonNegativeCount = 0
    lr_min: NonNegative = 0.0

    def problems(self) -> Iterator[str]:
        """The rate must have rounds to fall in, and somewhere to fall to."""
        if self.warmup >= self.rounds:
            yield f"warmup = {self.warmup} must be below rounds = {self.rounds}: no round would be left to fall in"
        if self.lr_min > self.lr:
            yield f"lr_min = {self.lr_min} must not be above lr = {self.lr}"

    def __call__(self, round: int) -> float:
        """The rate of a round, counted from 1; it is positive in the last one, too."""
        if round <= self.warmup:
            return self.lr * round / (self.warmup + 1)
        done = (min(round, self.rounds) - 1 - self.warmup) / (self.rounds - self.warmup)
        left = (1 + math.cos(math.pi * done)) / 2 if self.shape == "cosine" else 1 - done
        return self.lr_min + (self.lr - self.lr_min) * left
