"""The cohort of a round, and who trains it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gluefl.clients.rules import Outcome

__all__ = ["Cohort", "Engine", "Outcome"]


@dataclass(frozen=True)
class Cohort:
    """The clients that train in a round, and what all of them start from."""

    round: int
    clients: tuple[int, ...]
    weights: Tensor
    statistics: Tensor
    frozen: Tensor | None = None  # coordinates that must not move


class Engine(Protocol):
    """Trains cohorts, on this machine or elsewhere."""

    def train(self, cohort: Cohort) -> Iterator[Outcome]:
        """One outcome per client, in any order."""
        ...

    def work(self, client: int) -> int:
        """How many samples pass through the model when this client trains in a round."""
        ...
