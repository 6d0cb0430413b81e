"""The Gaussian mechanism on the server (McMahan et al., ICLR 2018): a strategy around another one."""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gluefl.core.sampling import Sampler, Sticky, Uniform
from gluefl.errors import UsageError
from gluefl.parameters import Has, Positive, Seed, Share, checked
from gluefl.randomness import stream
from gluefl.strategies import PARTS, KeepsUpdates, MeasuresUploads, Space, Strategy, Task, Traits, Upload
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import Sparse
from gluefl.wire.updates import Updates


@checked
@dataclass(frozen=True)
class Private:
    """A strategy whose server limits what a client adds to the sum, and adds Gaussian noise to the sum.

    What a client adds, its weight times its decoded update, is scaled down to the norm `clip` · `weight` at most:
    after decoding, because error compensation and codecs change norms. The noise has the standard deviation
    `noise` · `clip` · `weight` in every coordinate, before the strategy selects any. `epsilon` says what that gives.

    Noise of the source "seeded" is repeatable and can be computed by everybody who knows the seed: for experiments.
    "system" draws from the operating system's cryptographic source, and no run repeats another.

    >>> sampler = Uniform(cohort=100)
    >>> Private(FedAvg(), clip=0.5, noise=1.0, weight=largest_weight(sampler, clients=10_000))
    """

    strategy: Annotated[Strategy, Has(PARTS)]
    clip: Positive  # S, norm of an update
    noise: Positive  # z, noise multiplier
    weight: Share  # with which an update may enter the sum in full
    source: Literal["seeded", "system"] = "seeded"
    seed: Seed = 1  # of the source "seeded"

    def traits(self, space: Space) -> Traits:
        """Those of the strategy inside."""
        return self.strategy.traits(space)

    def init(self, space: Space, initial: Tensor) -> tuple[Any, Tensor]:
        """The state of the strategy inside; refuses models with statistics, which would travel without noise."""
        if space.statistics:
            raise UsageError(
                f"Private limits and hides what clients send of the weights; this model or rule also sends "
                f"{space.statistics_size} statistics, in the clear. Use a model without BatchNorm (GroupNorm has no "
                "statistics) and a local rule that exchanges no second vector."
            )
        return self.strategy.init(space, initial)

    def mask(self, state: Any, round: int) -> Mask:
        """That of the strategy inside."""
        return self.strategy.mask(state, round)

    def frozen(self, mask: Mask) -> Mask | None:
        """What the strategy inside freezes."""
        return self.strategy.frozen(mask)

    def compress(self, delta: Tensor, task: Task, residual: Tensor | None) -> tuple[Sparse, Tensor | None]:
        """What the strategy inside sends: the server limits it, and need not trust the client to."""
        return self.strategy.compress(delta, task, residual)

    def combine(self, state: Any, uploads: Sequence[Upload], round: int) -> Tensor:
        """The sum of limited contributions, with noise."""
        total = torch.zeros(())
        for upload in uploads:
            added = self.strategy.combine(state, [upload], round)
            total = total.to(added.device) + added * limit(added, self.clip * self.weight)
        deviation = self.noise * self.clip * self.weight
        return total + deviation * self._drawn(total.numel(), round).to(total.device)

    def aggregate(self, state: Any, total: Tensor, round: int) -> tuple[Any, Sparse]:
        """What the strategy inside makes of the sum."""
        return self.strategy.aggregate(state, total, round)

    def updates(self, state: Any, base: int) -> Updates | None:
        """Those that the strategy inside keeps."""
        return self.strategy.updates(state, base) if isinstance(self.strategy, KeepsUpdates) else None

    def without_updates(self, state: Any, version: int) -> Any:
        """What the strategy inside makes of it."""
        return self.strategy.without_updates(state, version) if isinstance(self.strategy, KeepsUpdates) else state

    def measured(self, sent: Tensor, space: Space) -> tuple[float, Tensor] | None:
        """What the strategy inside measures: a guard judges uploads before they are limited."""
        return self.strategy.measured(sent, space) if isinstance(self.strategy, MeasuresUploads) else None

    def _drawn(self, size: int, round: int) -> Tensor:
        if self.source == "system":
            return torch.from_numpy(system_normal(size).astype(np.float32))
        rng = stream(self.seed, "privacy", round)
        return torch.from_numpy(rng.standard_normal(size, dtype=np.float32))


def limit(vector: Tensor, norm: float) -> Tensor:
    """The factor, 1 at most, that scales a vector to this norm at most."""
    factor: Tensor = norm / vector.double().norm().clamp(min=norm)
    return factor.to(vector.dtype)


def system_normal(size: int) -> NDArray[np.float64]:
    """Standard normal numbers from the operating system's random bytes (Box and Muller)."""
    pairs = (size + 1) // 2
    bits = np.frombuffer(secrets.token_bytes(16 * pairs), np.uint64) >> 11
    uniform = (bits + 1.0) * 2.0**-53  # above 0, at most 1
    radius, angle = np.sqrt(-2 * np.log(uniform[:pairs])), 2 * math.pi * uniform[pairs:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]


def largest_weight(sampler: Sampler, clients: int) -> float:
    """The largest weight that a sampler gives to one of this many equally important clients, if its quotas are met."""
    sampler.check(clients)
    if isinstance(sampler, Uniform):
        return 1 / sampler.cohort
    if not isinstance(sampler, Sticky):
        raise UsageError(f"the weights of {type(sampler).__name__} are not known here: give `weight` as a number.")
    inside, outside = sampler.sticky_cohort, sampler.cohort - sampler.sticky_cohort
    if sampler.weights in ("equal", "equal_sum", "proportional"):
        return 1 / sampler.cohort
    share = sampler.sticky_size / clients if sampler.weights == "unbiased" else float(sampler.weights)
    return max(share / inside, (1 - share) / outside)
