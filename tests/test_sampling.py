"""Who is invited: exact inclusion probabilities, weights that make up for them, sizes that are kept."""

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gluefl.core.sampling import LISTABLE, Group, Pool, Sticky, Uniform, draw, extra_invitations
from gluefl.errors import UsageError
from gluefl.experiments.theory.planning import sticky_return


class Scripted:
    """A generator whose choices come from a script: replaying all scripts enumerates what can happen."""

    def __init__(self, integers, permutation=None) -> None:
        self._integers, self._permutation = integers, permutation

    def integers(self, high, size):
        return np.resize(np.array(self._integers), size)  # repeats are rejected, as any repeated draw is

    def permutation(self, of):
        return np.array(of)[list(self._permutation)]


def uniform_pool(size, **options) -> Pool:
    return Pool(size, lambda client: 1 / size, **options)


def skewed_pool(size) -> Pool:
    total = size * (size + 1) // 2
    return Pool(size, lambda client: Fraction(client + 1, total))


def rng(*path) -> np.random.Generator:
    return np.random.default_rng(path)


# --- inclusion probability × ν_i = p_i, given the group ---------------------------------------------------


@pytest.mark.parametrize(("size", "cohort"), [(4, 1), (5, 2), (5, 5), (6, 4)])
def test_uniform_sampling_is_unbiased_by_enumeration(size, cohort) -> None:
    pool, expected, cases = skewed_pool(size), Counter(), 0
    for order in itertools.permutations(range(size)):  # all orders in which distinct clients can be drawn
        (group,) = Uniform(cohort).invite((), pool, Scripted(order))
        assert len(group.clients) == group.quota == cohort
        expected.update(dict(zip(group.clients, map(Fraction, group.weights))))
        cases += 1
    for client in range(size):
        assert float(expected[client] / cases) == pytest.approx(float(pool.importance(client)), rel=1e-12)


@pytest.mark.parametrize(
    ("size", "cohort", "inside", "sticky"), [(6, 2, 3, 1), (6, 3, 3, 2), (6, 3, 4, 1), (5, 2, 3, 1)]
)
def test_sticky_sampling_is_unbiased_given_the_group_by_enumeration(size, cohort, inside, sticky) -> None:
    pool, sampler = skewed_pool(size), Sticky(cohort, inside, sticky)
    for members in [tuple(range(inside)), tuple(range(size - inside, size))]:
        expected, cases = Counter(), 0
        for order in itertools.permutations(range(size)):
            for inner in itertools.permutations(range(inside)):
                groups = sampler.invite(members, pool, Scripted(order, inner))
                for group in groups:
                    expected.update(dict(zip(group.clients, map(Fraction, group.weights))))
                cases += 1
        for client in range(size):
            assert float(expected[client] / cases) == pytest.approx(float(pool.importance(client)), rel=1e-12)


@given(st.integers(1, 30), st.data())
def test_draw_takes_distinct_accepted_clients_and_all_if_it_must(size, data) -> None:
    wanted = data.draw(st.integers(0, size + 3))
    accepted = data.draw(st.sets(st.integers(0, size - 1)))
    taken = draw(rng(data.draw(st.integers(0, 10**6))), size, wanted, accepted.__contains__)
    assert len(set(taken)) == len(taken) == min(wanted, len(accepted)) and set(taken) <= accepted


def test_draw_is_uniform_over_sets_also_when_rejection_gives_up() -> None:
    for online in (range(5), [0, 997, 998, 1999, 1]):  # the second: 5 of 2000, found by looking at everyone
        size, found = max(online) + 1, Counter()
        trials = 2000 if size == 5 else 600
        for seed in range(trials):
            found[frozenset(draw(rng(size, seed), size, 2, set(online).__contains__))] += 1
        assert len(found) == 10 and chi_square(list(found.values()), [trials / 10] * 10) < 3


def chi_square(found, expected) -> float:
    """Standard deviations by which Pearson's statistic exceeds its mean (normal approximation)."""
    statistic = sum((f - e) ** 2 / e for f, e in zip(found, expected))
    free = len(found) - 1
    return (statistic - free) / math.sqrt(2 * free)


def test_pooled_frequencies_per_group_at_large_n() -> None:
    size, sampler, rounds = 1000, Sticky(cohort=30, sticky_size=120, sticky_cohort=24), 4000
    pool = uniform_pool(size)
    members = sampler.init(pool, rng(1))
    found = Counter()
    for round in range(rounds):
        sticky, others = sampler.invite(members, pool, rng(2, round))
        assert set(sticky.clients) <= set(members) and not set(others.clients) & set(members)
        found.update(sticky.clients + others.clients)
    outside = sorted(set(range(size)) - set(members))
    # Sampling without replacement spreads less than a multinomial: only an excess is suspicious.
    assert chi_square([found[c] for c in members], [rounds * 24 / 120] * 120) < 3
    assert chi_square([found[c] for c in outside], [rounds * 6 / 880] * 880) < 3


@pytest.mark.parametrize("sampler", [Uniform(5), Sticky(5, 8, 3)])
def test_weights_of_a_whole_cohort_sum_to_one_on_equal_importance(sampler) -> None:
    pool = uniform_pool(40)
    groups = sampler.invite(sampler.init(pool, rng(0)), pool, rng(1))
    assert math.fsum(w for g in groups for w in g.weights[: g.quota]) == pytest.approx(1)


# --- other weights ----------------------------------------------------------------------------------------


def test_equal_weights_are_one_over_k_whatever_the_importance() -> None:
    for sampler in (Uniform(5, weights="equal"), Sticky(5, 8, 3, weights="equal")):
        groups = sampler.invite(sampler.init(skewed_pool(40), rng(0)), skewed_pool(40), rng(1))
        assert [w for g in groups for w in g.weights] == [1 / 5] * 5


def test_equal_sums_have_the_unbiased_weights_for_clients_and_one_over_k_in_the_sum() -> None:
    plain, sampler = Sticky(5, 8, 3), Sticky(5, 8, 3, weights="equal_sum")
    members, pool = plain.init(uniform_pool(40), rng(0)), uniform_pool(40)
    for own, group in zip(plain.invite(members, pool, rng(1)), sampler.invite(members, pool, rng(1)), strict=True):
        assert group.weights == own.weights and (group.clients, group.quota) == (own.clients, own.quota)
        used = group.clients[: group.quota]
        assert group.actual_weights(used) == pytest.approx(dict.fromkeys(used, 1 / 5))


def test_a_share_runs_from_unbiased_to_equal() -> None:
    n, k, s, c = 40, 5, 8, 3
    pool = uniform_pool(n)
    members = Sticky(k, s, c).init(pool, rng(0))

    def weights(mode) -> list[float]:
        return [w for g in Sticky(k, s, c, weights=mode).invite(members, pool, rng(1)) for w in g.weights]

    assert weights(s / n) == pytest.approx(weights("unbiased"))
    assert weights(c / k) == pytest.approx(weights("equal"))
    between = Sticky(k, s, c, weights=0.4).invite(members, pool, rng(1))
    assert [math.fsum(g.weights) for g in between] == pytest.approx([0.4, 0.6])


def test_fewer_arrivals_stand_for_more() -> None:
    group = Group("sticky", (4, 7, 9), 3, (0.1, 0.2, 0.3))
    assert group.actual_weights([4, 7, 9]) == pytest.approx({4: 0.1, 7: 0.2, 9: 0.3})
    assert group.actual_weights([9, 4]) == pytest.approx({9: 0.45, 4: 0.15})
    assert group.actual_weights([]) == {}


# --- over-commitment --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "split"), [(0.1, (1, 8)), (0.3, (3, 6)), (0.5, (5, 4)), (None, (7, 2))])
def test_the_extra_invitations_split_as_in_the_paper(share, split) -> None:
    sampler = Sticky(30, 120, 24, over_commitment=1.3, sticky_share=share)
    assert sampler.invitations() == (24 + split[0], 6 + split[1])
    pool = uniform_pool(2800)
    sticky, others = sampler.invite(sampler.init(pool, rng(0)), pool, rng(1))
    assert (len(sticky.clients), len(others.clients)) == sampler.invitations()
    assert (sticky.quota, others.quota) == (24, 6)  # who is used does not change, only who is invited


@pytest.mark.parametrize(
    ("oc", "cohort", "extra"), [(1.0, 30, 0), (1.3, 30, 9), (1.1, 5, 1), (1.05, 10, 1), (1.5, 3, 2)]
)
def test_extra_invitations_are_rounded_half_up_in_decimals(oc, cohort, extra) -> None:
    assert extra_invitations(oc, cohort) == extra
    (group,) = Uniform(cohort, over_commitment=oc).invite((), uniform_pool(100), rng(0))
    assert len(group.clients) == cohort + extra and group.quota == cohort


# --- the sticky group over time ---------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.integers(2, 8), st.data())
def test_the_group_keeps_its_size_and_only_idle_members_leave(cohort, data) -> None:
    sticky_cohort = data.draw(st.integers(1, cohort - 1))
    sticky_size = data.draw(st.integers(cohort, 20))
    size = data.draw(st.integers(sticky_size + cohort, 60))
    seed = data.draw(st.integers(0, 10**6))
    sampler = Sticky(cohort, sticky_size, sticky_cohort)
    pool = uniform_pool(size, is_online=lambda client: (client * 7 + seed) % 5 > 0)
    members = sampler.init(pool, rng(seed))
    for round in range(12):
        groups = sampler.invite(members, pool, rng(seed, round))
        invited = [c for g in groups for c in g.clients]
        used = set(invited[: data.draw(st.integers(0, len(invited)))])
        after = sampler.next_state(members, used, rng(seed, round, 1))
        assert len(after) == len(set(after)) == sticky_size and list(after) == sorted(after)
        assert used <= set(after)  # newcomers enter, and nobody who was used leaves
        assert set(after) <= set(members) | used
        members = after


def test_every_idle_member_is_evicted_alike() -> None:
    sampler, found = Sticky(3, 6, 2), Counter()
    for seed in range(3000):  # members 0…5; 0 and 1 were used, 8 is new
        after = sampler.next_state((0, 1, 2, 3, 4, 5), (0, 1, 8), rng(seed))
        found.update({2, 3, 4, 5} - set(after))
    assert sorted(found) == [2, 3, 4, 5] and chi_square(list(found.values()), [750] * 4) < 3


def test_the_first_group_is_random_or_the_fastest() -> None:
    pool = uniform_pool(50, speed=lambda client: -abs(client - 20))
    assert Sticky(3, 5, 2, initial="fastest").init(pool, rng(0)) == (18, 19, 20, 21, 22)
    ties = [int(speed) for speed in rng(3).integers(4, size=50)]
    expected = sorted(range(50), key=ties.__getitem__, reverse=True)[:9]
    pooled = uniform_pool(50, speed=ties.__getitem__)
    assert Sticky(3, 9, 2, initial="fastest").init(pooled, rng(0)) == tuple(sorted(expected))
    with pytest.raises(UsageError, match=r"'fastest'.*of at most 10,000,000; .*10,000,001: choose initial = 'random'"):
        Sticky(3, 5, 2, initial="fastest").check(LISTABLE + 1)
    with pytest.raises(UsageError, match=r"'fastest' needs the speeds .*: choose initial = 'random'"):
        Sticky(3, 5, 2, initial="fastest").init(uniform_pool(50), rng(0))
    seen = Counter(c for seed in range(2000) for c in Sticky(3, 5, 2).init(pool, rng(seed)))
    assert chi_square([seen[c] for c in range(50)], [200] * 50) < 3


# --- limits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampler", "says"),
    [
        (Sticky(5, 200, 3), "S = 200 is larger than the population of 100"),
        (Sticky(5, 99, 3), "only 1 clients are outside the sticky group; 2 are invited"),
        (Sticky(5, 97, 3, over_commitment=1.4, sticky_share=0.0), "only 3 clients are outside"),
        (Uniform(101), "cohort of 101 clients"),
        (Uniform(90, over_commitment=1.3), "over-commitment 1.3"),
    ],
)
def test_sizes_that_cannot_run_are_refused(sampler, says) -> None:
    with pytest.raises(UsageError, match=says):
        sampler.init(uniform_pool(100), rng(0))


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((5, 20, 5), "C = 5 must lie between 1 and cohort − 1 = 4"),
        ((5, 20, 0), "sticky_cohort: input should be greater than or equal to 1; found 0"),
        ((5, 4, 3), "S = 4 must be at least the cohort K = 5"),
        ((5, 2, 9), r"C = 9 must lie.*\n.*S = 2 must be at least"),  # everything at once
    ],
)
def test_sizes_that_no_population_can_serve_are_refused(sizes, says) -> None:
    with pytest.raises(UsageError, match=says):
        Sticky(*sizes)


def test_when_few_are_online_there_is_what_there_is() -> None:
    members = tuple(range(8))
    sampler = Sticky(5, 8, 3, over_commitment=1.2)

    def invited(*online) -> tuple[tuple[set[int], int], ...]:
        groups = sampler.invite(members, uniform_pool(40, is_online=set(online).__contains__), rng(0))
        return tuple((set(g.clients), g.quota) for g in groups)

    assert invited() == ((set(), 0), (set(), 0))
    assert invited(3) == (({3}, 1), (set(), 0))
    assert invited(30) == ((set(), 0), ({30}, 1))
    assert invited(3, 30) == (({3}, 1), ({30}, 1))
    assert invited(1, *range(20, 40))[0] == ({1}, 1)
    assert len(invited(1, *range(20, 40))[1][0]) == 5 and invited(1, *range(20, 40))[1][1] == 4  # others take the rest
    assert len(invited(*range(8), 30)[0][0]) == 5 and invited(*range(8), 30)[0][1] == 4  # and so do the sticky
    (group,) = Uniform(5).invite((), uniform_pool(40, is_online={7, 9}.__contains__), rng(0))
    assert set(group.clients) == {7, 9} and group.quota == 2 and group.weights == (0.5, 0.5)
    (nobody,) = Uniform(5).invite((), uniform_pool(40, is_online=lambda client: False), rng(0))
    assert nobody.clients == () and nobody.quota == 0


class Unlistable:
    """A generator that does not list a billion clients."""

    def __init__(self, inner: np.random.Generator) -> None:
        self._inner = inner

    def integers(self, *arguments, **options):
        return self._inner.integers(*arguments, **options)

    def permutation(self, of):
        assert not isinstance(of, int), "the whole pool was listed"
        return self._inner.permutation(of)


def test_inviting_from_a_billion_looks_at_a_few() -> None:
    asked = []

    def is_online(client) -> bool:
        asked.append(client)
        return client % 10 == 0  # one in ten is there

    pool = uniform_pool(10**9, is_online=is_online)
    sampler = Sticky(30, 120, 24, over_commitment=1.3)
    members = sampler.init(pool, Unlistable(rng(0)))
    groups = sampler.invite(members, pool, Unlistable(rng(1)))
    (group,) = Uniform(30).invite((), pool, Unlistable(rng(2)))
    assert sum(len(g.clients) for g in groups) == 39 and len(group.clients) == 30
    assert len(asked) < 120 + 20 * (39 + 30)


# --- Proposition 2 ----------------------------------------------------------------------------------------


def test_ten_thousand_rounds_return_as_proposition_2_says() -> None:
    n, k, s, c, rounds = 2800, 30, 120, 24, 10_000
    pool, sampler = uniform_pool(n), Sticky(k, s, c)
    visits = [[] for _ in range(n)]
    generator = rng(20)
    members = sampler.init(pool, generator)
    for round in range(1, rounds + 1):
        used = [client for group in sampler.invite(members, pool, generator) for client in group.clients]
        for client in used:
            visits[client].append(round)
        members = sampler.next_state(members, used, generator)
    gaps = np.concatenate([np.diff(v, append=10**9) for v in visits])  # the last visit never returns
    began = np.concatenate(visits)

    counted = gaps[began <= rounds - 6]
    for r in range(1, 7):
        p = sticky_return(n, k, s, c, r)
        assert abs(np.mean(counted == r) - p) < 3 * math.sqrt(p * (1 - p) / counted.size), f"r = {r}"

    truncated = np.minimum(gaps[began <= rounds // 2], rounds // 2)
    expected = survival(n, k, s, c, rounds // 2).sum()  # E[min(R, limit)] = Σ_{r<limit} P(R > r)
    assert abs(truncated.mean() - expected) < 3 * truncated.std() / math.sqrt(truncated.size)


def survival(n, k, s, c, limit) -> np.ndarray:
    """P(return > r) for r < limit, by following a client inside and outside the group from round to round."""
    inside, outside, result = 1.0, 0.0, []
    for _ in range(limit):
        result.append(inside + outside)
        inside, outside = inside * (1 - k / s), inside * (k - c) / s + outside * (1 - (k - c) / (n - s))
    return np.array(result)


def test_the_formula_agrees_with_following_a_client() -> None:
    returned = np.cumsum([sticky_return(2800, 30, 120, 24, r) for r in range(1, 200)])
    assert survival(2800, 30, 120, 24, 200)[1:] == pytest.approx(1 - returned, abs=1e-12)
