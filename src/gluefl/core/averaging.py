"""An average over the versions of the model, as the model that is evaluated and handed over. It costs no bytes."""

from collections.abc import Iterator
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
    forgotten. With a span, β grows with the run, so that the average always reaches back over at least this share of
    the rounds so far: late in a run the model moves slowly, and the mean of more versions has less noise. Statistics
    are averaged along.
    """

    average: Decay = 0.0  # β: the average reaches back over 1/(1−β) rounds
    span: Decay = 0.0  # of the rounds so far, if that is more

    def problems(self) -> Iterator[str]:
        """A span is that of an average."""
        if self.span and not self.average:
            yield f"span = {self.span} needs an average above 0"

    def init(self, weights: Tensor, statistics: Tensor) -> Average | None:
        """The average before round 1: version 0."""
        return (weights, statistics) if self.average else None

    def step(self, average: Average | None, weights: Tensor, statistics: Tensor, round: int) -> Average | None:
        """The average after a round."""
        if average is None:
            return None
        share = self.share(round)
        return average[0].lerp(weights, share), average[1].lerp(statistics, share)

    def share(self, round: int) -> float:
        """1 − β in a round: how much of the average is the newest version."""
        decay, rounds = self.average, self.span * round
        if rounds > 1:
            decay = max(decay, 1 - 1 / rounds)
        return 1 - min(decay, (1 + round) / (WARM_UP + round))
