"""Propositions 1 and 2 and what follows from them, against the figures and the closed form of the paper."""

import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gluefl import GlueFL, Sticky, Uniform, plan
from gluefl.cli import main
from gluefl.core.ledger import Ledger
from gluefl.core.sampling import Pool
from gluefl.errors import UsageError
from gluefl.experiments.report.tradeoff import draw
from gluefl.experiments.theory.options import read_options
from gluefl.experiments.theory.propositions import (
    horizon,
    mean_return_rounds,
    sticky_return,
    uniform_return,
    variance_factor,
)
from gluefl.experiments.theory.staleness import download_share, in_bytes, measured_share, missing_share, staleness
from gluefl.strategies import Space, Task, Upload

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
    assert found.resample_probability == tuple(sticky_return(**FEMNIST, r=r) for r in range(1, 7))
    assert found.uniform_probability == 30 / 2800 and found.horizon == 11
    assert found.effective_cohort == pytest.approx(6.5, abs=0.06) == 30 / found.variance_factor
    assert 0.35 < found.expected_download_share < 0.53  # the paper's Table 2, inverted
    assert found.expected_download_share < found.uniform_download_share < 1


def test_the_command_prints_the_figures_of_the_paper() -> None:
    sizes = ["--clients", "2800", "--cohort", "30", "--sticky-size", "120", "--sticky-cohort", "24"]
    done = CliRunner().invoke(main, ["plan", *sizes, "--json"])
    found = json.loads(done.stdout)
    assert list(found) == [
        "sticky_size",
        "sticky_cohort",
        "resample_probability",
        "uniform_probability",
        "mean_return_rounds",
        "variance_factor",
        "effective_cohort",
        "expected_download_share",
    ]
    assert found["resample_probability"] == pytest.approx([0.200, 0.150, 0.113, 0.085, 0.064, 0.048], abs=6e-4)
    assert round(found["variance_factor"], 2) == 4.58 and round(found["mean_return_rounds"], 1) == 93.3
    text = CliRunner().invoke(main, ["plan", *sizes, "--parameters", "1000000", "--network", "edge"])
    assert text.exit_code == 0 and "4.58" in text.stdout and "try it too" in text.stdout


@pytest.mark.parametrize("wrong", [{"sticky_cohort": 30}, {"sticky_cohort": 0}, {"sticky_size": 29}, {"clients": 125}])
def test_a_plan_for_sizes_that_cannot_run_is_refused(wrong) -> None:
    with pytest.raises(UsageError, match=r"cannot (run|be used)"):
        plan(**{**FEMNIST, **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"cohort": 2800},
        {"cohort": -3},
        {"cohort": "a"},
        {"sticky_size": "a"},
        {"q": 0.1},
        {"q": 1.2},
        {"rounds": 0},
        {"regenerate_every": 0},
        {"over_commitment": 0.5},
        {"over_commitment": math.nan},
        {"online_share": 0.0},
        {"staleness_cost": [0.2, 7.0]},
        {"network": "pigeon", "parameters": 1000},
    ],
)
def test_what_cannot_be_planned_is_refused(wrong) -> None:
    with pytest.raises(UsageError):
        plan(**{**FEMNIST, **wrong})


MANY = {"staleness_cost": "0.2", "rounds": 3 * 10**9}  # before the shares of so many rounds are computed


def test_words_on_the_command_line_are_read_or_refused(tmp_path) -> None:
    assert read_options({"regenerate_every": "never", "q": None}) == {"regenerate_every": None}
    assert read_options({"staleness_cost": "0.2,0.5"}) == {"staleness_cost": [0.2, 0.5]}
    for wrong in ({"regenerate_every": "often"}, {"staleness_cost": "a,b"}, {"staleness_cost": str(tmp_path)}, MANY):
        with pytest.raises(UsageError):
            read_options(wrong)


@settings(max_examples=15)
@given(st.integers(50, 4000), st.integers(2, 40))
def test_the_sizes_that_are_chosen_can_run_and_gain_something(clients, cohort) -> None:
    assume(clients >= 8 * cohort)
    found = plan(clients, cohort, rounds=200)
    Sticky(cohort, found.sticky_size, found.sticky_cohort).check(clients)
    assert found.sticky_cohort * clients > found.sticky_size * cohort
    assert found.candidates[0].cost == min(candidate.cost for candidate in found.candidates)
    assert found.sticky_cohort <= 0.3 * found.sticky_size  # of whom 30% are online


def test_a_figure_of_the_trade_off(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    draw(plan(400, 20), tmp_path / "new" / "plan.svg")
    assert "<svg" in (tmp_path / "new" / "plan.svg").read_text()
    with pytest.raises(UsageError, match="ends in"):
        draw(plan(400, 20), tmp_path / "plan.txt")


@given(sizes(), st.integers(1, 40))
def test_staleness_follows_the_propositions(setting, rounds) -> None:
    n, k, s, c = setting.values()
    assume(s > c)
    sticky = staleness(Sticky(k, s, c), n, rounds)
    assert sticky == pytest.approx([sticky_return(**setting, r=r) for r in range(1, rounds + 1)], abs=1e-12)
    uniform = staleness(Uniform(k), n, rounds)
    assert uniform == pytest.approx([uniform_return(n, k, r) for r in range(1, rounds + 1)], abs=1e-12)


@pytest.mark.parametrize("over_commitment", [1.0, 1.5])
def test_staleness_with_over_commitment_against_a_simulation(over_commitment) -> None:
    sampler, clients, rounds = Sticky(10, 40, 8, over_commitment=over_commitment), 200, 3000
    pool, rng = Pool(clients, lambda client: 1 / clients), np.random.default_rng(3)
    state, last, ages = sampler.init(pool, rng), dict[int, int](), list[int]()
    for t in range(rounds):
        groups = sampler.invite(state, pool, rng)
        for client in (client for group in groups for client in group.clients):
            ages += [t - last[client]] if client in last else []
            last[client] = t
        used = [client for group in groups for client in rng.permutation(group.clients)[: group.quota].tolist()]
        state = sampler.next_state(state, used, rng)
    found = np.bincount(ages, minlength=41)[1:41] / len(ages)
    assert found == pytest.approx(staleness(sampler, clients, 40), abs=0.006)


def test_the_expected_share_against_simulated_masks() -> None:
    """Mask shifting on coordinates whose updates differ in size for good, as those of a network do."""
    clients, cohort, rounds, d, q, q_shared, every = 150, 10, 120, 4000, 0.2, 0.16, 10
    rng = np.random.default_rng(5)
    strategy, space = GlueFL(q, q_shared, every, compensation="none"), Space((d,), torch.device("cpu"))
    scale = rng.exponential(size=d).astype(np.float32)
    state, sampler = strategy.init(space, torch.zeros(d))[0], Sticky(cohort, 40, 8)
    pool = Pool(clients, lambda client: 1 / clients)
    members, ledger, shares = sampler.init(pool, rng), Ledger.init(d), list[float]()
    for t in range(1, rounds + 1):
        invited = [client for group in sampler.invite(members, pool, rng) for client in group.clients]
        shares += [ledger.missing(ledger.base(client)).density for client in invited]
        delta = torch.from_numpy(scale * rng.standard_normal(d).astype(np.float32))
        sent, _ = strategy.compress(delta, Task(t, strategy.mask(state, t), 1.0, space), None)
        total = strategy.combine(state, [Upload(0, 1.0, sent, torch.zeros(0))], t)
        state, update = strategy.aggregate(state, total, t)
        ledger = ledger.synchronised(invited).publish(ledger.changed_by(update))
        members = sampler.next_state(members, invited, rng)
    expected = download_share(staleness(sampler, clients, rounds), missing_share(q, q_shared, every, rounds))
    assert np.mean(shares) == pytest.approx(expected, abs=0.05)


def test_missing_shares_grow_from_q_and_are_exact_in_the_first_round() -> None:
    for every in (1, 10, None):
        found = missing_share(0.2, 0.16, every, 300)
        assert found[0] == pytest.approx(0.2) and (np.diff(found) > 0).all() and found[-1] < 1
    often, never = missing_share(0.2, 0.16, 1, 50), missing_share(0.2, 0.16, None, 50)
    assert (often[1:] > never[1:]).all()
    # Positions and mask cost something, never more than two bits a coordinate.
    assert (in_bytes(never, 0.16) > never).all() and (in_bytes(never, 0.16) - never < 2 / 32).all()


def test_a_measured_curve_is_read_from_a_journal() -> None:
    clients = [
        {"id": [5, 6, 7], "staleness": [None, 1, 3], "down_bytes": [100, 20, 40], "fate": ["used"] * 3},
        {"id": [6, 8, 7], "staleness": [1, 1, 3], "down_bytes": [30, 1, 40], "fate": ["used", "late", "used"]},
    ]  # 8 was told to stop when it had received one byte
    found = measured_share([{"clients": some} for some in clients], 100, 5)
    assert found == pytest.approx([0.25, 0.325, 0.4, 0.4, 0.4])
    with pytest.raises(UsageError, match="invited twice"):
        first = {"id": [5], "staleness": [None], "down_bytes": [100], "fate": ["used"]}
        measured_share([{"clients": first}], 100, 5)


@given(
    clients=st.integers(3, 300),
    over_commitment=st.floats(1, 30),
    uniform=st.booleans(),
    data=st.data(),
)
def test_probabilities_stay_probabilities_with_any_over_commitment(clients, over_commitment, uniform, data) -> None:
    cohort = data.draw(st.integers(2, clients - 1))
    if uniform:
        sampler = Uniform(cohort, over_commitment=over_commitment)
    else:
        size = data.draw(st.integers(cohort, clients - 1))
        sticky = data.draw(st.integers(max(1, cohort - (clients - size)), cohort - 1))
        sampler = Sticky(cohort, size, sticky, over_commitment=over_commitment)
    stale = staleness(sampler, clients, 200)
    assert (stale >= 0).all() and stale.sum() <= 1 + 1e-9


def test_plans_print_all_that_they_were_asked_for() -> None:
    arguments = ["plan", "--clients", "100", "--cohort", "10", "--json"]
    done = CliRunner().invoke(main, [*arguments, "--parameters", "1000000", "--network", "edge"])
    found = json.loads(done.stdout)
    assert found["down_bytes"] > 0 and len(found["download_s"]) == 2
    refused = CliRunner().invoke(main, [*arguments, "--network", "edge"])
    assert refused.exit_code == 2 and "needs parameters" in refused.stderr
    refused = CliRunner().invoke(main, [*arguments, "--over-commitment", "11"])
    assert refused.exit_code == 2 and "invites 110 of 100 clients: lower it" in refused.stderr
    lean = [*arguments[:2], "1000000000000", "--cohort", "1000000", "--strategy", "lean", "--parameters", "10"]
    done = CliRunner().invoke(main, [*lean, "--rounds-exponent", "100", "--online-share", "1"])
    assert done.exit_code == 0, done.output
