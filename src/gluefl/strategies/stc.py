"""STC: Sattler et al., Robust and Communication-Efficient Federated Learning, 2019.

By default Algorithm 1 of the GlueFL paper: top-q on the clients and top-q on the server, values as they are. The
original has ternary values, a sign times one magnitude, feeds both compression errors back, and its clients download
the updates that they missed: `STC(0.01, "plain", server_feedback=True, ternary=True, cached_updates=50)`. Without
`cached_updates` clients download the weights that changed, as with every strategy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gluefl.parameters import NonNegativeCount, Share, checked
from gluefl.strategies import Space, Task, Traits, Upload, plain_sum, weighted_sum
from gluefl.strategies.compensation import Compensation, compensate, remember
from gluefl.vectors.mask import Mask
from gluefl.vectors.selection import counts, top
from gluefl.vectors.sparse import Masked, Sparse, part_of
from gluefl.wire.ternary import Signs
from gluefl.wire.updates import TernaryUpdates, Updates


@dataclass(frozen=True)
class Cache:
    """The updates of the last rounds, a byte for every coordinate of each."""

    signs: Tensor  # of `Updates`
    magnitudes: Tensor
    rounds: tuple[int, ...] = ()  # of the updates; a round without uploads has none
    since: int = 0  # the version after which nothing is missing here

    def with_update(self, update: Sparse, round: int, most: int) -> "Cache":
        """The cache after a round, with the newest `most` updates."""
        signs = torch.cat([self.signs, _signs(update).unsqueeze(0)])[-most:]
        magnitudes = torch.cat([self.magnitudes, _magnitude(update)])[-most:]
        dropped = self.rounds[0] if len(self.rounds) == most else self.since
        return Cache(signs, magnitudes, (*self.rounds, round)[-most:], dropped)


@dataclass(frozen=True)
class STCState:
    """What the server's own top-q left out so far, if it is fed back."""

    space: Space
    residual: Tensor | None = None
    cache: Cache | None = None


@checked
@dataclass(frozen=True)
class STC:
    """Clients upload the share q of largest coordinates of their update; the server publishes those of the sum."""

    q: Share = 0.2  # share of the coordinates that are sent
    compensation: Compensation = "none"  # what becomes of the part of an update that is not sent
    server_feedback: bool = False  # the server adds what its top-q left out to the next sum
    scope: Literal["vector", "tensor"] = "vector"  # top-q of the whole vector, or of every tensor
    ternary: bool = False  # every value of an update becomes its sign times the mean magnitude of all of them
    cached_updates: NonNegativeCount = 0  # the server keeps so many updates for downloads; not on Flower

    def problems(self) -> Iterator[str]:
        """Updates are shorter than weights only if they are ternary."""
        if self.cached_updates and not self.ternary:
            yield f"cached_updates = {self.cached_updates} needs ternary = true"

    def traits(self, space: Space) -> Traits:
        """Values travel as float32, ternary ones of uploads as signs and one magnitude. An optimiser may not change an
        update that is kept for later downloads."""
        if self.cached_updates:
            return Traits(Signs(), TernaryUpdates(), optimizer_acts_on="sum", optimizer_may_remember=False)
        return Traits(upload_codec=Signs()) if self.ternary else Traits()

    def init(self, space: Space, initial: Tensor) -> tuple[STCState, Tensor]:
        """Nothing left out yet."""
        residual = torch.zeros_like(initial) if self.server_feedback else None
        if not self.cached_updates:
            return STCState(space, residual), initial
        signs = torch.zeros(0, initial.numel(), dtype=torch.int8, device=initial.device)
        return STCState(space, residual, Cache(signs, initial[:0])), initial

    def mask(self, state: STCState, round: int) -> Mask:
        """Nothing is known to both sides."""
        return state.space.mask(False)

    def frozen(self, mask: Mask) -> Mask | None:
        """Nothing."""
        return None

    def compress(self, delta: Tensor, task: Task, residual: Tensor | None) -> tuple[Sparse, Tensor | None]:
        """Line 10: top_q of the update."""
        delta = compensate(delta, residual, task.weight, self.compensation)
        sent = self._sparse(delta, task.space, task.round)
        return sent, remember(delta, sent, task.weight, self.compensation)

    @plain_sum
    def combine(self, state: STCState, uploads: Sequence[Upload], round: int) -> Tensor:
        """Σ ν_i Δ_i."""
        return weighted_sum(uploads, state.space)

    def aggregate(self, state: STCState, total: Tensor, round: int) -> tuple[STCState, Sparse]:
        """Line 14: top_q of the weighted sum, with what was left out before if that is fed back."""
        if state.residual is not None:
            total = total + state.residual
        update = self._sparse(total, state.space, round)
        if state.residual is not None:
            rest = update.add_to(total.clone(), -1) if self.ternary else update.set_in(total.clone(), 0)
            state = replace(state, residual=rest)
        if state.cache is not None:
            state = replace(state, cache=state.cache.with_update(update, round, self.cached_updates))
        return state, update

    def updates(self, state: STCState, base: int) -> Updates | None:
        """What clients that hold this version missed, if all of it is kept."""
        cache = state.cache
        if cache is None or base < cache.since:
            return None
        first = sum(round <= base for round in cache.rounds)
        return Updates(cache.signs[first:], cache.magnitudes[first:])

    def without_updates(self, state: STCState, version: int) -> STCState:
        """With an empty cache, if there is one."""
        cache = state.cache
        if cache is None:
            return state
        return replace(state, cache=Cache(cache.signs[:0], cache.magnitudes[:0], since=version))

    def _sparse(self, vector: Tensor, space: Space, round: int) -> Sparse:
        """The largest coordinates of a vector, ternary if so chosen."""
        segments = space.segments(self.scope)
        chosen = top(vector, counts(self.q, segments, at_least=1), segments, round)
        return _ternary(part_of(vector, _signed(vector, chosen))) if self.ternary else part_of(vector, chosen)


def _signed(vector: Tensor, chosen: Mask) -> Mask:
    """The chosen coordinates that are not zero, because a bit has no code for zero. If all are zero, all are kept and
    the magnitude is 0: an update without positions could not be cached."""
    bits = chosen.bits & (vector != 0)
    return Mask(torch.where(bits.any(), bits, chosen.bits))


def _ternary(update: Sparse) -> Sparse:
    """The signs of values times their mean magnitude."""
    if isinstance(update, Masked):  # listing positions would synchronise with a GPU
        sizes = update.vector.abs().masked_fill(~update.mask.bits, 0)
        mean = (sizes.sum(dtype=torch.float64) / update.mask.bits.sum()).float()
        return Masked(update.mask, torch.where(update.vector < 0, -mean, mean), update.covers)
    mean = update.values.abs().mean(dtype=torch.float64).float()
    return update.with_values(torch.where(update.values < 0, -mean, mean))


def _signs(update: Sparse) -> Tensor:
    """−1, 0 or 1 for every coordinate of a ternary update."""
    if isinstance(update, Masked):
        return (1 - 2 * torch.signbit(update.vector).to(torch.int8)) * update.mask.bits
    signs = torch.zeros(update.size, dtype=torch.int8, device=update.values.device)
    return signs.index_copy_(0, update.positions, 1 - 2 * torch.signbit(update.values).to(torch.int8))


def _magnitude(update: Sparse) -> Tensor:
    """The magnitude of a ternary update, as a vector of one entry."""
    return (update.vector if isinstance(update, Masked) else update.values)[:1].abs()
