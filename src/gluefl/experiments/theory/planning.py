"""What sticky sampling will do before anything is trained: Propositions 1 and 2, the variance factor of Theorem 2,
the share of the model that clients will download, and which sizes to choose. docs/planning.md derives it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gluefl.core.sampling import Sticky, Uniform
from gluefl.errors import UsageError
from gluefl.experiments.theory.staleness import (
    Floats,
    download_share,
    in_bytes,
    measured_share,
    missing_share,
    staleness,
)
from gluefl.fleet import Fleet
from gluefl.storage import journal

# GlueFL needs 1.6–2.2 times the rounds of FedAvg in the paper's Table 2, at A = 4.6–4.8: rounds grow like A^0.42.
VARIANCE_EXPONENT = 0.42
# The least share of clients online in the authors' runs: a sticky group must be served from those.
ONLINE_SHARE = 0.3
MULTIPLES = (1, 2, 3, 4, 6, 8, 12, 16)  # candidates for S/K
TENTHS = range(1, 10)  # candidates for 10·C/K


def uniform_return(clients: int, cohort: int, r: int) -> float:
    """Proposition 1: the probability that a client just sampled is next sampled after exactly r rounds."""
    p = cohort / clients
    return p * (1 - p) ** (r - 1)


def sticky_return(clients: int, cohort: int, sticky_size: int, sticky_cohort: int, r: int) -> float:
    """Proposition 2: the same for a client of the sticky group, from it or from outside after an eviction."""
    stay = 1 - cohort / sticky_size  # neither sampled nor evicted
    leave = (cohort - sticky_cohort) / sticky_size
    back = (cohort - sticky_cohort) / (clients - sticky_size)
    inside = sticky_cohort / sticky_size * stay ** (r - 1)
    # Σ over the round of the eviction: it stayed r−i−1 rounds, left, then missed i−1 rounds outside.
    outside = sum(leave * back * stay ** (r - i - 1) * (1 - back) ** (i - 1) for i in range(1, r))
    return inside + outside


def mean_return_rounds(clients: int, cohort: int) -> float:
    """Both propositions: a client is sampled every N/K rounds, sticky or not."""
    return clients / cohort


def variance_factor(clients: int, cohort: int, sticky_size: int, sticky_cohort: int, squares: float = 0.0) -> float:
    """A of Theorem 2: K/N (S²/C + (N−S)²/(K−C)) Σ p_i². 1 for uniform sampling and equal importance."""
    squares = squares or 1 / clients
    if sticky_size == 0:
        return clients * squares
    spread = sticky_size**2 / sticky_cohort + (clients - sticky_size) ** 2 / (cohort - sticky_cohort)
    return cohort / clients * spread * squares


def horizon(clients: int, cohort: int, sticky_size: int, sticky_cohort: int) -> int:
    """App. A.3: up to this many rounds a sticky client is likelier to return than a uniform one; 0 if never."""
    gain = sticky_cohort * clients / (sticky_size * cohort)
    if gain <= 1 or sticky_size <= cohort:
        return 0 if gain <= 1 else 1
    decay = sticky_size * (clients - cohort) / (clients * (sticky_size - cohort))
    return 1 + math.floor(math.log(gain) / math.log(decay))


@dataclass(frozen=True)
class Candidate:
    """A pair of sizes, and what it costs."""

    sticky_size: int  # S
    sticky_cohort: int  # C
    variance_factor: float  # A
    download_share: float  # of the model, per client and round
    cost: float  # download until a target, in models per client: share · A^exponent, 1 for FedAvg


@dataclass(frozen=True)
class Plan:
    """What to expect of sticky sampling with some sizes, and of others."""

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
    horizon: int  # up to so many rounds a sticky client is likelier to return than a uniform one
    uniform_download_share: float  # with the same masks, but without a sticky group
    candidates: tuple[Candidate, ...]  # the cheapest first
    reason: str
    down_bytes: float | None = None  # of one download, where the parameters are known
    download_s: tuple[float, float] | None = None  # of the median client and of one in ten, on the network

    def as_json(self) -> dict[str, Any]:
        """What `gluefl plan --json` prints."""
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
        return {name: getattr(self, name) for name in names} | {"resample_probability": [*self.resample_probability]}


def plan(
    clients: int,
    cohort: int,
    sticky_size: int | None = None,
    sticky_cohort: int | None = None,
    *,
    rounds: int = 1000,
    q: float = 0.2,
    q_shared: float = 0.16,
    regenerate_every: int | None = 10,
    over_commitment: float = 1.0,
    parameters: int | None = None,
    network: str | None = None,
    staleness_cost: Sequence[float] | None = None,
    variance_exponent: float = VARIANCE_EXPONENT,
    online_share: float = ONLINE_SHARE,
) -> Plan:
    """What these sizes will do, before anything is trained; sizes that are not given are chosen.

    `staleness_cost` is the share of the model that a client downloads after 1, 2, … rounds (the last value holds
    from there on), where it was measured; otherwise it follows from q, q_shared and regenerate_every.

    >>> plan(2800, 30, 120, 24).variance_factor
    4.576...
    """
    _check(clients, cohort, rounds, q, q_shared, regenerate_every, over_commitment, parameters, online_share)
    if staleness_cost is None:
        missing = in_bytes(missing_share(q, q_shared, regenerate_every, rounds), q_shared)
    else:
        missing = _extended(staleness_cost, rounds)

    def candidate(size: int, sticky: int) -> Candidate:
        sampler = Sticky(cohort, size, sticky, over_commitment=over_commitment)
        share = download_share(staleness(sampler, clients, rounds), missing)
        variance = variance_factor(clients, cohort, size, sticky)
        return Candidate(size, sticky, variance, share, share * variance**variance_exponent)

    pair = (sticky_size, sticky_cohort) if sticky_size is not None and sticky_cohort is not None else None
    given = (sticky_size, sticky_cohort) if pair is None else (None, None)  # a pair is compared with all others
    pairs = _pairs(clients, cohort, *given, over_commitment, online_share)
    ranked = sorted((candidate(*pair) for pair in pairs), key=lambda found: found.cost)
    if pair is not None:
        Sticky(cohort, *pair, over_commitment=over_commitment).check(clients)
    elif not ranked:
        raise UsageError(
            f"no sticky group fits N = {clients}, K = {cohort} with {online_share:.0%} of the clients online: "
            "lower the cohort, or sample uniformly."
        )
    chosen = ranked[0] if pair is None else candidate(*pair)
    uniform = download_share(staleness(Uniform(cohort, over_commitment=over_commitment), clients, rounds), missing)
    sizes = (clients, cohort, chosen.sticky_size, chosen.sticky_cohort)
    down_bytes = None if parameters is None else 4 * parameters * chosen.download_share
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
        reason=_reason(chosen, ranked, cohort, uniform, variance_exponent, online_share),
        down_bytes=down_bytes,
        download_s=_seconds(network, clients, down_bytes),
    )


def read_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `plan` from words: `regenerate_every` may be "never", `staleness_cost` a list or a run's folder."""
    found = {key: value for key, value in options.items() if value is not None}
    if (every := found.get("regenerate_every")) is not None:
        if every != "never" and not str(every).isdigit():
            raise UsageError(f"regenerate_every = {every}: write a number of rounds, or never.")
        found["regenerate_every"] = None if every == "never" else int(every)
    if (cost := found.get("staleness_cost")) is not None:
        found["staleness_cost"] = _read_cost(str(cost), int(found.get("rounds", 1000)))
    return found


def _read_cost(text: str, rounds: int) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        path = Path(text) / "journal.jsonl"
    if not path.exists():
        raise UsageError(f"staleness_cost = {text}: write shares with commas, or the folder of a run.")
    lines, _ = journal.read(path)
    if not lines:
        raise UsageError(f"{path} holds no whole line.")
    whole = max(lines[0]["clients"]["down_bytes"])  # in round 1 everyone downloads the whole model
    return [float(share) for share in measured_share(lines, whole, rounds)]


def _pairs(
    clients: int, cohort: int, size: int | None, sticky: int | None, over_commitment: float, online: float
) -> list[tuple[int, int]]:
    """Sizes worth looking at: they can run, they gain something, and enough of either group is online."""
    found = []
    for s in [size] if size is not None else [m * cohort for m in MULTIPLES]:
        for c in [sticky] if sticky is not None else sorted({round(t * cohort / 10) for t in TENTHS}):
            if not (0 < c < cohort <= s < clients and c * clients > s * cohort):
                continue
            inside, outside = Sticky(cohort, s, c, over_commitment=over_commitment).invitations()
            if inside <= online * s and outside <= online * (clients - s):
                found.append((s, c))
    return found


def _reason(
    chosen: Candidate, ranked: Sequence[Candidate], cohort: int, uniform: float, exponent: float, online: float
) -> str:
    best = ranked[0] if ranked else chosen
    equal = cohort / chosen.variance_factor
    text = (
        f"S = {best.sticky_size}, C = {best.sticky_cohort} downloads least until a target: {best.download_share:.0%} "
        f"of the model per client and round (uniform sampling {uniform:.0%}) for A = {best.variance_factor:.2f}, "
        f"if rounds grow like A^{exponent:g} and {online:.0%} of the clients are online. "
        if ranked
        else f"No pair of sizes can be served with {online:.0%} of the clients online. "
    )
    return text + (
        f"FedAvg with {equal:.1f} clients has the variance of S = {chosen.sticky_size}, C = {chosen.sticky_cohort} and "
        f"downloads {equal:.1f} models a round, against {cohort * chosen.download_share:.1f}: try it too."
    )


def _seconds(network: str | None, clients: int, down_bytes: float | None) -> tuple[float, float] | None:
    if network is None or down_bytes is None:
        return None
    fleet = Fleet(network, "always")
    fleet.check(clients)
    seconds = fleet.durations(np.arange(min(clients, 10_000)), int(down_bytes), 0, 0)[0]
    return float(np.quantile(seconds, 0.5)), float(np.quantile(seconds, 0.9))


def _extended(shares: Sequence[float], rounds: int) -> Floats:
    if not shares or not all(0 <= share <= 1.1 for share in shares):
        raise UsageError("a staleness cost is a list of shares of the model, from 0 to 1, for 1, 2, … rounds.")
    return np.interp(np.arange(rounds), np.arange(len(shares)), shares)


def _check(
    clients: int,
    cohort: int,
    rounds: int,
    q: float,
    q_shared: float,
    regenerate_every: int | None,
    over_commitment: float,
    parameters: int | None,
    online: float,
) -> None:
    problems = [
        (not 2 <= cohort < clients, f"cohort K = {cohort} must lie between 2 and the population N − 1 = {clients - 1}"),
        (rounds < 1, f"rounds = {rounds} must be at least 1"),
        (not 0 < q_shared < q <= 1, f"q = {q} and q_shared = {q_shared} must satisfy 0 < q_shared < q ≤ 1"),
        (regenerate_every is not None and regenerate_every < 1, f"regenerate_every = {regenerate_every} is below 1"),
        (not over_commitment >= 1, f"over_commitment = {over_commitment} is below 1"),
        (parameters is not None and parameters < 1, f"parameters = {parameters} must be at least 1"),
        (not 0 < online <= 1, f"online_share = {online} must be above 0 and at most 1"),
    ]
    if found := [text for wrong, text in problems if wrong]:
        raise UsageError("this cannot be planned: " + "; ".join(found) + ".")
