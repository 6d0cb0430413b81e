"""Which uploads may enter the model, by what clients sent before; and when the server goes back to an earlier version.

The bounds are medians, so that a minority of hostile clients cannot move them. They defend against uploads that would
ruin a model at once, not against small lies of many clients.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gluefl.parameters import AtLeastOne, Count, checked

UPDATE, EXAMPLES, LOSS = "update", "examples", "loss"  # quantities, beside the kinds of statistics
EVALUATED = "evaluated examples"
COUNTS = (EXAMPLES, EVALUATED, "counter")  # numbers that follow from how much data a client has
MOST_EXAMPLES = 2**32 - 1  # that the header of an upload can hold
FEWEST_LOSSES = 3  # rounds before a loss can be too large


@checked
@dataclass(frozen=True)
class Guard:
    """Bounds on uploads, as factors over a median: of what was accepted last, or of the round, if that is larger.

    >>> GlueFLStrategy(sampler, guard=Guard(norm_factor=5.0))
    """

    norm_factor: AtLeastOne = 10.0  # of the length of an update, and of the change of each kind of statistics
    count_factor: AtLeastOne = 1000.0  # of a number of examples, and of a counter of batches
    loss_factor: AtLeastOne = 10.0  # of the median loss of a round: above it, the round counts as bad
    window: Count = 100  # how many accepted numbers a running median is taken over
    patience: Count = 2  # bad rounds in a row until the server goes back to the last good version


@dataclass(frozen=True)
class GuardState:
    """What a guard remembers: for each quantity the numbers accepted last, and how many rounds were bad."""

    accepted: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    bad_rounds: int = 0
    good_round: int | None = None  # after which the model was the last good version

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        lists = {name: list(numbers) for name, numbers in self.accepted.items()}
        return {"accepted": lists, "bad_rounds": self.bad_rounds, "good_round": self.good_round}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "GuardState":
        """What `to_json` returned."""
        accepted = {str(name): tuple(map(float, numbers)) for name, numbers in saved["accepted"].items()}
        return cls(accepted, int(saved["bad_rounds"]), saved["good_round"])


@dataclass(frozen=True)
class Claim:
    """What a reply amounts to: its quantities, their limits whatever others send, and what is wrong with it at once."""

    quantities: Mapping[str, float]
    limits: Mapping[str, float]
    problem: str | None = None
    slack: float = 1.0  # how much longer than others the update may be, because it enters the model with less weight

    @property
    def reason(self) -> str | None:
        """Why the reply is refused whatever others send, None if it is not."""
        wrong = [name for name, number in self.quantities.items() if not 0 <= number < math.inf]
        return self.problem or (f"no finite number for {', '.join(wrong)}" if wrong else None)


def claim_of_examples(name: str, count: float) -> Claim:
    """A claim of a number of examples."""
    return Claim({name: count}, {name: float(MOST_EXAMPLES)})


def judged(guard: Guard, state: GuardState, claims: Mapping[int, Claim]) -> tuple[GuardState, dict[int, str]]:
    """The state after the uploads of a round, and the clients that are refused, each with the reason."""
    refused = {client: one.reason for client, one in claims.items() if one.reason is not None}
    for name in sorted({name for one in claims.values() for name in one.quantities}):
        rest = {client: one for client, one in claims.items() if client not in refused}
        reference = _reference(state.accepted.get(name, ()), [one.quantities[name] for one in rest.values()])
        factor = guard.count_factor if name in COUNTS else guard.norm_factor
        for client, one in rest.items():
            usual = factor * reference * (one.slack if name == UPDATE else 1.0)
            limit = min(usual, one.limits[name]) if reference else one.limits[name]
            if one.quantities[name] > limit:
                refused[client] = _reason(name, one.quantities[name], limit)
    accepted = dict(state.accepted)
    for client, one in claims.items():
        if client not in refused:
            accepted |= {name: _appended(guard, accepted, name, number) for name, number in one.quantities.items()}
    return replace(state, accepted=accepted), refused


def watched(
    guard: Guard, state: GuardState, round: int, losses: Sequence[float], failed: bool, is_good: bool = False
) -> GuardState:
    """The state after the losses of a round, which were measured on the version before it.

    A round is bad if the median loss is far above earlier ones, or if nodes answered and none had a usable upload
    (`failed`). With a usable upload and a loss as before, the version is the last good one. If that version itself
    (`is_good`) has a larger loss than before, something else has changed, and this loss is usual from now on.
    """
    past, median = state.accepted.get(LOSS, ()), _lower_median(losses)
    exploded = len(past) >= FEWEST_LOSSES and 0 < _lower_median(past) * guard.loss_factor < median
    if (exploded and not is_good) or (failed and not losses):
        return replace(state, bad_rounds=state.bad_rounds + 1)
    if not losses:
        return state
    accepted = {**state.accepted, LOSS: (median,) if exploded else _appended(guard, state.accepted, LOSS, median)}
    return GuardState(accepted, 0, round - 1)


def _reference(past: Sequence[float], present: Sequence[float]) -> float:
    """What is usual: in the last rounds, or, if more, in this one. The median of a single client is not used."""
    return max(_lower_median(past), _lower_median(present) if len(present) > 1 else 0.0)


def _lower_median(numbers: Sequence[float]) -> float:
    return sorted(numbers)[(len(numbers) - 1) // 2] if numbers else 0.0


def _appended(guard: Guard, accepted: Mapping[str, tuple[float, ...]], name: str, number: float) -> tuple[float, ...]:
    return (*accepted.get(name, ()), number)[-guard.window :]


def _reason(name: str, number: float, limit: float) -> str:
    what = dict.fromkeys((EXAMPLES, EVALUATED), "a number of examples of") | {UPDATE: "an update of length"}
    return f"{what.get(name, f'a change of the statistics ({name}) of length')} {number:.4g}, {limit:.4g} is allowed"
