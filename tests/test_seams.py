"""The seams: what can be added without touching anything else, each a small class here and a run that uses it."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from federations import LAYOUT, Engine, measured, simulation
from gluefl import STC, FedAvg, GlueFL, LocalSGD, Setting, Sticky, Uniform, train, wire
from gluefl.clients.cohort import Cohort, Outcome
from gluefl.errors import UsageError, WireError
from gluefl.parameters import Count, Positive, checked
from gluefl.simulation.channel import Encoded
from gluefl.simulation.round import play
from gluefl.strategies import Space, Task, Traits, Upload, weighted_sum
from gluefl.vectors.layout import Layout
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import Sparse, whole
from runs import options, small_run
from stubs import Blobs, mlp

# --- a strategy that sends quantised, randomised values ---------------------------------------------------


@dataclass(frozen=True)
class Levels:
    """Whole multiples of a step, one byte each, after the step itself: values = step · level, |level| ≤ 127."""

    code: int = 200

    def measure(self, update: Sparse) -> Callable[[], int]:
        support = update.support
        return lambda: self.longest(support.count)

    def longest(self, size: int) -> int:
        return 4 + size

    def encode(self, update: Sparse) -> bytes:
        step = step_of(update.values)
        levels = (update.values / step).round().to(torch.int8)
        return np.float32(step).tobytes() + levels.numpy().tobytes()

    def decode(self, data: memoryview, positions: Tensor) -> Tensor:
        count = positions.numel()
        if len(data) != 4 + count:
            raise WireError(f"{count} levels take {4 + count} bytes, {len(data)} were found")
        step = float(np.frombuffer(data[:4], np.float32)[0])
        return torch.from_numpy(np.frombuffer(data[4:], np.int8).astype(np.float32)) * step


def step_of(values: Tensor) -> float:
    """A power of two, so that multiples are exact, with which 127 levels reach the largest value."""
    largest = float(values.abs().max()) if values.numel() else 0.0
    return 2.0 ** math.ceil(math.log2(largest / 127)) if largest else 1.0


@checked
@dataclass(frozen=True)
class Quantised:
    """FedAvg whose clients round their updates to levels at random, so that they are right in the mean."""

    def traits(self, space: Space) -> Traits:
        return Traits(upload_codec=Levels())

    def init(self, space: Space, initial: Tensor) -> tuple[Space, Tensor]:
        return space, initial

    def mask(self, state: Space, round: int) -> Mask:
        return state.mask(True)

    def frozen(self, mask: Mask) -> Mask | None:
        return None

    def compress(self, delta: Tensor, task: Task, residual: Tensor | None) -> tuple[Sparse, Tensor | None]:
        step = step_of(delta)
        noise = torch.from_numpy(task.stream().random(delta.numel(), dtype=np.float32)).to(delta.device)
        return whole((delta / step + noise).floor().clamp(-127, 127) * step), None

    def combine(self, state: Space, uploads: Sequence[Upload], round: int) -> Tensor:
        return weighted_sum(uploads, state)

    def aggregate(self, state: Space, total: Tensor, round: int) -> tuple[Space, Sparse]:
        return state, whole(total)


def test_a_quantised_strategy_costs_a_byte_a_value_and_is_the_same_measured_and_encoded() -> None:
    plays = []
    for channel in (measured, Encoded):
        sim, state = simulation(Quantised(), Uniform(6), 40, channel=channel)
        lines = []
        for _ in range(5):
            state, record = play(sim, state)
            lines.append(record.line)
        plays.append((state.weights, lines))
    assert torch.equal(plays[0][0], plays[1][0]) and plays[0][1] == plays[1][1]
    upload = wire.HEADER_BYTES + 4 * 16 + 4 + LAYOUT.size + 4 * LAYOUT.statistics_size
    assert all(line["up_bytes"] == 6 * upload for line in plays[0][1])


def test_random_rounding_depends_on_round_and_client_and_is_right_in_the_mean() -> None:
    space, delta = Space((3,)), torch.tensor([0.3, -0.7, 1.0])
    sent = [
        Quantised().compress(delta, Task(round, space.mask(True), 1.0, space, client, seed=4), None)[0].values
        for round in range(40)
        for client in range(50)
    ]
    again = Quantised().compress(delta, Task(7, space.mask(True), 1.0, space, 9, seed=4), None)[0].values
    assert torch.equal(again, sent[7 * 50 + 9]) and len({tuple(one.tolist()) for one in sent}) > 2
    torch.testing.assert_close(torch.stack(sent).mean(0), delta, atol=1e-3, rtol=0)


def test_a_codec_that_was_not_agreed_on_is_refused() -> None:
    sim, _ = simulation(Quantised(), Uniform(6), 40)
    shared = wire.Shared(sim.core.space.mask(True))
    body = wire.Body(whole(torch.ones(LAYOUT.size)), torch.zeros(LAYOUT.statistics_size), shared, False, Levels(7))
    header = wire.Header(wire.UPLOAD, sim.core.run, LAYOUT.fingerprint, 1, 0, 0)
    data = wire.encode(header, wire.encode_body(body), LAYOUT.size, LAYOUT.statistics_size)
    with pytest.raises(WireError, match="codec 7 for values was found, 200 was expected"):
        wire.decode(data, sim.core.expected(wire.UPLOAD, shared))


# --- a server optimiser with a state of its own -----------------------------------------------------------


@dataclass(frozen=True)
class AdamState:
    """Nested on purpose: a checkpoint holds any tree."""

    moments: tuple[Tensor, Tensor]
    steps: int


@checked
@dataclass(frozen=True)
class ServerAdam:
    """FedAdam (Reddi et al. 2021): Adam on what the clients' updates add up to, at the positions of the update."""

    lr: Positive = 0.01
    beta_1: Positive = 0.9
    beta_2: Positive = 0.99
    adaptivity: Positive = 1e-3  # τ

    def init(self, space: Space) -> AdamState:
        zeros = torch.zeros(space.size, device=space.device)
        return AdamState((zeros, zeros), 0)

    def step(self, state: AdamState, update: Sparse) -> tuple[AdamState, Sparse]:
        first, second = (moment.clone() for moment in state.moments)
        at, values = update.positions, update.values
        first[at] = self.beta_1 * first[at] + (1 - self.beta_1) * values
        second[at] = self.beta_2 * second[at] + (1 - self.beta_2) * values**2
        moved = self.lr * first[at] / (second[at].sqrt() + self.adaptivity)
        return AdamState((first, second), state.steps + 1), update.with_values(moved)


def test_server_adam_is_adam() -> None:
    sim, state = simulation(FedAvg(), Uniform(6), 40, optimizer=ServerAdam(0.1), channel=measured)
    first = second = torch.zeros(LAYOUT.size, dtype=torch.float64)
    weights = state.weights.double()
    for round in range(1, 4):
        state, record = play(sim, state)
        clients = record.line["clients"]["id"]
        mean = torch.stack([Engine().delta(round, client).double() for client in clients]).mean(0)
        first, second = 0.9 * first + 0.1 * mean, 0.99 * second + 0.01 * mean**2
        weights = weights + 0.1 * first / (second.sqrt() + 1e-3)
        torch.testing.assert_close(state.weights.double(), weights, atol=1e-4, rtol=1e-4)
    assert state.optimizer.steps == 3


def test_server_adam_composes_with_masks_and_resumes(tmp_path) -> None:
    parts = {"server": ServerAdam(0.02), "strategy": GlueFL(regenerate_every=6)}
    expected = small_run(**parts)
    small_run(out=tmp_path / "run", rounds=9, **parts)
    resumed = small_run(out=tmp_path / "run", resume=True, **parts)
    for name, tensor in expected.module.state_dict().items():
        assert torch.equal(resumed.module.state_dict()[name], tensor), name
    assert all(line["update_density"] < 0.25 for line in expected.journal)  # the update stays sparse


@dataclass(frozen=True)
class OnSum(STC):
    """As STC, with an optimiser that sees the sum before the strategy selects from it."""

    def traits(self, space: Space) -> Traits:
        return Traits(optimizer_acts_on="sum")


@pytest.mark.parametrize("strategy", [STC(0.2), OnSum(0.2)], ids=["update", "sum"])
def test_an_optimiser_acts_where_the_strategy_declares(strategy) -> None:
    sim, state = simulation(strategy, Uniform(6), 40, optimizer=ServerAdam(), channel=measured)
    state, record = play(sim, state)
    moved = (state.optimizer.moments[0] != 0).float().mean()
    assert record.line["update_density"] == 0.2  # what is published is sparse either way
    assert moved > 0.7 if isinstance(strategy, OnSum) else moved == pytest.approx(0.2)


# --- hooks on a client's update and on the server's sum ---------------------------------------------------


@checked
@dataclass(frozen=True)
class ClipAndNoise:
    """Clip every update to a norm, then add Gaussian noise to the sum: the centre of differential privacy."""

    norm: Positive
    noise: Positive
    seed: Count = 1

    def on_delta(self, delta: Tensor, task: Task) -> Tensor:
        return delta * min(1.0, self.norm / float(delta.norm()))

    def on_sum(self, total: Tensor, uploads: Sequence[Upload], round: int) -> Tensor:
        largest = max(upload.weight for upload in uploads)
        drawn = np.random.default_rng([self.seed, round]).standard_normal(total.numel()).astype(np.float32)
        return total + self.noise * self.norm * largest * torch.from_numpy(drawn)


@dataclass
class Seen:
    """Writes down what passes."""

    norms: list[float] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)

    def on_delta(self, delta: Tensor, task: Task) -> Tensor:
        self.norms.append(float(delta.norm()))
        return delta

    def on_sum(self, total: Tensor, uploads: Sequence[Upload], round: int) -> Tensor:
        self.sums.append(total)
        return total


@pytest.mark.parametrize("strategy, sampler", [(FedAvg(), Uniform(6)), (GlueFL(0.3, 0.2), Sticky(6, 12, 4))])
def test_updates_are_clipped_before_compression_and_noise_is_added_before_selection(strategy, sampler) -> None:
    before, after = Seen(), Seen()
    hooks = (before, ClipAndNoise(norm=0.5, noise=0.1), after)
    sim, state = simulation(strategy, sampler, 40, hooks=hooks, channel=measured)
    for _ in range(3):
        state, record = play(sim, state)
    assert min(before.norms) > 1 and max(after.norms) <= 0.5 + 1e-5
    noise = torch.cat([b - a for a, b in zip(before.sums, after.sums)])
    weight = max(
        max(group.weights) for group in sim.core.sampler.invite(state.sampler, sim.pool, np.random.default_rng())
    )
    assert float(noise.std()) == pytest.approx(0.1 * 0.5 * weight, rel=0.1)
    if isinstance(strategy, GlueFL):  # noise on the sum makes no dense update
        assert record.line["update_density"] < 0.35


# --- an engine of one's own -------------------------------------------------------------------------------


@dataclass(frozen=True)
class LeastSquares:
    """Trains nothing by gradients: every client solves its own least squares problem on random features."""

    population: Blobs
    layout: Layout
    trained: list[tuple[int, ...]] = field(default_factory=list)

    def train(self, cohort: Cohort) -> Iterator[Outcome]:
        self.trained.append(cohort.clients)
        for client in cohort.clients:
            samples = self.population.train(client)
            inputs = torch.cat([samples.inputs, torch.ones(len(samples), 1)], 1)
            targets = nn.functional.one_hot(samples.labels, 4).float()
            solved = torch.linalg.lstsq(inputs.T @ inputs + torch.eye(7), inputs.T @ targets).solution
            weights = torch.cat([solved[:-1].T.reshape(-1), solved[-1]])
            yield Outcome(client, weights - cohort.weights, cohort.statistics, float((weights**2).mean()))

    def work(self, client: int) -> int:
        return self.population.size(client)


def test_an_engine_of_ones_own_trains() -> None:
    model = nn.Linear(6, 4)
    engine = LeastSquares(Blobs(), Layout.of(model))
    result = small_run(
        model=model, strategy=FedAvg(), sampler=Uniform(8), rounds=5, engine=engine, options=options(trainer="auto")
    )
    assert len(engine.trained) == 5 and result.summary["mean_accuracy"] > 0.8
    assert result.summary["trainer"] == "leastsquares"


# --- adapters: no change at all ---------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer with a table of its own, and a low-rank adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 16).requires_grad_(False)
        self.register_buffer("scale", torch.full((16,), 0.5))  # a constant of the architecture
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, 4)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.base(inputs) * self.scale + self.up(self.down(inputs))
        return self.head(self.norm(hidden).relu())


@pytest.mark.parametrize("trainer", ["loop", "workers", "stacked"])
@pytest.mark.parametrize("strategy", [FedAvg(), GlueFL(0.5, 0.4)], ids=["fedavg", "gluefl"])
def test_only_adapters_and_statistics_of_normalisation_travel(strategy, trainer) -> None:
    model = Adapted()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    layout = Layout.of(model)
    assert {part.name.split(".")[0] for part in layout.weights} == {"down", "up", "norm", "head"}
    assert [part.name for part in layout.statistics] == [
        "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
    ]  # fmt: skip
    result = small_run(
        model=model, strategy=strategy, sampler=Uniform(6), rounds=40, options=options(trainer=trainer),
        training=LocalSGD(steps=5, batch=8, lr=0.1),
    )  # fmt: skip
    after = result.module.state_dict()
    assert result.summary["mean_accuracy"] > 0.5 and result.summary["parameters"] == layout.size
    for name in ("base.weight", "base.bias", "scale"):
        assert torch.equal(after[name], before[name]), name
    assert not torch.equal(after["up.weight"], before["up.weight"])


# --- what is not a part is refused ------------------------------------------------------------------------


class NoStrategy:
    """Has a mask and nothing else."""

    def mask(self, state: Any, round: int) -> Mask:
        raise NotImplementedError


def test_what_is_no_strategy_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(UsageError, match="is no strategy: it has no traits, init, frozen, compress, combine"):
        train(mlp(), Blobs(), NoStrategy(), sampler=Uniform(4), setting=Setting())
