"""A strategy of one's own beside STC and lean: hard thresholds (Sahu et al., NeurIPS 2021).

    python examples/own_strategy.py

STC sends a fixed share of an update. Here a client sends whatever is larger than `threshold` standard deviations of
its update, and the server publishes its sum by the same rule: a quiet round costs few bytes. What was not sent is the
client's residual. `docs/your-own-strategy.md` explains the seven functions.
"""

from dataclasses import dataclass

import torch

import gluefl
from gluefl.models import build as build_model
from gluefl.parameters import Positive, checked
from gluefl.populations import build as build_population
from gluefl.strategies import Traits, weighted_sum
from gluefl.strategies.compensation import compensate, remember
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import part_of


@checked
@dataclass(frozen=True)
class Threshold:
    """Coordinates above a multiple of the standard deviation, in both directions."""

    threshold: Positive = 2.0

    def traits(self, space):
        """Values travel as float32; the server's optimiser acts on the update."""
        return Traits()

    def init(self, space, initial):
        """The server's state, nothing but the sizes of the model, and version 0."""
        return space, initial

    def mask(self, state, round):
        """No positions are known beforehand: they travel beside the values."""
        return state.mask(False)

    def frozen(self, mask):
        """Clients train everything."""
        return None

    def large(self, vector):
        """The part of a vector that is sent."""
        return part_of(vector, Mask(vector.abs() > self.threshold * vector.square().mean().sqrt()))

    def compress(self, delta, task, residual):
        """Client: add what was left over, send what is large, remember the rest."""
        delta = compensate(delta, residual, task.weight, "rescaled")
        sent = self.large(delta)
        return sent, remember(delta, sent, task.weight, "rescaled")

    def combine(self, state, uploads, round):
        """Server: Σ ν_i Δ_i."""
        return weighted_sum(uploads, state)

    def aggregate(self, state, total, round):
        """Server: publish what is large of the sum."""
        return state, self.large(total)


def main(rounds=30):
    torch.manual_seed(0)
    population = build_population("glyphs", clients=100, difficulty=0.5, label_skew=0.5)
    model = build_model("mlp", classes=population.classes, channels=1)
    sampler, setting = gluefl.Uniform(cohort=10), gluefl.Setting(training=gluefl.LocalSGD(lr=0.05))
    strategies = {"threshold": (Threshold(), sampler), "stc": (gluefl.STC(q=0.1), sampler), "lean": gluefl.Lean()}
    compared = gluefl.compare(model, population, strategies, rounds=rounds, setting=setting)
    print(compared)
    return compared


if __name__ == "__main__":
    main()
