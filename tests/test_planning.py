"""Propositions 1 and 2 and what follows from them, against the figures and the closed form of the paper."""

import math
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gluefl import plan
from gluefl.errors import UsageError
from gluefl.planning import horizon, mean_return_rounds, sticky_return, uniform_return, variance_factor

FEMNIST = {"clients": 2800, "cohort": 30, "sticky_size": 120, "sticky_cohort": 24}


@st.composite
def sizes(draw) -> dict[str, int]:
    cohort = draw(st.integers(2, 30))
    sticky_cohort = draw(st.integers(1, cohort - 1))
    sticky_size = draw(st.integers(cohort, 150))
    clients = draw(st.integers(sticky_size + cohort - sticky_cohort, 3000))
    return {"clients": clients, "cohort": cohort, "sticky_size": sticky_size, "sticky_cohort": sticky_cohort}


def test_the_figures_of_the_paper() -> None:
    found = [100 * sticky_return(**FEMNIST, r=r) for r in range(1, 7)]
    assert found == pytest.approx([20.0, 15.0, 11.27, 8.5, 6.4, 4.8], abs=0.06)
    assert 100 * uniform_return(2800, 30, 1) == pytest.approx(1.07, abs=0.005)
    assert mean_return_rounds(2800, 30) == pytest.approx(93.3, abs=0.05)
    assert variance_factor(**FEMNIST) == pytest.approx(4.58, abs=0.005)
    assert horizon(**FEMNIST) == 11


@given(sizes(), st.integers(1, 60))
def test_the_closed_form_of_proposition_2(setting, r) -> None:
    n, k, s, c = setting.values()
    divisor = (n - s) * k - (k - c) * s
    assume(divisor != 0)  # there the closed form is 0/0, and the sum is not
    inside = Fraction(k * (n * c - s * k), s) * (1 - Fraction(k, s)) ** (r - 1)
    outside = (k - c) ** 2 * (1 - Fraction(k - c, n - s)) ** (r - 1)
    assert sticky_return(**setting, r=r) == pytest.approx(float((inside + outside) / divisor), rel=1e-9, abs=1e-15)


@settings(max_examples=15)
@given(st.integers(8, 60), st.integers(2, 4), st.data())
def test_a_client_returns_surely_and_every_n_over_k_rounds(clients, cohort, data) -> None:
    sticky_cohort = data.draw(st.integers(1, cohort - 1))
    sticky_size = data.draw(st.integers(cohort, clients - cohort + sticky_cohort))
    rounds = range(1, 700)
    uniform = [uniform_return(clients, cohort, r) for r in rounds]
    sticky = [sticky_return(clients, cohort, sticky_size, sticky_cohort, r) for r in rounds]
    for chances in (uniform, sticky):
        assert math.fsum(chances) == pytest.approx(1, abs=1e-3)
        mean = math.fsum(r * p for r, p in zip(rounds, chances))
        assert mean == pytest.approx(mean_return_rounds(clients, cohort), rel=2e-2)


@given(sizes())
def test_up_to_the_horizon_a_sticky_client_is_likelier_to_return(setting) -> None:
    n, k, s, c = setting.values()
    last = horizon(**setting)
    for r in range(1, min(last, 50) + 1):
        assert sticky_return(**setting, r=r) >= uniform_return(n, k, r) * (1 - 1e-12)
    if last > 1:  # one round later, a return from inside the group alone no longer is
        inside = c / s * (1 - k / s) ** last
        assert inside <= uniform_return(n, k, last + 1) * (1 + 1e-12)
    assert (last == 0) == (c * n <= s * k)


@given(sizes(), st.lists(st.floats(0.1, 10), min_size=2, max_size=8))
def test_variance_is_least_for_uniform_sampling(setting, shares) -> None:
    assert variance_factor(**setting) >= 1 - 1e-12
    assert variance_factor(setting["clients"], setting["cohort"], 0, 0) == pytest.approx(1)
    squares = sum((share / sum(shares)) ** 2 for share in shares)
    assert variance_factor(len(shares), 2, 0, 0, squares) >= 1 - 1e-12


def test_a_plan_says_it_all() -> None:
    found = plan(**FEMNIST)
    assert found.returns == tuple(sticky_return(**FEMNIST, r=r) for r in range(1, 7))
    assert found.uniform_returns[0] == 30 / 2800 and found.horizon == 11
    assert found.effective_cohort == pytest.approx(6.5, abs=0.06) == 30 / found.variance_factor


@pytest.mark.parametrize("wrong", [{"sticky_cohort": 30}, {"sticky_cohort": 0}, {"sticky_size": 29}, {"clients": 125}])
def test_a_plan_for_sizes_that_cannot_run_is_refused(wrong) -> None:
    with pytest.raises(UsageError, match="cannot run"):
        plan(**{**FEMNIST, **wrong})
