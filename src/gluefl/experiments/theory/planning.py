"""Planning without training: the effect of sticky sampling on download and variance, and which sizes to choose.

docs/planning.md derives it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, Any, Literal, overload

import numpy as np
from pydantic import Field

from gluefl.core.sampling import Sticky, Uniform, extra_invitations
from gluefl.errors import UsageError, nearest
from gluefl.experiments.theory.assumptions import planned
from gluefl.experiments.theory.lean_plan import LeanPlan
from gluefl.experiments.theory.propositions import (
    horizon,
    mean_return_rounds,
    sticky_return,
    uniform_return,
    variance_factor,
)
from gluefl.experiments.theory.staleness import (
    NETWORKS,
    Exponent,
    Floats,
    PlannedRounds,
    download_share,
    in_bytes,
    missing_share,
    staleness,
)
from gluefl.fleet import Fleet
from gluefl.parameters import AtLeastOne, Count, NonNegativeCount, OneOf, OpenShare, Share, check, checked

# GlueFL needed 1.65 (A = 3.25) and 2.38 (A = 4.58) times the rounds of FedAvg in our runs, in which masks count too.
VARIANCE_EXPONENT = 0.5
# The lowest share of clients online in the authors' runs: the sticky group must be served from these.
ONLINE_SHARE = 0.3
MULTIPLES = (1, 2, 3, 4, 6, 8, 12, 16)  # candidates for S/K
TENTHS = range(1, 10)  # candidates for 10·C/K


@dataclass(frozen=True)
class Candidate:
    """A pair of sizes and its costs."""

    sticky_size: int  # S
    sticky_cohort: int  # C
    variance_factor: float  # A
    download_share: float  # of the model, per client and round
    cost: float  # download until a target, in models per client: share · A^exponent, 1 for FedAvg


@dataclass(frozen=True)
class Plan:
    """The expected effect of sticky sampling with the chosen sizes, and other candidates."""

    clients: int  # N
    cohort: int  # K
    sticky_size: int  # S
    sticky_cohort: int  # C
    resample_probability: tuple[float, ...]  # that a client just sampled is next sampled after exactly 1, 2, … rounds
    uniform_probability: float  # K/N, the same without a sticky group, after one round
    mean_return_rounds: float  # N/K
    variance_factor: float  # A
    effective_cohort: float  # K/A
    expected_download_share: float  # of the model, per client and round
    horizon: int  # up to this many rounds a sticky client returns with a higher probability than a uniform one
    uniform_download_share: float  # with the same masks, but without a sticky group
    candidates: tuple[Candidate, ...]  # the cheapest first
    reason: str
    down_bytes: float | None = None  # of one download, if the number of parameters is given
    download_s: tuple[float, float] | None = None  # of the median client and of the 90th percentile, on the network

    def __str__(self) -> str:
        from gluefl.experiments.theory.tables import text  # which needs this module

        return text(self)

    def as_json(self) -> dict[str, Any]:
        """The object that `gluefl plan --json` prints."""
        names = (
            "sticky_size",
            "sticky_cohort",
            "resample_probability",
            "uniform_probability",
            "mean_return_rounds",
            "variance_factor",
            "effective_cohort",
            "expected_download_share",
        )
        optional = [name for name in ("down_bytes", "download_s") if getattr(self, name) is not None]
        values = {name: getattr(self, name) for name in (*names, *optional)}
        return values | {"resample_probability": [*self.resample_probability]}


@checked
@dataclass(frozen=True)
class Scenario:
    """What a plan assumes of the federation.

    `staleness_cost` is the share of the model that a client downloads after 1, 2, … rounds (the last value holds
    from there on), if it was measured; otherwise it follows from q, q_shared and regenerate_every.
    """

    clients: Count  # N
    cohort: Annotated[Count, Field(ge=2)]  # K
    rounds: PlannedRounds = 1000  # over which the download is averaged
    q: Share = 0.2
    q_shared: OpenShare = 0.16
    regenerate_every: Count | None = 10  # I, None for never
    over_commitment: AtLeastOne = 1.0
    parameters: Count | None = None  # d, for bytes
    network: Annotated[str, OneOf(NETWORKS)] | None = None  # for seconds
    staleness_cost: Sequence[float] | None = None
    variance_exponent: Exponent = VARIANCE_EXPONENT
    online_share: Share = ONLINE_SHARE

    def problems(self) -> Iterator[str]:
        """What several values together exclude."""
        if self.cohort >= self.clients:
            yield f"cohort K = {self.cohort} must lie below the population N = {self.clients}"
        invited = self.cohort + extra_invitations(self.over_commitment, self.cohort)
        if self.cohort < self.clients < invited:
            yield f"over_commitment = {self.over_commitment} invites {invited} of {self.clients} clients: lower it"
        if self.network is not None and self.parameters is None:
            yield f"network = {self.network!r} needs parameters: seconds follow from the bytes of a download"
        if self.q_shared >= self.q:
            yield f"q_shared = {self.q_shared} must be below q = {self.q}"

    def sampler(self, size: int, sticky: int) -> Sticky:
        """The sampler with these sizes."""
        return Sticky(self.cohort, size, sticky, over_commitment=self.over_commitment)

    @cached_property
    def missing(self) -> Floats:
        """The share of the model that a client downloads after 1, 2, … rounds."""
        if self.staleness_cost is None:
            changed = missing_share(self.q, self.q_shared, self.regenerate_every, self.rounds)
            return in_bytes(changed, self.q_shared)
        shares = self.staleness_cost
        if not shares or not all(0 <= share <= 1.1 for share in shares):
            raise UsageError("a staleness cost is a list of shares of the model, from 0 to 1, for 1, 2, … rounds.")
        return np.interp(np.arange(self.rounds), np.arange(len(shares)), shares)

    def download_share(self, sampler: Sticky | Uniform) -> float:
        """The expected download per client and round, as a share of the model."""
        return download_share(staleness(sampler, self.clients, self.rounds), self.missing)

    def candidate(self, size: int, sticky: int) -> Candidate:
        """The costs of a pair of sizes."""
        share = self.download_share(self.sampler(size, sticky))
        variance = variance_factor(self.clients, self.cohort, size, sticky)
        return Candidate(size, sticky, variance, share, share * variance**self.variance_exponent)

    def pairs(self, size: int | None, sticky: int | None) -> list[tuple[int, int]]:
        """Pairs of sizes that can run, that reduce the download, and whose groups have enough clients online."""
        n, k, online = self.clients, self.cohort, self.online_share
        pairs = []
        for s in [size] if size is not None else [m * k for m in MULTIPLES]:
            for c in [sticky] if sticky is not None else sorted({round(t * k / 10) for t in TENTHS}):
                if not (0 < c < k <= s < n and c * n > s * k):
                    continue
                inside, outside = self.sampler(s, c).invitations()
                if inside <= online * s and outside <= online * (n - s):
                    pairs.append((s, c))
        return pairs

    def download_s(self, down_bytes: float | None) -> tuple[float, float] | None:
        """Seconds of one download for the median client and for the 90th percentile, if the network is given."""
        if self.network is None or down_bytes is None:
            return None
        fleet = Fleet(self.network, "always")
        fleet.check(self.clients)
        seconds = fleet.durations(np.arange(min(self.clients, 10_000)), int(down_bytes), 0, 0)[0]
        return float(np.quantile(seconds, 0.5)), float(np.quantile(seconds, 0.9))


@overload
def plan(
    clients: int,
    cohort: int | None = None,
    sticky_size: int | None = None,
    sticky_cohort: int | None = None,
    *,
    strategy: Literal["gluefl"] = "gluefl",
    **assumptions: Any,
) -> Plan:
    """A plan for GlueFL, which needs the cohort."""


@overload
def plan(
    clients: int,
    cohort: int | None = None,
    sticky_size: int | None = None,
    sticky_cohort: int | None = None,
    *,
    strategy: Literal["lean"],
    **assumptions: Any,
) -> LeanPlan:
    """A plan for lean."""


def plan(
    clients: int,
    cohort: int | None = None,
    sticky_size: int | None = None,
    sticky_cohort: int | None = None,
    *,
    strategy: Literal["gluefl", "lean"] = "gluefl",
    **assumptions: Any,
) -> Plan | LeanPlan:
    """The expected effect of these sizes, computed without training; sizes that are not given are chosen.

    For GlueFL, `assumptions` are the other fields of `Scenario`: rounds, q, q_shared, regenerate_every,
    over_commitment, parameters, network, staleness_cost, variance_exponent, online_share. For lean they are model (a
    name) or parameters, statistics and tensors; run (a folder) or the fields of `Movement`; step, upload_share; and
    the other fields of `LeanScenario`.

    >>> plan(2800, 30, 120, 24).variance_factor
    4.576...
    >>> plan(2800, strategy="lean", model="shufflenet_v2_x2_0", network="edge").recommended
    """
    if strategy not in ("gluefl", "lean"):
        raise UsageError(f"strategy = {strategy!r} cannot be planned: choose gluefl or lean.")
    size = NonNegativeCount | None
    check(
        "a plan",
        clients=(Count, clients),
        cohort=(size, cohort),
        sticky_size=(size, sticky_size),
        sticky_cohort=(size, sticky_cohort),
    )
    if strategy == "lean":
        return planned(clients, (cohort, sticky_size, sticky_cohort), assumptions)
    if cohort is None:
        raise UsageError("a plan for GlueFL needs the cohort K; one for lean chooses it.")
    valid = [field.name for field in fields(Scenario)]
    if unknown := [name for name in assumptions if name not in valid]:
        raise UsageError(f"a plan for GlueFL has no {unknown[0]}{nearest(unknown[0], valid)}.")
    return _plan_gluefl(Scenario(clients, cohort, **assumptions), sticky_size, sticky_cohort)


def _plan_gluefl(scenario: Scenario, sticky_size: int | None, sticky_cohort: int | None) -> Plan:
    clients, cohort = scenario.clients, scenario.cohort
    pair = (sticky_size, sticky_cohort) if sticky_size is not None and sticky_cohort is not None else None
    given = (sticky_size, sticky_cohort) if pair is None else (None, None)  # a given pair is compared with all others
    ranked = sorted((scenario.candidate(*sizes) for sizes in scenario.pairs(*given)), key=lambda other: other.cost)
    if pair is not None:
        scenario.sampler(*pair).check(clients)
    elif not ranked:
        raise UsageError(
            f"no sticky group fits N = {clients}, K = {cohort} with {scenario.online_share:.0%} of the clients online: "
            "lower the cohort, or sample uniformly."
        )
    chosen = ranked[0] if pair is None else scenario.candidate(*pair)
    uniform = scenario.download_share(Uniform(cohort, over_commitment=scenario.over_commitment))
    sizes = (clients, cohort, chosen.sticky_size, chosen.sticky_cohort)
    down_bytes = None if scenario.parameters is None else 4 * scenario.parameters * chosen.download_share
    return Plan(
        *sizes,
        resample_probability=tuple(sticky_return(*sizes, r) for r in range(1, 7)),
        uniform_probability=uniform_return(clients, cohort, 1),
        mean_return_rounds=mean_return_rounds(clients, cohort),
        variance_factor=chosen.variance_factor,
        effective_cohort=cohort / chosen.variance_factor,
        expected_download_share=chosen.download_share,
        horizon=horizon(*sizes),
        uniform_download_share=uniform,
        candidates=tuple(ranked),
        reason=_reason(scenario, chosen, ranked, uniform),
        down_bytes=down_bytes,
        download_s=scenario.download_s(down_bytes),
    )


def _reason(scenario: Scenario, chosen: Candidate, ranked: Sequence[Candidate], uniform: float) -> str:
    online, cohort, equal = scenario.online_share, scenario.cohort, scenario.cohort / chosen.variance_factor
    text = f"No pair of sizes can be served with {online:.0%} of the clients online. "
    if ranked:
        best = ranked[0]
        text = (
            f"S = {best.sticky_size}, C = {best.sticky_cohort} downloads least until a target: "
            f"{best.download_share:.0%} of the model per client and round (uniform sampling {uniform:.0%}) "
            f"for A = {best.variance_factor:.2f}, if rounds grow like A^{scenario.variance_exponent:g} "
            f"and {online:.0%} of the clients are online. "
        )
    return text + (
        f"FedAvg with {equal:.1f} clients has the variance of S = {chosen.sticky_size}, C = {chosen.sticky_cohort} and "
        f"downloads {equal:.1f} models a round, against {cohort * chosen.download_share:.1f}: try it too."
    )
