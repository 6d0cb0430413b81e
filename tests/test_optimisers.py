"""What people bring to training: optimisers of torch, schedules, mixed precision; and what is refused."""

import math
import tomllib
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from federations import LAYOUT, RUN, simulation
from gluefl import (
    APF,
    STC,
    Adagrad,
    Adam,
    Clipped,
    Falling,
    FedAvg,
    GlueFL,
    Lean,
    LocalAdam,
    LocalSGD,
    Options,
    Scaffold,
    Server,
    TorchOptimizer,
    Uniform,
    Yogi,
)
from gluefl.clients.trainers.dense import Dense
from gluefl.clients.trainers.loop import Loop
from gluefl.clients.trainers.stacked import Stacked
from gluefl.clients.trainers.workers import Workers
from gluefl.config import to_toml, validated
from gluefl.config.tables import local_rule
from gluefl.core.sampling import Pool
from gluefl.core.server import Core, aggregate, start
from gluefl.errors import UsageError
from gluefl.simulation.round import play
from gluefl.storage import toml
from gluefl.strategies import Space, Upload
from gluefl.strategies.coded import Coded
from gluefl.vectors.sparse import whole
from runs import small_run
from stubs import mlp
from test_rules import FLOAT64, gradients, setting

NAMES = [
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
]


# --- clients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("trainer_of", [Loop, Workers])
def test_any_optimiser_of_torch_is_what_a_plain_loop_gives(name, trainer_of) -> None:
    factory = getattr(torch.optim, name)
    rule = TorchOptimizer(4, batch=8, lr=0.02, factory=factory)
    given = setting(rule)
    for job, outcome in zip(given.jobs, given.train(trainer_of, rule)):
        given.layout.fill(given.module.train(), given.cohort.weights, given.cohort.statistics)
        optimizer = factory(given.module.parameters(), lr=0.02)
        for _ in gradients(given.module, job):
            optimizer.step()
        weights, statistics = given.layout.flatten(given.module)
        assert outcome.delta.any()
        torch.testing.assert_close(outcome.delta, weights - given.cohort.weights, **FLOAT64)
        torch.testing.assert_close(outcome.statistics, statistics, **FLOAT64)


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        (torch.optim.LBFGS, "LBFGS evaluates the loss several times.*closure"),
        (torch.optim.SparseAdam, "SparseAdam cannot train this model: .*Choose another optimiser"),
        (lambda parameters, lr: None, "returned a NoneType: it must return an optimiser of torch.optim"),
        (partial(torch.optim.SGD, momentum=-1), "cannot be called with .*: Invalid momentum"),
        (lambda parameters: None, "cannot be called with a list of parameters and the learning rate"),
    ],
)
def test_a_factory_that_cannot_train_is_refused(factory, reason) -> None:
    rule = TorchOptimizer(1, batch=8, factory=factory)
    with pytest.raises(UsageError, match=reason):
        setting(rule).train(Loop, rule)


@pytest.mark.parametrize("arguments", [{"factory": "adam"}, {}, {"factory": torch.optim.Adam, "lr": -1.0}])
def test_a_torch_optimizer_needs_a_factory_and_a_rate(arguments) -> None:
    with pytest.raises((UsageError, TypeError), match=r"factory|lr"):
        TorchOptimizer(**arguments)


def test_scaffold_refuses_a_rate_below_float32() -> None:
    rule = Scaffold(3, batch=8, lr=0.01, lr_decay=0.1, lr_decay_every=1, share=0.1)
    assert rule.rate(36) == LocalSGD(3, lr=0.01, lr_decay=0.1, lr_decay_every=1).rate(36) > 0
    for wrapped in (rule, Clipped(rule)):
        with pytest.raises(UsageError, match=r"the learning rate of round 60 is 1e-61; .* set lr_min"):
            wrapped.rate(60)
    assert replace(rule, lr_min=1e-6).rate(60) == 1e-6


def test_the_smallest_rate_is_not_above_the_first() -> None:
    for kind in (LocalSGD, LocalAdam):
        with pytest.raises(UsageError, match=r"lr_min = 0\.5 must not be above lr = 0\.01"):
            kind(lr=0.01, lr_min=0.5)
        with pytest.raises(UsageError, match=r"lr_min = 0\.5 has no effect beside a schedule"):
            kind(lr_min=0.5, schedule=lambda round: 0.1)


def test_frozen_coordinates_leave_control_variates_as_they_are() -> None:
    """A coordinate that did not move says nothing about its gradient."""
    rule = Scaffold(3, batch=8, lr=0.05, share=0.1)
    given = setting(rule, frozen=True)
    frozen, received = given.cohort.frozen, given.cohort.statistics[given.layout.tracked_size :]
    for outcome in given.train(Loop, rule):
        memory = given.cohort.memories.get(outcome.client, torch.zeros_like(outcome.memory))
        sent = outcome.statistics[given.layout.tracked_size :]
        assert torch.equal(outcome.memory[frozen], memory[frozen]) and torch.equal(sent[frozen], received[frozen])
        assert not torch.isclose(outcome.memory[~frozen], memory[~frozen]).all()


@pytest.mark.parametrize("fused", [True, False])
def test_in_bfloat16_every_trainer_gives_nearly_the_same(fused) -> None:
    exact, rough = (LocalSGD(4, batch=8, lr=0.05, precision=precision) for precision in (None, "bfloat16"))
    given = setting(exact, module=mlp())
    given = replace(given, module=given.module.float(), layout=replace(given.layout, dtype=torch.float32))
    cohort = replace(given.cohort, weights=given.cohort.weights.float(), statistics=given.cohort.statistics.float())
    jobs = [replace(job, samples=replace(job.samples, inputs=job.samples.inputs.float())) for job in given.jobs]
    given = replace(given, cohort=cohort, jobs=jobs)
    expected = given.train(Loop, exact)
    for kind in (Loop, Workers, Stacked):
        outcomes = given.train(kind, rough if fused else Clipped(rough, norm=1e6))
        for a, b in zip(expected, outcomes, strict=True):
            away = float((a.delta - b.delta).norm() / a.delta.norm())
            assert b.delta.dtype == torch.float32 and 1e-5 < away < 0.3, (kind, away)
    with pytest.raises(UsageError, match="computes in float32, not bfloat16"):
        given.train(Dense, rough)


def test_a_run_in_bfloat16_learns_and_is_not_dense() -> None:
    rule = LocalSGD(4, batch=8, lr=0.05, precision="bfloat16")
    result = small_run(rounds=8, strategy=FedAvg(), training=Clipped(rule, norm=10.0), options=Options())
    assert result.summary["trainer"] == "workers" and Clipped(rule).precision == "bfloat16"
    assert result.journal[-1]["loss"] < result.journal[0]["loss"]
    with pytest.raises(UsageError, match="precision"):
        LocalSGD(precision="float16")


@settings(max_examples=50, deadline=None)
@given(
    shape=st.sampled_from(["cosine", "linear"]),
    rounds=st.integers(2, 300),
    warmup=st.integers(0, 50),
    least=st.floats(0, 0.1),
)
def test_a_falling_rate_rises_then_falls_and_stays_positive(shape, rounds, warmup, least) -> None:
    if warmup >= rounds:
        with pytest.raises(UsageError, match="warmup"):
            Falling(shape, 0.1, rounds, warmup)
        return
    schedule = Falling(shape, 0.1, rounds, warmup, least)
    rates = [schedule(round) for round in range(1, rounds + 5)]
    assert all(a < b for a, b in pairwise(rates[: warmup + 1])) and rates[warmup] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(rates[warmup:])) and min(rates) > 0
    assert rates[-1] == rates[rounds - 1] >= least


def test_a_schedule_has_a_name_in_toml() -> None:
    table = {"schedule": "linear", "schedule_rounds": 20, "warmup": 4, "lr": 0.5, "lr_min": 0.1, "rule": "adam"}
    config = validated({"training": table})
    rule = local_rule(config.training, 1.0)
    assert isinstance(rule, LocalAdam) and rule.schedule == Falling("linear", 0.5, 20, 4, 0.1)
    assert validated(tomllib.loads(to_toml(config))) == config
    assert "schedule" not in toml.dumps(validated({}).model_dump()["training"])


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"schedule": "cosine"}, "schedule needs schedule_rounds"),
        ({"warmup": 3}, "warmup needs a schedule: cosine or linear"),
        ({"schedule": "linear", "schedule_rounds": 5, "warmup": 7}, "warmup = 7 must be below rounds = 5"),
        ({"schedule": "linear", "schedule_rounds": 5, "lr_min": 0.5}, "lr_min = 0.5 must not be above lr"),
        ({"schedule": "step"}, "training.schedule: input should be 'cosine' or 'linear'; found 'step'"),
        ({"schedule": "cosine", "schedule_rounds": 9, "lr_decay": 0.5}, "give schedule or lr_decay, not both"),
        ({"precision": "float16"}, "training.precision: input should be 'bfloat16'; found 'float16'"),
    ],
)
def test_nonsense_in_the_training_table_is_refused(table, reason) -> None:
    with pytest.raises(UsageError) as error:
        validated({"training": table})
    assert reason in str(error.value)


# --- the server -------------------------------------------------------------------------------------------


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "optimizer", [Adam(0.1, 0.9, 0.99, 1e-3), Yogi(0.1, 0.9, 0.99, 1e-3), Adagrad(0.1, 0.5, 1e-3)], ids=repr
)
def test_fedadam_and_its_kin_by_hand_in_float64(optimizer, double) -> None:
    """Algorithm 2 of Reddi et al., 2021, written down; two rounds of three clients."""
    generator = torch.Generator().manual_seed(4)
    deltas = torch.randn(2, 3, LAYOUT.size, generator=generator)
    x = torch.randn(LAYOUT.size, generator=generator)
    space = Space.of(LAYOUT)
    core = Core(
        1, RUN, LAYOUT, space, Uniform(3), FedAvg(), x, torch.zeros(LAYOUT.statistics_size), optimizer=optimizer
    )
    state = start(core, Pool(3, lambda client: 1 / 3))
    m, v = torch.zeros_like(x), torch.full_like(x, 1e-6)
    for round, updates in enumerate(deltas, 1):
        uploads = [Upload(i, 1 / 3, whole(one), core.statistics) for i, one in enumerate(updates)]
        result = aggregate(core, state, uploads, round)
        mean = updates.mean(0)
        m = optimizer.beta_1 * m + (1 - optimizer.beta_1) * mean
        if isinstance(optimizer, Adam):
            v = 0.99 * v + 0.01 * mean**2
        elif isinstance(optimizer, Yogi):
            v = v - 0.01 * mean**2 * torch.sign(v - mean**2)
        else:
            v = v + mean**2
        x = x + 0.1 * m / (v.sqrt() + 1e-3)
        assert result.weights.dtype == torch.float64
        torch.testing.assert_close(result.weights, x, rtol=1e-9, atol=1e-12)
        state = replace(state, weights=result.weights, optimizer=result.optimizer, strategy=result.strategy)


class DenseMomentum:
    """Moves every coordinate in every round, whatever the strategy chose."""

    def init(self, space: Space) -> Tensor:
        return torch.zeros(space.size)

    def step(self, state: Tensor, update):
        velocity = update.add_to(0.9 * state)
        return velocity, whole(velocity)


@pytest.mark.parametrize("strategy", [STC(0.2), GlueFL(), APF(0.3, 1, 0.5)], ids=repr)
def test_a_dense_momentum_is_refused_where_it_would_undo_a_sparse_update(strategy) -> None:
    sim, state = simulation(strategy, Uniform(6), 40, optimizer=DenseMomentum())
    with pytest.raises(UsageError, match=r"DenseMomentum.step returned 180 positions .* undo a sparse update.*lean"):
        for _ in range(30):  # APF freezes something after a while
            state, _ = play(sim, state)


@pytest.mark.parametrize("strategy", [FedAvg(), Lean(upload_block=64)], ids=["fedavg", "lean"])
def test_a_dense_momentum_acts_on_all_coordinates_of_fedavg_and_lean(strategy) -> None:
    momentum = small_run(strategy=strategy, rounds=3, server=DenseMomentum())
    ours = small_run(strategy=strategy, rounds=3, server=Server(1.0, 0.9))
    for name, tensor in ours.module.state_dict().items():
        torch.testing.assert_close(momentum.module.state_dict()[name], tensor)


@pytest.mark.parametrize("optimizer", [Server(1.0, 0.9), Adam(), Yogi(), Adagrad()], ids=repr)
def test_moments_are_refused_before_a_selection(optimizer) -> None:
    for inner in (STC(0.2), GlueFL(), APF()):
        with pytest.raises(UsageError, match=r"keeps a momentum or moments.*before it selects.*lean"):
            simulation(Coded(inner, package="float16"), Uniform(6), 40, optimizer=optimizer)
    simulation(Coded(FedAvg(), package="float16"), Uniform(6), 40, optimizer=optimizer)
    simulation(Coded(STC(0.2), package="float16"), Uniform(6), 40, optimizer=Server(0.5))  # keeps nothing


def test_scaffold_goes_with_every_strategy_but_lean() -> None:
    rule = Scaffold(2, batch=8, lr=0.05, share=0.1)
    for strategy in (FedAvg(), STC(), APF(), GlueFL()):
        assert math.isfinite(small_run(strategy=strategy, rounds=2, training=rule).journal[-1]["loss"])
    with pytest.raises(UsageError, match="no grid for the second vector"):
        small_run(strategy=Lean(), rounds=2, training=rule)
