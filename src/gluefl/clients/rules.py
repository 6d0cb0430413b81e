"""Local rules: how a client moves its weights in a round.

A rule is three plain functions on flat tensors, `init`, `step` and `final`, and a schedule of batches and learning
rates. The reference trainer (`trainers/loop.py`) and `torch.func.vmap` (`trainers/stacked.py`) run any rule as it is;
other trainers have faster forms of some rules and agree with the reference.

A rule of one's own inherits the schedule's fields and adds the three functions:

>>> @dataclass(frozen=True)
... class SignSGD(Schedule):
...     def init(self, context):
...         return ()
...     def step(self, state, weights, gradient, context):
...         return state, weights - context.lr * gradient.sign()
...     def final(self, state, weights, context):
...         return Final(weights - context.start)
"""

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from gluefl.clients.precision import Precision
from gluefl.errors import UsageError
from gluefl.parameters import Count, Decay, NonNegative, Positive, Share, check_inherited, checked

MOST_SAMPLES = 10**8  # of a client in a round: their indices are listed
FALLING = ("lr_decay", "lr_decay_every", "lr_min")  # how a rate falls without a schedule
Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs, labels) → mean loss of the batch


@dataclass(frozen=True)
class Context:
    """What a rule knows about a client's round. All vectors are flat."""

    start: Tensor  # the weights of the round
    lr: float  # the learning rate of the round
    round: int
    frozen: Tensor | None = None  # coordinates that must not move; the trainer holds them, see `advance`
    memory: Tensor | None = None  # what this client kept at its last participation, zeros before the first
    received: Tensor | None = None  # the second vector, as the server holds it


@dataclass(frozen=True)
class Final:
    """The result of a client's round."""

    delta: Tensor
    memory: Tensor | None = None  # kept by this client until its next participation
    sent: Tensor | None = None  # the second vector; the server averages it over the cohort


class Rule(Protocol):
    """A local rule on flat tensors. Its functions are pure: they return new tensors and change none.

    The state is a tensor or a (nested) tuple of tensors, `()` if there is none, so that `torch.func.vmap` maps over
    it: `step` must neither convert tensors to numbers nor branch on their values.
    """

    @property
    def batch(self) -> int:
        """Samples of one step."""
        ...

    def rate(self, round: int) -> float:
        """The learning rate of a round."""
        ...

    def steps_for(self, samples: int) -> int:
        """The number of steps of a client with this many samples."""
        ...

    def batches(self, rng: np.random.Generator, samples: int) -> Tensor:
        """Indices of samples, (steps, batch)."""
        ...

    def kept(self, size: int) -> int:
        """The length of the vector that a client keeps between its rounds, for a model of `size` weights."""
        ...

    def exchanged(self, size: int) -> int:
        """The length of the second vector that travels both ways beside a model of `size` weights."""
        ...

    def init(self, context: Context) -> Any:
        """The state before the first step."""
        ...

    def step(self, state: Any, weights: Tensor, gradient: Tensor, context: Context) -> tuple[Any, Tensor]:
        """The state and the weights after a step."""
        ...

    def final(self, state: Any, weights: Tensor, context: Context) -> Final:
        """What the client sends and keeps after its last step."""
        ...


@checked
@dataclass(frozen=True)
class Schedule:
    """The batches and learning rates of a rule. By default a rule keeps nothing and exchanges no second vector."""

    steps: Count | None = None  # E; by default 10, unless epochs is given
    epochs: Positive | None = None  # passes over the client's samples, instead of steps
    batch: Count = 20  # samples per step
    lr: Positive = 0.01  # γ, the learning rate of round 1
    lr_decay: Share = field(default=0.98, kw_only=True)  # γ is multiplied by it after every lr_decay_every rounds
    lr_decay_every: Count = field(default=10, kw_only=True)  # rounds
    lr_min: NonNegative = field(default=0.0, kw_only=True)  # the smallest γ
    schedule: Callable[[int], float] | None = field(default=None, kw_only=True)  # γ by round, instead of lr_decay
    precision: Precision | None = field(default=None, kw_only=True)  # of forward passes; float32 by default

    def __post_init__(self) -> None:
        if self.steps is None and self.epochs is None:
            object.__setattr__(self, "steps", 10)
        check_inherited(self, Schedule)

    def problems(self) -> Iterator[str]:
        """Steps and epochs are two units of one length; a rate falls to `lr_min`."""
        if self.steps is not None and self.epochs is not None:
            yield "give steps or epochs, not both"
        if self.schedule is not None:
            for key in FALLING:
                if getattr(self, key) != getattr(Schedule, key):
                    yield f"{key} = {getattr(self, key)} has no effect beside a schedule: remove one of them"
        if self.schedule is None and 0 < self.lr < self.lr_min:
            yield f"lr_min = {self.lr_min} must not be above lr = {self.lr}"

    def rate(self, round: int) -> float:
        """The learning rate of a round: lowered by `lr_decay` after every `lr_decay_every` rounds, or by `schedule`."""
        if self.schedule is not None:
            given = self.schedule(round)
            try:
                rate = float(given)
            except (TypeError, ValueError):
                raise UsageError(f"schedule({round}) is {given!r}: a learning rate must be a number.") from None
            if not 0 < rate < math.inf:
                raise UsageError(f"schedule({round}) is {rate}: a learning rate must be positive and finite.")
            return rate
        return max(self.lr_min, self.lr * self.lr_decay ** ((round - 1) // self.lr_decay_every))

    def steps_for(self, samples: int) -> int:
        """The number of steps of a client with this many samples."""
        if self.steps is not None:
            return self.steps
        return max(1, math.ceil((self.epochs or 1) * samples / self.batch))

    def batches(self, rng: np.random.Generator, samples: int) -> Tensor:
        """Indices of (steps, batch): consecutive slices of concatenated permutations, so that every batch is
        full and every sample is seen once a pass."""
        steps = self.steps_for(samples)
        if steps * self.batch > MOST_SAMPLES:
            raise UsageError(
                f"{steps} steps of {self.batch} samples are {steps * self.batch} samples for a client and round; at "
                f"most {MOST_SAMPLES} can be drawn: lower steps, epochs or batch."
            )
        passes = -(-steps * self.batch // samples)
        order = np.concatenate([rng.permutation(samples) for _ in range(passes)])
        return torch.from_numpy(order[: steps * self.batch].reshape(steps, self.batch))

    def kept(self, size: int) -> int:
        """Nothing."""
        return 0

    def exchanged(self, size: int) -> int:
        """Nothing."""
        return 0


@checked
@dataclass(frozen=True)
class LocalSGD(Schedule):
    """SGD with a momentum that starts at zero in every round; with `proximal`, FedProx."""

    momentum: Decay = 0.9  # of sgd: 0.9 by default; it starts at zero in every round
    weight_decay: NonNegative = 0.0
    proximal: NonNegative = 0.0  # FedProx's μ; 0 by default

    def init(self, context: Context) -> Tensor:
        """The velocity."""
        return torch.zeros_like(context.start)

    def step(self, velocity: Tensor, weights: Tensor, gradient: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """One step of SGD on the loss, (weight_decay/2)·‖w‖² and (μ/2)·‖w − w^t‖²."""
        slope = gradient + self.weight_decay * weights + self.proximal * (weights - context.start)
        velocity = self.momentum * velocity + slope
        return velocity, weights - context.lr * velocity

    def final(self, velocity: Tensor, weights: Tensor, context: Context) -> Final:
        """The difference."""
        return Final(weights - context.start)


@checked
@dataclass(frozen=True)
class TorchOptimizer(Schedule):
    """Any optimiser of `torch.optim` whose `step` needs no closure, fresh in every round.

    >>> TorchOptimizer(factory=torch.optim.Adam, lr=0.001)
    >>> TorchOptimizer(factory=partial(torch.optim.SGD, momentum=0.9, nesterov=True))
    """

    factory: Callable[[list[nn.Parameter], float], torch.optim.Optimizer] = field(kw_only=True)  # (parameters, lr) →

    def build(self, parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """The optimiser of a client's round."""
        name = getattr(self.factory, "__name__", type(self.factory).__name__)
        try:
            optimizer: object = self.factory(parameters, lr)
        except Exception as error:
            raise UsageError(
                f"factory = {name} cannot be called with a list of parameters and the learning rate: {error}"
            ) from error
        if not isinstance(optimizer, torch.optim.Optimizer):
            found = type(optimizer).__name__
            raise UsageError(f"factory = {name} returned a {found}: it must return an optimiser of torch.optim.")
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UsageError(
                f"{type(optimizer).__name__} evaluates the loss several times in a step, by a closure, and a client "
                "gives it one gradient per batch: choose an optimiser whose step needs no closure."
            )
        return optimizer

    def move(self, optimizer: torch.optim.Optimizer) -> None:
        """One step with the gradients that the parameters have."""
        try:
            optimizer.step()
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:
            kind = type(optimizer).__name__
            raise UsageError(f"{kind} cannot train this model: {error}. Choose another optimiser.") from error


LocalRule = Rule | TorchOptimizer


def advance(rule: Rule, state: Any, weights: Tensor, gradient: Tensor, context: Context) -> tuple[Any, Tensor]:
    """One step of any rule in which frozen coordinates have no gradient and do not move."""
    if context.frozen is None:
        return rule.step(state, weights, gradient, context)
    state, moved = rule.step(state, weights, gradient.masked_fill(context.frozen, 0), context)
    return state, torch.where(context.frozen, context.start, moved)
