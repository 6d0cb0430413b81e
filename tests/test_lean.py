"""The laws of lean: replicas are exact, what is published is the latent vector rounded, and nothing is lost."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from federations import LAYOUT, RUN, Engine, Unreliable, delivered, measured, simulation
from gluefl import APF, STC, FedAvg, GlueFL, Lean, LocalSGD, Options, Setting, Sticky, Uniform, train, wire
from gluefl.clients.cohort import Outcome
from gluefl.core.optimizer import Server
from gluefl.core.sampling import Pool
from gluefl.core.server import bodies_for, start
from gluefl.errors import Diverged, UsageError
from gluefl.simulation.channel import Encoded
from gluefl.simulation.round import play
from gluefl.simulation.settings import Evaluation
from gluefl.strategies import Space, Statistic, Task, Upload
from gluefl.strategies.lean import NEVER, LeanState
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import Masked
from gluefl.wire.cells import stacked
from stubs import Blobs, mlp

CLIENTS = 40
SAMPLERS = [Uniform(5, over_commitment=1.6), Sticky(6, 10, 4, "proportional", over_commitment=1.5)]
# Limits so far apart from the defaults that a few rounds with a small model refine and coarsen.
RESTLESS = Lean(movement=0.01, refine_below=0.05, coarsen_above=0.2, upload_block=64)
WEIGHTS, MEANS, VARIANCES, COUNTER = (slice(*ends) for ends in ((0, 180), (180, 188), (188, 196), (196, 197)))


def lose(client: int, clock_s: int) -> float | None:
    """One in five is lost during the download, one in five after it."""
    return {0: 0.5, 1: 1.5}.get((client * 31 + clock_s * 17) % 11 % 5)


@dataclass(frozen=True)
class Slowing(Engine):
    """Large updates at first, so that steps are doubled, then small ones, so that they are halved."""

    large: float = 0.3
    small: float = 0.003
    large_until: int = 10

    def draws(self, size: int, *path: int) -> Tensor:
        return torch.from_numpy(np.random.default_rng(path).standard_normal(size, dtype=np.float32))

    def delta(self, round: int, client: int) -> Tensor:
        return self.draws(LAYOUT.size, round, client) * (self.large if round <= self.large_until else self.small)

    def statistics(self, round: int, client: int) -> Tensor:
        draws = self.draws(16, round, client, 1)
        return torch.cat([0.1 * draws[:8], torch.exp(draws[8:] - round / 20), torch.tensor([2.0 * round])])


def federation(strategy=RESTLESS, sampler=SAMPLERS[1], model=None, **parts: Any):
    """As `simulation`, of a model as it is initialised."""
    channel = parts.pop("channel", measured)
    sim, _ = simulation(strategy, sampler, CLIENTS, **{"engine": Slowing(), "channel": measured, **parts})
    core = replace(sim.core, **dict(zip(("weights", "statistics"), LAYOUT.flatten(model or mlp(norm=True)))))
    return replace(sim, core=core, channel=channel(core)), start(core, sim.pool)


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def published(state) -> Tensor:
    return torch.cat([state.weights, state.statistics])


# --- replicas ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sampler", "initial"), zip(SAMPLERS, ("known", "download")), ids=["uniform", "sticky"])
def test_replicas_follow_the_server_over_fifty_rounds(sampler, initial) -> None:
    """With misses, losses, refinements and coarsenings; every package is applied as another program would."""
    f, state = federation(RESTLESS, sampler, devices=Unreliable(lose), channel=delivered, initial=initial)
    version_0, expected = published(state), f.core.expected(wire.PACKAGE)
    replicas, versions, fates, factors, ages = {}, {}, [], set(), set()
    for _ in range(50):
        f.channel.sent.clear(), f.channel.delivered.clear()
        before, (state, record) = state, play(f, state)
        fates += record.line["clients"]["fate"]
        ages |= set(record.line["clients"]["staleness"])
        factors |= set((state.strategy.steps / before.strategy.steps).nan_to_num(1).tolist())
        assert record.line["down_bytes"] == sum(len(parcel.data) for parcel in f.channel.sent)
        for client, parcel in f.channel.delivered:
            header, body = wire.decode(parcel.data, expected)
            assert header.base == versions.get(client, 0 if initial == "known" else None)
            replica = replicas.get(client, version_0 if initial == "known" else torch.full_like(version_0, -7)).clone()
            replica[body.update.positions] = body.update.values
            replicas[client], versions[client] = replica, header.version
            assert torch.equal(bits(replica), bits(published(before)))
            assert header.hash == wire.replica_hash(before.weights, before.statistics)
        assert dict(state.ledger.held) == versions
    assert {"used", "lost", "late"} == set(fates) and len(versions) > CLIENTS // 2
    assert {0.5, 2.0} <= factors and len(ages) > 6  # refined, coarsened; missed rounds
    assert len(f.residuals) == 0


def test_a_client_of_version_0_is_sent_what_differs_from_it_and_nothing_else() -> None:
    # Weights that return to where they were: every second update takes the one before it back.
    class Returning(Slowing):
        def delta(self, round: int, client: int) -> Tensor:
            return self.draws(LAYOUT.size, (round + 1) // 2) * (0.1 if round % 2 else -0.1)

    f, state = federation(replace(RESTLESS, upload_bits=4), Uniform(5), engine=Returning(), initial="known")
    shared, spared = wire.Shared(f.core.space.mask(False)), 0
    for _ in range(12):
        state, _ = play(f, state)
        (body,) = bodies_for(f.core, state, [0], shared).values()
        differs = published(state) != f.core.origin
        assert torch.equal(body.update.mask.bits, differs)
        spared += int(((state.ledger.changed_at > 0) & ~differs).sum())
        patched = f.core.origin.clone()
        patched[body.update.positions] = body.update.values
        assert torch.equal(bits(patched), bits(published(state)))
    assert spared > 100  # coordinates that changed and have come back


def test_a_client_is_sent_all_that_differs_from_its_version_and_little_else() -> None:
    """A value that came back is not sent, as far as that is remembered."""
    f, state = federation(engine=Slowing(large=0.2, large_until=99))
    versions, spared = [published(state)], 0
    for _ in range(20):
        state, _ = play(f, state)
        versions.append(published(state))
        for base, vector in enumerate(versions):
            missing, changed_since = state.ledger.missing(base).bits, state.ledger.changed_at > base
            assert not (missing & ~changed_since).any() and not ((vector != versions[-1]) & ~missing).any()
            spared += int((changed_since & ~missing).sum())
    assert spared > 100


# --- what is published ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Played:
    """A round: states before and after it, and both steps of every coordinate."""

    before: LeanState
    after: LeanState
    vector: Tensor  # what the server's state says is published

    def spread(self, numbers: Tensor) -> Tensor:
        return self.after.space.segments_of_all.spread(numbers)[WEIGHTS]

    @property
    def step(self) -> Tensor:
        """The step of the round; the first one may have been halved at its end already."""
        return self.spread(torch.where(self.before.steps < NEVER, self.before.steps, self.after.steps))

    @property
    def changes(self) -> Tensor:
        return self.before.published != self.after.published

    @property
    def distance(self) -> Tensor:
        return (self.after.latent.double() - self.after.published.double()).abs()[WEIGHTS]


@pytest.fixture(scope="module", params=[0.5, 0.8], ids=["rounding", "hysteresis"])
def rounds(request) -> list[Played]:
    """Rounds in which every kind of change happens."""
    f, state = federation(replace(RESTLESS, hysteresis=request.param), devices=Unreliable(lose))
    played = []
    for _ in range(45):
        before, (state, _) = state, play(f, state)
        played.append(Played(before.strategy, state.strategy, published(state)))
    factors = torch.cat([(p.after.steps / p.before.steps)[:8] for p in played])
    assert 0.5 in factors and 2 in factors
    assert any((p.before.slack[:8] > request.param).any() for p in played)  # refinements were pending
    return played


def test_the_state_of_the_server_is_what_the_strategy_published(rounds) -> None:
    for played in rounds:
        assert torch.equal(bits(played.vector), bits(played.after.published))


def test_what_changed_is_the_latent_vector_rounded_to_the_grid(rounds) -> None:
    changed = 0
    for played in rounds:
        at, step = played.changes[WEIGHTS], played.step.double()
        moved = (played.after.published.double() - played.after.origin.double())[WEIGHTS]
        assert not (moved / step % 1)[at].any()
        whole_steps = played.spread((played.before.steps < NEVER).float()) > 0  # the first step is not known afterwards
        assert (played.distance <= step * 0.5001)[at & whole_steps].all()
        changed += int(at.sum())
    assert changed > 500


def test_nothing_is_further_from_the_latent_vector_than_the_slack_allows(rounds) -> None:
    h, largest = float(rounds[0].before.slack[0]), 0.0
    for played in rounds:
        step, slack, now = played.step, played.spread(played.before.slack), played.spread(played.after.steps)
        settled = slack <= h
        assert (played.distance <= slack * step * 1.0001 + 1e-7)[step < NEVER].all()
        assert (played.distance <= max(h, 0.5) * now.maximum(step) * 1.0001)[settled & (step < NEVER)].all()
        # In the units of the new step, too, unless it was halved just now and is pending from here on.
        pending = played.spread(played.after.slack) > h
        assert (played.distance <= max(h, 0.5) * now * 1.0001)[settled & ~pending & (step < NEVER)].all()
        largest = max(largest, float(torch.where(settled, played.distance / step, 0.0).max()))
    assert largest > h - 0.05  # the limit is used


def test_the_latent_vector_loses_nothing(rounds) -> None:
    """What was not published in a round is where it was, plus the next update."""
    assert all(one.after is other.before for one, other in pairwise(rounds))
    moved = sum((p.after.latent - p.before.latent)[WEIGHTS].double() for p in rounds)
    torch.testing.assert_close(moved, (rounds[-1].after.latent - rounds[0].before.latent)[WEIGHTS].double())


def test_everything_is_exact_and_zero_is_positive(rounds) -> None:
    finest = (
        rounds[0]
        .before.space.segments_of_all.spread(
            torch.stack([p.after.steps.minimum(p.before.steps) for p in rounds]).min(0).values
        )[WEIGHTS]
        .double()
    )
    for played in rounds:
        old, new, origin = (v.double() for v in (played.before.published, played.after.published, played.after.origin))
        single = played.after.published - played.before.published
        assert torch.equal(single.double(), new - old)
        assert torch.equal((played.after.published - played.after.origin).double()[:188], (new - origin)[:188])
        assert not (((new - origin)[WEIGHTS] / finest) % 1)[finest < NEVER].any()
        for vector in (played.before.published, played.after.published, played.after.origin):
            assert not bits(vector)[vector == 0].any()


def test_variances_are_positive_and_on_their_grid_and_counters_stay(rounds) -> None:
    ends = set()
    for played in rounds:
        variances = played.after.published[VARIANCES]
        assert (variances > 0).all() and not (bits(variances) & (1 << 20) - 1).any()
        assert torch.equal(played.after.published[COUNTER], played.before.origin[COUNTER])
        ends |= set(variances.tolist())
    assert len(ends) > 20 and any(p.changes[MEANS].any() for p in rounds)


def test_statistics_that_are_published_are_near_those_that_were_measured() -> None:
    f, state = federation(Lean(upload_block=64), Uniform(6), engine=Slowing(small=0.3))
    for round in range(1, 12):
        state, record = play(f, state)
        true = torch.stack([Slowing().statistics(round, client) for client in record.line["clients"]["id"]]).mean(0)
        variances, steps = state.statistics[8:16], state.strategy.steps[-3]
        # Eight bits of every client, three mantissa bits with hysteresis, and at most a factor per round.
        assert (variances / true[8:16]).log2().abs().max() < 0.4
        assert ((state.statistics[:8] - true[:8]).abs() <= 0.75 * steps + 0.04).all()


# --- both forms -------------------------------------------------------------------------------------------


def test_masked_and_listed_vectors_give_the_same(monkeypatch) -> None:
    plays = []
    for form in (None, lambda vector, mask, covers=None: Masked(mask, vector, covers)):  # the second is that of a GPU
        if form is not None:
            monkeypatch.setattr("gluefl.strategies.lean.part_of", form)
        f, state = federation(initial="known")
        plays.append([])
        for _ in range(8):
            state, record = play(f, state)
            bodies = bodies_for(f.core, state, [0, 1, 5, None], wire.Shared(f.core.space.mask(False)))
            messages = [wire.encode_body(body) for body in bodies.values()]
            cells = f.core.traits.package_codec.cells
            together = cells.measure_batch(stacked([body.update for body in bodies.values()]), f.core.origin)
            assert together == [len(message) for message in messages]
            plays[-1].append((record.line, messages, published(state), state.strategy.steps, state.ledger.changed_at))
    for one, other in zip(*plays):
        assert one[:2] == other[:2] and all(torch.equal(a, b) for a, b in zip(one[2:], other[2:]))


SPACES = st.tuples(
    st.lists(st.integers(1, 90), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["mean", "variance", "counter"])), max_size=3),
)


def steps_of(strategy, space, initial, rounds, seed, scale=0.1) -> Iterator[tuple[LeanState, Any]]:
    """Rounds of three clients, of a strategy alone."""
    generator, state = torch.Generator().manual_seed(seed), strategy.init(space, initial)[0]
    for round in range(1, rounds + 1):
        uploads = []
        for client in (1, 4, 5):
            delta = torch.randn(space.size + space.statistics_size, generator=generator) * scale
            sent, residual = strategy.compress(delta, Task(round, space.mask(False), 0.3, space, client, 3), None)
            assert residual is None
            uploads.append(Upload(client, 0.3, sent, torch.zeros(0), 3))
        state, update = strategy.aggregate(state, strategy.combine(state, uploads, round), round)
        yield state, update


@settings(max_examples=25)
@given(SPACES, st.integers(0, 99), st.sampled_from([1e-6, 0.05, 1.0, 1e4]), st.booleans(), st.floats(0, 1))
def test_any_model_is_published_exactly_and_measured_as_it_is_encoded(shape, seed, scale, known, density) -> None:
    sizes, statistics = shape
    space = Space(tuple(sizes), statistics=tuple(Statistic(*one) for one in statistics))
    strategy, generator = Lean(upload_block=64), torch.Generator().manual_seed(seed)
    initial = torch.randn(space.size + space.statistics_size, generator=generator) * scale
    initial[space.size :] = initial[space.size :].abs()
    codec, version_0 = strategy.traits(space).package_codec, strategy.init(space, initial)[1]
    vector = version_0.clone()
    for state, update in steps_of(strategy, space, initial, 4, seed, scale):
        vector = update.add_to(vector)
        assert torch.equal(bits(vector), bits(state.published)) and torch.isfinite(vector).all()
        mask = Mask(torch.rand(vector.numel(), generator=generator) <= density)
        body = wire.Body(
            Masked(mask, vector),
            torch.zeros(0),
            wire.Shared(space.mask(False)),
            True,
            codec,
            version_0 if known else None,
        )
        data = codec.encode(body)
        assert len(data) == codec.measure([body])[0]
        assert torch.equal(bits(codec.decode(memoryview(data), body.origin).values), bits(vector[mask.bits]))


# --- no state on clients, the same bits after a resume ----------------------------------------------------


def run(model=None, strategy=RESTLESS, rounds=12, **parts: Any):
    """A small run, by default with the average over versions and the known version 0 that go with lean."""
    options = {"trainer": "loop", "checkpoint_every": 4, **parts.pop("options", {})}
    setting = {"training": LocalSGD(steps=2, batch=8, lr=0.05), "evaluation": Evaluation(every=3), **parts}
    return train(
        model or mlp(norm=True), Blobs(), strategy, sampler=Sticky(4, 12, 3, "proportional"), rounds=rounds,
        setting=Setting(**setting), options=Options(**options),
    )  # fmt: skip


def lines(result) -> list[dict]:
    return [{name: value for name, value in line.items() if name != "wall_s"} for line in result.journal]


def same_models(one, other) -> bool:
    pairs = zip(one.module.state_dict().values(), other.module.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_encoding_every_message_gives_the_same_journal() -> None:
    one, other = run(), run(options={"encode": True})
    assert lines(one) == lines(other) and same_models(one, other)
    assert one.summary["down_bytes"] == other.summary["down_bytes"]


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(tmp_path) -> None:
    expected = run(server=Server(0.9, 0.5))
    run(server=Server(0.9, 0.5), rounds=7, options={"out": tmp_path / "run"})
    resumed = run(server=Server(0.9, 0.5), options={"out": tmp_path / "run", "resume": True, "encode": True})
    assert same_models(resumed, expected) and lines(resumed)[7:] == lines(expected)[7:]
    written = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    assert [line["round"] for line in written] == list(range(1, 13))
    assert not list((tmp_path / "run").rglob("*residual*.bin"))


def test_clients_keep_nothing() -> None:
    f, state = federation()
    for _ in range(5):
        state, _ = play(f, state)
    assert len(f.residuals) == 0
    task, delta = Task(1, f.core.space.mask(False), 1.0, f.core.space), torch.ones(197)
    with_residual = RESTLESS.compress(delta, task, torch.ones(180))
    assert with_residual[1] is None
    assert torch.equal(with_residual[0].values, RESTLESS.compress(delta, task, None)[0].values)


# --- tensors at the edges ---------------------------------------------------------------------------------


class Odd(nn.Module):
    """Tensors that have no spread: a constant that is no power of two, one entry, none at all, zeros."""

    def __init__(self, constant: float = 0.1) -> None:
        super().__init__()
        self.down, self.up, self.head = nn.Linear(6, 3), nn.Linear(3, 8, bias=False), nn.Linear(8, 4)
        self.gain, self.scale = nn.Parameter(torch.full((8,), constant)), nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0))
        nn.init.zeros_(self.up.weight), nn.init.zeros_(self.head.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.up(self.down(inputs)) + inputs.sum(1, keepdim=True) * self.gain
        return self.head(hidden.relu()) * self.scale


def trained_before(norm_mean: float = 1.0) -> nn.Sequential:
    """Statistics of any value, as a model has that was trained elsewhere."""
    model, generator = mlp(norm=True), torch.Generator().manual_seed(3)
    model[1].running_mean.copy_(torch.randn(8, generator=generator) * norm_mean)
    model[1].running_mean[0] = 1e-9
    model[1].running_var.copy_(torch.rand(8, generator=generator) + 0.01)
    model[1].num_batches_tracked.fill_(12345)
    return model


def changed(model: nn.Module, function) -> nn.Module:
    with torch.no_grad():
        function(model)
    return model


def scaled(factor: float):
    return lambda model: [parameter.mul_(factor) for parameter in model.parameters()]


def outlier(model: nn.Module) -> None:
    """Noise of a billionth around one, and one weight that is far away."""
    model[0].weight.copy_(1 + 1e-9 * torch.randn(8, 6, generator=torch.Generator().manual_seed(1)))
    model[2].weight.mul_(1e-6)[0, 0] = 50.0


MODELS = {
    "no normalisation": mlp,
    "odd tensors": Odd,
    "a constant of a third": lambda: Odd(1 / 3),
    "trained before": trained_before,
    "trained before, large means": lambda: trained_before(1e4),
    "variances of zero": lambda: changed(mlp(norm=True), lambda model: model[1].running_var.zero_()),
    "tiny weights": lambda: changed(mlp(norm=True), scaled(1e-6)),
    "huge weights": lambda: changed(mlp(), scaled(1e4)),  # with a learning rate that fits them
    "zeros alone": lambda: changed(mlp(norm=True), scaled(0.0)),
    "outliers": lambda: changed(mlp(), outlier),
}


@pytest.mark.parametrize("initial", ["known", "download"])
@pytest.mark.parametrize("name", MODELS)
def test_any_model_trains_with_replicas_that_are_exact(name, initial) -> None:
    """Every message is encoded and every replica compared; the loss may be what it is."""
    training = LocalSGD(steps=2, batch=8, lr=3e-6 if name == "huge weights" else 0.05)
    result = run(MODELS[name](), initial=initial, training=training, rounds=6, options={"encode": True})
    assert len(result.journal) == 6 and sum(line["update_density"] for line in result.journal) > 0
    assert all(torch.isfinite(tensor).all() for tensor in result.module.state_dict().values())
    for part, tensor in result.module.state_dict().items():
        if part.endswith("num_batches_tracked"):
            assert tensor == (12345 if name.startswith("trained") else 0)


def test_a_tensor_without_spread_takes_its_step_from_its_first_update_also_later() -> None:
    strategy, space = Lean(hysteresis=0.5), Space((50, 4))
    initial = torch.cat([torch.randn(50, generator=torch.Generator().manual_seed(1)), torch.zeros(4)])
    state, _ = strategy.init(space, initial)
    for round in range(1, 31):
        state, _ = strategy.aggregate(state, torch.cat([torch.full((50,), 0.01), torch.zeros(4)]), round)
        assert state.steps[1] == NEVER and not state.published[50:].any() and state.slack[1] == 0.5
    step = torch.tensor([0.03, -0.04, 0.05, 0.0])
    state, _ = strategy.aggregate(state, torch.cat([torch.zeros(50), step]), 31)
    rms = float(step.square().mean().sqrt())
    assert (
        2**-0.5 <= state.steps[1] / (strategy.step_of_first_update * rms) <= 2**0.5
        and math.log2(state.steps[1]) % 1 == 0
    )
    assert state.slack[1] == 0.5
    first = float(state.steps[1])
    for round in range(32, 52):
        state, _ = strategy.aggregate(state, torch.cat([torch.zeros(50), step]), round)
    assert state.published[50:].abs().max() > 0 and state.published[53] == 0
    assert torch.equal(state.latent[50:], sum([step] * 21, torch.zeros(4)))
    assert (state.latent - state.published)[50:].abs().max() <= first / 2


@pytest.mark.parametrize("growth", [1.0, 64.0])
def test_a_tensor_without_spread_becomes_as_coarse_as_it_would_begin_today(growth) -> None:
    """Its first update may be small, at a learning rate that rises: its step follows, and never beyond its updates."""
    strategy, space, generator = Lean(), Space((4000,)), torch.Generator().manual_seed(1)
    state, _ = strategy.init(space, torch.zeros(4000))
    state, _ = strategy.aggregate(state, 0.01 * torch.randn(4000, generator=generator), 1)
    first, changed = float(state.steps[0]), []
    for round in range(2, 60):
        state, update = strategy.aggregate(state, 0.01 * growth * torch.randn(4000, generator=generator), round)
        changed.append(update.density)
        assert (state.latent - state.published).abs().max() <= strategy.hysteresis * float(state.steps[0]) + 1e-6
    assert first == 2.0**-4 and state.steps[0] == first * growth
    assert changed[0] > 0.9 or growth == 1
    assert changed[-1] < 0.15


def test_a_refined_tensor_is_published_over_several_rounds() -> None:
    strategy, space, generator = (
        Lean(movement=0.01, refine_below=0.01, hysteresis=0.5),
        Space((4000,)),
        torch.Generator().manual_seed(1),
    )
    state, _ = strategy.init(space, torch.randn(4000, generator=generator))
    state, _ = strategy.aggregate(state, torch.randn(4000, generator=generator) * 0.1, 1)
    step = float(state.steps[0])
    while state.slack[0] == 0.5:
        state, update = strategy.aggregate(state, torch.zeros(4000), 2)
        assert not update.count  # halving a step publishes nothing
    assert state.slack[0] == 1 and state.steps[0] == step / 2  # in new steps what h was in old ones
    densities = []
    for round in range(20):
        assert state.slack[0] == pytest.approx(1 - round / 40)
        state, update = strategy.aggregate(state, torch.zeros(4000), round)
        densities.append(update.density)
    assert state.steps[0] == step / 2 and max(densities) < 0.03 and sum(densities) > 0.05
    assert (state.latent - state.published).abs().max() <= (0.5 + 1 / 40) * step / 2


def test_a_step_stays_above_a_limit_however_long_nothing_moves() -> None:
    strategy, space = Lean(), Space((40, 6))
    state, _ = strategy.init(space, torch.cat([torch.linspace(-1, 1, 40), torch.zeros(6)]))
    state, _ = strategy.aggregate(state, torch.full((46,), 0.125), 1)
    for round in range(2, 700):
        state, update = strategy.aggregate(state, torch.zeros(46), round)
        assert update.finite()
    assert (state.steps >= state.finest).all() and (state.finest > 2.0**-24).all()
    assert torch.equal(state.latent[40:], torch.full((6,), 0.125))
    state, update = strategy.aggregate(state, torch.full((46,), 10.0), 700)
    assert update.finite() and (state.published - state.latent).abs().max() <= float(state.steps.max())


# --- what is not finite -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Diverging(Slowing):
    """One number of one client is replaced in round 3."""

    place: int = 0
    number: float = math.nan

    def train(self, cohort) -> Iterator[Outcome]:
        for outcome in super().train(cohort):
            vector = torch.cat([outcome.delta, outcome.statistics])
            if cohort.round == 3 and outcome.client == max(cohort.clients):
                vector[self.place] = self.number
            yield replace(outcome, delta=vector[:180], statistics=vector[180:])


@pytest.mark.parametrize("channel", [measured, Encoded])
@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("place", [3, 179, 181, 189], ids=["weight", "bias", "mean", "variance"])
def test_an_update_that_is_not_finite_ends_the_run(place, number, channel) -> None:
    f, state = federation(engine=Diverging(place=place, number=number), channel=channel)
    for _ in range(2):
        state, _ = play(f, state)
    with pytest.raises(Diverged, match=r"round 3: the update .*is not finite"):
        play(f, state)


def test_weights_that_leave_the_range_of_exact_numbers_end_the_run() -> None:
    f, state = federation(engine=Diverging(place=3, number=1e30))
    with pytest.raises(Diverged, match="round 3"):
        for _ in range(4):
            state, _ = play(f, state)


def test_a_second_vector_is_refused() -> None:
    with pytest.raises(UsageError, match="no grid for the second vector"):
        Lean().traits(Space((4,), statistics=(Statistic(4, "exchanged"),)))


# --- the server's optimiser, and hooks --------------------------------------------------------------------


def test_momentum_acts_on_the_latent_vector_before_rounding() -> None:
    """Updates that are too small to be published add up, in the velocity and in the latent vector."""

    class Steady(Slowing):
        def delta(self, round: int, client: int) -> Tensor:
            return self.draws(LAYOUT.size, 1) * 2e-3

    server = Server(lr=0.5, momentum=0.9)
    f, state = federation(
        Lean(upload_bits=4, upload_block=64, coarsen_above=1.0), Uniform(5), engine=Steady(), optimizer=server
    )
    begin, latent, velocity, unpublished = published(state)[WEIGHTS], state.strategy.latent[WEIGHTS], 0, 0
    for _ in range(30):
        before, (state, _) = state, play(f, state)
        total = (state.strategy.latent - before.strategy.latent)[WEIGHTS]
        velocity = 0.9 * velocity + (state.optimizer - 0.9 * before.optimizer)
        torch.testing.assert_close(state.optimizer, velocity)
        torch.testing.assert_close(total, 0.5 * state.optimizer, atol=1e-6, rtol=1e-3)
        unpublished += int(((state.weights == before.weights) & (total != 0)).sum())
    direction = Steady().delta(1, 0)
    expected = direction * sum(0.5 * sum(0.9**i for i in range(t)) for t in range(1, 31))
    torch.testing.assert_close(state.strategy.latent[WEIGHTS] - latent, expected, atol=0.03, rtol=0.1)
    far = expected.abs() > 0.1
    assert far.any() and unpublished > 1000
    assert ((state.weights - begin)[far].sign() == expected[far].sign()).float().mean() > 0.9


def test_hooks_see_weights_alone() -> None:
    sizes = []

    class Halving:
        def on_delta(self, delta: Tensor, task: Task) -> Tensor:
            sizes.append(delta.numel())
            return delta

        def on_sum(self, total: Tensor, uploads, round: int) -> Tensor:
            sizes.append(total.numel())
            return total * 0

    f, state = federation(hooks=(Halving(),))
    latent, statistics = state.strategy.latent, state.statistics
    for _ in range(3):
        state, _ = play(f, state)
    assert set(sizes) == {LAYOUT.size}
    assert torch.equal(state.strategy.latent[WEIGHTS], latent[WEIGHTS])
    assert not torch.equal(state.statistics, statistics)


# --- the weights that go with it --------------------------------------------------------------------------


@given(st.integers(0, 999), st.integers(1, 9))
def test_proportional_weights_of_sticky_sampling(seed, sticky_cohort) -> None:
    rng = np.random.default_rng(seed)
    importance = rng.random(60) + 0.1
    importance /= importance.sum()
    pool, sampler = Pool(60, lambda client: importance[client]), Sticky(10, 20, sticky_cohort, "proportional")
    for group in sampler.invite(sampler.init(pool, rng), pool, rng):
        assert group.weights == pytest.approx([60 / 10 * importance[client] for client in group.clients])
    even = Pool(60, lambda client: 1 / 60)
    for weights in ("proportional", sticky_cohort / 10):
        chosen = replace(sampler, weights=weights)
        sticky, others = chosen.invite(chosen.init(even, rng), even, rng)
        assert sum(sticky.weights) == pytest.approx(sticky_cohort / 10)
        assert sum(sticky.weights) + sum(others.weights) == pytest.approx(1)


def test_the_expected_share_of_the_sticky_group_is_its_share_of_the_cohort() -> None:
    importance = np.arange(1, 61) / np.arange(1, 61).sum()
    pool, sampler = Pool(60, lambda client: importance[client]), Sticky(10, 20, 7, "proportional")
    shares = []
    for seed in range(400):
        rng = np.random.default_rng(seed)
        sticky, others = sampler.invite(sampler.init(pool, rng), pool, rng)
        shares.append((sum(sticky.weights), sum(others.weights)))
    assert np.mean(shares, 0) == pytest.approx([0.7, 0.3], abs=0.02)


@pytest.mark.parametrize("online", [2, 5])
def test_a_sticky_group_that_is_short_weighs_what_it_has(online) -> None:
    rng = np.random.default_rng(1)
    sampler = Sticky(10, 20, 7, "proportional")
    state = sampler.init(Pool(60, lambda client: 1 / 60), rng)
    present = set(state[:online]) | (set(range(60)) - set(state))
    groups = sampler.invite(state, Pool(60, lambda client: 1 / 60, is_online=present.__contains__), rng)
    assert [group.quota for group in groups] == [online, 10 - online]
    assert [w for group in groups for w in group.weights] == pytest.approx([1 / 10] * 10)
    # Fewer arrivals than the quota: the group as a whole keeps its weight.
    used = groups[1].clients[:2]
    assert sum(groups[1].actual_weights(used).values()) == pytest.approx((10 - online) / 10)


# --- others are as they were ------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [FedAvg(), STC(), APF(), GlueFL()], ids=repr)
def test_other_strategies_publish_the_initial_model_and_know_no_origin(strategy) -> None:
    f, state = simulation(strategy, Uniform(5), CLIENTS, channel=measured, initial="known")
    assert f.core.origin is None and torch.equal(state.weights, f.core.weights)
    assert f.core.run == RUN and state.average is None


@pytest.mark.parametrize("rms", [0.001, 0.05, 0.2, 3.0])
def test_a_tensor_that_moves_fast_in_its_first_update_gets_a_coarser_step(rms) -> None:
    """The step is the larger of what the spread and what the movement ask for, up to a limit, and once only."""
    strategy, space, generator = Lean(), Space((4000,)), torch.Generator().manual_seed(3)
    state, _ = strategy.init(space, torch.randn(4000, generator=generator))
    assert state.steps[0] == 0.5
    state, _ = strategy.aggregate(state, rms * torch.randn(4000, generator=generator), 1)
    assert state.steps[0] == max(0.5, min(2.0, 2.0 ** round(math.log2(6 * rms))))
    step = float(state.steps[0])
    state, _ = strategy.aggregate(state, 0.1 * step * torch.randn(4000, generator=generator), 2)
    assert state.steps[0] == step


def test_fast_tensors_of_a_slow_model_keep_their_step() -> None:
    """A tensor is made coarser by its first update only as far as the mean of the whole model is."""
    generator = torch.Generator().manual_seed(3)
    state, _ = Lean().init(Space((1000, 9000)), torch.randn(10_000, generator=generator))
    first, noise = [float(step) for step in state.steps], torch.randn(10_000, generator=generator)
    speeds = torch.cat([torch.full((1000,), 0.4), torch.full((9000,), 0.01)])
    slow, _ = Lean().aggregate(state, speeds * noise, 1)
    assert slow.steps.tolist() == first
    fast, _ = Lean().aggregate(state, 0.4 * noise, 1)
    assert fast.steps.tolist() == [4 * step for step in first]


@pytest.mark.gpu
def test_the_server_asks_a_gpu_for_nothing_between_uploads_and_update() -> None:
    device, strategy = torch.device("cuda"), Lean(upload_block=256)
    space = Space((5000, 300), device, (Statistic(20, "mean"), Statistic(20, "variance")))
    initial = torch.rand(space.size + space.statistics_size, device=device) + 0.5
    state, _ = strategy.init(space, initial)
    for round in range(1, 5):
        torch.cuda.set_sync_debug_mode("error" if round > 2 else "default")  # the first rounds compile
        try:
            uploads = []
            for client in range(3):
                task = Task(round, space.mask(False), 0.3, space, client, 7)
                update, _ = strategy.compress(0.01 * initial, task, None)
                uploads.append(Upload(client, 0.3, update, initial[:0], 7))
            state, update = strategy.aggregate(state, strategy.combine(state, uploads, round), round)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert update.count
