"""What a node can do wrong on Flower, without a network: the round goes on, and nothing bad enters the model."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, arrays_size_mod, fixedclipping_mod, message_size_mod

from flower_nodes import Grid, Node, app, initial_arrays, train, weights_of
from gluefl import APF, STC, FedAvg, GlueFL, Server, Uniform, wire
from gluefl.errors import GlueFLError, UsageError
from gluefl.flower import GlueFLMod, GlueFLStrategy, Sticky, content, exchange, nodes
from gluefl.flower.arrays import Table
from gluefl.vectors.selection import Sparse

SAMPLER = Uniform(cohort=4)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch) -> None:
    monkeypatch.setattr(exchange, "POLL_S", 0.0)
    monkeypatch.setattr(nodes, "POLL_S", 0.0)


def federation(tmp_path, count: int = 4, rounds: int = 3, sampler=SAMPLER, strategy=None, meddle=None, **parts):
    """Run some rounds; `meddle` is (place, round, reply) → reply. Returns strategy, nodes and result."""
    parts = {"timeout": 5.0, "seed": 5, "out": None, **parts}
    timeout, grid_nodes, first_id = parts.pop("timeout"), parts.pop("nodes", None), parts.pop("first_id", 100)
    grid_nodes = grid_nodes or [Node(place, tmp_path / f"device-{place}") for place in range(count)]
    if meddle is not None:
        for node in grid_nodes:
            node.meddle = lambda round, reply, place=node.place: meddle(place, round, reply)
    server = GlueFLStrategy(sampler, strategy or GlueFL(regenerate_every=4), **parts)
    result = server.start(Grid(grid_nodes, first_id), initial_arrays(), num_rounds=rounds, timeout=timeout)
    return server, grid_nodes, result


def check_replicas(server, grid_nodes) -> list[int]:
    """Every node's replica is the server's model of the version it says, bit for bit."""
    versions = []
    for node in grid_nodes:
        if node.folder.exists():
            replica, _ = node.device().replica()
            assert replica.hash == server.session.hashes[replica.version]
            versions.append(replica.version)
    return versions


def fates(server, round: int) -> dict[int, str]:
    clients = server.session.journal.lines[round - 1]["clients"]
    return dict(zip(clients["id"], clients["fate"]))


def incidents(server, round: int) -> list[dict]:
    return server.session.journal.lines[round - 1]["incidents"]


def changed(reply: Message, change) -> Message:
    """A reply whose upload bytes were changed."""
    data = content.read_array(reply.content, content.UPLOAD, None)
    reply.content[content.BODY] = ArrayRecord({content.UPLOAD: content.to_array(change(data))})
    return reply


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


def test_bytes_are_those_of_the_messages(tmp_path) -> None:
    server, _, _ = federation(tmp_path, rounds=2, count=6)
    line = server.session.journal.lines[0]
    table = server.session.table
    whole = wire.HEADER_BYTES + 4 * 16 + 4 * (table.layout.size + table.layout.statistics_size)
    sent = [size - whole for size in line["clients"]["down_bytes"]]
    assert all(len(table.to_json()) < extra < len(table.to_json()) + 400 for extra in sent)


def corrupt(data: bytes) -> bytes:
    return data[:200] + bytes([data[200] ^ 1]) + data[201:]


def with_nan(data: bytes) -> bytes:
    return _rebuilt(
        data,
        lambda body: replace(
            body, update=Sparse(body.update.positions, body.update.values * torch.nan, body.update.size)
        ),
    )


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
    table = Table.of(initial_arrays())
    layout = table.layout
    shared = wire.Shared(torch.ones(layout.size, dtype=torch.bool))
    expected = wire.Expected(data[8:16], layout.fingerprint, layout.size, layout.statistics_size, wire.UPLOAD, shared)
    header, body = wire.decode(data, expected)
    return wire.encode(
        replace(header, **header_changes), wire.encode_body(change(body)), layout.size, layout.statistics_size
    )


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
            reply.content[content.OURS] = ConfigRecord({"answer": answer})
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
    import shutil

    saved = tmp_path / "saved"

    def meddle(place, round, reply):
        if place != 0:
            return reply
        node = grid_nodes[0]
        if round == 1 and loss == "older":
            shutil.copytree(node.folder, saved)
        if round == 3:
            if loss == "disk":
                shutil.rmtree(node.folder)
            elif loss == "older":
                shutil.rmtree(node.folder)
                shutil.copytree(saved, node.folder)
            elif loss == "replica":
                (node.device().folder / "replica.safetensors").unlink()
            else:
                path = node.device().folder / "replica.safetensors"
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
    from gluefl.flower.device import _load

    return _load(node.device().folder / f"{name}.safetensors")[0].get("residual")


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
    server, _, _ = federation(tmp_path, nodes=grid_nodes, sampler=equal, strategy=FedAvg(), server=Server(lr=4.0))
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
    import shutil

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


@pytest.mark.parametrize(
    "inside", [[LocalDpMod(1.0, 0.0, 1.0, 0.1)], [message_size_mod, arrays_size_mod]], ids=["dp", "sizes"]
)
def test_mods_of_flower_work_inside_ours(tmp_path, inside) -> None:
    grid_nodes = [Node(place, tmp_path / f"device-{place}", mods=inside) for place in range(4)]
    server, _, _ = federation(tmp_path, nodes=grid_nodes, rounds=2)
    assert [line["used"] for line in server.session.journal.lines] == [4, 4]
    check_replicas(server, grid_nodes)


def test_the_size_mods_work_outside_ours(tmp_path) -> None:
    class Outside(Node):
        def handle(self, message):
            context = Context(1, 100, {"partition-id": self.place}, RecordDict(), {})
            return app([message_size_mod, arrays_size_mod, GlueFLMod(folder=self.folder)])(message, context)

    server, _, _ = federation(tmp_path, nodes=[Outside(place, tmp_path / str(place)) for place in range(4)], rounds=2)
    assert [line["used"] for line in server.session.journal.lines] == [4, 4]


@pytest.mark.parametrize("outside", [LocalDpMod(1.0, 0.0, 1.0, 0.1), fixedclipping_mod], ids=["dp", "clipping"])
def test_mods_that_alter_arrays_are_refused_outside_ours(tmp_path, outside) -> None:
    class Outside(Node):
        def handle(self, message):

            context = Context(1, 100, {"partition-id": self.place}, RecordDict(), {})
            return app([outside, GlueFLMod(folder=self.folder)])(message, context)

    grid_nodes = [Outside(place, tmp_path / f"device-{place}") for place in range(4)]
    server, _, _ = federation(tmp_path, nodes=grid_nodes, rounds=1, timeout=0.3)
    # Flower's local DP mod answers its own reply, which nobody waits for; clipping answers the server.
    assert set(fates(server, 1).values()) <= {"failed", "unanswered"}
    assert server.session.journal.lines[0]["used"] == 0
    assert torch.equal(weights_of(initial_arrays()), server.session.state.weights)


@pytest.mark.parametrize("mod", [fixedclipping_mod, adaptiveclipping_mod])
def test_clipping_works_inside_ours(tmp_path, mod) -> None:
    grid_nodes = [Node(place, tmp_path / f"device-{place}", mods=[mod]) for place in range(4)]
    server = GlueFLStrategy(SAMPLER, FedAvg())
    config = ConfigRecord({"clipping_norm": 0.5})
    result = server.start(Grid(grid_nodes), initial_arrays(), num_rounds=1, timeout=5, train_config=config)
    assert server.session.journal.lines[0]["used"] == 4
    moved = weights_of(result.arrays) - weights_of(initial_arrays())
    assert 0 < float(moved.norm()) <= 0.5 + 1e-4


def test_secure_aggregation_is_refused(tmp_path) -> None:
    from flwr.client.mod import secaggplus_mod

    grid_nodes = [Node(place, tmp_path / f"device-{place}", mods=[secaggplus_mod]) for place in range(4)]
    server, _, _ = federation(tmp_path, nodes=grid_nodes, rounds=1)
    assert set(fates(server, 1).values()) == {"failed"}
    assert torch.equal(weights_of(initial_arrays()), server.session.state.weights)


def test_a_client_without_the_mod_is_refused_with_the_reason(tmp_path) -> None:
    class Bare(Node):
        def handle(self, message):
            reply = RecordDict({"arrays": initial_arrays(), "metrics": MetricRecord({"num-examples": 1})})
            return Message(reply, reply_to=message)

    grid_nodes = [Bare(place, tmp_path / f"device-{place}") for place in range(4)]
    server, _, _ = federation(tmp_path, nodes=grid_nodes, rounds=1)
    assert all("gluefl_mod" in i["why"] for i in incidents(server, 1))


def test_a_numpy_client_app_is_refused_with_the_reason(tmp_path) -> None:
    from flwr.client import NumPyClient

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


def test_configure_train_needs_a_session() -> None:
    with pytest.raises(GlueFLError, match="start"):
        GlueFLStrategy(SAMPLER).configure_train(1, initial_arrays(), ConfigRecord(), None)


def test_too_few_nodes_say_what_is_missing(tmp_path) -> None:
    with pytest.raises(UsageError, match="cannot be invited"):
        federation(tmp_path, count=2, wait_for_nodes_s=0.0)


def test_statistics_are_told_from_weights_by_name_or_by_the_module() -> None:
    from stubs import mlp

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


def test_a_task_that_is_delivered_twice_leaves_the_residual_of_the_upload_that_was_used(tmp_path) -> None:
    import copy

    grid_nodes = [Node(place, tmp_path / f"device-{place}") for place in range(4)]
    messages, seen = [], {}

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
                messages.append(super().handle(again))  # its reply is lost
            return reply

    grid_nodes[0] = Twice(0, tmp_path / "device-0", trains=noisy)
    federation(tmp_path, nodes=grid_nodes, rounds=2)
    # The server used the first upload; the node kept only what the second left over, which is not that.
    assert messages and residual_of(grid_nodes[0], "residual") is None
