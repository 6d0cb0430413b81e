"""Rounds on Flower in which nothing goes wrong but nodes come and go, and servers are started again."""

import shutil

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ConfigRecord

from flower_nodes import (
    SAMPLER,
    Grid,
    Node,
    check_replicas,
    fates,
    federation,
    incidents,
    initial_arrays,
    train,
    weights_of,
)
from gluefl import APF, STC, FedAvg, GlueFL, Uniform, wire
from gluefl.errors import GlueFLError, UsageError
from gluefl.flower import GlueFLStrategy, Sticky, TrimmedMean, exchange, nodes, session
from gluefl.flower.arrays import Table
from stubs import mlp


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch) -> None:
    monkeypatch.setattr(exchange, "POLL_S", 0.0)
    monkeypatch.setattr(nodes, "POLL_S", 0.0)


@pytest.mark.parametrize("strategy", [GlueFL(regenerate_every=3), FedAvg(), STC(), APF(check_every=2)], ids=repr)
@pytest.mark.parametrize("sampler", [Sticky(3, 5, 2), Uniform(3, over_commitment=1.34)], ids=["sticky", "uniform"])
def test_replicas_are_the_servers_model_bit_for_bit(tmp_path, strategy, sampler) -> None:
    server, grid_nodes, result = federation(tmp_path, 9, 8, sampler, strategy, fraction_evaluate=0.2)
    assert len(check_replicas(server, grid_nodes)) >= 8
    lines = server.session.journal.lines
    assert [line["used"] for line in lines] == [3] * 8
    assert not any(line["incidents"] for line in lines)
    assert torch.equal(weights_of(result.arrays), server.session.state.weights)
    assert len(result.evaluate_metrics_clientapp) == 8


@pytest.mark.parametrize(
    "wrong",
    [
        {"checkpoints_kept": 0},
        {"fraction_evaluate": "a"},
        {"seed": "x"},
        {"averaging": 0.9},
        {"initial": "foo"},
        {"out": 3},
        {"guard": 1.0},
        {"server": "adam"},
        {"strategy": FedAvg},
        {"sampler": 3},
        {"hooks": TrimmedMean()},
        {"hooks": [object()]},
        {"hooks": [TrimmedMean]},
        {"statistics": 5},
        {"statistics": "*running_mean"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_arguments_that_cannot_be_used_are_refused(wrong) -> None:
    with pytest.raises(UsageError, match=rf"GlueFLStrategy cannot be used:\n  {next(iter(wrong))}(\.0)?: .* found "):
        GlueFLStrategy(**{"sampler": Uniform(2), **wrong})


def test_hooks_and_statistics_may_be_any_iterable() -> None:
    hook, names = TrimmedMean(), ("a", "b")
    server = GlueFLStrategy(Uniform(2), FedAvg(), hooks=(one for one in [hook]), statistics=(name for name in names))
    assert server.hooks == (hook,) and server.statistics == names


def test_the_fastest_nodes_are_not_known(tmp_path) -> None:
    with pytest.raises(UsageError, match="initial = 'fastest' needs the speeds"):
        federation(tmp_path, count=8, sampler=Sticky(3, 5, 2, initial="fastest"), out=tmp_path / "run")
    assert not any((tmp_path / "run").glob("*.jsonl")) and not any(tmp_path.glob("device-*"))


def test_bytes_are_those_of_the_messages(tmp_path) -> None:
    server, _, _ = federation(tmp_path, rounds=2, count=6)
    line = server.session.journal.lines[0]
    table = server.session.table
    whole = wire.HEADER_BYTES + 4 * 16 + 4 * (table.layout.size + table.layout.statistics_size)
    sent = [size - whole for size in line["clients"]["down_bytes"]]
    assert all(len(table.to_json()) < extra < len(table.to_json()) + 400 for extra in sent)


def test_first_k_of_those_invited_are_used(tmp_path) -> None:
    grid_nodes = [Node(place, tmp_path / f"device-{place}") for place in range(6)]
    for node in grid_nodes:
        node.delay = lambda round, place=node.place: place
    server, _, _ = federation(tmp_path, nodes=grid_nodes, sampler=Uniform(3, over_commitment=2.0))
    assert server.session.journal.lines[0]["invited"] == 6
    assert [c for c, fate in fates(server, 1).items() if fate == "used"] == [c for c in fates(server, 1) if c < 3]


def test_the_app_sees_an_ordinary_message(tmp_path) -> None:
    seen = []

    def looks(message, context):
        seen.append((list(message.content), list(message.content["arrays"]), dict(message.content["config"])))
        return train(message, context)

    grid_nodes = [Node(place, tmp_path / f"device-{place}", trains=looks) for place in range(4)]
    federation(tmp_path, nodes=grid_nodes, rounds=1)
    assert seen[0] == (["arrays", "config"], list(initial_arrays()), {"server-round": 1})


def test_a_server_that_is_killed_goes_on(tmp_path) -> None:
    grid_nodes = [Node(place, tmp_path / f"device-{place}") for place in range(8)]
    sampler = Sticky(3, 5, 2)
    federation(tmp_path, nodes=grid_nodes, sampler=sampler, rounds=3, out=tmp_path / "run")
    server, _, result = federation(tmp_path, nodes=grid_nodes, sampler=sampler, rounds=7, out=tmp_path / "run")
    assert [line["round"] for line in server.session.journal.lines] == list(range(1, 8))
    assert not any(line["incidents"] for line in server.session.journal.lines)
    _, _, whole = federation(tmp_path / "b", count=8, sampler=sampler, rounds=7)
    assert torch.equal(weights_of(result.arrays), weights_of(whole.arrays))
    check_replicas(server, grid_nodes)
    with pytest.raises(UsageError, match="other settings"):
        federation(tmp_path, nodes=grid_nodes, sampler=sampler, rounds=8, out=tmp_path / "run", seed=6)


def test_a_node_is_known_by_its_key_when_the_superlink_has_forgotten_its_id(tmp_path) -> None:
    grid_nodes = [Node(place, tmp_path / f"device-{place}") for place in range(4)]
    federation(tmp_path, nodes=grid_nodes, rounds=2, out=tmp_path / "run")
    server, _, _ = federation(tmp_path, nodes=grid_nodes, rounds=4, out=tmp_path / "run", first_id=700)
    third = server.session.journal.lines[2]
    assert third["nodes"] == 4 and third["cold"] == 0 and not third["incidents"]
    check_replicas(server, grid_nodes)


def test_what_was_written_after_the_checkpoint_does_not_count(tmp_path) -> None:
    # Killed between federation.json and state.json: round 3 is played again, its uploads were never used.
    grid_nodes = [Node(place, tmp_path / f"device-{place}") for place in range(4)]
    federation(tmp_path, nodes=grid_nodes, rounds=2, out=tmp_path / "run")
    shutil.copytree(tmp_path / "run" / "checkpoint", tmp_path / "old")
    federation(tmp_path, nodes=grid_nodes, rounds=3, out=tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    shutil.copytree(tmp_path / "old", tmp_path / "run" / "checkpoint")
    server, _, result = federation(tmp_path, nodes=grid_nodes, rounds=5, out=tmp_path / "run")
    _, _, whole = federation(tmp_path / "b", rounds=5)
    assert torch.equal(weights_of(result.arrays), weights_of(whole.arrays))
    assert len(server.session.journal.lines) == 5
    check_replicas(server, grid_nodes)


def test_a_node_that_joins_is_counted_and_may_be_drawn(tmp_path) -> None:
    grid_nodes = [Node(place, tmp_path / f"device-{place}", online=place < 4) for place in range(6)]

    def meddle(place, round, reply):
        if round == 2:
            grid_nodes[4].online = grid_nodes[5].online = True
            grid_nodes[0].online = False
        return reply

    server, _, _ = federation(tmp_path, nodes=grid_nodes, meddle=meddle, sampler=Uniform(3), rounds=6)
    assert [line["nodes"] for line in server.session.journal.lines] == [4, 4, 6, 6, 6, 6]
    assert incidents(server, 3)[0]["what"] == "joined"
    later = {c for round in (3, 4, 5, 6) for c in fates(server, round)}
    assert later & {4, 5} and 0 not in later


class Outage(Grid):
    """The nodes of round 1 leave; after some polls others are connected."""

    def __init__(self, nodes: list[Node], polls: int) -> None:
        super().__init__(nodes)
        self.absent = polls

    def get_nodes(self):
        if not any(message.metadata.group_id == "1" for message in self.pushed):
            return super().get_nodes()
        self.absent -= 1
        for node in self.nodes:
            node.online = self.absent < 0 and node.place >= 4
        return super().get_nodes()


def outage(tmp_path, polls: int) -> GlueFLStrategy:
    server = GlueFLStrategy(SAMPLER)
    grid_nodes = [Node(place, tmp_path / f"device-{place}", online=place < 4) for place in range(6)]
    server.start(Outage(grid_nodes, polls), initial_arrays(), num_rounds=2, timeout=5)
    return server


def test_a_round_waits_while_no_node_is_connected(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(session, "WAIT_S", 0.001)
    server = outage(tmp_path, polls=3)
    line = server.session.journal.lines[1]
    assert line["waited_s"] == pytest.approx(0.003) and any("waited" in note for note in line["notes"])
    assert set(fates(server, 2)) == {4, 5} and incidents(server, 2)[0]["what"] == "joined"


def test_a_round_without_any_node_ends_the_run_with_the_reason(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(session, "WAIT_S", 0.0)
    monkeypatch.setattr(session, "MOST_WAITS", 5)
    with pytest.raises(GlueFLError, match=r"round 2: no node was connected"):
        outage(tmp_path, polls=100)


def test_configure_train_needs_a_session() -> None:
    with pytest.raises(GlueFLError, match="start"):
        GlueFLStrategy(SAMPLER).configure_train(1, initial_arrays(), ConfigRecord(), None)


def test_too_few_nodes_say_what_is_missing(tmp_path) -> None:
    with pytest.raises(UsageError, match="cannot be invited"):
        federation(tmp_path, count=2, wait_for_nodes_s=0.0)


def test_statistics_are_told_from_weights_by_name_or_by_the_module() -> None:
    by_name, by_module = Table.of(initial_arrays()), Table.of(initial_arrays(), mlp(norm=True))
    assert by_name == by_module
    assert [part.name for part in by_name.layout.statistics] == [
        "1.running_mean", "1.running_var", "1.num_batches_tracked",
    ]  # fmt: skip
    assert Table.from_json(by_name.to_json()) == by_name
    weights, statistics = by_name.flatten(initial_arrays())
    again = by_name.arrays(weights, statistics)
    assert list(again) == list(initial_arrays())
    for name, array in initial_arrays().items():
        assert np.array_equal(again[name].numpy(), array.numpy()) and again[name].dtype == array.dtype
