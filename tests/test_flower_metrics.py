"""Numbers that apps report: whatever they are, the run goes on and its journal can be read."""

import json
import math

import pytest

pytest.importorskip("flwr")

from flwr.app import Message, MetricRecord, RecordDict

from flower_nodes import Grid, Node, federation, initial_arrays, train
from gluefl import FedAvg, Uniform
from gluefl.flower import GlueFLStrategy, exchange, nodes
from gluefl.flower.metrics import journaled, mean_metrics


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
@pytest.mark.parametrize("places", [{0}, {0, 1, 2, 3}], ids=["one", "all"])
def test_an_evaluation_metric_that_is_not_finite(tmp_path, value, places) -> None:
    def meddle(place, round, reply):
        return with_metrics(reply, total=value) if place in places and "gluefl-body" not in reply.content else reply

    federation(tmp_path, meddle=meddle, fraction_evaluate=1.0, out=tmp_path / "run", rounds=2)
    for line in read(tmp_path / "run" / "evaluations.jsonl"):
        assert (line["metrics"]["total"] is None) == (len(places) == 4)  # the mean is that of the other nodes
        assert [note.split(",")[0] for note in line.get("notes", [])] == ["metrics.total is nan"] * (len(places) == 4)
        why = f"left out of 1 of 1 means: total is {value}"
        assert line["incidents"] == [{"client": place, "what": "metrics", "why": why} for place in sorted(places)]


def test_losses_whose_sum_overflows(tmp_path) -> None:
    def reports(message, context):
        return with_metrics(train(message, context), train_loss=1.7e308)

    grid_nodes = [Node(place, tmp_path / f"device-{place}", trains=reports) for place in range(4)]
    federation(tmp_path, nodes=grid_nodes, out=tmp_path / "run", strategy=FedAvg())
    lines = read(tmp_path / "run" / "journal.jsonl")
    assert [line["loss"] for line in lines] == [None] * 3 and [line["used"] for line in lines] == [4] * 3
    assert any("loss is inf" in note for note in lines[0]["notes"])


REPORTS = [
    {"num-examples": 10, "loss": 1.0, "by_class": [1.0, 0.0], "only": 7},
    {"num-examples": 30, "loss": 2.0, "by_class": [0.0, 1.0]},
    {"loss": 100.0},
    {"num-examples": [1, 2], "loss": 100.0},
    {"num-examples": math.inf, "loss": 100.0},
    {"num-examples": 10, "loss": math.nan, "by_class": [1.0, 1.0, 1.0], "none": math.inf},
]


def means_of(*reports: dict) -> tuple[MetricRecord | None, dict]:
    """The means, and the incidents by client."""
    received = exchange.Exchange(1, (), None, {}, {}, None, {}, None)
    for client, numbers in enumerate(reports):
        content = RecordDict({"metrics": MetricRecord(numbers)} if numbers else {})
        received.replies[client] = Message(content, 100 + client, "train")
    means = mean_metrics(received, "num-examples")
    assert all(incident["what"] == "metrics" for incident in received.incidents)
    return means, {incident["client"]: incident["why"] for incident in received.incidents}


def test_every_metric_is_the_mean_over_the_nodes_that_report_it() -> None:
    means, incidents = means_of(*REPORTS)
    assert math.isnan(means.pop("none"))
    assert means == {"loss": 1.75, "by_class": [0.25, 0.75], "only": 7}
    assert incidents == {
        0: "left out of 1 of 4 means: none is missing",
        1: "left out of 2 of 4 means: only is missing, none is missing",
        2: "left out of 4 of 4 means: num-examples is missing",
        3: "left out of 4 of 4 means: num-examples is [1, 2]",
        4: "left out of 4 of 4 means: num-examples is inf",
        5: "left out of 4 of 4 means: loss is nan, by_class is [1.0, 1.0, 1.0], only is missing, none is inf",
    }


def test_means_need_metrics_and_a_weight() -> None:
    assert means_of() == means_of({}, {}) == (None, {})
    assert means_of({"num-examples": 3}, {}) == ({}, {})
    means, incidents = means_of({"loss": 1.0}, {"loss": 2.0, "num-examples": 0})
    assert means is None and list(incidents) == [None] and "num-examples" in incidents[None]
    many = {f"m{number}": 1.0 for number in range(50)}  # of one node: the others are not named 50 times
    _, incidents = means_of({"num-examples": 1, **many}, {"num-examples": 1})
    assert incidents[1].endswith("m4 is missing and 45 more")


def test_weights_whose_sum_overflows() -> None:
    means, incidents = means_of(*[{"num-examples": 1.7e308, "loss": 3.0}] * 4)
    assert means == {"loss": 3.0} and not incidents


def test_a_node_that_is_left_out_of_a_mean_is_in_the_journal(tmp_path) -> None:
    def meddle(place, round, reply):
        if place == 0:
            reply.content["metrics"] = MetricRecord({"num-examples": [10], "train_loss": 0.5})
        return reply

    _, _, result = federation(tmp_path, meddle=meddle, out=tmp_path / "run", guard=None, rounds=1)
    assert dict(result.train_metrics_clientapp[1]) == {"train_loss": 0.5}
    why = "left out of 1 of 1 means: num-examples is [10]"
    assert read(tmp_path / "run" / "journal.jsonl")[0]["incidents"] == [{"client": 0, "what": "metrics", "why": why}]


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
