"""What an app or a user of the Flower side may do: losses that are no numbers, other strategies, numpy's integers."""

import math
import time

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord

from flower_nodes import Node, federation, incidents, train
from gluefl import STC, FedAvg
from gluefl.errors import UsageError
from gluefl.flower import exchange, nodes, server, session
from gluefl.flower.arrays import STATISTICS, Table


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    for module in (exchange, nodes):
        monkeypatch.setattr(module, "POLL_S", 0.0)


def reporting(metrics):
    """An app that reports these metrics in a round."""

    def trains(message, context):
        reply = train(message, context)
        reply.content["metrics"] = MetricRecord(metrics(message.content["config"]["server-round"], context))
        return reply

    return trains


def nodes_that(tmp_path, metrics):
    return [Node(place, tmp_path / f"device-{place}", trains=reporting(metrics)) for place in range(4)]


@pytest.mark.parametrize("bad", [1e6, math.inf, math.nan])
def test_a_loss_that_is_no_number_is_that_of_a_model_that_exploded(bad, tmp_path) -> None:
    def metrics(round, context):
        return {"train_loss": 0.5 if round < 5 else bad, "num-examples": 10}

    grid_nodes = nodes_that(tmp_path, metrics)
    strategy, _, _ = federation(tmp_path, nodes=grid_nodes, rounds=7, strategy=FedAvg())
    returned = [one for round in (5, 6, 7) for one in incidents(strategy, round) if one["what"] == "returned"]
    assert len(returned) == 1 and "the model after round 3 is published again" in returned[0]["why"]


def test_an_app_that_reports_no_loss_has_none_in_the_journal(tmp_path) -> None:
    def metrics(round, context):
        first = context.node_config["partition-id"] == 0
        return {"num-examples": 10} | ({"loss": 2.0} if first and round == 2 else {})

    strategy, _, _ = federation(tmp_path, nodes=nodes_that(tmp_path, metrics), rounds=2, strategy=FedAvg())
    assert [line["loss"] for line in strategy.session.journal.lines] == [None, 2.0]
    assert [line["used"] for line in strategy.session.journal.lines] == [4, 4]


def test_a_number_of_examples_that_is_nan_does_not_fail_the_node(tmp_path) -> None:
    def metrics(round, context):
        return {"loss": 1.0, "num-examples": math.nan}

    strategy, _, _ = federation(tmp_path, nodes=nodes_that(tmp_path, metrics), rounds=1, strategy=FedAvg())
    assert "failed" not in strategy.session.journal.lines[0]["clients"]["fate"]


@pytest.mark.parametrize(("of_server", "of_node"), [(STC(q=0.1), STC(q=0.9)), (STC(q=0.1), FedAvg())])
def test_a_node_with_another_strategy_is_refused(of_server, of_node, tmp_path) -> None:
    grid_nodes = [
        Node(place, tmp_path / f"device-{place}", ours={"strategy": of_node if place == 0 else of_server})
        for place in range(4)
    ]
    strategy, _, _ = federation(tmp_path, nodes=grid_nodes, rounds=1, strategy=of_server)
    line = strategy.session.journal.lines[0]
    assert sorted(line["clients"]["fate"]) == ["failed", "used", "used", "used"]
    assert "and the server runs" in line["incidents"][0]["why"]


def test_arguments_are_used_as_they_were_checked(tmp_path) -> None:
    strategy, _, _ = federation(
        tmp_path,
        rounds=2,
        out=tmp_path / "run",
        seed=np.int64(3),
        checkpoints_kept=2.0,
        min_available_nodes=np.int32(4),
    )
    assert (strategy.seed, strategy.checkpoints_kept) == (3, 2) and type(strategy.seed) is int
    with pytest.raises(UsageError, match="seed"):
        federation(tmp_path / "b", rounds=1, seed=-1)


def test_a_resumed_server_waits_for_its_nodes_in_its_round(tmp_path, monkeypatch) -> None:
    strategy, grid_nodes, _ = federation(tmp_path, rounds=2, out=tmp_path / "run")
    monkeypatch.setattr(server, "RETURN_S", 0.01)
    for node in grid_nodes:
        node.online = False

    looks: list[float] = []

    def back_later(seconds):
        if seconds == session.WAIT_S:  # of a round, not of the start
            looks.append(seconds)
            for node in grid_nodes:
                node.online = len(looks) > 3

    monkeypatch.setattr(time, "sleep", back_later)
    strategy, _, _ = federation(tmp_path, rounds=4, out=tmp_path / "run", nodes=grid_nodes)
    assert strategy.session.state.round == 4 and len(looks) == 4


@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
def test_an_app_that_changes_nothing_has_no_update(kind) -> None:
    named = {"a.weight": torch.randn(3, 5).to(kind), "a.bias": torch.randn(5), "a.running_mean": torch.randn(5)}
    table = Table.of(ArrayRecord(named), STATISTICS)
    weights, statistics = torch.randn(table.layout.size), torch.randn(table.layout.statistics_size)
    returned, _ = table.flatten(table.arrays(weights, statistics))
    assert torch.equal(returned, table.rounded(weights))
    assert torch.equal(table.rounded(weights), weights) == (kind != torch.float16)
