"""Local rules beside SGD: Adam, SCAFFOLD, and a bound on the gradient's norm around any rule.

All are plain functions on flat tensors (`clients.rules`), so that every trainer runs them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from gluefl.clients.precision import Precision, precision_of
from gluefl.clients.rules import Context, Final, LocalSGD, Rule, Schedule
from gluefl.errors import UsageError
from gluefl.parameters import Decay, Has, NonNegative, Positive, Share, checked

SMALLEST_RATE = 2.0**-126  # the smallest normal number of float32


@checked
@dataclass(frozen=True)
class LocalAdam(Schedule):
    """Adam (Kingma and Ba, 2015) that starts afresh in every round; with `weight_decay`, AdamW."""

    beta1: Decay = 0.9  # of adam: 0.9 by default
    beta2: Decay = 0.999  # of adam: 0.999 by default
    eps: Positive = 1e-8  # of adam: 1e-8 by default
    weight_decay: NonNegative = 0.0  # of sgd and adam: 0 by default

    def init(self, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Both moments, and the number of steps."""
        return torch.zeros_like(context.start), torch.zeros_like(context.start), context.start.new_zeros(())

    def step(
        self, state: tuple[Tensor, Tensor, Tensor], weights: Tensor, gradient: Tensor, context: Context
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """One step with moments corrected for their start at zero."""
        mean, square, steps = state
        mean = self.beta1 * mean + (1 - self.beta1) * gradient
        square = self.beta2 * square + (1 - self.beta2) * gradient * gradient
        steps = steps + 1
        root = (square / (1 - self.beta2**steps)).sqrt() + self.eps
        shrunk = weights * (1 - context.lr * self.weight_decay)
        return (mean, square, steps), shrunk - context.lr * mean / (1 - self.beta1**steps) / root

    def final(self, state: Any, weights: Tensor, context: Context) -> Final:
        """The difference."""
        return Final(weights - context.start)


@checked
@dataclass(frozen=True)
class Scaffold(Schedule):
    """SCAFFOLD (Karimireddy et al., 2020, option II): control variates take the drift out of local steps.

    A client keeps c_i, and c travels beside the model in both directions: its bytes are charged. The server averages
    what clients send, so that a client sends c + (K/N)·Δc_i and the mean is the next c. If fewer than K clients arrive,
    the server moves c by their share of K.
    """

    share: Share = field(kw_only=True)  # K/N, the share of the clients that a round uses

    def rate(self, round: int) -> float:
        """The learning rate of a round, by which `final` divides."""
        rate = super().rate(round)
        if rate < SMALLEST_RATE:
            raise UsageError(
                f"the learning rate of round {round} is {rate:.3g}; SCAFFOLD divides by it in float32 and needs at "
                f"least {SMALLEST_RATE:.3g}: set lr_min, or let the schedule end higher."
            )
        return rate

    def kept(self, size: int) -> int:
        """c_i."""
        return size

    def exchanged(self, size: int) -> int:
        """c."""
        return size

    def init(self, context: Context) -> Tensor:
        """The number of steps."""
        return context.start.new_zeros(())

    def step(self, steps: Tensor, weights: Tensor, gradient: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """One step along the gradient corrected by c − c_i."""
        own, shared = _both(context)
        return steps + 1, weights - context.lr * (gradient - own + shared)

    def final(self, steps: Tensor, weights: Tensor, context: Context) -> Final:
        """The difference, the new c_i, and this client's part of the new c."""
        (own, shared), delta = _both(context), weights - context.start
        change = -shared - delta / (steps * context.lr)
        if context.frozen is not None:  # a coordinate that did not move says nothing about its gradient
            change = change.masked_fill(context.frozen, 0)
        return Final(delta, own + change, shared + self.share * change)


def _both(context: Context) -> tuple[Tensor, Tensor]:
    if context.memory is None or context.received is None:
        raise ValueError("SCAFFOLD needs the vector that a client keeps and the one that it receives")
    return context.memory, context.received


AnyRule = Annotated[Rule, Has(("batch", "rate", "steps_for", "batches", "kept", "exchanged", "init", "step", "final"))]


@checked
@dataclass(frozen=True)
class Clipped:
    """Another rule whose gradients are scaled down to a norm: `Clipped(LocalSGD(lr=0.1), norm=1.0)`."""

    rule: AnyRule = LocalSGD()  # noqa: RUF009 - frozen
    norm: Positive = 1.0

    def problems(self) -> Iterator[str]:
        """One bound is enough."""
        if isinstance(self.rule, Clipped):
            yield "rule is Clipped already: give one norm"

    @property
    def batch(self) -> int:
        """Samples of one step."""
        return self.rule.batch

    @property
    def precision(self) -> Precision | None:
        """Of products."""
        return precision_of(self.rule)

    def rate(self, round: int) -> float:
        """The learning rate of a round."""
        return self.rule.rate(round)

    def steps_for(self, samples: int) -> int:
        """The number of steps of a client with this many samples."""
        return self.rule.steps_for(samples)

    def batches(self, rng: np.random.Generator, samples: int) -> Tensor:
        """Indices of samples, (steps, batch)."""
        return self.rule.batches(rng, samples)

    def kept(self, size: int) -> int:
        """The length of the vector that a client keeps."""
        return self.rule.kept(size)

    def exchanged(self, size: int) -> int:
        """The length of the second vector that travels."""
        return self.rule.exchanged(size)

    def init(self, context: Context) -> Any:
        """The state of the rule."""
        return self.rule.init(context)

    def step(self, state: Any, weights: Tensor, gradient: Tensor, context: Context) -> tuple[Any, Tensor]:
        """A step of the rule with the gradient, or with its direction and the largest norm allowed."""
        scale = (self.norm / torch.linalg.vector_norm(gradient)).clamp(max=1.0)
        return self.rule.step(state, weights, gradient * scale, context)

    def final(self, state: Any, weights: Tensor, context: Context) -> Final:
        """What the rule sends and keeps."""
        return self.rule.final(state, weights, context)
