"""Numbers that apps report: whatever they are, the run goes on and its journal can be read."""

import json
import math

import pytest

pytest.importorskip("flwr")

from flwr.app import Message, MetricRecord

from flower_nodes import Grid, Node, federation, initial_arrays, train
from gluefl import FedAvg, Uniform
from gluefl.flower import GlueFLStrategy, exchange, nodes
from gluefl.flower.metrics import journaled


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch) -> None:
    monkeypatch.setattr(exchange, "POLL_S", 0.0)
    monkeypatch.setattr(nodes, "POLL_S", 0.0)


def read(path) -> list[dict]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def with_metrics(reply: Message, **metrics: float) -> Message:
    reply.content["metrics"] = MetricRecord({"num-examples": 10, **metrics})
    return reply


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_evaluation_metric_that_is_not_finite(tmp_path, value) -> None:
    def meddle(place, round, reply):
        return with_metrics(reply, total=value) if place == 0 and "gluefl-body" not in reply.content else reply

    federation(tmp_path, meddle=meddle, fraction_evaluate=1.0, out=tmp_path / "run", rounds=2)
    lines = read(tmp_path / "run" / "evaluations.jsonl")
    assert [line["metrics"]["total"] for line in lines] == [None, None]
    assert "metrics.total is" in lines[0]["notes"][0] and str(value) in lines[0]["notes"][0]


def test_losses_whose_sum_overflows(tmp_path) -> None:
    def reports(message, context):
        return with_metrics(train(message, context), train_loss=1.7e308)

    grid_nodes = [Node(place, tmp_path / f"device-{place}", trains=reports) for place in range(4)]
    federation(tmp_path, nodes=grid_nodes, out=tmp_path / "run", strategy=FedAvg())
    lines = read(tmp_path / "run" / "journal.jsonl")
    assert [line["loss"] for line in lines] == [None] * 3 and [line["used"] for line in lines] == [4] * 3
    assert any("loss is inf" in note for note in lines[0]["notes"])


@pytest.mark.parametrize("name", ["accuracy", "loss"])
def test_an_evaluation_on_the_server_that_is_not_finite(tmp_path, name) -> None:
    server = GlueFLStrategy(Uniform(2), FedAvg(), out=tmp_path / "run", seed=1)
    grid = Grid([Node(place, tmp_path / f"device-{place}") for place in range(2)])
    result = server.start(
        grid, initial_arrays(), num_rounds=2, evaluate_fn=lambda round, arrays: MetricRecord({name: math.nan})
    )
    assert [line["accuracy"] for line in read(tmp_path / "run" / "journal.jsonl")] == [None, None]
    assert len(result.evaluate_metrics_serverapp) == 3


def test_only_what_is_not_finite_is_replaced() -> None:
    line = {"round": 1, "a": [1.5, math.nan, {"b": -math.inf}], "notes": ["x"], "c": None, "d": "nan", "e": True}
    cleaned = journaled(line)
    assert cleaned | {"notes": 0} == line | {"a": [1.5, None, {"b": None}], "notes": 0}
    assert [note.split(",")[0] for note in cleaned["notes"]] == ["x", "a[1] is nan", "a[2].b is -inf"]
    assert journaled({"round": 1}) == {"round": 1}
