"""GlueFL: He et al., Reconciling Client Sampling and Model Masking for Bandwidth Efficient Federated Learning, 2023.

This file is mask shifting (§3.2, Algorithm 3) with mask regeneration and error compensation (§3.3); sticky
sampling is `gluefl.core.sampling.Sticky`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from gluefl.parameters import Rounds, Share, checked
from gluefl.strategies import Space, Task, Traits, Upload, plain_sum, weighted_sum
from gluefl.strategies.compensation import Compensation, compensate, remember
from gluefl.vectors.mask import Mask
from gluefl.vectors.selection import count, counts, top
from gluefl.vectors.sparse import Sparse, part_of


@dataclass(frozen=True)
class GlueFLState:
    """M^t, the mask that the next update shares with the last one."""

    space: Space
    shared: Mask


@checked
@dataclass(frozen=True)
class GlueFL:
    """Consecutive updates share most of their coordinates, so that a client that skipped rounds misses little."""

    q: Share = 0.2  # share of the coordinates that are sent
    q_shared: Share = 0.16  # q_shr, the share that the shared mask covers
    regenerate_every: Rounds = 10  # I, in rounds; "never" (in Python None) is the paper's I = ∞
    compensation: Compensation = "rescaled"  # what becomes of the part of an update that is not sent
    scope: Literal["vector", "tensor"] = "vector"  # top-q of the whole vector, or of every tensor

    def problems(self) -> Iterator[str]:
        """The shared mask must leave a unique part."""
        if self.q_shared >= self.q:
            yield (
                f"q_shared = {self.q_shared} must be below q = {self.q}: "
                "without a unique part the mask could never move"
            )

    def traits(self, space: Space) -> Traits:
        """Values travel as float32."""
        return Traits()

    def init(self, space: Space, initial: Tensor) -> tuple[GlueFLState, Tensor]:
        """No mask yet: round 1 regenerates it."""
        return GlueFLState(space, space.mask(False)), initial

    def mask(self, state: GlueFLState, round: int) -> Mask:
        """M^t; empty in round 1 and in every I-th round after it, where the mask is regenerated."""
        regenerates = round == 1 or (self.regenerate_every is not None and (round - 1) % self.regenerate_every == 0)
        return state.space.mask(False) if regenerates else state.shared

    def frozen(self, mask: Mask) -> Mask | None:
        """Nothing."""
        return None

    def compress(self, delta: Tensor, task: Task, residual: Tensor | None) -> tuple[Sparse, Tensor | None]:
        """Lines 13–14: everything in the shared mask, and the largest of the rest."""
        delta = compensate(delta, residual, task.weight, self.compensation)
        unique = self._unique(delta, task.mask, task.space, task.round)
        sent = part_of(delta, task.mask.joined(unique), covers=task.mask)
        return sent, remember(delta, sent, task.weight, self.compensation)

    @plain_sum
    def combine(self, state: GlueFLState, uploads: Sequence[Upload], round: int) -> Tensor:
        """Line 16: Σ ν_i Δ_i."""
        return weighted_sum(uploads, state.space)

    def aggregate(self, state: GlueFLState, total: Tensor, round: int) -> tuple[GlueFLState, Sparse]:
        """Lines 17–22: the update, and the mask that the next one will share with it."""
        mask = self.mask(state, round)
        changed = mask.joined(self._unique(total, mask, state.space, round))
        segments = state.space.segments(self.scope)
        budgets = [max(1, count(self.q, part.size)) - 1 for part in changed.split(segments)]  # one is never shared
        keep = [min(own, most) for own, most in zip(counts(self.q_shared, segments), budgets, strict=True)]
        shared = top(total, keep, segments, round, among=changed)
        return replace(state, shared=shared), part_of(total, changed, covers=mask)

    def _unique(self, vector: Tensor, mask: Mask, space: Space, round: int) -> Mask:
        """top_{q−q_shr}(¬M ⊙ Δ): what the mask leaves of the budget, so the whole of it when M is empty."""
        segments = space.segments(self.scope)
        keep = [max(1, count(self.q, part.size)) - part.count for part in mask.split(segments)]
        return top(vector, keep, segments, round, among=mask.complement)
