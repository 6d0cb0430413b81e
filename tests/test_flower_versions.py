"""Nodes and a server of two versions of gluefl in one federation."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from flower_nodes import Node, fates, federation, incidents, weights_of
from gluefl import __version__
from gluefl.flower import exchange, messages, nodes


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch) -> None:
    monkeypatch.setattr(exchange, "POLL_S", 0.0)
    monkeypatch.setattr(nodes, "POLL_S", 0.0)


@dataclass
class Retold(Node):
    """A node that finds other things in its tasks than were sent."""

    task: dict[str, Any] | None = None  # replaces fields of the text
    format: object = 1

    def handle(self, message):
        ours = message.content.config_records[messages.OURS]
        ours["task"] = json.dumps(json.loads(ours["task"]) | (self.task or {}))
        del ours["format"]
        if self.format is not None:
            ours["format"] = self.format
        return super().handle(message)


def test_a_node_refuses_tasks_of_another_format_and_says_which(tmp_path) -> None:
    grid_nodes = [Node(place, tmp_path / f"device-{place}") for place in range(3)]
    grid_nodes.append(Retold(3, tmp_path / "device-3", format=2))
    server, _, result = federation(tmp_path, nodes=grid_nodes)
    assert fates(server, 1)[3] == "failed" and [i["client"] for i in incidents(server, 1)] == [3]
    why = incidents(server, 1)[0]["why"]
    assert "the server writes messages of format 2" in why and f"(gluefl {__version__}) reads format 1" in why
    assert not (tmp_path / "device-3").exists()
    assert len(result.arrays) and server.session.journal.lines[2]["used"] == 3


@pytest.mark.parametrize("format_", [2, "1 and more", [1, 2]])
def test_a_server_refuses_replies_of_another_format_and_says_which(tmp_path, format_) -> None:
    def meddle(place, round, reply):
        if place == 1:
            reply.content.config_records[messages.OURS]["format"] = format_
        return reply

    server, _, _ = federation(tmp_path, meddle=meddle, rounds=1)
    assert fates(server, 1)[1] == "refused"
    (incident,) = incidents(server, 1)
    assert f"the node writes messages of format {format_!r}" in incident["why"]
    assert f"this server (gluefl {__version__}) reads format 1" in incident["why"]


def test_what_was_written_before_formats_had_a_number_has_the_first(tmp_path) -> None:
    def meddle(place, round, reply):
        del reply.content.config_records[messages.OURS]["format"]
        return reply

    grid_nodes = [Retold(place, tmp_path / f"device-{place}", format=None) for place in range(4)]
    server, _, result = federation(tmp_path, nodes=grid_nodes, meddle=meddle)
    _, _, expected = federation(tmp_path / "b")
    assert not any(line["incidents"] for line in server.session.journal.lines)
    assert torch.equal(weights_of(result.arrays), weights_of(expected.arrays))


@pytest.mark.parametrize(
    ("strategy", "unknown"),
    [({"name": "gluefl", "momentum_of_next_year": 3}, "momentum_of_next_year"), ({"name": "next_year"}, "next_year")],
)
def test_a_strategy_or_parameter_that_a_node_does_not_know_is_named(tmp_path, strategy, unknown) -> None:
    grid_nodes = [Node(place, tmp_path / f"device-{place}") for place in range(3)]
    grid_nodes.append(Retold(3, tmp_path / "device-3", task={"strategy": strategy}))
    server, _, _ = federation(tmp_path, nodes=grid_nodes, rounds=1)
    why = incidents(server, 1)[0]["why"]
    assert unknown in why and f"gluefl {__version__}" in why and "same version" in why
