"""The server's own step on what the clients' updates add up to."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import torch
from pydantic import Field
from torch import Tensor

from gluefl.errors import UsageError
from gluefl.parameters import Decay, Positive, checked
from gluefl.strategies import Space, Strategy
from gluefl.vectors.sparse import Masked, Sparse

Adaptivity = Annotated[float, Field(ge=1e-18, le=1e18)]  # τ; its square must fit into float32
Moments = tuple[Tensor, Tensor]  # m, v


class Optimizer(Protocol):
    """A step of the server. `Traits.optimizer_acts_on` of the strategy says whether it is given the sum of all
    updates, as a whole vector, or the update that is published. The state is a tree, as that of a strategy."""

    def init(self, space: Space) -> Any:
        """The state before round 1."""
        ...

    def step(self, state: Any, update: Sparse) -> tuple[Any, Sparse]:
        """The next state, and the update to use instead, on the same positions."""
        ...


def move(optimizer: Optimizer, state: Any, update: Sparse) -> tuple[Any, Sparse]:
    """A step of any optimiser; refuses one that moves other positions than the strategy chose."""
    state, stepped = optimizer.step(state, update)
    if not _same_positions(stepped, update):
        raise UsageError(
            f"{type(optimizer).__name__}.step returned {stepped.count} positions where the strategy chose "
            f"{update.count} of {update.size}: a dense momentum would undo a sparse update. Return values at the "
            "positions that it is given, update.with_values(…), or choose lean, whose latent weights keep the momentum."
        )
    return state, stepped


def check_memory(optimizer: Optimizer, strategy: Strategy, space: Space) -> None:
    """Refuse an optimiser with momentum or moments where they would act before the selection of what is published."""
    if strategy.traits(space).optimizer_may_remember or optimizer.init(space) is None:
        return
    raise UsageError(
        f"{type(optimizer).__name__} keeps a momentum or moments of every coordinate, and {type(strategy).__name__} "
        "lets an optimiser act before it selects what is published: the steps of all other coordinates would be lost. "
        "Choose float32 packages, where it acts on the published positions, FedAvg, or lean, whose latent weights "
        "keep them."
    )


def _same_positions(one: Sparse, other: Sparse) -> bool:
    if one.size != other.size:
        return False
    if one.is_whole and other.is_whole:
        return True
    if isinstance(one, Masked) and isinstance(other, Masked):  # listing positions would synchronise with a GPU
        return one.mask is other.mask or torch.equal(one.mask.bits, other.mask.bits)
    return one.positions is other.positions or torch.equal(one.positions, other.positions)


@checked
@dataclass(frozen=True)
class Server:
    """SGD: w ← w + lr · v, v ← momentum · v + Δ, on the positions of Δ.

    A velocity that moved every coordinate in every round would make every update dense and undo what masking saves.
    """

    lr: Positive = 1.0  # by default 1 for sgd, 0.01 for adam and yogi, 0.1 for adagrad
    momentum: Decay = 0.0  # of sgd: 0 by default

    def init(self, space: Space) -> Tensor | None:
        """The velocity before round 1."""
        return torch.zeros(space.size, device=space.device) if self.momentum else None

    def step(self, state: Tensor | None, update: Sparse) -> tuple[Tensor | None, Sparse]:
        """The next velocity and the update to publish."""
        if state is None:
            return None, update if self.lr == 1 else _stepped((), update, lambda delta, _: (self.lr * delta, ()))[1]

        def rule(delta: Tensor, velocities: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
            velocity = self.momentum * velocities[0] + delta
            return velocity if self.lr == 1 else self.lr * velocity, (velocity,)

        (velocity,), update = _stepped((state,), update, rule)
        return velocity, update


@checked
@dataclass(frozen=True)
class Adam:
    """FedAdam (Reddi et al., Adaptive Federated Optimization, 2021): m ← β₁·m + (1−β₁)·Δ,
    v ← β₂·v + (1−β₂)·Δ², w ← w + lr · m / (√v + τ), without bias correction, from m = 0 and v = τ².

    As every optimiser of the server it acts on the positions of Δ alone. FedAvg and lean give it every coordinate.
    The updates of STC, APF and GlueFL have few: there the moments are those of the rounds in which a coordinate was
    selected.
    """

    lr: Positive = 0.01
    beta_1: Decay = 0.9  # β₁: by default 0.9 for adam and yogi, 0 for adagrad
    beta_2: Decay = 0.99  # β₂ of adam and yogi: 0.99 by default
    tau: Adaptivity = 1e-3  # τ of all but sgd: 0.001 by default

    def init(self, space: Space) -> Moments:
        """The moments before round 1."""
        return _moments(space, self.tau)

    def step(self, state: Moments, update: Sparse) -> tuple[Moments, Sparse]:
        """The next moments and the update to use."""
        return _adaptive(self, state, update, lambda v, square: self.beta_2 * v + (1 - self.beta_2) * square)


@checked
@dataclass(frozen=True)
class Yogi:
    """FedYogi: as `Adam`, with v ← v − (1−β₂)·Δ²·sign(v − Δ²), which lets v fall slowly."""

    lr: Positive = 0.01
    beta_1: Decay = 0.9
    beta_2: Decay = 0.99
    tau: Adaptivity = 1e-3

    def init(self, space: Space) -> Moments:
        """The moments before round 1."""
        return _moments(space, self.tau)

    def step(self, state: Moments, update: Sparse) -> tuple[Moments, Sparse]:
        """The next moments and the update to use."""
        share = 1 - self.beta_2
        return _adaptive(self, state, update, lambda v, square: v - share * square * torch.sign(v - square))


@checked
@dataclass(frozen=True)
class Adagrad:
    """FedAdagrad: as `Adam`, with v ← v + Δ², and no momentum by default."""

    lr: Positive = 0.1
    beta_1: Decay = 0.0
    tau: Adaptivity = 1e-3

    def init(self, space: Space) -> Moments:
        """The moments before round 1."""
        return _moments(space, self.tau)

    def step(self, state: Moments, update: Sparse) -> tuple[Moments, Sparse]:
        """The next moments and the update to use."""
        return _adaptive(self, state, update, torch.add)


def _moments(space: Space, tau: float) -> Moments:
    zeros = torch.zeros(space.size, device=space.device)
    return zeros, torch.full_like(zeros, tau**2)


def _adaptive(
    optimizer: Adam | Yogi | Adagrad, state: Moments, update: Sparse, second: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Moments, Sparse]:
    """A step along m, coordinate by coordinate in units of √v; `second` gives the next v from v and Δ²."""

    def rule(delta: Tensor, moments: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        m = optimizer.beta_1 * moments[0] + (1 - optimizer.beta_1) * delta
        v = second(moments[1], delta.square())
        return optimizer.lr * m / (v.sqrt() + optimizer.tau), (m, v)

    (m, v), update = _stepped(state, update, rule)
    return (m, v), update


def _stepped(
    state: tuple[Tensor, ...],
    update: Sparse,
    rule: Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, tuple[Tensor, ...]]],
) -> tuple[tuple[Tensor, ...], Sparse]:
    """Apply a rule for every coordinate at the positions of an update; the state elsewhere stays as it is."""
    if update.is_whole:
        values, state = rule(update.values, state)
        return state, update.with_values(values)
    if isinstance(update, Masked):  # listing positions would synchronise with a GPU
        vector, moved = rule(update.vector, state)
        bits = update.mask.bits
        kept = tuple(torch.where(bits, new, old) for new, old in zip(moved, state, strict=True))
        return kept, Masked(update.mask, vector, update.covers)
    positions = update.positions
    values, moved = rule(update.values, tuple(one.index_select(0, positions) for one in state))
    kept = tuple(old.index_copy(0, positions, new) for new, old in zip(moved, state, strict=True))
    return kept, update.with_values(values)


OPTIMIZERS = {"sgd": Server, "adam": Adam, "yogi": Yogi, "adagrad": Adagrad}
