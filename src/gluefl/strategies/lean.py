"""Lean: a published model on a grid, so that a client downloads only the cells that changed, as small integers.

The server keeps its model in full precision, the latent vector. What it publishes, what clients train from, is that
vector rounded to a grid: version 0 plus a whole number of steps, one power of two per tensor. A coordinate is
published anew when the latent value has moved far enough from the published one; the rest stays latent and is
published in a later round. Uploads are rotated and take about one bit per coordinate (`vectors.rotation`); clients keep
no state. With sticky sampling (He et al., MLSys 2023) most clients took part recently and miss few cells.
`docs/lean.md` explains the parameters and measures them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from gluefl.errors import UsageError
from gluefl.parameters import Count, Positive, Share, checked
from gluefl.strategies import Space, Task, Traits, Upload
from gluefl.vectors import grid
from gluefl.vectors.mask import Mask
from gluefl.vectors.rotation import MOST_CLIENTS, Rotated
from gluefl.vectors.sparse import Sparse, part_of, whole
from gluefl.wire.body_codecs import CellBodies, RotatedBodies
from gluefl.wire.cells import CellCodec
from gluefl.wire.floats8 import Floats8, rounded
from gluefl.wire.rotated import rotated_codec

SMOOTHING = 0.9  # of the share of coordinates that change in a round
PENDING_ROUNDS = 20  # over which the coordinates of a refined tensor are published
STATISTICS_HYSTERESIS = 0.75  # they are measured anew in every round, with noise
MEAN_CELLS = 2**12  # of version 0: in the largest mean of a tensor, about
MOST_CELLS = 2**20  # steps in the largest weight of a tensor: sums of grid values stay exact in float32
MOST_REFINED = 2**12  # times, of a step that was taken from a first update
NEVER = float("inf")  # a step that nothing crosses


@dataclass(frozen=True)
class LeanState:
    """Weights and statistics as one vector; `steps` and what follows it have one entry per tensor."""

    space: Space
    latent: Tensor
    published: Tensor  # what clients hold
    origin: Tensor  # version 0
    steps: Tensor  # Δ
    finest: Tensor  # the smallest step
    coarsest: Tensor  # the largest; 0 of a tensor without spread, which it takes from how far it moves
    slack: Tensor  # in steps: how far the latent value may be from the published one
    shares: Tensor  # of the coordinates that change in a round, smoothed
    updates: int = 0  # so far


@checked
@dataclass(frozen=True)
class Lean:
    """Clients download the cells of a grid that changed, as small integers, and upload about one bit per weight."""

    step: Positive = 0.5  # s: a tensor's first step, in standard deviations of its initial weights
    movement: Positive = 6.0  # a first step is at least so many rms of the first update, limited by the model's mean
    coarsest: Positive = 2.0  # the largest step, in the unit of `step`
    step_of_first_update: Positive = 8.0  # first step of a constant tensor, in rms of its first update
    step_of_statistics: Positive = 0.0625  # step of BatchNorm means, in rms of their first update
    origin_cells: Annotated[Count, Field(le=2**10)] = (
        4  # version 0 is on a grid so many times finer than the first step
    )
    hysteresis: Annotated[Positive, Field(ge=0.5)] = 0.55  # h, in steps: coordinates further away are published
    refine_below: Share = 0.0001  # halve a tensor's step when a smaller share of it changes in a round
    coarsen_above: Share = 0.05  # double it when a larger share changes, of it and of all weights
    upload_bits: Annotated[Count, Field(le=4)] = 1  # per coordinate of an upload, at most 4
    upload_share: Share = 1.0  # p, the share of the rotated coordinates that is sent
    upload_block: Count = 4096  # coordinates that are rotated together and share a scale
    upload_rounding: Literal["nearest", "stochastic"] = "nearest"  # of rotated coordinates
    upload_rotation: Literal["client", "round"] = "client"  # one per client and round, or one per round

    def problems(self) -> Iterator[str]:
        """The limits must leave room for steps."""
        if self.coarsest < self.step:
            yield f"coarsest = {self.coarsest} must be at least step = {self.step}"
        if self.refine_below >= self.coarsen_above:
            yield (
                f"refine_below = {self.refine_below} must be below coarsen_above = {self.coarsen_above}: "
                "a step would be halved and doubled in turn"
            )
        if self.origin_cells & (self.origin_cells - 1):
            yield f"origin_cells = {self.origin_cells} must be a power of two, as every step is"
        yield from Rotated.problems_of_block(self.upload_block)

    @property
    def rotated(self) -> Rotated:
        """How updates are compressed."""
        return Rotated(
            self.upload_bits, self.upload_share, self.upload_block, self.upload_rounding, self.upload_rotation
        )

    def traits(self, space: Space) -> Traits:
        """Cells down, rotated codes and eight-bit statistics up; the optimiser acts on the latent vector."""
        if any(statistic.kind == "exchanged" for statistic in space.statistics):
            raise UsageError(
                "lean has no grid for the second vector that this local rule exchanges (SCAFFOLD's control variates, "
                "for instance): choose another rule, or FedAvg, STC, APF or GlueFL."
            )
        sizes = tuple(statistic.size for statistic in space.statistics)
        variances = tuple(statistic.kind == "variance" for statistic in space.statistics)
        cells = CellCodec((*space.tensors, *sizes), (*(False for _ in space.tensors), *variances))
        uploads = RotatedBodies(rotated_codec(self.rotated, space.size), Floats8(sizes))
        return Traits(uploads, CellBodies(cells), "sum", covers="everything", most_clients=MOST_CLIENTS)

    def init(self, space: Space, initial: Tensor) -> tuple[LeanState, Tensor]:
        """Version 0: weights on a grid finer than the first steps, means on one, variances on the logarithmic grid."""
        segments, moving = space.segments_of_all, _weights(space)
        spreads, largest = (numbers.to(space.device) for numbers in grid.spreads(initial, segments.sizes))
        finest = 2 * grid.power_of_two(largest / MOST_CELLS)
        spreads = torch.where(moving, spreads, 0.0)
        steps = grid.power_of_two(spreads * self.step)
        steps = torch.where(steps > 0, steps.maximum(finest), 0.0)
        first = torch.where(steps > 0, steps, grid.power_of_two(largest) / 256)  # of a constant: eight bits
        fine = torch.where(moving, first / self.origin_cells, grid.power_of_two(largest) / MEAN_CELLS)
        whole_numbers = torch.tensor([factor == 0 for factor in self._factors(space)], device=space.device)
        origin = grid.on_grid(initial, segments.spread(torch.where((fine == 0) | whole_numbers, 1.0, fine)))
        statistics = torch.where(space.variances, grid.logarithmic(initial[space.size :]), origin[space.size :])
        origin = torch.cat([origin[: space.size], statistics])
        state = LeanState(
            space,
            latent=initial,
            published=origin,
            origin=origin,
            steps=torch.where(steps > 0, steps, NEVER),
            finest=finest,
            coarsest=grid.power_of_two(spreads * self.coarsest),
            slack=torch.where(moving, self.hysteresis, STATISTICS_HYSTERESIS),
            shares=torch.full_like(steps, (self.refine_below * self.coarsen_above) ** 0.5),
        )
        return state, origin

    def mask(self, state: LeanState, round: int) -> Mask:
        """Nothing: the mask is not chosen, it emerges from what has moved."""
        return state.space.mask(False)

    def frozen(self, mask: Mask) -> Mask | None:
        """Nothing."""
        return None

    def compress(self, delta: Tensor, task: Task, residual: Tensor | None) -> tuple[Sparse, Tensor | None]:
        """Codes of the rotated update, and the change of the statistics."""
        size = task.space.size
        codes = self.rotated.compress(delta[:size], task.seed, task.round, task.client)
        return whole(torch.cat([codes, rounded(delta[size:], task.space.statistics_segments)])), None

    def measured(self, sent: Tensor, space: Space) -> tuple[float, Tensor]:
        """The length of the rotated update, which is that of the update, and the change of the statistics."""
        codes = self.rotated.size(space.size)
        return self.rotated.length(sent[:codes], space.size), sent[codes:]

    def combine(self, state: LeanState, uploads: Sequence[Upload], round: int) -> Tensor:
        """Σ ν_i Δ_i of the weights, and the mean change of the statistics."""
        size, rotated = state.space.size, self.rotated
        weights, clients = [upload.weight for upload in uploads], [upload.client for upload in uploads]
        statistics: list[Tensor] = []

        def codes() -> Iterator[Tensor]:  # one by one: all of a large model do not fit into memory
            for upload in uploads:
                vector = upload.update.values
                statistics.append(vector[rotated.size(size) :].clone())
                yield vector[: rotated.size(size)]

        total = rotated.combine(codes(), weights, size, uploads[0].seed, round, clients)
        return torch.cat([total, torch.stack(statistics).mean(0)])

    def aggregate(self, state: LeanState, total: Tensor, round: int) -> tuple[LeanState, Sparse]:
        """Move the latent vector, and publish the coordinates that are too far from it."""
        space, segments, old = state.space, state.space.segments_of_all, state.published
        # A statistic is measured anew in every round: what its rounding left out is not carried over.
        latent = torch.cat([state.latent[: space.size], old[space.size :]]) + total
        moves = segments.means(total.square()).sqrt()
        steps, finest = self._first_steps(state, moves)
        widths = segments.spread(steps)
        target, distance = grid.nearest(latent, state.origin, widths), (latent - old).abs() / widths
        target, distance = _with_variances(space, latent, old, target, distance)
        changes = ~(distance <= segments.spread(state.slack)) & (target != old)  # also what is not finite
        published = torch.where(changes, target, old)
        updates = state.updates + 1
        state = replace(state, latent=latent, published=published, steps=steps, finest=finest, updates=updates)
        update = _exact_change(state, old, Mask(changes))
        return self._controlled(state, segments.means(changes), moves), update

    def _first_steps(self, state: LeanState, moves: Tensor) -> tuple[Tensor, Tensor]:
        """Steps, and the smallest ones, from the rms of an update by tensor. A tensor that has no step takes it from
        its first update. In the first of all updates the others become coarser by a factor that follows from their
        movement; its mean over the model is the limit, so that fast tensors of a slow model keep their precision."""
        lacks, segments = state.steps == NEVER, state.space.segments_of_all
        factors = segments.numbers(self._factors(state.space))
        if state.updates == 0:
            coarser = self.movement * moves / state.steps
            sizes = torch.where(lacks, 0, segments.lengths)
            mean = (coarser.double() * sizes).sum() / sizes.sum().clamp(min=1)
            coarse = torch.where(lacks, 0.0, state.steps) * grid.power_of_two(coarser.minimum(mean.float()))
            state = replace(state, steps=state.steps.maximum(coarse.minimum(state.coarsest)))
        steps = grid.power_of_two(factors * moves)
        starts, steps = lacks & (steps > 0), steps.maximum(state.finest)
        finest = torch.where(starts, state.finest.maximum(steps / MOST_REFINED), state.finest)
        return torch.where(lacks, torch.where(starts, steps, NEVER), state.steps), finest

    def _factors(self, space: Space) -> list[float]:
        """By tensor: the first step in rms of the first update; 0 for variances and counters, which have no step."""
        of_statistics = [self.step_of_statistics if one.kind == "mean" else 0.0 for one in space.statistics]
        return [self.step_of_first_update] * len(space.tensors) + of_statistics

    def _controlled(self, state: LeanState, changed: Tensor, moves: Tensor) -> LeanState:
        """Rate control: steps follow the share of coordinates that changed. A refined tensor is published over
        several rounds, so that no round is flooded. A tensor without spread becomes at most as coarse as it would
        begin today: its first update may have been small, for instance at a learning rate that rises."""
        weights, has_step = _weights(state.space), state.steps < NEVER
        shares = torch.where(has_step, SMOOTHING * state.shares + (1 - SMOOTHING) * changed, state.shares)
        sizes = state.space.segments_of_all.lengths[: len(state.space.tensors)]
        changed_of_all = (shares[: len(sizes)] * sizes).sum() / sizes.sum()
        settled = weights & (state.slack <= self.hysteresis)
        finer = settled & (shares < self.refine_below) & (state.steps / 2 >= state.finest)
        large = changed_of_all > self.coarsen_above
        coarsest = torch.where(state.coarsest > 0, state.coarsest, grid.power_of_two(self.step_of_first_update * moves))
        coarser = settled & large & (shares > self.coarsen_above) & (state.steps * 2 <= coarsest)
        slack = (state.slack - self.hysteresis / PENDING_ROUNDS).maximum(torch.full_like(shares, self.hysteresis))
        factor = torch.where(finer, 0.5, torch.where(coarser, 2.0, 1.0))
        return replace(
            state,
            steps=state.steps * factor,
            slack=torch.where(finer, 2 * self.hysteresis, torch.where(weights, slack, state.slack)),
            shares=shares / factor,
        )


def _weights(space: Space) -> Tensor:
    """Which of the tensors are weights."""
    return torch.arange(len(space.segments_of_all.sizes), device=space.device) < len(space.tensors)


def _exact_change(state: LeanState, old: Tensor, changes: Mask) -> Sparse:
    """What is published minus what was; NaN where a sum with it or a difference to version 0 would be rounded: weights
    that are so many steps large have diverged."""
    space, published = state.space, state.published
    places = slice(None) if published.is_cuda else changes.positions  # listing positions synchronises with a GPU
    logarithmic = torch.cat([space.variances.new_zeros(space.size), space.variances])  # they have no difference
    update = published - old
    new, origin, change = published[places], state.origin[places], update[places]
    moved = new - origin
    exact = (origin + moved == new) & (new - moved == origin) | logarithmic[places]
    update[places] = torch.where(exact & (old[places] + change == new), change, torch.nan)
    return part_of(update, changes)


def _with_variances(
    space: Space, latent: Tensor, old: Tensor, target: Tensor, distance: Tensor
) -> tuple[Tensor, Tensor]:
    """Targets and distances, with those of variances on their logarithmic grid: no variance is ever published as 0."""
    values, published = latent[space.size :], old[space.size :]
    values = values.clamp(published / grid.FACTOR, torch.where(published > 0, published * grid.FACTOR, NEVER))
    values = torch.where(torch.isfinite(latent[space.size :]), values, torch.nan)
    near, away = grid.logarithmic(values), grid.logarithmic_distance(values, published).abs()
    return (
        torch.cat([target[: space.size], torch.where(space.variances, near, target[space.size :])]),
        torch.cat([distance[: space.size], torch.where(space.variances, away, distance[space.size :])]),
    )
