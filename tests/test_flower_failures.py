"""What a node can do wrong on Flower, without a network: the round goes on, and nothing bad enters the model."""

import copy
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from safetensors.torch import load_file

from flower_nodes import Node, check_replicas, fates, federation, incidents, initial_arrays, train, weights_of
from gluefl import FedAvg, Server, Uniform, wire
from gluefl.flower import exchange, messages, nodes
from gluefl.flower.arrays import Table
from gluefl.vectors.mask import Mask


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch) -> None:
    monkeypatch.setattr(exchange, "POLL_S", 0.0)
    monkeypatch.setattr(nodes, "POLL_S", 0.0)


def changed(reply: Message, change) -> Message:
    """A reply whose upload bytes were changed."""
    data = messages.read_array(reply.content, messages.UPLOAD, None)
    reply.content[messages.BODY] = ArrayRecord({messages.UPLOAD: messages.to_array(change(data))})
    return reply


def corrupt(data: bytes) -> bytes:
    return data[:200] + bytes([data[200] ^ 1]) + data[201:]


def with_nan(data: bytes) -> bytes:
    return _rebuilt(data, lambda body: replace(body, update=body.update.with_values(body.update.values * torch.nan)))


def with_infinite_statistics(data: bytes) -> bytes:
    return _rebuilt(data, lambda body: replace(body, statistics=body.statistics + torch.inf))


def with_older_round(data: bytes) -> bytes:
    return _rebuilt(data, lambda body: body, round=1)


def with_another_base(data: bytes) -> bytes:
    return _rebuilt(data, lambda body: body, base=0, version=0)


def with_another_size(data: bytes) -> bytes:
    header = wire.Header(wire.UPLOAD, data[8:16], data[16:24], 2, 1, 1)
    return wire.encode(header, data[wire.HEADER_BYTES :], 10, 3)


def _rebuilt(data: bytes, change, **header_changes) -> bytes:
    layout = Table.of(initial_arrays()).layout
    shared = wire.Shared(Mask(torch.ones(layout.size, dtype=torch.bool)))
    expected = wire.Expected(data[8:16], layout.fingerprint, layout.size, layout.statistics_size, wire.UPLOAD, shared)
    header, body = wire.decode(data, expected)
    header, encoded = replace(header, **header_changes), wire.encode_body(change(body))
    return wire.encode(header, encoded, layout.size, layout.statistics_size)


@pytest.mark.parametrize(
    "change",
    [
        corrupt,
        with_nan,
        with_infinite_statistics,
        with_older_round,
        with_another_base,
        with_another_size,
        lambda data: data[:100],
        lambda data: b"",
        lambda data: bytes(10**6),
    ],
)
def test_a_bad_upload_is_refused_and_the_others_are_used(tmp_path, change) -> None:
    def meddle(place, round, reply):
        return changed(reply, change) if (place, round) == (2, 2) else reply

    def silent(place, round, reply):
        return None if (place, round) == (2, 2) else reply

    server, grid_nodes, result = federation(tmp_path, strategy=FedAvg(), meddle=meddle)
    assert fates(server, 2)[2] == "refused"
    assert [(i["client"], i["what"]) for i in incidents(server, 2)] == [(2, "refused")]
    assert server.session.journal.lines[1]["used"] == 3
    assert fates(server, 3)[2] == "used"
    check_replicas(server, grid_nodes)
    # The model is the one that would have come out had the node said nothing.
    other, _, expected = federation(tmp_path / "b", strategy=FedAvg(), meddle=silent, timeout=0.3)
    assert fates(other, 2)[2] == "unanswered"
    assert torch.equal(weights_of(result.arrays), weights_of(expected.arrays))


@pytest.mark.parametrize(
    "answer",
    [
        '{"round":2,"version":1,"hash":"0000000000000000"}',  # the right version, another model
        '{"round":2,"version":7,"hash":"0000000000000000"}',
        '{"round":2,"version":"1","hash":"0000000000000000"}',
        '{"round":2}',
        "not json",
        "[]",
    ],
)
def test_a_node_that_lies_about_its_version_gets_the_whole_model(tmp_path, answer) -> None:
    def meddle(place, round, reply):
        if (place, round) == (1, 2):
            reply.content[messages.OURS] = ConfigRecord({"answer": answer})
        return reply

    server, grid_nodes, _ = federation(tmp_path, meddle=meddle)
    assert fates(server, 2)[1] == "refused"
    third = server.session.journal.lines[2]["clients"]
    assert third["staleness"][third["id"].index(1)] is None
    assert fates(server, 3)[1] == "used"
    check_replicas(server, grid_nodes)


def test_a_reply_for_an_older_round_is_late_and_tells_what_the_node_holds(tmp_path) -> None:
    grid_nodes = [Node(place, tmp_path / str(place)) for place in range(4)]
    grid_nodes[3].delay = lambda round: 3 if round == 1 else 0  # its answer comes in a later round
    server, _, _ = federation(tmp_path, nodes=grid_nodes, sampler=Uniform(3, over_commitment=1.34), rounds=4)
    assert fates(server, 1)[3] == "unanswered"
    noted = [i for line in server.session.journal.lines for i in line["incidents"]]
    assert {"client": 3, "what": "late", "why": "of round 1"} in noted
    assert 3 in server.session.state.ledger.held
    check_replicas(server, grid_nodes)


def test_a_duplicate_is_counted_once(tmp_path) -> None:
    def meddle(place, round, reply):
        if (place, round) != (0, 2):
            return reply
        reply.metadata.__dict__["_twice"] = True
        return [reply, reply]

    server, grid_nodes, result = federation(tmp_path, meddle=meddle)
    _, _, expected = federation(tmp_path / "b")
    assert torch.equal(weights_of(result.arrays), weights_of(expected.arrays))
    assert [i["what"] for i in incidents(server, 2)] == ["refused"]
    check_replicas(server, grid_nodes)


@pytest.mark.parametrize("loss", ["disk", "replica", "damaged", "older"])
def test_a_node_without_its_disk_is_sent_the_whole_model_in_the_same_round(tmp_path, loss) -> None:
    saved = tmp_path / "saved"

    def meddle(place, round, reply):
        if place != 0:
            return reply
        node = grid_nodes[0]
        if round == 1 and loss == "older":
            shutil.copytree(node.folder, saved)
        if round == 3:
            if loss in ("disk", "older"):
                shutil.rmtree(node.folder)
                if loss == "older":
                    shutil.copytree(saved, node.folder)
            elif loss == "replica":
                (node.store().folder / "replica.safetensors").unlink()
            else:
                path = node.store().folder / "replica.safetensors"
                data = bytearray(path.read_bytes())
                data[-3] ^= 1
                path.write_bytes(bytes(data))
        return reply

    grid_nodes = [Node(place, tmp_path / f"device-{place}") for place in range(4)]
    server, _, _ = federation(tmp_path, nodes=grid_nodes, meddle=meddle, rounds=5)
    assert [i["what"] for i in incidents(server, 4)] == ["needs model"]
    assert fates(server, 4)[0] == "used"
    clients = server.session.journal.lines[3]["clients"]
    assert clients["down_bytes"][clients["id"].index(0)] > max(
        size for i, size in zip(clients["id"], clients["down_bytes"]) if i
    )
    assert check_replicas(server, grid_nodes) == [4, 4, 4, 4]


def test_a_node_whose_reply_was_lost_builds_on_what_it_holds(tmp_path) -> None:
    # The server believes it holds version 0, it holds 1: the package from 0 serves both, no whole model is sent.
    def meddle(place, round, reply):
        return None if (place, round) == (0, 2) else reply

    server, grid_nodes, _ = federation(tmp_path, meddle=meddle, timeout=0.3)
    assert fates(server, 2)[0] == "unanswered"
    assert fates(server, 3)[0] == "used"
    assert not incidents(server, 3)
    assert check_replicas(server, grid_nodes) == [2, 2, 2, 2]


def residual_of(node: Node, name: str):
    path = node.store().folder / f"{name}.safetensors"
    return load_file(path)["residual"] if path.exists() else None


def test_a_residual_counts_only_when_the_upload_was_used(tmp_path) -> None:
    grid_nodes = [Node(place, tmp_path / f"device-{place}") for place in range(4)]
    seen = {}

    def meddle(place, round, reply):
        if place == 0:
            seen[round] = residual_of(grid_nodes[0], "residual"), residual_of(grid_nodes[0], "pending")
        return None if (place, round) == (0, 2) else reply

    federation(tmp_path, nodes=grid_nodes, meddle=meddle, rounds=4, timeout=0.3)
    assert seen[1][0] is None and seen[1][1] is not None
    assert torch.equal(seen[2][0], seen[1][1])  # round 1 was used: committed when round 2 said so
    assert torch.equal(seen[3][0], seen[1][1])  # round 2 was lost: its residual was dropped
    assert torch.equal(seen[4][0], seen[3][1])


def test_training_that_fails_or_diverges_leaves_the_round_to_the_others(tmp_path) -> None:
    def diverges(message, context):
        reply = train(message, context)
        if message.content["config"]["server-round"] == 2:
            arrays = reply.content["arrays"].to_torch_state_dict()
            reply.content["arrays"] = ArrayRecord(
                {n: t * torch.nan if t.is_floating_point() else t for n, t in arrays.items()}
            )
        return reply

    def shape(message, context):
        reply = train(message, context)
        reply.content["arrays"]["0.weight"] = Array(np.zeros((3, 3), np.float32))
        return reply

    def raises(message, context):
        raise RuntimeError("out of memory")

    grid_nodes = [Node(place, tmp_path / f"device-{place}") for place in range(5)]
    grid_nodes[0].trains, grid_nodes[1].trains, grid_nodes[2].trains = diverges, shape, raises
    server, _, _ = federation(tmp_path, nodes=grid_nodes, sampler=Uniform(5))
    assert fates(server, 2) | {3: "", 4: ""} == {0: "failed", 1: "failed", 2: "failed", 3: "", 4: ""}
    reasons = {i["client"]: i["why"] for i in incidents(server, 2)}
    assert "not finite" in reasons[0] and "0.weight" in reasons[1] and "out of memory" in reasons[2]
    assert server.session.journal.lines[1]["used"] == 2
    check_replicas(server, grid_nodes)


def test_a_sum_that_overflows_changes_nothing(tmp_path) -> None:
    def huge(message, context):
        reply = train(message, context)
        if message.content["config"]["server-round"] == 2:
            arrays = reply.content["arrays"].to_torch_state_dict()
            arrays["0.weight"] = torch.full_like(arrays["0.weight"], 3e38)
            reply.content["arrays"] = ArrayRecord(arrays)
        return reply

    grid_nodes = [Node(place, tmp_path / f"device-{place}", trains=huge) for place in range(4)]
    equal = Uniform(4, weights="unbiased")
    server, _, _ = federation(
        tmp_path, nodes=grid_nodes, sampler=equal, strategy=FedAvg(), server=Server(lr=4.0), guard=None
    )
    lines = server.session.journal.lines
    assert [line["used"] for line in lines] == [4, 0, 4]
    assert set(fates(server, 2).values()) == {"refused"} and "not finite" in incidents(server, 2)[0]["why"]
    check_replicas(server, grid_nodes)


def test_too_much_beside_the_upload_is_refused(tmp_path) -> None:
    def meddle(place, round, reply):
        if (place, round) == (1, 1):
            reply.content["metrics"] = MetricRecord({"num-examples": 1, "x": [0.0] * 200_000})
        return reply

    server, _, _ = federation(tmp_path, meddle=meddle, rounds=1)
    assert fates(server, 1)[1] == "refused"


def test_empty_texts_and_lists_beside_the_upload_are_no_reason_to_refuse_it(tmp_path) -> None:
    def meddle(place, round, reply):
        reply.content["notes"] = ConfigRecord({"text": "", "bytes": b"", "none": [], "names": ["a", ""]})
        reply.content["metrics"] = MetricRecord({"num-examples": 1, "none": []})
        return reply

    server, _, _ = federation(tmp_path, meddle=meddle, rounds=1)
    assert set(fates(server, 1).values()) == {"used"}


def test_a_task_that_is_delivered_twice_leaves_the_residual_of_the_upload_that_was_used(tmp_path) -> None:
    grid_nodes = [Node(place, tmp_path / f"device-{place}") for place in range(4)]
    lost_replies, seen = [], {}

    def noisy(message, context):
        reply = train(message, context)
        arrays = reply.content["arrays"].to_torch_state_dict()
        arrays["0.weight"] = arrays["0.weight"] + len(seen)  # training is not the same the second time
        reply.content["arrays"] = ArrayRecord(arrays)
        return reply

    class Twice(Node):
        def handle(self, message):
            again = copy.deepcopy(message)
            reply = super().handle(message)
            if message.metadata.group_id == "1":
                seen["left by the first"] = residual_of(self, "pending")
                lost_replies.append(super().handle(again))
            return reply

    grid_nodes[0] = Twice(0, tmp_path / "device-0", trains=noisy)
    federation(tmp_path, nodes=grid_nodes, rounds=2)
    # The server used the first upload; the node kept only what the second left over, which is not that.
    assert lost_replies and residual_of(grid_nodes[0], "residual") is None
