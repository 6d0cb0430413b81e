"""Staleness of sampled clients, the share of the model that changes meanwhile, and the resulting download.

docs/planning.md derives it and compares it with a measured run.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gluefl.core.sampling import Sampler, Sticky, Uniform, extra_invitations
from gluefl.errors import UsageError
from gluefl.storage.journal import clients_of

Floats = NDArray[np.float64]
PlannedRounds = Annotated[int, Field(ge=1, le=10**6)]  # each is an entry of an array
Exponent = Annotated[float, Field(ge=0, le=100)]  # x, where rounds grow like a factor to the power x
CERTAIN = 1e18  # odds of what always happens; infinite odds times no rounds would be no number
NETWORKS = ("edge", "5g", "cloud", "uniform")  # a file of one's own belongs to a fleet, which a plan does not have


def staleness(sampler: Sampler, clients: int, rounds: int) -> Floats:
    """The stationary probability that an invited client was last invited 1, 2, …, `rounds` rounds ago.

    Without over-commitment these are Propositions 1 and 2; with it, late clients hold the model too. All clients are
    assumed to be online and equally fast.
    """
    if isinstance(sampler, Uniform):
        p = min(1, (sampler.cohort + extra_invitations(sampler.over_commitment, sampler.cohort)) / clients)
        return p * (1 - p) ** np.arange(rounds, dtype=np.float64)
    assert isinstance(sampler, Sticky)
    k, s, c = sampler.cohort, sampler.sticky_size, sampler.sticky_cohort
    wanted, others = sampler.invitations()
    inside = min(wanted, s)  # where the group has too few, others are invited
    outside = min(others + wanted - inside, clients - s)
    evicted = (k - c) / (s - c)  # a sticky client that was not used
    # The share of invited clients in the sticky group afterwards: used ones, and late sticky ones not evicted.
    sticky = (k + (inside - c) * (1 - evicted)) / (inside + outside)
    other = 1 - sticky
    probability = np.zeros(rounds)
    for r in range(rounds):
        probability[r] = sticky * inside / s + other * outside / (clients - s)
        waiting = sticky * (1 - inside / s)
        sticky, other = waiting * (1 - evicted), other * (1 - outside / (clients - s)) + waiting * evicted
    return probability


def missing_share(q: float, q_shared: float, regenerate_every: int | None, rounds: int) -> Floats:
    """The share of the coordinates that change in 1, 2, …, `rounds` updates of mask shifting.

    The first update changes q of them. Each later one changes the shared mask, all of which has changed already,
    and q − q_shr outside it; one that regenerates changes q anywhere. Selections of different rounds are independent,
    but coordinates differ in their rates: if rates are exponentially distributed, the odds of having changed add up
    over the selections. (Equal rates would be the worst case, 1 − (1−q)^r without a shared mask.)
    """
    fresh, unique = _odds(q), _odds((q - q_shared) / (1 - q_shared))
    later = np.arange(rounds, dtype=np.float64)
    if regenerate_every is None:
        return _chance(fresh + later * unique)
    fewer = later // regenerate_every  # regenerations among them: this number, or one more, by the phase
    more = later % regenerate_every / regenerate_every
    few, many = (_chance(fresh * (1 + n) + unique * np.maximum(later - n, 0)) for n in (fewer, fewer + 1))
    return (1 - more) * few + more * many


def in_bytes(missing: Floats, q_shared: float) -> Floats:
    """From a share of the coordinates to a share of the model's bytes: 32 bits per value, and the entropy of the mask
    and of the positions outside it."""
    rest = 1 - q_shared
    outside = np.clip((missing - q_shared) / rest, 0, 1)
    return missing + (rest * entropy(outside) + entropy(np.array(q_shared))) / 32


def download_share(stale: Floats, missing: Floats, whole: float = 1.0) -> float:
    """The mean share of the model in a download over the first `len(stale)` rounds, first downloads included.

    In round t, K·f(r) of the K clients return after r rounds for every r < t; the others download for the first time.
    """
    rounds = len(stale)
    counted = stale * (1 - np.arange(1, rounds + 1) / rounds)
    return float(counted @ missing + (1 - counted.sum()) * whole)


def measured_share(lines: Sequence[dict[str, Any]], model_bytes: int, rounds: int, stopped: bool = True) -> Floats:
    """The mean download after 1, 2, … rounds according to a journal, interpolated where it has no value; `stopped`
    as in `packages`."""
    sums: dict[int, list[float]] = {}
    for line in lines:
        for _, age, size in packages(line, stopped):
            if age:
                sums.setdefault(age, []).append(size / model_bytes)
    if not sums:
        raise UsageError("no client of this run was invited twice: its journal contains no staleness.")
    ages = sorted(sums)
    return np.interp(np.arange(1, rounds + 1), ages, [math.fsum(sums[a]) / len(sums[a]) for a in ages])


def packages(line: Mapping[str, Any], stopped: bool) -> Iterator[tuple[int, int | None, int]]:
    """Client, staleness and bytes of the whole packages of a round. In a run in which late clients were stopped they
    are those of the used ones: the bytes of the others may be a part."""
    clients = clients_of(line)
    rows = zip(clients["id"], clients["staleness"], clients["down_bytes"], clients["fate"])
    return ((client, age, size) for client, age, size, fate in rows if fate == "used" or not stopped)


def entropy(chance: Floats) -> Floats:
    """Bits per entry of a random set that holds this share of the entries."""
    p = np.clip(chance, 1e-12, 1 - 1e-12)
    return -(p * np.log2(p) + (1 - p) * np.log2(1 - p))


def _odds(chance: float) -> float:
    return chance / (1 - chance) if chance < 1 else CERTAIN


def _chance(odds: Floats) -> Floats:
    return 1 - 1 / (1 + odds)
