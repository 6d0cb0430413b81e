"""APF: Chen et al., Communication-Efficient Federated Learning with Adaptive Parameter Freezing, 2021.

A parameter whose updates cancel out is stable: it is frozen for a while, neither trained nor sent, then tried
again. The longer it stays stable the longer it is frozen (additive increase, multiplicative decrease).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gluefl.parameters import Count, Decay, Positive, Share, checked
from gluefl.strategies import Space, Task, Traits, Upload, plain_sum, weighted_sum
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import Sparse, part_of


@dataclass(frozen=True)
class APFState:
    """Per parameter: moving averages of the change and of its magnitude, and how long it is frozen."""

    space: Space
    accumulated: Tensor  # Δ since the last check
    average: Tensor  # E
    magnitude: Tensor  # A
    period: Tensor  # L, in rounds
    frozen_until: Tensor  # the last round in which it is frozen
    threshold: float


@checked
@dataclass(frozen=True)
class APF:
    """Parameters that have become stable are frozen for a while: they are neither trained nor sent."""

    threshold: Positive = 0.1  # of the effective perturbation |E| / A
    check_every: Count = 5  # F_c, rounds between checks of stability
    decay: Decay = 0.99  # α, of the moving averages
    tighten_at: Share | None = None  # halve the threshold when this share is frozen, as the original does

    def traits(self, space: Space) -> Traits:
        """Values travel as float32."""
        return Traits()

    def init(self, space: Space, initial: Tensor) -> tuple[APFState, Tensor]:
        """Everything is active."""
        zeros, never = torch.zeros_like(initial), torch.zeros_like(initial, dtype=torch.int32)
        return APFState(space, zeros, zeros, zeros, never, never, self.threshold), initial

    def mask(self, state: APFState, round: int) -> Mask:
        """The active parameters."""
        return Mask(state.frozen_until < round)

    def frozen(self, mask: Mask) -> Mask | None:
        """What is not active does not move on the clients either."""
        return mask.complement

    def compress(self, delta: Tensor, task: Task, residual: Tensor | None) -> tuple[Sparse, Tensor | None]:
        """The active part of the update."""
        return part_of(delta, task.mask, covers=task.mask), None

    @plain_sum
    def combine(self, state: APFState, uploads: Sequence[Upload], round: int) -> Tensor:
        """Σ ν_i Δ_i."""
        return weighted_sum(uploads, state.space)

    def aggregate(self, state: APFState, total: Tensor, round: int) -> tuple[APFState, Sparse]:
        """The active part of the model moves; every F_c rounds it is decided what is active."""
        active = self.mask(state, round)
        update = part_of(total, active)
        state = replace(state, accumulated=update.add_to(state.accumulated.clone()))
        return (self._check(state, active.bits, round) if round % self.check_every == 0 else state), update

    def _check(self, state: APFState, active: Tensor, round: int) -> APFState:
        change = state.accumulated
        average = torch.where(active, self.decay * state.average + (1 - self.decay) * change, state.average)
        magnitude = torch.where(active, self.decay * state.magnitude + (1 - self.decay) * change.abs(), state.magnitude)
        # |E| < threshold · A is |E| / A < threshold, with 0/0 to be counted as stable.
        stable = active & ((average.abs() < state.threshold * magnitude) | (magnitude == 0))
        period = torch.where(stable, state.period + self.check_every, state.period)
        period = torch.where(active & ~stable, period // 2, period)
        frozen_until = torch.where(stable, round + period, state.frozen_until)
        threshold = state.threshold
        if self.tighten_at is not None and float((frozen_until > round).float().mean()) >= self.tighten_at:
            threshold /= 2
        return replace(
            state,
            accumulated=torch.zeros_like(change),
            average=average,
            magnitude=magnitude,
            period=period,
            frozen_until=frozen_until,
            threshold=threshold,
        )
