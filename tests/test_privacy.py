"""Privacy: what a client can add is limited, noise has the stated variance, and ε agrees with closed forms."""

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from federations import measured, simulation
from gluefl import APF, STC, FedAvg, GlueFL, Lean, LocalSGD, Sticky, Uniform
from gluefl.core.guard import UPDATE
from gluefl.core.protection import claim
from gluefl.core.sampling import Pool
from gluefl.core.server import Core, start
from gluefl.errors import MissingExtra, UsageError
from gluefl.privacy import Private, amplified_epsilon, epsilon, largest_weight, participations
from gluefl.privacy.mechanism import limit, system_normal
from gluefl.simulation.round import play
from gluefl.strategies import Space, Statistic, Task, Upload
from gluefl.vectors.layout import Layout
from gluefl.vectors.sparse import whole
from runs import options, small_run
from stubs import dyadic, mlp

SPACE = Space((40,))


def uploads(*updates: torch.Tensor, weight: float = 0.5) -> list[Upload]:
    return [Upload(client, weight, whole(update), torch.zeros(0)) for client, update in enumerate(updates)]


vectors = st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20).map(torch.tensor)


@given(vectors, st.floats(1e-6, 1e6))
@settings(max_examples=60)
def test_a_limited_vector_keeps_its_direction_and_has_the_norm_at_most(vector, norm) -> None:
    before = float(vector.double().norm())
    after = vector.double() * limit(vector.double(), norm)
    assert float(after.norm()) <= norm * (1 + 1e-12)
    torch.testing.assert_close(after, vector.double() * (1.0 if before <= norm else norm / before), rtol=1e-9, atol=0)


@given(st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=6), st.floats(0.01, 1), st.integers(0, 2**31))
@settings(max_examples=40)
def test_nobody_moves_the_sum_further_than_the_bound(lengths, share, seed) -> None:
    """Replacing a client's update by zero: the sum moves by clip · weight at most, whatever the client sent."""
    private = Private(FedAvg(), clip=2.0, noise=1.0, weight=share)
    rng = np.random.default_rng(seed)
    sent = [length * torch.from_numpy(rng.standard_normal(40, dtype=np.float32)) for length in lengths]
    state, _ = private.init(SPACE, torch.zeros(40))
    total = private.combine(state, uploads(*sent), round=3)
    without = private.combine(state, uploads(torch.zeros(40), *sent[1:]), round=3)
    assert float((total - without).norm()) <= 2.0 * share * (1 + 1e-4) + 1e-6 * len(lengths)


def test_updates_below_the_bound_are_summed_as_they_are() -> None:
    sent = [0.1 * torch.ones(40), -0.05 * torch.ones(40)]
    private = Private(FedAvg(), clip=1.0, noise=1e-6, weight=0.5)
    total = private.combine(private.init(SPACE, torch.zeros(40))[0], uploads(*sent), 1)
    torch.testing.assert_close(total, torch.full((40,), 0.025), atol=1e-5, rtol=0)


@pytest.mark.parametrize("source", ["seeded", "system"])
def test_noise_has_the_stated_variance_in_every_coordinate(source) -> None:
    private, space = Private(FedAvg(), clip=3.0, noise=0.5, weight=0.1, source=source), Space((2000,))
    state, _ = private.init(space, torch.zeros(2000))
    drawn = torch.stack([private.combine(state, uploads(torch.zeros(2000)), round) for round in range(40)])
    deviation, number = 0.5 * 3.0 * 0.1, drawn.numel()
    assert abs(float(drawn.mean())) < 6 * deviation / math.sqrt(number)
    assert float(drawn.std()) == pytest.approx(deviation, rel=6 / math.sqrt(2 * number))
    assert not torch.equal(drawn[0], drawn[1])
    again = private.combine(state, uploads(torch.zeros(2000)), 0)
    assert torch.equal(again, drawn[0]) == (source == "seeded")


def test_numbers_of_the_operating_system_are_normal() -> None:
    values = np.sort(system_normal(20_001))
    assert len(values) == 20_001 and np.isfinite(values).all()
    normal = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in values])
    distance = np.abs(normal - np.arange(len(values)) / len(values)).max()
    assert distance < 2.5 / math.sqrt(len(values))  # Kolmogorov and Smirnov: one false alarm in 100,000


@pytest.mark.parametrize("strategy", [FedAvg(), STC(0.2), APF(), GlueFL(), Lean()], ids=lambda s: type(s).__name__)
def test_every_strategy_runs_with_it_measured_and_encoded(strategy) -> None:
    sampler = Sticky(cohort=4, sticky_size=12, sticky_cohort=3)
    private = Private(strategy, clip=1.0, noise=0.01, weight=largest_weight(sampler, 40))
    runs = [
        small_run(model=mlp(), strategy=private, sampler=sampler, rounds=3, options=options(encode=encode))
        for encode in (False, True)
    ]
    assert runs[0].summary["strategy"] == f"{type(strategy).__name__.lower()} (private)"
    for one, other in zip(*(run.module.parameters() for run in runs)):
        assert torch.equal(one, other)


@pytest.mark.parametrize("factor", [1.0, 1e6])
def test_a_guard_measures_what_came_and_not_what_is_left_of_it(factor) -> None:
    module = mlp(norm=False)
    layout = Layout.of(module)
    lengths = []
    for strategy in (Lean(), Private(Lean(), clip=1.0, noise=1.0, weight=0.5)):
        core = Core(5, bytes(16), layout, Space.of(layout), Uniform(2), strategy, *layout.flatten(module))
        state = start(core, Pool(2, lambda client: 0.5))
        task = Task(1, strategy.mask(state.strategy, 1), 1.0, core.space, 0, core.seed)
        sent, _ = strategy.compress(factor * dyadic(layout.size, 1, 0), task, None)
        upload = Upload(0, 1.0, sent, torch.zeros(0), core.seed)
        lengths.append(claim(core, state, upload, 1, 10).quantities[UPDATE])
    assert lengths[0] == lengths[1] > factor


def test_updates_that_the_strategy_inside_keeps_are_sent() -> None:
    strategy = STC(0.05, "plain", server_feedback=True, ternary=True, cached_updates=9)
    private = Private(strategy, clip=1.0, noise=0.1, weight=0.5)
    space = Space((100,))
    state, _ = strategy.init(space, torch.zeros(100))
    for round in (1, 2, 3):
        state, _ = strategy.aggregate(state, dyadic(100, round, 0), round)
    assert torch.equal(private.updates(state, 1).signs, strategy.updates(state, 1).signs)
    assert private.updates(private.without_updates(state, 3), 2) is None


def test_it_still_learns() -> None:
    private = Private(FedAvg(), clip=5.0, noise=0.05, weight=1 / 20)
    training = LocalSGD(steps=5, batch=8, lr=0.1)
    run = small_run(
        model=mlp(),
        strategy=private,
        sampler=Uniform(20),
        rounds=20,
        training=training,
        options=options(trainer="auto"),
    )
    assert run.summary["mean_accuracy"] > 0.7


def test_statistics_would_travel_in_the_clear_and_are_refused() -> None:
    private = Private(FedAvg(), clip=1.0, noise=1.0, weight=0.1)
    with pytest.raises(UsageError, match="17 statistics, in the clear"):
        small_run(model=mlp(norm=True), strategy=private, sampler=Uniform(4), rounds=1)
    with pytest.raises(UsageError, match="exchanges no second vector"):
        private.init(Space((3,), statistics=(Statistic(3, "exchanged"),)), torch.zeros(3))


@pytest.mark.parametrize("wrong", [{"clip": 0}, {"noise": math.nan}, {"weight": 1.5}, {"source": "dice"}], ids=str)
def test_a_mechanism_that_protects_nobody_cannot_be_made(wrong) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Private(**{"strategy": FedAvg(), "clip": 1.0, "noise": 1.0, "weight": 0.1, **wrong})


SAMPLERS = [
    Uniform(7),
    Sticky(6, 12, 4),
    Sticky(6, 12, 4, weights="equal"),
    Sticky(6, 12, 4, weights="equal_sum"),
    Sticky(6, 12, 4, weights="proportional"),
    Sticky(6, 12, 4, weights=0.5),
]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_the_largest_weight_is_the_one_that_the_sampler_gives(sampler) -> None:
    pool, rng = Pool(50, lambda client: 1 / 50), np.random.default_rng(0)
    groups = sampler.invite(sampler.init(pool, rng), pool, rng)
    used = [group.actual_weights(group.clients[: group.quota]) for group in groups]
    assert largest_weight(sampler, 50) == pytest.approx(max(max(weights.values()) for weights in used))


def test_participations_are_counted_in_the_journal() -> None:
    sim, state = simulation(FedAvg(), Sticky(6, 12, 4), 40, channel=measured)
    lines, counts = [], dict[int, int]()
    for _ in range(12):
        state, record = play(sim, state)
        lines.append(record.line)
        for client, fate in zip(record.line["clients"]["id"], record.line["clients"]["fate"]):
            counts[client] = counts.get(client, 0) + (fate == "used")
    assert participations(lines) == max(counts.values()) > 1 and participations([]) == 0


def test_participations_need_the_clients_of_the_journal() -> None:
    run = small_run(rounds=2, options=options(journal_clients="none"))
    with pytest.raises(UsageError, match=r'no clients in round 1: .*clients = "none"'):
        participations(run.journal)


# --- the accountant ---------------------------------------------------------------------------------------


def gaussian_epsilon(sigma: float, delta: float) -> float:
    """The exact ε of one Gaussian mechanism (Balle and Wang, ICML 2018, Theorem 8), by bisection."""

    def normal(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    def excess(e: float) -> float:
        return normal(0.5 / sigma - e * sigma) - math.exp(e) * normal(-0.5 / sigma - e * sigma) - delta

    low, high = 0.0, 200.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


@pytest.mark.parametrize(("noise", "count"), [(1.0, 1), (4.0, 30), (0.8, 3), (10.0, 100)])
def test_epsilon_is_that_of_the_gaussian_mechanism_composed(noise, count) -> None:
    """`count` Gaussian mechanisms with multiplier z are one with z/√count, so the exact value is known."""
    pytest.importorskip("dp_accounting")
    for delta in (1e-5, 1e-7):
        exact = gaussian_epsilon(noise / math.sqrt(count), delta)
        accounted = epsilon(noise, count, delta)
        assert exact * (1 - 1e-6) <= accounted <= exact * 1.01 + 1e-3
        orders = (1 + i / 50 for i in range(1, 5000))
        renyi = min(a * count / (2 * noise**2) + math.log(1 / delta) / (a - 1) for a in orders)  # Mironov 2017
        assert accounted <= renyi


def test_amplification_is_counted_for_uniform_sampling_alone() -> None:
    pytest.importorskip("dp_accounting")
    noise, rounds, delta = 2.0, 50, 1e-6
    everybody = [amplified_epsilon(noise, Uniform(cohort), 10_000, rounds, delta) for cohort in (10, 100, 1000)]
    assert everybody == sorted(everybody) and everybody[0] < epsilon(noise, rounds, delta) / 10
    # Sampling all, the only loss against the exact value is that of Rényi orders and of sampling without replacement.
    assert amplified_epsilon(noise, Uniform(10_000), 10_000, rounds, delta) >= epsilon(noise / 2, rounds, delta)
    for sampler, words in ((Sticky(10, 40, 8), "no amplification"), (Uniform(10, over_commitment=1.3), "fastest")):
        with pytest.raises(UsageError, match=words):
            amplified_epsilon(noise, sampler, 10_000, rounds, delta)


@pytest.mark.parametrize("wrong", [{"noise": 0.0}, {"participations": 0}, {"delta": 1.0}, {"delta": math.nan}], ids=str)
def test_what_cannot_be_accounted_for_is_refused(wrong) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        epsilon(**{"noise": 1.0, "participations": 3, "delta": 1e-5, **wrong})


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(MissingExtra, match=r"pip install 'gluefl\[privacy\]'"):
        epsilon(1.0, 3, 1e-5)
