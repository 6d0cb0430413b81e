"""Planning lean without training: what a round costs in bytes and seconds, and which K, S, C, s and p to choose.

docs/planning.md derives it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from typing import Annotated, Any, Literal

import numpy as np

from gluefl.core.sampling import Sticky, Uniform, extra_invitations
from gluefl.errors import UsageError
from gluefl.experiments.theory.lean import (
    Model,
    Movement,
    mean_bytes,
    newcomer_bytes,
    package_bytes,
    upload_bytes,
    whole_bytes,
)
from gluefl.experiments.theory.staleness import NETWORKS, Exponent, Floats, PlannedRounds, staleness
from gluefl.fleet import Fleet
from gluefl.parameters import AtLeastOne, Count, OneOf, Positive, Share, checked
from gluefl.strategies.lean import Lean

COHORTS = (5, 10, 15, 20, 30, 50, 100)  # candidates for K
MULTIPLES = (2, 4, 8)  # for S/K
STICKY_SHARES = (0.8, 0.9)  # for C/K
STEPS = (0.5, 1.0)  # for s
UPLOAD_SHARES = (1.0, 0.5, 0.25)  # for p
AGES = (1, 2, 4, 8, 16, 32, 64, 128)  # shown
MEGABYTE = 10**6
SAMPLES = 200  # that a client trains on in a round, for seconds: 10 steps of 20

# Rules of thumb for the rounds to a target, relative to uniform sampling with K = 30, s = 0.5 and p = 1.
ROUNDS_OF_STICKY = 1.25  # S = 4K, C = 4K/5 with weights in proportion
ROUNDS_BY_STICKY_SIZE = 0.2  # (4K/S)^x
ROUNDS_OF_MORE_STICKY = 1.05  # C = 9K/10 against 4K/5
ROUNDS_BY_STEP = 0.12  # (s/0.5)^x
ROUNDS_BY_SHARE = 0.1  # p^−x


@dataclass(frozen=True)
class LeanCandidate:
    """A choice of parameters and its costs."""

    cohort: int  # K
    sticky_size: int  # S, 0 for uniform sampling
    sticky_cohort: int  # C
    step: float  # s
    upload_share: float  # p
    down_bytes: float  # of one download, in the mean
    up_bytes: int  # of one upload
    round_bytes: float  # of all downloads and uploads of a round
    round_s: float | None  # None without a network
    relative_rounds: float  # to a target, by rules of thumb: 1 for uniform sampling with K = 30, s = 0.5, p = 1
    cost_bytes: float  # the download until a target: of all invited clients, times the relative rounds


@dataclass(frozen=True)
class Package:
    """The package of a client that returns after a number of rounds."""

    rounds: int
    share: float  # of the weights
    down_bytes: float


@dataclass(frozen=True)
class LeanPlan:
    """What lean costs with the recommended parameters, and with others."""

    clients: int  # N
    model: Model
    movement: Movement
    recommended: LeanCandidate
    candidates: tuple[LeanCandidate, ...]  # the cheapest first; only those within the bounds
    packages: tuple[Package, ...]  # by staleness, with the recommended parameters
    newcomer_bytes: float  # of a client that holds version 0, at the end
    whole_bytes: float  # of a client that holds nothing
    fedavg_bytes: int  # of a model in float32
    reason: str

    def __str__(self) -> str:
        from gluefl.experiments.theory.tables import text  # which needs this module

        return text(self)

    def as_json(self) -> dict[str, Any]:
        """The object that `gluefl plan --strategy lean --json` prints."""
        return {"strategy": "lean"} | asdict(self)


@checked
@dataclass(frozen=True)
class LeanScenario:
    """What a plan for lean assumes of the federation."""

    clients: Count  # N
    model: Model
    movement: Movement
    rounds: PlannedRounds = 300  # over which the download is averaged
    over_commitment: AtLeastOne = 1.0
    initial: Literal["known", "download"] = "known"
    network: Annotated[str, OneOf(NETWORKS)] | None = None  # for seconds
    rounds_exponent: Exponent = 0.5  # x: rounds to a target grow like (1/K)^x
    online_share: Share = 0.3
    most_round_s: Positive | None = None
    most_round_bytes: Positive | None = None

    def problems(self) -> Iterator[str]:
        """A bound on seconds needs a network."""
        if self.most_round_s is not None and self.network is None:
            yield "most_round_s needs a network, from which seconds follow: edge, 5g or cloud"

    def sampler(self, cohort: int, size: int, sticky: int) -> Sticky | Uniform:
        """The sampler with these sizes; uniform for S = 0."""
        if not size:
            return Uniform(cohort, over_commitment=self.over_commitment)
        return Sticky(cohort, size, sticky, weights="proportional", over_commitment=self.over_commitment)

    def moving(self, step: float, share: float) -> Movement:
        """Movement with these parameters, where it was given for s = 0.5 and p = 1."""
        return self.movement.with_step(step / Lean().step).with_share(share)

    def down_bytes(self, stale: Floats, movement: Movement) -> float:
        """The mean download of a client and round, for clients as stale as this."""
        ages = np.arange(1.0, self.rounds + 1)
        first = np.full(self.rounds, whole_bytes(self.model, movement))
        if self.initial == "known":
            first = newcomer_bytes(self.model, movement, ages - 1)
        return mean_bytes(stale, package_bytes(self.model, movement, ages), first)

    def candidates(
        self, sizes: tuple[int, int, int], steps: Sequence[float], shares: Sequence[float]
    ) -> Iterator[LeanCandidate]:
        """The costs of K, S and C with each of these s and p."""
        stale = staleness(self.sampler(*sizes), self.clients, self.rounds)
        for step, share in product(steps, shares):
            yield self.candidate(sizes, step, share, self.down_bytes(stale, self.moving(step, share)))

    def candidate(self, sizes: tuple[int, int, int], step: float, share: float, down_bytes: float) -> LeanCandidate:
        """The costs of a choice of parameters with which a client downloads so many bytes in the mean."""
        cohort = sizes[0]
        invited = cohort + extra_invitations(self.over_commitment, cohort)
        up_bytes = upload_bytes(self.model, Lean(step=step, upload_share=share))
        relative = self.relative_rounds(sizes, step, share)
        return LeanCandidate(
            *sizes,
            step=step,
            upload_share=share,
            down_bytes=down_bytes,
            up_bytes=up_bytes,
            round_bytes=invited * down_bytes + cohort * up_bytes,
            round_s=self.round_s(cohort, invited, down_bytes, up_bytes),
            relative_rounds=relative,
            cost_bytes=invited * down_bytes * relative,
        )

    def relative_rounds(self, sizes: tuple[int, int, int], step: float, share: float) -> float:
        """The rounds to a target by rules of thumb, relative to uniform sampling with K = 30, s = 0.5 and p = 1."""
        cohort, size, sticky = sizes
        by_group = 1.0
        if size:
            by_group = ROUNDS_OF_STICKY * max(0.75, (4 * cohort / size) ** ROUNDS_BY_STICKY_SIZE)
            by_group *= ROUNDS_OF_MORE_STICKY if sticky > 0.85 * cohort else 1.0
        by_step = max(1.0, step / Lean().step) ** ROUNDS_BY_STEP
        return float(by_group * (30 / cohort) ** self.rounds_exponent * by_step * share**-ROUNDS_BY_SHARE)

    def round_s(self, cohort: int, invited: int, down_bytes: float, up_bytes: int) -> float | None:
        """Seconds until the K-th of the invited clients arrives, if all download the mean."""
        if self.network is None:
            return None
        download_s, compute_s, upload_s = self._seconds
        trips = download_s * down_bytes / MEGABYTE + compute_s + upload_s * up_bytes / MEGABYTE
        return float(np.quantile(trips, cohort / (invited + 1)))

    @cached_property
    def _seconds(self) -> tuple[Floats, Floats, Floats]:
        """Seconds that clients need to download a megabyte, to train, and to upload a megabyte."""
        assert self.network is not None
        fleet = Fleet(self.network, "always")
        fleet.check(self.clients)
        return fleet.durations(np.arange(min(self.clients, 10_000)), MEGABYTE, MEGABYTE, SAMPLES)

    def can_run(self, sizes: tuple[int, int, int]) -> bool:
        """Whether enough clients are online to invite."""
        cohort, size, sticky = sizes
        online = self.online_share
        if not size:
            return cohort + extra_invitations(self.over_commitment, cohort) <= online * self.clients
        if not 0 < sticky < cohort <= size < self.clients or sticky * self.clients <= size * cohort:
            return False
        inside, outside = Sticky(cohort, size, sticky, over_commitment=self.over_commitment).invitations()
        return inside <= online * size and outside <= online * (self.clients - size)

    def within(self, candidate: LeanCandidate) -> bool:
        """Whether a candidate keeps the bounds."""
        seconds, size = self.most_round_s, self.most_round_bytes
        return (seconds is None or candidate.round_s is None or candidate.round_s <= seconds) and (
            size is None or candidate.round_bytes <= size
        )


def plan_lean(
    scenario: LeanScenario,
    sizes: tuple[int | None, int | None, int | None],
    step: float | None = None,
    upload_share: float | None = None,
) -> LeanPlan:
    """The costs of lean with these K, S, C, s and p; those that are not given are chosen."""
    steps = STEPS if step is None else (Lean(step=step).step,)
    shares = UPLOAD_SHARES if upload_share is None else (Lean(upload_share=upload_share).upload_share,)
    groups = [group for group in _groups(*sizes) if scenario.can_run(group)]
    if not groups:
        raise UsageError(
            f"no group of clients fits N = {scenario.clients} with {scenario.online_share:.0%} of the clients online: "
            "lower the cohort, or give other sizes."
        )
    every = [candidate for group in groups for candidate in scenario.candidates(group, steps, shares)]
    ranked = sorted(filter(scenario.within, every), key=lambda candidate: candidate.cost_bytes)
    if not ranked:
        raise UsageError(_nothing_within(every))
    best, last = ranked[0], np.array([float(scenario.rounds)])
    movement = scenario.moving(best.step, best.upload_share)
    ages = np.array([float(age) for age in AGES])
    sizes_of, shown = package_bytes(scenario.model, movement, ages), movement.missing(ages)[0]
    return LeanPlan(
        scenario.clients,
        scenario.model,
        movement,
        best,
        tuple(ranked),
        packages=tuple(Package(a, float(share), float(size)) for a, share, size in zip(AGES, shown, sizes_of)),
        newcomer_bytes=float(newcomer_bytes(scenario.model, movement, last)[0]),
        whole_bytes=whole_bytes(scenario.model, movement),
        fedavg_bytes=4 * (scenario.model.weights + scenario.model.statistics),
        reason=_reason(scenario, ranked),
    )


def _groups(cohort: int | None, size: int | None, sticky: int | None) -> Iterator[tuple[int, int, int]]:
    for k in COHORTS if cohort is None else (cohort,):
        if not size and not sticky:
            yield k, 0, 0
        if size == 0:
            continue
        for s in [k * multiple for multiple in MULTIPLES] if size is None else [size]:
            for c in sorted({int(share * k) for share in STICKY_SHARES}) if sticky is None else [sticky]:
                yield k, s, c


def _nothing_within(every: list[LeanCandidate]) -> str:
    seconds = [candidate.round_s for candidate in every if candidate.round_s is not None]
    fastest = f" and at least {min(seconds):.1f} s" if seconds else ""
    smallest = min(candidate.round_bytes for candidate in every)
    return (
        f"no choice keeps the bounds: a round needs at least {smallest / 1e6:.3g} MB{fastest}. "
        "Raise most_round_bytes or most_round_s, or allow a smaller cohort."
    )


def _reason(scenario: LeanScenario, ranked: Sequence[LeanCandidate]) -> str:
    best, float32 = ranked[0], 4 * (scenario.model.weights + scenario.model.statistics)
    group = f"S = {best.sticky_size}, C = {best.sticky_cohort}" if best.sticky_size else "uniform sampling"
    bounds = [f"{scenario.most_round_s:g} s a round"] if scenario.most_round_s is not None else []
    bounds += [f"{scenario.most_round_bytes:g} bytes a round"] if scenario.most_round_bytes is not None else []
    within = f" within {' and '.join(bounds)}" if bounds else ""
    least = f" least until a target{within}, by rules of thumb for the rounds" if len(ranked) > 1 else ""
    return (
        f"K = {best.cohort}, {group}, s = {best.step:g}, p = {best.upload_share:g} downloads{least}: "
        f"{float32 / best.down_bytes:.0f} times less than float32 per client and round. The plan does not know how "
        "many rounds a target takes: smaller cohorts, coarser steps, smaller p and more sticky clients need more of "
        "them. Compare two or three candidates in short runs."
    )
