"""Five nodes, one of them hostile in turn: what it sends is refused and named, and the model is that of the others."""

import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import zstandard

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord

from flower_nodes import Node, check_replicas, fates, federation, incidents, initial_arrays, train, weights_of
from gluefl import FedAvg, GlueFL, Lean, Uniform, wire
from gluefl.flower import Guard, Median, TrimmedMean, exchange, messages, nodes
from gluefl.flower.arrays import Table
from gluefl.vectors.mask import Mask
from gluefl.wire import positions
from gluefl.wire.messages import SECTION

STRATEGIES = {"fedavg": FedAvg(), "gluefl": GlueFL(regenerate_every=3), "lean": Lean()}
HOSTILE, ROUNDS, ATTACKED = 2, 3, (1, 3)
LAYOUT = Table.of(initial_arrays()).layout


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch) -> None:
    monkeypatch.setattr(exchange, "POLL_S", 0.0)
    monkeypatch.setattr(nodes, "POLL_S", 0.0)


def run(tmp_path, name: str, attack: "Attack", **parts: Any):
    """A federation in which one node attacks in some rounds."""
    grid_nodes = [Node(place, tmp_path / f"device-{place}", ours={"initial": initial_arrays}) for place in range(5)]
    grid_nodes[HOSTILE].trains = attack.trains
    grid_nodes[HOSTILE].meddle = attack.meddle
    parts = {"sampler": Uniform(5), "strategy": STRATEGIES[name], "rounds": ROUNDS, **parts}
    return federation(tmp_path, nodes=grid_nodes, **parts)


class Attack:
    """An honest node; others override what the app returns, or what is sent."""

    def trains(self, message, context):
        reply = train(message, context)
        return self.trained(reply) if message.content["config"]["server-round"] in ATTACKED else reply

    def meddle(self, round: int, reply: Message) -> Any:
        return self.sent(reply) if round in ATTACKED else reply

    def trained(self, reply: Message) -> Message:
        return reply

    def sent(self, reply: Message) -> Any:
        return reply


class Fails(Attack):
    """The reference: a node that is lost."""

    def meddle(self, round: int, reply: Message) -> Any:
        return self.lost(reply) if round in ATTACKED else reply

    def lost(self, reply: Message) -> Message:
        error = Message(Error(code=2, reason="lost"), reply_to=reply)
        error.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
        return error


class Trains(Attack):
    """The app of the hostile node returns other arrays, by name."""

    def __init__(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        self.change = change

    def trained(self, reply: Message) -> Message:
        arrays = reply.content["arrays"].to_torch_state_dict()
        reply.content["arrays"] = ArrayRecord({name: self.change(name, array) for name, array in arrays.items()})
        return reply


class Counts(Attack):
    """The app reports a number of examples."""

    def __init__(self, count: Any) -> None:
        self.count = count

    def sent(self, reply: Message) -> Message:
        reply.content["metrics"] = MetricRecord({"train_loss": 1e6, "num-examples": self.count})
        return reply


class Bytes(Attack):
    """The upload of the hostile node is changed on its way."""

    def __init__(self, change: Callable[[bytes], bytes]) -> None:
        self.change = change

    def sent(self, reply: Message) -> Message:
        data = messages.read_array(reply.content, messages.UPLOAD, None)
        reply.content[messages.BODY] = ArrayRecord({messages.UPLOAD: messages.to_array(self.change(data))})
        return reply


class Replays(Attack):
    """The upload of the round before is sent again."""

    last: Any = None

    def meddle(self, round: int, reply: Message) -> Any:
        before, self.last = self.last, reply.content[messages.BODY]
        if round in ATTACKED and before is not None:
            reply.content[messages.BODY] = before
        return Fails().meddle(round, reply) if round in ATTACKED and before is None else reply


class Announces(Attack):
    """An array that announces two gigabytes."""

    def sent(self, reply: Message) -> Message:
        array = reply.content[messages.BODY][messages.UPLOAD]
        text = array.data[10:128].replace(f"({array.shape[0]},)".encode(), b"(2147483648,)").rstrip().ljust(117) + b"\n"
        assert b"2147483648" in text
        announced = Array(array.dtype, array.shape, array.stype, array.data[:10] + text + array.data[128:])
        reply.content[messages.BODY] = ArrayRecord({messages.UPLOAD: announced})
        return reply


def everywhere(value: float) -> Callable[[str, torch.Tensor], torch.Tensor]:
    return lambda name, array: torch.full_like(array, value) if "weight" in name else array


def rebuilt(change: Callable[[wire.Body], wire.Body], **fields: Any) -> Callable[[bytes], bytes]:
    """An upload of format 1 with another body or header and right checksums."""

    def changed(data: bytes) -> bytes:
        shared = wire.Shared(Mask(torch.ones(LAYOUT.size, dtype=torch.bool)))
        sizes = LAYOUT.size, LAYOUT.statistics_size
        expected = wire.Expected(data[8:16], LAYOUT.fingerprint, *sizes, wire.UPLOAD, shared)
        header, body = wire.decode(data, expected)
        return wire.encode(replace(header, **fields), wire.encode_body(change(body)), *sizes)

    return changed


def with_values(body: wire.Body, value: float) -> wire.Body:
    return replace(body, update=body.update.with_values(torch.full_like(body.update.values, value)))


def with_sections(data: bytes, *sections: tuple[int, int, int, bytes]) -> bytes:
    """An upload of format 1 with these sections and right checksums."""
    body = b"".join(
        SECTION.pack(codec, relation, 0, count, len(part)) + part for codec, relation, count, part in sections
    )
    fields = data[:88] + struct.pack("<QI", len(body), zlib.crc32(body))
    return fields + struct.pack("<I", zlib.crc32(fields)) + body


def beyond_the_end(data: bytes) -> bytes:
    gaps = zstandard.ZstdCompressor().compress(bytes([127, 127]))
    statistics = np.ones(LAYOUT.statistics_size, "<f4").tobytes()
    values = (0, 0, 2, bytes(8)), (0, 0, LAYOUT.statistics_size, statistics)
    return with_sections(data, (0, 2, 0, b""), (positions.GAPS_ZSTD, 0, 2, gaps), *values)


def too_many(data: bytes) -> bytes:
    return with_sections(data, (0, 2, 0, b""), (positions.EVERYTHING, 0, 2**32 - 1, b""), (0, 0, 2**32 - 1, b""))


BY_TRAINING = {
    "3e38": Trains(everywhere(3e38)),
    "a million times": Trains(lambda name, array: array * 10**6 if "weight" in name else array),
    "running_var=-1e6": Trains(lambda name, array: torch.full_like(array, -1e6) if "running_var" in name else array),
    "running_var=1e6": Trains(lambda name, array: torch.full_like(array, 1e6) if "running_var" in name else array),
    "running_mean=1e30": Trains(lambda name, array: torch.full_like(array, 1e30) if "running_mean" in name else array),
    "NaN": Trains(lambda name, array: array * torch.nan if array.is_floating_point() else array),
    "num-examples=10^12": Counts(10**12),
    "num-examples=NaN": Counts(float("nan")),
    "num-examples=-5": Counts(-5),
    "truncated": Bytes(lambda data: data[: len(data) // 2]),
    "empty": Bytes(lambda data: b""),
    "oversized": Bytes(lambda data: data + bytes(10**6)),
    "announced": Announces(),
    "replayed": Replays(),
}
BY_BYTES = {
    "NaN in the message": Bytes(rebuilt(lambda body: with_values(body, torch.nan))),
    "3e38 in the message": Bytes(rebuilt(lambda body: with_values(body, 3e38))),
    "an older round": Bytes(rebuilt(lambda body: body, round=0)),
    "another version": Bytes(rebuilt(lambda body: body, version=7)),
    "a loss that is infinite": Bytes(rebuilt(lambda body: body, loss=float("inf"))),
    "positions beyond the end": Bytes(beyond_the_end),
    "too many positions": Bytes(too_many),
}
ELSEWHERE = (
    "3e38",
    "a million times",
    "running_var=-1e6",
    "running_mean=1e30",
    "num-examples=10^12",
    "truncated",
    "replayed",
)
CASES = [("fedavg", way) for way in (*BY_TRAINING, *BY_BYTES)]
CASES += [(name, way) for name in ("gluefl", "lean") for way in ELSEWHERE]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, torch.Tensor]:
    """The models of the honest nodes alone."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(exchange, "POLL_S", 0.0)
        patched.setattr(nodes, "POLL_S", 0.0)
        models = {}
        for name in STRATEGIES:
            server, _, result = run(tmp_path_factory.mktemp(name), name, Fails())
            assert all(fates(server, round)[HOSTILE] == "failed" for round in ATTACKED)
            models[name] = torch.cat([t.reshape(-1).double() for t in result.arrays.to_torch_state_dict().values()])
        return models


@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_hostile_reply_is_refused_and_named_and_the_model_is_that_of_the_others(tmp_path, alone, name, way) -> None:
    server, grid_nodes, result = run(tmp_path, name, {**BY_TRAINING, **BY_BYTES}[way])
    for round in range(1, ROUNDS + 1):
        expected = {"refused", "failed"} if round in ATTACKED else {"used"}
        assert fates(server, round)[HOSTILE] in expected, (round, incidents(server, round))
        assert all(fate == "used" for client, fate in fates(server, round).items() if client != HOSTILE)
        # A node whose last answer was lost may need another package.
        noted = [one["client"] for one in incidents(server, round) if one["what"] != "needs model"]
        assert noted == [HOSTILE] * (round in ATTACKED)
        assert server.session.journal.lines[round - 1]["refused"] == (fates(server, round)[HOSTILE] == "refused")
    model = torch.cat([tensor.reshape(-1).double() for tensor in result.arrays.to_torch_state_dict().values()])
    assert torch.equal(model, alone[name])
    check_replicas(server, grid_nodes)


@pytest.mark.parametrize("way", ["3e38", "a million times", "running_var=-1e6"])
def test_without_a_guard_one_node_changes_the_model(tmp_path, alone, way) -> None:
    server, _, result = run(tmp_path, "fedavg", BY_TRAINING[way], guard=None)
    model = torch.cat([tensor.reshape(-1).double() for tensor in result.arrays.to_torch_state_dict().values()])
    assert not torch.equal(model, alone["fedavg"]) and fates(server, 3)[HOSTILE] == "used"


def test_one_node_cannot_outweigh_the_evaluations_of_the_others(tmp_path) -> None:
    class Evaluates(Attack):
        def meddle(self, round: int, reply: Message) -> Any:
            if messages.BODY not in reply.content:
                reply.content["metrics"] = MetricRecord({"total": 1e9, "num-examples": 10**12})
            return reply

    _, _, result = run(tmp_path / "a", "fedavg", Evaluates(), fraction_evaluate=1.0, out=tmp_path / "run")
    _, _, honest = run(tmp_path / "b", "fedavg", Attack(), fraction_evaluate=1.0)
    total = honest.evaluate_metrics_clientapp[ROUNDS]["total"]  # the same number from every node
    assert result.evaluate_metrics_clientapp[ROUNDS]["total"] == pytest.approx(total, rel=1e-12)
    text = (tmp_path / "run/evaluations.jsonl").read_text()
    assert '"client": 2, "what": "refused", "why": "a number of examples' in text


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(0.2)], ids=repr)
def test_a_median_or_trimmed_mean_bounds_one_node_without_a_guard(tmp_path, rule) -> None:
    _, _, result = run(tmp_path, "fedavg", BY_TRAINING["a million times"], guard=None, hooks=[rule])
    assert weights_of(result.arrays).abs().max() < 100


class Poisons(Attack):
    """Slips a bad update through a guard that lets it pass, once; nodes report the size of the model as loss."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def trains(self, message, context):
        size = float(sum(t.double().abs().mean() for t in message.content["arrays"].to_torch_state_dict().values()))
        reply = train(message, context)
        reply.content["metrics"] = MetricRecord({"train_loss": size, "num-examples": 10})
        if message.content["config"]["server-round"] == 5 and context.node_config["partition-id"] == HOSTILE:
            arrays = reply.content["arrays"].to_torch_state_dict()
            reply.content["arrays"] = ArrayRecord(
                {name: array * self.factor if "weight" in name else array for name, array in arrays.items()}
            )
        return reply


LAX = Guard(norm_factor=1e30)


def poisoned(tmp_path, name: str, rounds: int, factor: float = 1e5, out=None):
    attack = Poisons(factor)
    grid_nodes = [Node(place, tmp_path / f"device-{place}", ours={"initial": initial_arrays}) for place in range(5)]
    for node in grid_nodes:
        node.trains = attack.trains
    # The hostile node's own residual would hold the same numbers again.
    strategy = GlueFL(compensation="none") if name == "gluefl" else STRATEGIES[name]
    return federation(
        tmp_path, nodes=grid_nodes, sampler=Uniform(5), strategy=strategy, rounds=rounds, guard=LAX, out=out
    )


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_server_goes_back_to_the_last_good_version(tmp_path, name) -> None:
    """Round 5 poisons version 5; rounds 6 and 7 see it in the losses, and round 7 publishes version 4 again."""
    server, grid_nodes, _ = poisoned(tmp_path, name, 9)
    (incident,) = incidents(server, 7)
    assert incident["what"] == "returned" and "model after round 4 is published again as version 7" in incident["why"]
    hashes = server.session.hashes
    assert hashes[7] == hashes[4] and hashes[7] != hashes[6]
    assert [line["used"] for line in server.session.journal.lines] == [5] * 6 + [0, 5, 5]
    check_replicas(server, grid_nodes)
    assert weights_of(server.session.arrays).abs().max() < 100


@pytest.mark.parametrize("rounds", [5, 6])
def test_the_way_back_survives_a_restart(tmp_path, rounds) -> None:
    poisoned(tmp_path, "fedavg", rounds, out=tmp_path / "run")
    server, _, _ = poisoned(tmp_path, "fedavg", 7, out=tmp_path / "run")
    whole, _, _ = poisoned(tmp_path / "b", "fedavg", 7)
    assert server.session.hashes == whole.session.hashes
    assert server.session.protection.state == whole.session.protection.state
