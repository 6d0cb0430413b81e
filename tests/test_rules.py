"""Local rules of one's own: each a small class, run by every trainer as it is, and compared with a plain loop."""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gluefl import FedAvg, Fleet, LocalSGD, Sticky, Uniform
from gluefl.clients.cohort import Cohort, Job, Outcome, prefetch
from gluefl.clients.engine import LocalEngine
from gluefl.clients.optimisers import Clipped, LocalAdam, Scaffold
from gluefl.clients.rules import Context, Final, Rule, Schedule, TorchOptimizer
from gluefl.clients.trainers.choice import choose
from gluefl.clients.trainers.dense import Dense
from gluefl.clients.trainers.layers import ManyClients
from gluefl.clients.trainers.loop import Loop
from gluefl.clients.trainers.stacked import Stacked
from gluefl.clients.trainers.workers import Workers
from gluefl.errors import UsageError
from gluefl.populations import Samples
from gluefl.simulation.parts import Simulation
from gluefl.simulation.run import Options
from gluefl.vectors.layout import Layout
from runs import small_run
from stubs import Blobs, mlp

CPU = torch.device("cpu")
TRAINERS = (Loop, Workers, Stacked)
EPS = 1e-3  # of Adam: a bias before a normalisation has no gradient but rounding, which a small one would amplify
FLOAT64 = {"rtol": 1e-9, "atol": 1e-14}


@dataclass(frozen=True)
class FedProx(Schedule):
    """Li et al., 2020, without momentum."""

    mu: float = 0.1

    def init(self, context: Context):
        return ()

    def step(self, state, weights: Tensor, gradient: Tensor, context: Context):
        return state, weights - context.lr * (gradient + self.mu * (weights - context.start))

    def final(self, state, weights: Tensor, context: Context) -> Final:
        return Final(weights - context.start)


@dataclass(frozen=True)
class Unfused(LocalSGD):
    """Local SGD under a name that no trainer has a faster form of."""


RULES: dict[str, Rule] = {
    "adam": LocalAdam(steps=4, batch=8, lr=0.01, eps=EPS),
    "fedprox": FedProx(steps=4, batch=8, lr=0.05),
    "clipped": Clipped(LocalSGD(4, batch=8, lr=0.05, momentum=0.5), norm=0.5),
    "scaffold": Scaffold(steps=4, batch=8, lr=0.05, share=0.1),
    "sgd": Unfused(steps=4, batch=8, lr=0.05, weight_decay=1e-3, proximal=0.1),
}


@dataclass(frozen=True)
class Setting:
    """A module with normalisation in float64, and three clients of which one may train for fewer steps."""

    module: nn.Module
    layout: Layout
    cohort: Cohort
    jobs: list[Job]

    def train(self, trainer_of, rule) -> list[Outcome]:
        trainer = trainer_of(self.module, self.layout, lambda x: x, cross_entropy)
        return sorted(trainer.train(self.cohort, self.jobs, rule), key=lambda outcome: outcome.client)


def setting(rule, uneven: bool = False, frozen: bool = False, module: nn.Module | None = None) -> Setting:
    module = (module or mlp(norm=True)).double()
    layout = Layout.of(module, torch.float64)
    layout = replace(layout, exchanged=rule.exchanged(layout.size))
    weights, statistics = layout.flatten(module)
    rng, jobs = np.random.default_rng(3), []
    if layout.exchanged:
        statistics[layout.tracked_size :] = torch.from_numpy(0.1 * rng.standard_normal(layout.exchanged))
    memories = {1: torch.from_numpy(0.1 * rng.standard_normal(layout.size))}  # the others train for the first time
    for client, size in enumerate((9, 16, 30)):
        samples = Samples(
            torch.from_numpy(rng.standard_normal((size, 6))), torch.from_numpy(rng.integers(4, size=size))
        )
        batches = rule.batches(rng, size)
        jobs.append(Job(client, samples, batches[:-2] if uneven and client == 1 else batches))
    mask = torch.arange(layout.size) % 3 == 0 if frozen else None
    cohort = Cohort(1, (0, 1, 2), weights, statistics, mask, memories if rule.kept(layout.size) else {})
    return Setting(module, layout, cohort, jobs)


def gradients(module: nn.Module, job: Job) -> Iterator[Tensor]:
    """The flat gradients of batch after batch, for a plain loop that moves the module in between."""
    for batch in job.batches:
        module.zero_grad()
        cross_entropy(module(job.samples.inputs[batch]), job.samples.labels[batch]).backward()
        yield torch.cat([parameter.grad.reshape(-1) for parameter in module.parameters()])


@pytest.mark.parametrize("trainer_of", TRAINERS)
@pytest.mark.parametrize("name", ["adam", "fedprox"])
def test_a_rule_of_ones_own_is_the_optimiser_that_torch_has(name, trainer_of) -> None:
    rule = RULES[name]
    given = setting(rule)
    for job, outcome in zip(given.jobs, given.train(trainer_of, rule)):
        given.layout.fill(given.module.train(), given.cohort.weights, given.cohort.statistics)
        parameters = list(given.module.parameters())
        start = [parameter.detach().clone() for parameter in parameters]
        optimizer = torch.optim.Adam(parameters, 0.01, eps=EPS) if name == "adam" else torch.optim.SGD(parameters, 0.05)
        for _ in gradients(given.module, job):
            if name == "fedprox":
                for parameter, old in zip(parameters, start):
                    parameter.grad += 0.1 * (parameter.detach() - old)
            optimizer.step()
        weights, statistics = given.layout.flatten(given.module)
        torch.testing.assert_close(outcome.delta, weights - given.cohort.weights, **FLOAT64)
        torch.testing.assert_close(outcome.statistics, statistics, **FLOAT64)


@pytest.mark.parametrize("trainer_of", [Workers, Stacked])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_every_trainer_runs_every_rule_as_the_loop_does(name, uneven, frozen, trainer_of) -> None:
    rule = RULES[name]
    given = setting(rule, uneven, frozen)
    expected = given.train(Loop, rule)
    for a, b in zip(expected, given.train(trainer_of, rule), strict=True):
        assert a.delta.any()
        torch.testing.assert_close(b.delta, a.delta, **FLOAT64)
        torch.testing.assert_close(b.statistics, a.statistics, **FLOAT64)
        assert float(b.loss) == pytest.approx(float(a.loss), rel=1e-9)
        assert (a.memory is None) == (b.memory is None) == (name != "scaffold")
        if a.memory is not None:
            torch.testing.assert_close(b.memory, a.memory, **FLOAT64)
        if frozen:
            assert not b.delta[given.cohort.frozen].any()


@pytest.mark.parametrize("name", RULES)
def test_layers_for_many_clients_run_every_rule(name) -> None:
    """They keep weights in another order, with gaps: a rule must see neither."""
    rule = RULES[name]
    given = setting(rule, uneven=True, frozen=True, module=mlp())
    expected = given.train(Loop, rule)
    stacked = Stacked(given.module, given.layout, lambda x: x, cross_entropy)
    stacked.layers = ManyClients.of(given.module, given.layout)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trained = list(stacked.train(given.cohort, given.jobs, rule))
    assert stacked.layers is not None
    for a, b in zip(expected, trained, strict=True):
        torch.testing.assert_close(b.delta, a.delta, **FLOAT64)
        torch.testing.assert_close(b.statistics, a.statistics, **FLOAT64)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("trainer_of", [Workers, Stacked, Dense])
def test_what_a_trainer_fuses_is_the_rule(trainer_of, uneven, frozen) -> None:
    rule = RULES["sgd"]
    fused = LocalSGD(rule.steps, batch=8, lr=0.05, weight_decay=1e-3, proximal=0.1)
    assert trainer_of.fuses == (LocalSGD,) and type(rule) not in trainer_of.fuses  # another one needs a case here
    given = setting(rule, uneven, frozen, mlp(norm=trainer_of is not Dense))
    for a, b in zip(given.train(Loop, rule), given.train(trainer_of, fused), strict=True):
        torch.testing.assert_close(b.delta, a.delta, **FLOAT64)
        torch.testing.assert_close(b.statistics, a.statistics, **FLOAT64)


@pytest.mark.parametrize("trainer_of", [Loop, Workers])
@pytest.mark.parametrize("frozen", [False, True])
def test_any_torch_optimiser_is_a_rule(frozen, trainer_of) -> None:
    rule = TorchOptimizer(4, batch=8, lr=0.01, factory=partial(torch.optim.Adam, eps=EPS))
    given = setting(rule, frozen=frozen)
    for a, b in zip(given.train(Loop, RULES["adam"]), given.train(trainer_of, rule), strict=True):
        torch.testing.assert_close(b.delta, a.delta, **FLOAT64)
    momentum = partial(torch.optim.SGD, momentum=0.9)
    given = setting(rule)
    for a, b in zip(
        given.train(Loop, LocalSGD(4, batch=8, lr=0.01)),
        given.train(trainer_of, TorchOptimizer(4, batch=8, lr=0.01, factory=momentum)),
        strict=True,
    ):
        torch.testing.assert_close(b.delta, a.delta, **FLOAT64)


def test_clipped_gradients_are_those_that_torch_clips() -> None:
    rule = RULES["clipped"]
    given = setting(rule)
    for job, outcome in zip(given.jobs, given.train(Loop, rule)):
        given.layout.fill(given.module.train(), given.cohort.weights, given.cohort.statistics)
        parameters = list(given.module.parameters())
        optimizer, norms = torch.optim.SGD(parameters, 0.05, momentum=0.5), []
        for gradient in gradients(given.module, job):
            norms.append(float(gradient.norm()))
            nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
        assert max(norms) > 0.5
        # torch divides by the norm plus 1e-6.
        delta = given.layout.flatten(given.module)[0] - given.cohort.weights
        torch.testing.assert_close(outcome.delta, delta, rtol=1e-5, atol=1e-8)


def test_adam_with_weight_decay_is_that_of_torch() -> None:
    rule = LocalAdam(steps=4, batch=8, lr=0.01, eps=EPS, weight_decay=0.1)
    given = setting(rule)
    plain = TorchOptimizer(4, batch=8, lr=0.01, factory=partial(torch.optim.AdamW, eps=EPS, weight_decay=0.1))
    for a, b in zip(given.train(Loop, plain), given.train(Stacked, rule), strict=True):
        torch.testing.assert_close(b.delta, a.delta, **FLOAT64)


def test_a_schedule_is_a_function_of_the_round() -> None:
    rule = LocalSGD(1, batch=8, schedule=lambda round: 0.4 / round)
    given = setting(rule)
    later = replace(given, cohort=replace(given.cohort, round=4))
    for trainer_of in (Loop, Workers, Stacked):
        for first, fourth in zip(given.train(trainer_of, rule), later.train(trainer_of, rule)):
            torch.testing.assert_close(fourth.delta, first.delta / 4, **FLOAT64)
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(UsageError, match=r"schedule\(3\)"):
            LocalSGD(schedule=lambda round, wrong=wrong: wrong).rate(3)


def test_the_learning_rate_of_a_rule_is_that_of_the_round() -> None:
    rule = FedProx(steps=1, batch=8, lr=0.1, mu=0, lr_decay=0.5, lr_decay_every=1)
    optimizer = TorchOptimizer(1, batch=8, lr=0.1, lr_decay=0.5, lr_decay_every=1, factory=torch.optim.SGD)
    given = setting(rule)
    later = replace(given, cohort=replace(given.cohort, round=3))
    for trainer_of, own in [(Loop, rule), (Stacked, rule), (Loop, optimizer)]:
        for first, third in zip(given.train(trainer_of, own), later.train(trainer_of, own)):
            torch.testing.assert_close(third.delta, first.delta / 4, **FLOAT64)


def test_scaffold_by_hand() -> None:
    """Two rounds of option II, written down as in the paper's Algorithm 1."""
    rule = RULES["scaffold"]
    given = setting(rule)
    layout, lr, steps, clients = given.layout, rule.lr, rule.steps, 30
    x, statistics = given.cohort.weights, given.cohort.statistics[: layout.tracked_size]
    c, c_i = torch.zeros(layout.size, dtype=torch.float64), dict[int, Tensor]()
    cohort = Cohort(1, (0, 1, 2), x, torch.cat([statistics, c]))
    for round in (1, 2):
        trained = replace(given, cohort=replace(cohort, round=round)).train(Loop, rule)
        deltas, changes = [], []
        for job, outcome in zip(given.jobs, trained):
            layout.fill(given.module.train(), x, statistics)
            y, own = x.clone(), c_i.get(job.client, torch.zeros_like(c))
            for gradient in gradients(given.module, job):
                y -= lr * (gradient - own + c)
                layout.fill(given.module, y, layout.flatten(given.module)[1])
            c_i[job.client] = own - c + (x - y) / (steps * lr)
            deltas.append(y - x)
            changes.append(c_i[job.client] - own)
            torch.testing.assert_close(outcome.delta, y - x, **FLOAT64)
            torch.testing.assert_close(outcome.memory, c_i[job.client], **FLOAT64)
        c = c + len(changes) / clients * torch.stack(changes).mean(0)
        x = x + torch.stack(deltas).mean(0)
        averaged = torch.stack([outcome.statistics for outcome in trained]).mean(0)
        torch.testing.assert_close(averaged[layout.tracked_size :], c, **FLOAT64)
        assert c.any()
        statistics = averaged[: layout.tracked_size]
        memories = {outcome.client: outcome.memory for outcome in trained}
        cohort = Cohort(1, (0, 1, 2), x, averaged, memories=memories)


class Adapted(nn.Module):
    """A frozen layer with a low-rank correction that is learnt, a constant table, and normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.norm = nn.Linear(6, 4).requires_grad_(False), nn.BatchNorm1d(4)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.register_buffer("table", torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.base(x) + self.table * self.up(self.down(x)))


@pytest.mark.parametrize("rule", [LocalSGD(4, batch=8, lr=0.05), RULES["adam"]], ids=["sgd", "adam"])
def test_of_an_adapted_module_only_adapters_and_statistics_travel(rule) -> None:
    module = Adapted()
    given = setting(rule, module=module)
    names = [part.name for part in (*given.layout.weights, *given.layout.statistics)]
    assert not [name for name in names if name.startswith("base") or name == "table"] and len(names) == 7
    constants = {name: value.clone() for name, value in module.state_dict().items() if name not in names}
    expected = given.train(Loop, rule)
    for trainer_of in (Workers, Stacked):
        for a, b in zip(expected, given.train(trainer_of, rule), strict=True):
            assert a.delta.any()
            torch.testing.assert_close(b.delta, a.delta, **FLOAT64)
            torch.testing.assert_close(b.statistics, a.statistics, **FLOAT64)
    assert all(torch.equal(module.state_dict()[name], value) for name, value in constants.items())


def test_the_choice_gives_way_to_a_trainer_that_runs_the_rule() -> None:
    module = mlp()
    layout = Layout.of(module)
    optimizer = TorchOptimizer(factory=torch.optim.Adam)

    def chosen(rule, name="auto") -> type:
        return type(choose(name, module, layout, Blobs(), cross_entropy, CPU, rule))

    assert chosen(LocalSGD()) is Dense
    assert chosen(LocalAdam()) is chosen(Unfused()) is chosen(optimizer) is Workers
    assert chosen(LocalAdam(), "stacked") is Stacked
    with pytest.raises(UsageError, match="LocalSGD"):
        chosen(LocalAdam(), "dense")
    with pytest.raises(UsageError, match="use 'loop'"):
        chosen(optimizer, "stacked")
    given = setting(LocalAdam(), module=mlp())
    with pytest.raises(UsageError, match="not LocalAdam"):
        given.train(Dense, LocalAdam())
    with pytest.raises(UsageError, match=r"torch\.optim"):
        given.train(Stacked, optimizer)


class Counting(nn.Module):
    """Changes a buffer in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + len(x)
        return self.linear(x)


def test_a_buffer_that_changes_in_training_must_be_declared() -> None:
    module = Counting()
    with pytest.raises(UsageError, match=r"'seen'.*tracked_buffers"):
        choose("auto", module, Layout.of(module), Blobs(), cross_entropy, CPU, LocalSGD())
    module.tracked_buffers = ("seen",)
    assert type(choose("auto", module, Layout.of(module), Blobs(), cross_entropy, CPU, LocalSGD())) is Workers
    assert not module.seen.any()


@dataclass(frozen=True)
class Transformed(Blobs):
    """Blobs with a transform of one's own."""

    function: Callable[[Tensor], Tensor] = torch.clone

    def transform(self, inputs: Tensor) -> Tensor:
        return self.function(inputs)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x + torch.randn_like(x), "draws random numbers; it must be deterministic"),
        (lambda x: x - x.mean(0), "two samples together another result than each of them alone"),
        (lambda x: x[:, : 6 - len(x) % 2], "two samples together another result"),
        (lambda x: x + np.random.default_rng().random(), "must be deterministic"),
    ],
)
def test_a_transform_must_be_deterministic_and_sample_by_sample(function, words) -> None:
    module, before = mlp(), torch.random.get_rng_state()
    for name in ("auto", "loop"):
        with pytest.raises(UsageError, match=words):
            choose(name, module, Layout.of(module), Transformed(function=function), cross_entropy, CPU, LocalSGD())
    assert torch.equal(torch.random.get_rng_state(), before)


MATRIX = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sub_(0.5),
        lambda x: (x @ MATRIX).exp().log1p(),
        lambda x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True),
        lambda x: torch.where(x > 0, x, math.nan).nan_to_num(),
    ],
)
def test_a_transform_of_every_sample_by_itself_is_fine(function) -> None:
    module = mlp()
    given = Transformed(function=function)
    assert type(choose("auto", module, Layout.of(module), given, cross_entropy, CPU, LocalSGD())) is Dense


@pytest.mark.parametrize("rule", [RULES["adam"], TorchOptimizer(2, batch=8, factory=torch.optim.Adam)])
def test_a_run_learns_by_any_rule(rule) -> None:
    result = small_run(rounds=12, strategy=FedAvg(), training=rule, options=Options())
    losses = [line["loss"] for line in result.journal]
    assert result.summary["trainer"] == "workers" and losses[-1] < losses[0]


def test_a_rule_keeps_memory_per_client_and_pays_for_its_second_vector(tmp_path) -> None:
    """c travels with the statistics, c_i stays with its client, also when a run is resumed."""
    rule = replace(RULES["scaffold"], share=4 / 40)
    parts = {"strategy": FedAvg(), "sampler": Uniform(4), "training": rule, "rounds": 12}
    whole = small_run(**parts)
    plain = small_run(**{**parts, "training": LocalSGD(4, batch=8, lr=0.05)})
    size = whole.summary["parameters"]
    for ours, theirs in zip(whole.journal, plain.journal):
        assert ours["up_bytes"] == theirs["up_bytes"] + 4 * 4 * size  # four clients, four bytes an entry
        assert ours["down_bytes"] == theirs["down_bytes"] + 4 * 4 * size
    small_run(out=tmp_path / "run", **{**parts, "rounds": 6})
    assert (tmp_path / "run" / "checkpoint" / "memories").exists()
    resumed = small_run(out=tmp_path / "run", resume=True, **parts)
    forgetful = small_run(**{**parts, "training": Forgetful(4, batch=8, lr=0.05, share=4 / 40)})
    expected, other = whole.module.state_dict(), forgetful.module.state_dict()
    for name, tensor in resumed.module.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert any(not torch.equal(other[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("sampler", [Uniform(4), Sticky(4, 8, 3)], ids=["uniform", "sticky"])
def test_the_control_variate_of_the_server_is_the_mean_of_those_of_the_clients(sampler, monkeypatch) -> None:
    """Also when some clients of a cohort are lost."""
    kept, states, keep = {}, [], Simulation.keep

    def recorded(sim: Simulation, client: int, residual: Tensor | None, memory: Tensor | None) -> None:
        kept[client] = memory.clone()
        keep(sim, client, residual, memory)

    monkeypatch.setattr(Simulation, "keep", recorded)
    result = small_run(
        strategy=FedAvg(),
        sampler=sampler,
        training=replace(RULES["scaffold"], share=4 / 40),
        rounds=12,
        devices=Fleet("edge", "always", seed=1, failure_share=0.4),
        callbacks=[lambda line, state: states.append(state)],
    )
    assert min(line["used"] for line in result.journal) < 4
    mean = sum(kept.values()) / 40
    torch.testing.assert_close(states[-1].statistics[-mean.numel() :], mean, rtol=1e-4, atol=1e-6)


class Forgetful(Scaffold):
    """Every client starts with c_i = 0 again."""

    def step(self, steps: Tensor, weights: Tensor, gradient: Tensor, context: Context):
        return super().step(steps, weights, gradient, replace(context, memory=torch.zeros_like(context.memory)))


def test_prefetching_is_optional_for_an_engine() -> None:
    class Elsewhere:
        def train(self, cohort: Cohort) -> Iterator[Outcome]:
            yield from ()

        def work(self, client: int) -> int:
            return 1

    prefetch(Elsewhere(), [1, 2], 1)
    module = mlp()
    engine = LocalEngine(
        Blobs(), Loop(module, Layout.of(module), lambda x: x, cross_entropy), LocalSGD(), 1, torch.device("meta")
    )
    prefetch(engine, [1, 2], 1)
    assert set(engine.prepared) == {(1, 1), (1, 2)}
