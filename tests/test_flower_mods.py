"""Other mods, and apps of other kinds, together with ours."""

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, arrays_size_mod, fixedclipping_mod, message_size_mod

from flower_nodes import (
    SAMPLER,
    Grid,
    Node,
    app,
    check_replicas,
    fates,
    federation,
    incidents,
    initial_arrays,
    weights_of,
)
from gluefl import FedAvg
from gluefl.errors import UsageError
from gluefl.flower import GlueFLMod, GlueFLStrategy, TrimmedMean, exchange, nodes
from gluefl.flower.arrays import STATISTICS
from gluefl.strategies.lean import Lean
from stubs import mlp


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch) -> None:
    monkeypatch.setattr(exchange, "POLL_S", 0.0)
    monkeypatch.setattr(nodes, "POLL_S", 0.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"folder": 3},
        {"strategy": FedAvg},
        {"strategy": "fedavg"},
        {"hooks": TrimmedMean()},
        {"hooks": [TrimmedMean]},
        {"initial": mlp()},
        {"initial": {}},
        {"statistics": "*running_mean"},
        {"statistics": 5},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_arguments_that_cannot_be_used_are_refused(wrong) -> None:
    with pytest.raises(UsageError, match=rf"GlueFLMod cannot be used:\n  {next(iter(wrong))}(\.0)?: input should be "):
        GlueFLMod(**wrong)


def test_a_folder_may_be_a_text_and_hooks_and_statistics_lists(tmp_path) -> None:
    ours = {"hooks": [TrimmedMean()], "statistics": list(STATISTICS)}
    grid_nodes = [Node(place, str(tmp_path / f"device-{place}"), ours=ours) for place in range(4)]
    server, _, _ = federation(tmp_path, nodes=grid_nodes, rounds=2)
    assert [line["used"] for line in server.session.journal.lines] == [4, 4]
    assert all(any((tmp_path / f"device-{place}").iterdir()) for place in range(4))


@pytest.mark.parametrize(
    "inside", [[LocalDpMod(1.0, 0.0, 1.0, 0.1)], [message_size_mod, arrays_size_mod]], ids=["dp", "sizes"]
)
@pytest.mark.parametrize("strategy", [None, Lean()], ids=["gluefl", "lean"])
def test_mods_of_flower_work_inside_ours(tmp_path, inside, strategy) -> None:
    ours = {"initial": initial_arrays}
    grid_nodes = [Node(place, tmp_path / f"device-{place}", mods=inside, ours=ours) for place in range(4)]
    server, _, _ = federation(tmp_path, nodes=grid_nodes, rounds=2, strategy=strategy)
    lines = server.session.journal.lines
    assert [line["used"] for line in lines] == [4, 4] and not any(line["incidents"] for line in lines)
    check_replicas(server, grid_nodes)


@pytest.mark.parametrize("strategy", [None, Lean()], ids=["gluefl", "lean"])
def test_the_size_mods_work_outside_ours(tmp_path, strategy) -> None:
    class Outside(Node):
        def handle(self, message):
            context = Context(1, 100, {"partition-id": self.place}, RecordDict(), {})
            return app([message_size_mod, arrays_size_mod, GlueFLMod(folder=self.folder)])(message, context)

    grid_nodes = [Outside(place, tmp_path / str(place)) for place in range(4)]
    server, _, _ = federation(tmp_path, nodes=grid_nodes, rounds=2, strategy=strategy)
    assert [line["used"] for line in server.session.journal.lines] == [4, 4]


@pytest.mark.parametrize("outside", [LocalDpMod(1.0, 0.0, 1.0, 0.1), fixedclipping_mod], ids=["dp", "clipping"])
@pytest.mark.parametrize("strategy", [None, Lean()], ids=["gluefl", "lean"])
def test_mods_that_alter_arrays_are_refused_outside_ours(tmp_path, outside, strategy) -> None:
    class Outside(Node):
        def handle(self, message):
            context = Context(1, 100, {"partition-id": self.place}, RecordDict(), {})
            return app([outside, GlueFLMod(folder=self.folder)])(message, context)

    grid_nodes = [Outside(place, tmp_path / f"device-{place}") for place in range(4)]
    server, _, _ = federation(tmp_path, nodes=grid_nodes, rounds=1, timeout=0.3, strategy=strategy)
    # Flower's local DP mod replies to its own reply, so that the server gets none; clipping replies to the server.
    assert set(fates(server, 1).values()) <= {"failed", "unanswered"}
    assert server.session.journal.lines[0]["used"] == 0
    assert torch.equal(server.session.core.first[1][: len(server.session.state.weights)], server.session.state.weights)


@pytest.mark.parametrize("mod", [fixedclipping_mod, adaptiveclipping_mod])
def test_clipping_works_inside_ours(tmp_path, mod) -> None:
    grid_nodes = [Node(place, tmp_path / f"device-{place}", mods=[mod]) for place in range(4)]
    server = GlueFLStrategy(SAMPLER, FedAvg())
    config = ConfigRecord({"clipping_norm": 0.5})
    result = server.start(Grid(grid_nodes), initial_arrays(), num_rounds=1, timeout=5, train_config=config)
    assert server.session.journal.lines[0]["used"] == 4
    moved = weights_of(result.arrays) - weights_of(initial_arrays())
    assert 0 < float(moved.norm()) <= 0.5 + 1e-4


@pytest.mark.parametrize("strategy", [None, Lean()], ids=["gluefl", "lean"])
def test_secure_aggregation_is_refused(tmp_path, strategy) -> None:
    grid_nodes = [Node(place, tmp_path / f"device-{place}", mods=[secaggplus_mod]) for place in range(4)]
    server, _, _ = federation(tmp_path, nodes=grid_nodes, rounds=1, strategy=strategy)
    assert set(fates(server, 1).values()) == {"failed"}
    assert torch.equal(server.session.core.first[1][: len(server.session.state.weights)], server.session.state.weights)


def test_a_client_without_the_mod_is_refused_with_the_reason(tmp_path) -> None:
    class Bare(Node):
        def handle(self, message):
            reply = RecordDict({"arrays": initial_arrays(), "metrics": MetricRecord({"num-examples": 1})})
            return Message(reply, reply_to=message)

    grid_nodes = [Bare(place, tmp_path / f"device-{place}") for place in range(4)]
    server, _, _ = federation(tmp_path, nodes=grid_nodes, rounds=1)
    assert all("gluefl_mod" in i["why"] for i in incidents(server, 1))


def test_a_numpy_client_app_is_refused_with_the_reason(tmp_path) -> None:
    class Legacy(Node):
        def handle(self, message):
            client = ClientApp(lambda context: NumPyClient().to_client(), mods=[GlueFLMod(folder=self.folder)])
            context = Context(1, 100, {"partition-id": self.place}, RecordDict(), {})
            with pytest.raises(UsageError, match="Message API"):
                client(message, context)
            return Message(RecordDict(), reply_to=message)

    grid_nodes = [Legacy(place, tmp_path / f"device-{place}") for place in range(4)]
    federation(tmp_path, nodes=grid_nodes, rounds=1)


def test_messages_of_other_strategies_pass_untouched(tmp_path) -> None:
    node = Node(0, tmp_path)
    message = Message(
        RecordDict({"arrays": initial_arrays(), "config": ConfigRecord({"server-round": 1})}), 100, "train"
    )
    reply = node.handle(message)
    assert list(reply.content) == ["arrays", "metrics"] and not list(tmp_path.iterdir())
