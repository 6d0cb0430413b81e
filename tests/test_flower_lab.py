"""The laboratory and Flower: the same seed gives the same cohorts, the same updates the same positions and models.

Whatever the strategy, the sampler, the server's optimiser and the hooks: those below that are not part of gluefl show
that a person's own work in both.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor

from flower_nodes import Grid, Node, initial_arrays
from gluefl import APF, STC, FedAvg, GlueFL, Server, Sticky, Uniform, wire
from gluefl.accel.resources import current
from gluefl.clients.cohort import Cohort, Outcome
from gluefl.clients.residuals import Residuals
from gluefl.core.averaging import Averaging
from gluefl.core.sampling import Pool
from gluefl.core.server import Core, State, start
from gluefl.errors import UsageError
from gluefl.fleet import Instant
from gluefl.flower import GlueFLStrategy, exchange, messages
from gluefl.flower.arrays import Table
from gluefl.randomness import stream
from gluefl.simulation.channel import Encoded
from gluefl.simulation.parts import Simulation
from gluefl.simulation.round import play
from gluefl.storage.sealed import seal, unseal
from gluefl.strategies import Space, Traits
from gluefl.strategies.lean import Lean
from gluefl.strategies.registry import row_of
from gluefl.vectors.layout import Layout, split
from gluefl.vectors.sparse import Sparse, whole
from stubs import dyadic, mlp

LAYOUT = Layout.of(mlp(norm=True))  # 180 weights, 17 statistics
SPACE = Space.of(LAYOUT)
CLIENTS, ROUNDS, SEED = 12, 12, 5


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch) -> None:
    monkeypatch.setattr(exchange, "POLL_S", 0.0)


@dataclass(frozen=True)
class Normal:
    """Updates without ties: an update that went through a float32 model and back is off by a rounding error."""

    def delta(self, round: int, client: int) -> Tensor:
        return torch.from_numpy(stream(3, "delta", round, client).standard_normal(LAYOUT.size, dtype="float32"))

    def statistics(self, round: int, client: int) -> Tensor:
        return torch.full((LAYOUT.statistics_size,), float(round + client))

    def train(self, cohort: Cohort) -> Iterator[Outcome]:
        for client in cohort.clients:
            delta = self.delta(cohort.round, client)
            moved = delta if cohort.frozen is None else torch.where(cohort.frozen, 0.0, delta)
            yield Outcome(client, moved, self.statistics(cohort.round, client), 0.5)

    def work(self, client: int) -> int:
        return 1


@dataclass(frozen=True)
class Exact(Normal):
    """Updates that survive the way through a float32 model."""

    def delta(self, round: int, client: int) -> Tensor:
        return dyadic(LAYOUT.size, round, client, bits=10)


def app_of(engine: Normal):
    """The same updates as an app's training: the arrays that came, moved."""

    def train(message: Message, context: Context) -> Message:
        round, client = message.content["config"]["server-round"], context.node_config["partition-id"]
        weights, _ = Table.of(initial_arrays()).flatten(message.content["arrays"])
        moved = dict(split(LAYOUT.weights, weights + engine.delta(round, client)))
        moved |= dict(split(LAYOUT.statistics, engine.statistics(round, client)))
        types = {name: tensor.dtype for name, tensor in message.content["arrays"].to_torch_state_dict().items()}
        arrays = ArrayRecord({name: moved[name].to(dtype) for name, dtype in types.items()})
        metrics = MetricRecord({"num-examples": 1, "loss": 0.5})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return train


@dataclass(frozen=True)
class Parts:
    """What a federation is made of, here and there."""

    strategy: Any
    sampler: Any
    optimizer: Any = Server()  # noqa: RUF009 - frozen
    hooks: tuple[Any, ...] = ()
    engine: Normal = Normal()
    initial: ArrayRecord = field(default_factory=initial_arrays)


def in_the_laboratory(parts: Parts, rounds: int = ROUNDS) -> tuple[State, list[dict[str, Any]]]:
    initial = Table.of(parts.initial).flatten(parts.initial)
    row = row_of(parts.strategy)
    own = {"optimizer": parts.optimizer, "hooks": parts.hooks}
    own |= {"averaging": Averaging(row.average, row.average_span), "initial": row.initial}
    core = Core(SEED, b"test run", LAYOUT, SPACE, parts.sampler, parts.strategy, *initial, **own)
    pool = Pool(CLIENTS, lambda client: 1 / CLIENTS)
    sim = Simulation(core, pool, Instant(), parts.engine, Encoded(core), Residuals(LAYOUT.size))
    state, lines = start(core, pool), []
    for _ in range(rounds):
        state, played = play(sim, state)
        lines.append(played.line)
    return state, lines


def nodes_of(parts: Parts, folder) -> list[Node]:
    ours = {"strategy": parts.strategy, "hooks": parts.hooks, "initial": lambda: parts.initial}
    return [Node(c, folder / str(c), trains=app_of(parts.engine), ours=ours) for c in range(CLIENTS)]


def on_flower(parts: Parts, nodes: list[Node], rounds: int = ROUNDS, out=None) -> GlueFLStrategy:
    server = GlueFLStrategy(
        parts.sampler, parts.strategy, server=parts.optimizer, hooks=parts.hooks, seed=SEED, out=out
    )
    server.start(Grid(nodes), parts.initial, num_rounds=rounds, timeout=10)
    assert current() is None, "threads of the run are left"
    return server


@dataclass(frozen=True)
class Adam:
    """A server's optimiser with a state of its own: moments and a counter."""

    lr: float = 0.1

    def init(self, space: Space) -> dict[str, Any]:
        return {"moments": (torch.zeros(space.size), torch.zeros(space.size)), "steps": 0}

    def step(self, state: dict[str, Any], update: Sparse) -> tuple[dict[str, Any], Sparse]:
        (first, second), steps, gradient = state["moments"], state["steps"] + 1, update.dense()
        first, second = 0.9 * first + 0.1 * gradient, 0.99 * second + 0.01 * gradient**2
        scaled = self.lr * (first / (1 - 0.9**steps)) / ((second / (1 - 0.99**steps)).sqrt() + 0.1)
        return {"moments": (first, second), "steps": steps}, update.with_values(scaled[update.positions])


@dataclass(frozen=True)
class ClipAndNoise:
    """A hook on both sides."""

    norm: float = 1.0

    def on_delta(self, delta: Tensor, task) -> Tensor:
        return delta * min(1.0, self.norm / float(delta.norm()))

    def on_sum(self, total: Tensor, uploads, round: int) -> Tensor:
        noise = stream(9, "noise", round).standard_normal(total.numel(), dtype="float32")
        return total + self.norm * 0.1 * torch.from_numpy(noise)


PARTS = [
    Parts(GlueFL(regenerate_every=5), Sticky(4, 6, 3)),
    Parts(GlueFL(scope="tensor", compensation="plain"), Sticky(4, 6, 3, weights="equal"), Server(0.5)),
    Parts(STC(compensation="rescaled", server_feedback=True), Uniform(4)),
    Parts(APF(check_every=2), Uniform(4)),
    Parts(FedAvg(), Uniform(4), Server(0.7, 0.9)),
    Parts(FedAvg(), Uniform(4), Adam()),
    Parts(Lean(), Sticky(4, 6, 3, weights="proportional"), Server(0.5, 0.5), engine=Exact()),
    Parts(GlueFL(), Sticky(4, 6, 3), hooks=(ClipAndNoise(),)),
]


@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: f"{parts.strategy}-{parts.optimizer}-{parts.hooks}")
def test_the_laboratory_and_flower_agree(tmp_path, parts) -> None:
    state, lines = in_the_laboratory(parts)
    server = on_flower(parts, nodes_of(parts, tmp_path))
    reached, journal = server.session.state, server.session.journal.lines
    assert [line["clients"]["id"] for line in journal] == [line["clients"]["id"] for line in lines]
    assert [line["up_bytes"] for line in journal] == [line["up_bytes"] for line in lines]
    assert torch.equal(reached.ledger.changed_at, state.ledger.changed_at)
    assert reached.sampler == state.sampler
    torch.testing.assert_close(reached.weights, state.weights, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(reached.statistics, state.statistics)
    if isinstance(parts.strategy, Lean):
        assert all(map(torch.equal, [*reached.model, reached.weights], [*state.model, state.weights]))


class Sixteenths:
    """Multiples of 1/16 in two bytes."""

    code = 77

    def measure(self, update: Sparse):
        support = update.support
        return lambda: 2 * support.count

    def longest(self, size: int) -> int:
        return 2 * size

    def encode(self, update: Sparse) -> bytes:
        return (update.values * 16).numpy().astype("<i2").tobytes()

    def decode(self, data: memoryview, positions: Tensor) -> Tensor:
        return torch.from_numpy(np.frombuffer(data, "<i2").astype(np.float32)) / 16


@dataclass(frozen=True)
class Rounded(FedAvg):
    """Clients round at random to a grid, the server to the nearest point of it: both send two bytes a value."""

    def traits(self, space):
        return Traits(Sixteenths(), Sixteenths())

    def compress(self, delta, task, residual):
        noise = torch.from_numpy(task.stream().random(delta.numel(), dtype="float32"))
        return whole(torch.floor(delta * 16 + noise) / 16), None

    def aggregate(self, state, total, round):
        return state, whole(torch.round(total * 16) / 16)


def on_the_grid(arrays: ArrayRecord) -> ArrayRecord:
    """Plus zero: the codec knows no -0.0, which the hash of a replica tells from 0.0."""
    tensors = arrays.to_torch_state_dict()
    return ArrayRecord({n: torch.round(t * 16) / 16 + 0.0 if t.is_floating_point() else t for n, t in tensors.items()})


QUANTISED = Parts(Rounded(), Uniform(4), engine=Exact(), initial=on_the_grid(initial_arrays()))


def test_quantised_random_values_are_the_same_bits_in_both(tmp_path) -> None:
    state, lines = in_the_laboratory(QUANTISED)
    server = on_flower(QUANTISED, nodes_of(QUANTISED, tmp_path))
    journal = server.session.journal.lines
    assert torch.equal(server.session.state.weights, state.weights)  # so both sides drew the same numbers
    assert [line["up_bytes"] for line in journal] == [line["up_bytes"] for line in lines]
    assert not any(line["incidents"] for line in journal)
    upload_bytes = wire.HEADER_BYTES + 4 * 16 + 2 * LAYOUT.size + 4 * LAYOUT.statistics_size
    assert all(line["up_bytes"] == 4 * upload_bytes for line in journal)


def test_a_random_stream_belongs_to_the_seed(tmp_path) -> None:
    def weights(name: str, seed: int) -> Tensor:
        server = GlueFLStrategy(Uniform(CLIENTS), QUANTISED.strategy, seed=seed)  # all are used: only rounding is drawn
        server.start(Grid(nodes_of(QUANTISED, tmp_path / name)), QUANTISED.initial, num_rounds=1, timeout=10)
        return server.session.state.weights

    assert torch.equal(weights("a", 1), weights("b", 1))
    assert not torch.equal(weights("a", 1), weights("c", 2))


def in_float32(round: int, reply: Message) -> Message:
    """The reply of a node whose upload is encoded as that of another strategy."""
    data, shared = messages.read_array(reply.content, messages.UPLOAD, None), wire.Shared(SPACE.mask(True))
    sizes = LAYOUT.size, LAYOUT.statistics_size
    header, body = wire.decode(data, wire.Expected(data[8:16], data[16:24], *sizes, wire.UPLOAD, shared, Sixteenths()))
    data = wire.encode(header, wire.encode_body(replace(body, codec=wire.FLOAT32)), *sizes)
    reply.content[messages.BODY] = ArrayRecord({messages.UPLOAD: messages.to_array(data)})
    return reply


def test_an_upload_in_another_codec_is_refused(tmp_path) -> None:
    nodes = nodes_of(QUANTISED, tmp_path)
    nodes[0].meddle = in_float32
    line = on_flower(replace(QUANTISED, sampler=Uniform(CLIENTS)), nodes, rounds=1).session.journal.lines[0]
    assert [i["what"] for i in line["incidents"]] == ["refused"] and line["incidents"][0]["client"] == 0
    assert line["used"] == CLIENTS - 1


def test_a_package_of_another_strategy_is_refused(tmp_path) -> None:
    nodes = nodes_of(QUANTISED, tmp_path)
    nodes[0].ours = {"strategy": FedAvg()}
    line = on_flower(replace(QUANTISED, sampler=Uniform(CLIENTS)), nodes, rounds=1).session.journal.lines[0]
    assert {i["client"] for i in line["incidents"]} == {0} and line["used"] == CLIENTS - 1
    assert "and the server runs" in line["incidents"][0]["why"] and not (tmp_path / "0").exists()


def test_a_run_with_an_optimiser_and_hooks_of_ones_own_goes_on(tmp_path) -> None:
    parts = replace(PARTS[-1], optimizer=Adam())
    nodes = nodes_of(parts, tmp_path / "nodes")
    on_flower(parts, nodes, 3, tmp_path / "run")
    resumed = on_flower(parts, nodes, 7, tmp_path / "run").session
    whole_run = on_flower(parts, nodes_of(parts, tmp_path / "others"), 7).session
    assert torch.equal(resumed.state.weights, whole_run.state.weights)
    assert resumed.state.optimizer["steps"] == 7
    for other in (
        replace(parts, optimizer=Adam(0.2)),
        replace(parts, hooks=()),
        replace(parts, hooks=(ClipAndNoise(2),)),
    ):
        with pytest.raises(UsageError, match="other settings"):
            on_flower(other, nodes, 8, tmp_path / "run")


class Louder:
    """A hook that is no dataclass, with a part that is one."""

    def __init__(self, part: ClipAndNoise) -> None:
        self.part = part

    def on_delta(self, delta: Tensor, task) -> Tensor:
        return self.part.on_delta(delta, task)

    def on_sum(self, total: Tensor, uploads, round: int) -> Tensor:
        return self.part.on_sum(total, uploads, round)


@dataclass(frozen=True)
class ClipOnly(ClipAndNoise):
    """The same fields, another sum."""

    def on_sum(self, total: Tensor, uploads, round: int) -> Tensor:
        return total


def test_a_run_with_other_parts_inside_of_its_hooks_does_not_go_on(tmp_path) -> None:
    parts = replace(PARTS[-1], hooks=(Louder(ClipAndNoise()),))
    nodes = nodes_of(parts, tmp_path / "nodes")
    on_flower(parts, nodes, 3, tmp_path / "run")
    for hook in (Louder(ClipAndNoise(2.0)), Louder(ClipOnly())):
        with pytest.raises(UsageError, match="other settings") as refused:
            on_flower(replace(parts, hooks=(hook,)), nodes, 5, tmp_path / "run")
        assert "earlier version" not in str(refused.value)
    for path in (tmp_path / "run" / "checkpoint").glob("state-*.json"):  # as written without parts of hooks
        manifest, _ = unseal(path.read_bytes())
        notes = manifest["notes"]
        del notes["described"]
        notes["settings"]["hooks"] = [{"name": "Louder"}]
        path.write_bytes(seal(manifest, allow_nan=True))
    with pytest.raises(UsageError, match="It was written by an earlier version of gluefl"):
        on_flower(parts, nodes, 5, tmp_path / "run")
