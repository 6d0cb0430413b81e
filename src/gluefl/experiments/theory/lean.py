"""What lean's messages weigh: the share of the cells that change between two rounds, and the bytes of a package.

docs/planning.md derives it and compares it with measured runs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from gluefl.core.recurrence import VERSIONS
from gluefl.errors import UsageError
from gluefl.experiments.theory.staleness import Floats, entropy, packages
from gluefl.parameters import Count, Decay, NonNegativeCount, OpenShare, Positive, Share, checked
from gluefl.storage.journal import clients_of
from gluefl.strategies.lean import Lean
from gluefl.wire.compact import HEADER_BYTES
from gluefl.wire.messages import AROUND_BYTES
from gluefl.wire.rotated import rotated_codec

TENSOR_BYTES = 4  # what a package says of a tensor: number of positions, exponent, Rice parameters
NOISE_EXPONENT = 0.45  # a share p of an upload raises the share of changed cells by p^-0.45
LEAST_BITS = 1.5  # of a cell: a bit for its sign, and an end of its quotient now and then
BISECTIONS = 50
SMALLEST = 1e-300  # squares of positive numbers may be 0
PREFERENCE = 1e-4  # for the default growth, against squared ratios of bytes


@checked
@dataclass(frozen=True)
class Model:
    """The numbers of a model that its messages depend on."""

    weights: Count  # d
    statistics: NonNegativeCount = 0
    tensors: Count = 50  # of weights and of statistics


@checked
@dataclass(frozen=True)
class Movement:
    """How cells change. The defaults are those of the demo's task, rounds 31 to 60."""

    changed: OpenShare = 0.013  # ρ, the share of the weights whose cell changes in a round
    growth: Share = 0.9  # α: in τ rounds 1 − (1−ρ)^(τ^α) change at least once
    recurring: Decay = 0.0  # φ: of the changes of a round, the share that comes back within a few rounds
    changed_statistics: OpenShare = 0.5  # ρ of the statistics
    changed_first: OpenShare = 0.015  # ρ₁, of all in round 1, whose updates are the largest
    decay: Positive = 0.09  # γ: after t rounds (1−ρ₁) t^(−γ) of the cells are those of version 0
    cell_bits: Positive = 3.0  # of a changed cell in the package of a client that returns, beside its position
    newcomer_bits: Positive = 3.8  # in the package of a client that holds version 0
    whole_bits: Positive = 6.2  # of an entry where the whole model is sent as cells

    def with_step(self, factor: float) -> "Movement":
        """Movement with first steps larger by a factor. Rate control soon finds the same steps: only what refers to
        version 0 differs, which lies on a coarser grid."""
        odds, bits = self.changed_first / (1 - self.changed_first) / max(factor**2, SMALLEST), math.log2(factor)
        return replace(
            self,
            changed_first=min(0.99, max(1e-6, odds / (1 + odds))),
            newcomer_bits=max(LEAST_BITS, self.newcomer_bits - bits),
            whole_bits=max(LEAST_BITS, self.whole_bits - bits),
        )

    def with_share(self, upload_share: float) -> "Movement":
        """Movement where a share of every upload is sent: updates have more noise, and more cells change."""
        factor = upload_share**-NOISE_EXPONENT
        first, changed = (min(0.99, share * factor) for share in (self.changed_first, self.changed))
        return replace(self, changed=changed, changed_first=first)

    def missing(self, rounds: Floats) -> tuple[Floats, Floats]:
        """The shares of the weights and of the statistics that a client misses after so many rounds.

        A cell that came back is not missing while the server remembers the version that the client holds.
        """
        exponents = rounds**self.growth
        remembered = self.recurring + (1 - self.recurring) * exponents
        exponents = np.where(rounds < VERSIONS, remembered, exponents)
        return 1 - (1 - self.changed) ** exponents, 1 - (1 - self.changed_statistics) ** exponents

    def missing_since_start(self, rounds: Floats) -> Floats:
        """The share of the cells that are not those of version 0 after so many rounds: some have come back."""
        return np.where(rounds > 0, 1 - (1 - self.changed_first) * np.maximum(rounds, 1) ** -self.decay, 0.0)


def package_bytes(model: Model, movement: Movement, rounds: Floats) -> Floats:
    """Bytes of the package of a client that was last invited so many rounds ago."""
    weights, statistics = movement.missing(rounds)
    bits = _bits(model.weights, weights, movement.cell_bits) + _bits(model.statistics, statistics, movement.cell_bits)
    return bits / 8 + _head_bytes(model, model.weights * weights + model.statistics * statistics)


def newcomer_bytes(model: Model, movement: Movement, rounds: Floats) -> Floats:
    """Bytes of the package of a client that holds version 0, so many rounds after it."""
    entries, share = model.weights + model.statistics, movement.missing_since_start(rounds)
    return _bits(entries, share, movement.newcomer_bits) / 8 + _head_bytes(model, entries * share)


def whole_bytes(model: Model, movement: Movement) -> float:
    """Bytes of the whole model as cells, for a client that holds nothing."""
    entries = model.weights + model.statistics
    return movement.whole_bits * entries / 8 + float(_head_bytes(model, np.array(entries)))


def upload_bytes(model: Model, strategy: Lean) -> int:
    """Bytes of an upload: codes and scales of the weights, a byte per statistic, the header."""
    return HEADER_BYTES + rotated_codec(strategy.rotated, model.weights).measure() + model.statistics


def mean_bytes(stale: Floats, returning: Floats, first: Floats) -> float:
    """The mean download over the first `len(stale)` rounds.

    In round t, a share f(r) of the invited clients returns after r rounds for every r < t, each to a package of
    `returning[r-1]` bytes; the others are invited for the first time and download `first[t-1]`.
    """
    rounds = len(stale)
    counted = stale * (1 - np.arange(1, rounds + 1) / rounds)
    newcomers = 1 - np.concatenate([[0.0], np.cumsum(stale)[:-1]])
    return float(counted @ returning + newcomers @ first / rounds)


def model_of(summary: Mapping[str, Any], tensors: int) -> Model:
    """The model of a run, from its summary; the number of tensors is not part of it."""
    entries = (int(summary["model_bytes"]) - AROUND_BYTES) // 4  # the whole model, as FedAvg sends it in float32
    weights = int(summary.get("parameters", entries))
    return Model(weights, max(0, entries - weights), tensors)


def movement_of(lines: Sequence[Mapping[str, Any]], model: Model, stopped: bool = True) -> Movement:
    """The movement that a journal of a lean run shows in its second half.

    The share of a round is written in it. The bits of a cell follow from the packages of clients that missed one
    round; from the others follow α and φ. What newcomers download gives their bits. `stopped`: as in `packages`.
    """
    half = lines[len(lines) // 2 :]
    returning, newcomers = _packages(lines, stopped)
    if len(half) < 2 or not any(age == 1 for age, _ in returning) or not any(age > 1 for age, _ in returning):
        raise UsageError(
            f"a journal of {len(lines)} rounds shows no growth: needed clients that return after one and after more "
            "rounds in its second half. Train for more rounds."
        )
    first = float(lines[0]["update_density"])
    both = float(np.mean([line["update_density"] for line in half]))
    one = float(np.mean([size for age, size in returning if age == 1]))
    later = np.array([(age, size) for age, size in returning if age > 1], float).T
    fits = []
    for of_statistics, of_weights in _shares(both, model):
        base = Movement(of_weights, changed_first=min(0.99, max(first, 1e-6)), changed_statistics=of_statistics)
        base = replace(base, cell_bits=_fitted("cell_bits", (0.5, 12.0), base, model, np.ones(1), one))
        fits.append(_with_growth(base, model, *later))
    base, _ = min(fits, key=lambda fit: fit[1])
    if not newcomers:
        return base
    return _with_newcomers(base, model, *np.array(newcomers, float).T)


def _with_newcomers(base: Movement, model: Model, rounds: Floats, sizes: Floats) -> Movement:
    """The γ, and the bits of a cell with it, with which packages of newcomers are nearest to these bytes, in ratios."""

    def misfit(movement: Movement) -> float:
        ratios = np.log(newcomer_bytes(model, movement, rounds) / sizes)
        return float(np.mean(ratios**2)) + PREFERENCE * math.log2(movement.decay / Movement.decay) ** 2

    decays = Movement.decay * 2.0 ** np.linspace(-3, 1, 17)
    movements = [replace(base, decay=float(decay)) for decay in decays]
    bits = [_fitted("newcomer_bits", (0.5, 20.0), one, model, rounds, float(sizes.mean())) for one in movements]
    return min((replace(one, newcomer_bits=bit) for one, bit in zip(movements, bits)), key=misfit)


def _shares(both: float, model: Model) -> Iterator[tuple[float, float]]:
    """Possible shares of the statistics and of the weights that change in a round: a journal has only that of both."""
    part = model.statistics / (model.weights + model.statistics)
    halvings = range(8 if model.statistics else 1)
    for of_statistics in (*(Movement.changed_statistics / 2**n for n in halvings), both):
        of_weights = (both - part * of_statistics) / (1 - part)
        if of_weights > 0 or of_statistics == both:
            yield min(0.99, max(1e-6, of_statistics)), min(0.99, max(1e-6, of_weights))


def _with_growth(base: Movement, model: Model, ages: Floats, sizes: Floats) -> tuple[Movement, float]:
    """The α and φ with which packages after these rounds are nearest to these bytes, in ratios; and how far they are.

    Where few ages were seen, many pairs serve: the defaults then decide.
    """
    statistics = np.log2(base.changed_statistics / Movement.changed_statistics)

    def misfit(movement: Movement) -> float:
        away = ((movement.growth - Movement.growth) / 0.1) ** 2 + ((movement.recurring - Movement.recurring) / 0.2) ** 2
        ratios = np.log(package_bytes(model, movement, ages) / sizes)
        return float(np.mean(ratios**2)) + PREFERENCE * float(away + statistics**2)

    pairs = product(np.linspace(0.4, 1.0, 31), np.linspace(0.0, 0.9, 19))
    movements = (replace(base, growth=float(a), recurring=float(phi)) for a, phi in pairs)
    return min(((movement, misfit(movement)) for movement in movements), key=lambda fit: fit[1])


def _fitted(
    name: str, bounds: tuple[float, float], base: Movement, model: Model, rounds: Floats, mean_bytes: float
) -> float:
    """The value of a field with which packages after these rounds have this mean; packages grow with it."""
    predict = newcomer_bytes if name == "newcomer_bits" else package_bytes
    low, high = bounds
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        below = float(predict(model, replace(base, **{name: middle}), rounds).mean()) < mean_bytes
        low, high = (middle, high) if below else (low, middle)
    return (low + high) / 2


def _packages(lines: Sequence[Mapping[str, Any]], stopped: bool) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Staleness and bytes of the packages in the second half of a journal: of clients that return, of newcomers, which
    hold version 0. A client that was stopped in its first download is a newcomer again."""
    first = set(clients_of(lines[0])["id"]) if lines else set[int]()  # they hold version 0 because they downloaded it
    returning, newcomers = list[tuple[int, int]](), list[tuple[int, int]]()
    for number, line in enumerate(lines[len(lines) // 2 :], len(lines) // 2):
        for client, age, size in packages(line, stopped):
            if age:
                (newcomers if age == number and client not in first else returning).append((age, size))
    return returning, newcomers


def _bits(entries: int, share: Floats, cell_bits: float) -> Floats:
    """Positions at their entropy, and cells. Gaps are those of present positions: above a half they take a bit each."""
    return entries * (entropy(np.minimum(share, 0.5)) + share * cell_bits)


def _head_bytes(model: Model, changed: Floats) -> Floats:
    """Header, a bit per tensor, and what is said of the tensors that are sent."""
    return HEADER_BYTES + model.tensors / 8 + TENSOR_BYTES * np.minimum(model.tensors, changed)
