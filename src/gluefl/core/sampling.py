"""Who is invited, with which weight, and who stays: uniform sampling and sticky sampling (Algorithm 2).

Clients are the integers 0 … N−1. Inviting costs O(cohort): the pool is never listed, candidates are drawn and
rejected if they are offline, sticky or already drawn.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from typing import Annotated, Literal, Protocol

import numpy as np

from gluefl.errors import UsageError
from gluefl.parameters import AtLeastOne, ClosedShare, Count, NoneAs, OpenShare, checked

Weights = Literal["unbiased", "equal", "equal_sum", "proportional"] | OpenShare
StickyShare = Annotated[ClosedShare | None, NoneAs("proportional")]
LISTABLE = 10**7  # a pool up to this size may be looked through when too few of it are online


@dataclass(frozen=True)
class Pool:
    """The clients there are at this moment."""

    size: int  # N
    importance: Callable[[int], float]  # p_i; sums to 1 over the pool
    is_online: Callable[[int], bool] = lambda client: True
    speed: Callable[[int], float] | None = None  # if it is known; only for a first sticky group of the fastest


@dataclass(frozen=True)
class Group:
    """Clients invited on the same terms: the first `quota` of them to arrive are used."""

    name: str
    clients: tuple[int, ...]
    quota: int
    weights: tuple[float, ...]  # ν_i, sent to each client with its task
    equal_weight: float | None = None  # of every client in the sum, where it differs from ν_i

    def actual_weights(self, used: Sequence[int]) -> dict[int, float]:
        """The weights of those that were used: when fewer than the quota arrived, each weighs more.

        The weight of the group as a whole stays what it was, with equal weights too.
        """
        nominal = dict(zip(self.clients, self.weights))
        if self.equal_weight is not None:
            nominal = dict.fromkeys(self.clients, self.equal_weight)
        return {client: nominal[client] * self.quota / len(used) for client in used}


def nominal_weights(groups: Sequence[Group]) -> dict[int, float]:
    """ν_i of every invited client."""
    return {client: weight for group in groups for client, weight in zip(group.clients, group.weights)}


class Sampler(Protocol):
    """Chooses the clients of a round. The state is a tuple of integers that a checkpoint can hold; results depend on
    the arguments alone."""

    @property
    def cohort(self) -> int:
        """K, the number of clients that a round uses."""
        ...

    def check(self, size: int) -> None:
        """Refuse sizes that cannot run on a population of this size; `init` does so too."""
        ...

    def init(self, pool: Pool, rng: np.random.Generator) -> tuple[int, ...]:
        """The state before the first round."""
        ...

    def invite(self, state: tuple[int, ...], pool: Pool, rng: np.random.Generator) -> tuple[Group, ...]:
        """The groups to invite; smaller than wanted, or empty, when too few clients are online."""
        ...

    def next_state(self, state: tuple[int, ...], used: Iterable[int], rng: np.random.Generator) -> tuple[int, ...]:
        """The state after a round in which these clients were used."""
        ...


@checked
@dataclass(frozen=True)
class Uniform:
    """K of N clients, uniformly without replacement; ν_i = N/K · p_i (equation 2 of the paper)."""

    cohort: Count  # K
    weights: Weights = "unbiased"
    over_commitment: AtLeastOne = 1.0  # OC: invite OC·K, use the first K

    def problems(self) -> Iterator[str]:
        """One group has no share of the weight to choose, and no two weights."""
        if self.weights == "equal_sum":
            yield "weights = 'equal_sum' is for sticky sampling; with uniform sampling choose 'equal' or 'unbiased'"
        if not isinstance(self.weights, str):
            yield f"weights = {self.weights} is a share for a sticky group; uniform sampling has none"

    def init(self, pool: Pool, rng: np.random.Generator) -> tuple[int, ...]:
        """Uniform sampling remembers nothing."""
        self.check(pool.size)
        return ()

    def check(self, size: int) -> None:
        """Refuse a cohort that cannot be invited from a population of this size."""
        if self.cohort + extra_invitations(self.over_commitment, self.cohort) > size:
            raise UsageError(
                f"a cohort of {self.cohort} clients with over-commitment {self.over_commitment} cannot be invited "
                f"from a population of {size}: lower sampling.cohort or raise population.clients."
            )

    def invite(self, state: tuple[int, ...], pool: Pool, rng: np.random.Generator) -> tuple[Group, ...]:
        """One group."""
        wanted = self.cohort + extra_invitations(self.over_commitment, self.cohort)
        clients = draw(rng, pool.size, wanted, pool.is_online)
        quota = min(self.cohort, len(clients))
        factor = None if self.weights == "equal" else pool.size / max(quota, 1)
        return (_group("uniform", clients, quota, factor, pool, quota),)

    def next_state(self, state: tuple[int, ...], used: Iterable[int], rng: np.random.Generator) -> tuple[int, ...]:
        """Uniform sampling remembers nothing."""
        return state


@checked
@dataclass(frozen=True)
class Sticky:
    """C clients from a sticky group of S, K−C from outside it; newcomers replace sticky clients that were not used.

    Unbiased weights are ν_i = S/C · p_i inside and (N−S)/(K−C) · p_i outside. A number between S/N (unbiased)
    and C/K instead gives the sticky group that share of the whole weight; "proportional" is C/K, so that within a
    round weights are proportional to p_i. "equal" is 1/K for everyone. "equal_sum" sends the unbiased weights to
    clients and sums with 1/K.
    """

    cohort: Count  # K, the clients that a round uses
    sticky_size: Count  # S, the size of the sticky group
    sticky_cohort: Count  # C, how many of the K are from the sticky group
    weights: Weights = "unbiased"  # of clients in the sum: see Sticky in the Python interface
    over_commitment: AtLeastOne = 1.0  # OC
    sticky_share: StickyShare = None  # of the extra invitations; None is C/K, the paper's default
    initial: Literal["random", "fastest"] = "random"  # the first sticky group

    def problems(self) -> Iterator[str]:
        """The sizes with which Algorithm 2 cannot run on any population."""
        k, s, c = self.cohort, self.sticky_size, self.sticky_cohort
        if not c < k:
            yield f"sticky_cohort C = {c} must lie between 1 and cohort − 1 = {k - 1}"
        if s < k:
            yield f"sticky_size S = {s} must be at least the cohort K = {k}: eviction needs idle sticky clients"

    def invitations(self) -> tuple[int, int]:
        """How many sticky and how many other clients are invited."""
        extra = extra_invitations(self.over_commitment, self.cohort)
        share = Fraction(self.sticky_cohort, self.cohort) if self.sticky_share is None else self.sticky_share
        sticky_extra = math.floor(Fraction(str(share)) * extra + Fraction(1, 2))
        return self.sticky_cohort + sticky_extra, self.cohort - self.sticky_cohort + extra - sticky_extra

    def init(self, pool: Pool, rng: np.random.Generator) -> tuple[int, ...]:
        """The first sticky group: S clients at random, or the fastest, as in the authors' code."""
        self.check(pool.size)
        if self.initial == "fastest":
            if pool.speed is None:
                raise UsageError(
                    "initial = 'fastest' needs the speeds of the clients before round 1. They are known of simulated "
                    "devices that take time, not with network = 'instant' and not on Flower: choose initial = 'random'."
                )
            return tuple(sorted(heapq.nlargest(self.sticky_size, range(pool.size), key=pool.speed)))
        return tuple(sorted(draw(rng, pool.size, self.sticky_size, lambda client: True)))

    def check(self, size: int) -> None:
        """Refuse sizes with which Algorithm 2 cannot run on a population of this size."""
        s, others = self.sticky_size, self.invitations()[1]
        if s > size:
            raise UsageError(
                f"sticky sampling cannot run: sticky_size S = {s} is larger than the population of {size} clients."
            )
        if size < s + others:
            raise UsageError(
                f"sticky sampling cannot run: only {size - s} clients are outside the sticky group; "
                f"{others} are invited."
            )
        if self.initial == "fastest" and size > LISTABLE:
            raise UsageError(
                f"initial = 'fastest' computes the speed of every client, of at most {LISTABLE:,}; the population has "
                f"{size:,}: choose initial = 'random'."
            )

    def invite(self, state: tuple[int, ...], pool: Pool, rng: np.random.Generator) -> tuple[Group, ...]:
        """Two groups. One that is too small gives what it has and the other takes the rest."""
        sticky_wanted, others_wanted = self.invitations()
        members = frozenset(state)
        # Checked one by one, and no further than needed: whether a client is online has to be computed.
        available = (client for client in rng.permutation(state).tolist() if pool.is_online(client))
        sticky = list(islice(available, sticky_wanted))
        others_wanted += sticky_wanted - len(sticky)
        others = draw(rng, pool.size, others_wanted, lambda i: i not in members and pool.is_online(i))
        sticky += islice(available, others_wanted - len(others))

        sticky_quota = min(self.sticky_cohort, len(sticky))
        others_quota = min(self.cohort - sticky_quota, len(others))
        sticky_quota = min(self.cohort - others_quota, len(sticky))
        inside, outside = self._factors(pool.size, sticky_quota, others_quota)
        total = sticky_quota + others_quota
        return (
            self._terms(_group("sticky", sticky, sticky_quota, inside, pool, total), total),
            self._terms(_group("others", others, others_quota, outside, pool, total), total),
        )

    def _terms(self, group: Group, total: int) -> Group:
        return replace(group, equal_weight=1 / max(total, 1)) if self.weights == "equal_sum" else group

    def next_state(self, state: tuple[int, ...], used: Iterable[int], rng: np.random.Generator) -> tuple[int, ...]:
        """Newcomers enter; as many leave, drawn from the sticky clients that were not used in this round."""
        members, used = frozenset(state), frozenset(used)
        newcomers = used - members
        idle = sorted(members - used)
        evicted = rng.choice(idle, len(newcomers), replace=False).tolist() if newcomers else []
        return tuple(sorted((members | newcomers) - set(evicted)))

    def _factors(self, size: int, sticky: int, others: int) -> tuple[float | None, float | None]:
        if self.weights == "equal":
            return None, None
        if self.weights in ("unbiased", "equal_sum"):
            return self.sticky_size / max(sticky, 1), (size - self.sticky_size) / max(others, 1)
        if self.weights == "proportional":
            return size / max(sticky + others, 1), size / max(sticky + others, 1)
        share = float(self.weights)
        return share * size / max(sticky, 1), (1 - share) * size / max(others, 1)


def extra_invitations(over_commitment: float, cohort: int) -> int:
    """How many more clients than the cohort are invited: (OC−1)·K, rounded half up."""
    return math.floor((Fraction(str(over_commitment)) - 1) * cohort + Fraction(1, 2))


def draw(rng: np.random.Generator, size: int, wanted: int, accept: Callable[[int], bool]) -> list[int]:
    """Up to `wanted` distinct accepted clients of 0 … size−1, uniformly; fewer if there are hardly any more."""
    drawn: dict[int, bool] = {}
    taken: list[int] = []
    for _ in range(16):
        for client in rng.integers(size, size=4 * wanted + 4).tolist():
            if len(taken) == wanted:
                return taken
            if client not in drawn:
                drawn[client] = accept(client)
                taken += [client] if drawn[client] else []
    if size > LISTABLE:
        return taken  # hardly any client is online; a pool this large is never listed
    # Rejection has become slow: few are left or few are online. Only now the whole pool is looked at.
    rest = (int(c) for c in rng.permutation(size) if int(c) not in drawn)
    for client in rest:
        if len(taken) == wanted:
            break
        taken += [client] if accept(client) else []
    return taken


def _group(name: str, clients: list[int], quota: int, factor: float | None, pool: Pool, total: int) -> Group:
    # Equal weights are 1/K whatever the importance of a client.
    weights = [1 / max(total, 1) if factor is None else factor * pool.importance(i) for i in clients]
    return Group(name, tuple(clients), quota, tuple(weights))
