"""The laboratory and Flower: the same seed gives the same cohorts, the same updates the same positions and models."""

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict

from federations import LAYOUT, RUN, Engine, federation
from flower_nodes import Grid, Node, initial_arrays
from gluefl import APF, STC, FedAvg, GlueFL, Sticky, Uniform
from gluefl.core.federation import start
from gluefl.flower import GlueFLStrategy, exchange
from gluefl.flower.arrays import Table
from gluefl.randomness import stream
from gluefl.simulation.channel import Encoded
from gluefl.simulation.round import play
from gluefl.vectors.layout import split
from stubs import mlp

CLIENTS, ROUNDS = 12, 12


@dataclass(frozen=True)
class Normal(Engine):
    """Updates without ties: an update that went through a float32 model and back is off by a rounding error."""

    def delta(self, round: int, client: int):
        return torch.from_numpy(stream(3, "delta", round, client).standard_normal(LAYOUT.size, dtype="float32"))

    def statistics(self, round: int, client: int):
        return torch.full((LAYOUT.statistics_size,), float(round + client))


def train(message: Message, context: Context) -> Message:
    """The same updates as an app's training: the arrays that came, moved."""
    round, client = message.content["config"]["server-round"], context.node_config["partition-id"]
    weights, _ = Table.of(initial_arrays()).flatten(message.content["arrays"])
    moved = dict(split(LAYOUT.weights, weights + Normal().delta(round, client)))
    moved |= dict(split(LAYOUT.statistics, Normal().statistics(round, client)))
    arrays = {
        name: moved[name].to(tensor.dtype) for name, tensor in message.content["arrays"].to_torch_state_dict().items()
    }
    metrics = MetricRecord({"num-examples": 1, "loss": 0.5})
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)


@pytest.mark.parametrize(
    ("strategy", "sampler"),
    [
        (GlueFL(regenerate_every=5), Sticky(4, 6, 3)),
        (GlueFL(scope="tensor", compensation="plain"), Sticky(4, 6, 3, weights="equal")),
        (STC(compensation="rescaled", server_feedback=True), Uniform(4)),
        (APF(check_every=2), Uniform(4)),
        (FedAvg(), Uniform(4)),
    ],
    ids=repr,
)
def test_the_laboratory_and_flower_agree(tmp_path, monkeypatch, strategy, sampler) -> None:
    monkeypatch.setattr(exchange, "POLL_S", 0.0)
    f, _ = federation(strategy, sampler, CLIENTS, engine=Normal(), channel=Encoded(LAYOUT, RUN))
    state, cohorts, bytes_up = start(f, *LAYOUT.flatten(mlp(norm=True))), [], []
    for _ in range(ROUNDS):
        state, played = play(f, state)
        cohorts.append(played.line["clients"]["id"])
        bytes_up.append(played.line["up_bytes"])

    nodes = [Node(place, tmp_path / str(place), trains=train) for place in range(CLIENTS)]
    server = GlueFLStrategy(sampler, strategy, seed=f.seed)
    server.start(Grid(nodes), initial_arrays(), num_rounds=ROUNDS, timeout=10)
    found = server.session.state
    assert [line["clients"]["id"] for line in server.session.journal.lines] == cohorts
    assert [line["up_bytes"] for line in server.session.journal.lines] == bytes_up
    assert torch.equal(found.ledger.changed_at, state.ledger.changed_at)
    assert found.sampler == state.sampler
    torch.testing.assert_close(found.weights, state.weights, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.statistics, state.statistics)
