"""An average over the versions of the model, as the model that is evaluated and handed over. It costs no bytes."""

from dataclasses import dataclass

from torch import Tensor

from gluefl.parameters import Decay, checked

Average = tuple[Tensor, Tensor]  # weights and statistics
WARM_UP = 10  # rounds: how fast the average forgets the first versions


@checked
@dataclass(frozen=True)
class Averaging:
    """An exponential average: a ← β·a + (1−β)·w after every round, with β = 0 for none.

    In round t, β is at most (1+t) / (10+t): the first versions, which are far from the later ones, are soon
    forgotten. Statistics are averaged along.
    """

    average: Decay = 0.0  # β

    def init(self, weights: Tensor, statistics: Tensor) -> Average | None:
        """The average before round 1: version 0."""
        return (weights, statistics) if self.average else None

    def step(self, average: Average | None, weights: Tensor, statistics: Tensor, round: int) -> Average | None:
        """The average after a round."""
        if average is None:
            return None
        share = 1 - min(self.average, (1 + round) / (WARM_UP + round))
        return average[0].lerp(weights, share), average[1].lerp(statistics, share)
