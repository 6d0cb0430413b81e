"""Lean on Flower: nodes know version 0 or are sent it, hold cells on their disks, and come to the server's versions."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, MetricRecord
from safetensors import safe_open

from flower_nodes import (
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
from gluefl import FedAvg, Uniform
from gluefl.core.averaging import Averaging
from gluefl.core.replica import Replica
from gluefl.errors import UsageError, WireError
from gluefl.flower import GlueFLStrategy, Sticky, exchange, messages, nodes
from gluefl.flower.arrays import Table
from gluefl.flower.node_store import NodeStore, cells_of
from gluefl.flower.synchronise import Receiver
from gluefl.strategies.lean import Lean
from stubs import mlp

STICKY = Sticky(3, 4, 2, weights="proportional")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch) -> None:
    monkeypatch.setattr(exchange, "POLL_S", 0.0)
    monkeypatch.setattr(nodes, "POLL_S", 0.0)


def small_steps(message, context):
    """As `train`, but with updates of the size of a step: most weights come to lie on a cell near the first."""
    reply = train(message, context)
    old, new = message.content["arrays"].to_torch_state_dict(), reply.content["arrays"].to_torch_state_dict()
    moved = {n: old[n] + (new[n] - old[n]) / 32 if t.is_floating_point() else t for n, t in new.items()}
    reply.content["arrays"] = ArrayRecord(moved)
    return reply


def lean_nodes(tmp_path, count=4, initial=initial_arrays, trains=small_steps) -> list[Node]:
    ours = {"initial": initial} if initial else {}
    return [Node(place, tmp_path / f"device-{place}", ours=dict(ours), trains=trains) for place in range(count)]


def lean(tmp_path, grid_nodes, rounds=4, **parts):
    parts = {"sampler": Uniform(4), **parts}
    return federation(tmp_path, nodes=grid_nodes, rounds=rounds, strategy=parts.pop("strategy", Lean()), **parts)


def test_who_knows_version_0_downloads_neither_it_nor_the_names(tmp_path) -> None:
    grid_nodes = lean_nodes(tmp_path, 6)
    server, _, _ = lean(tmp_path, grid_nodes, rounds=6, sampler=STICKY, fraction_evaluate=0.2)
    lines = server.session.journal.lines
    assert [line["used"] for line in lines] == [3] * 6 and not any(line["incidents"] for line in lines)
    check_replicas(server, grid_nodes)
    for records in [records for node in grid_nodes for records in node.inbox]:
        told, sent = messages.read_package(records)
        assert sent.origin is None and told.table is None
    assert not any(node.store().origin(server.strategy) for node in grid_nodes if node.folder.exists())


@pytest.mark.parametrize(
    "initial",
    [initial_arrays, lambda: mlp(norm=True), lambda: mlp(norm=True).state_dict()],
    ids=["arrays", "module", "state_dict"],
)
def test_the_function_may_return_what_apps_have(tmp_path, initial) -> None:
    server, grid_nodes, _ = lean(tmp_path, lean_nodes(tmp_path, initial=initial), rounds=2)
    assert not any(line["incidents"] for line in server.session.journal.lines)
    assert check_replicas(server, grid_nodes) == [1] * 4


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[str]:
    """The hashes of the versions if all nodes know version 0."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return [line["hash"] for line in lean(folder, lean_nodes(folder), rounds=3)[0].session.journal.lines]


def fails():
    raise FileNotFoundError("no model.safetensors here")


@pytest.mark.parametrize(
    ("initial", "reason"),
    [
        (None, "gives it no function"),
        (lambda: mlp(norm=True, seed=1), "another seed"),
        (lambda: mlp(norm=False), "another seed"),
        (fails, "no model.safetensors here"),
    ],
    ids=["none", "wrong", "smaller", "raises"],
)
def test_who_does_not_know_version_0_is_sent_it_once(tmp_path, initial, reason, undisturbed) -> None:
    grid_nodes = lean_nodes(tmp_path)
    grid_nodes[1].ours = {"initial": initial}
    server, _, _ = lean(tmp_path, grid_nodes, rounds=3)
    assert [(i["client"], i["what"]) for i in incidents(server, 1)] == [(1, "needs model")]
    assert reason in incidents(server, 1)[0]["why"]
    lines = server.session.journal.lines
    assert [line["used"] for line in lines] == [4] * 3 and not any(line["incidents"] for line in lines[1:])
    assert check_replicas(server, grid_nodes) == [2] * 4
    brought = [messages.ORIGIN in records[messages.BODY] for records in grid_nodes[1].inbox]
    assert brought == [False, True, False, False]
    charged = dict(zip(lines[0]["clients"]["id"], lines[0]["clients"]["down_bytes"]))
    assert charged[1] > 2 * charged[0] + len(server.session.version_0.data)
    # The model is the one that all would have come to had they known version 0.
    assert [line["hash"] for line in lines] == undisturbed


def test_the_seed_of_the_function_is_not_that_of_the_training(tmp_path) -> None:
    def seeded():
        torch.manual_seed(0)
        return initial_arrays()

    drawn = []

    def draws(message, context):
        drawn.append(float(torch.rand(())))
        return small_steps(message, context)

    lean(tmp_path, lean_nodes(tmp_path, initial=seeded, trains=draws), rounds=2)
    assert len(set(drawn)) == len(drawn)


def test_a_replica_lies_on_the_disk_as_cells_and_nothing_else_does(tmp_path) -> None:
    server, grid_nodes, _ = lean(tmp_path, lean_nodes(tmp_path), rounds=5)
    state = server.session.state
    float_bytes = 4 * (state.weights.numel() + state.statistics.numel())
    for node in grid_nodes:
        assert [path.name for path in node.store().folder.iterdir()] == ["replica.safetensors"]
        with safe_open(node.store().folder / "replica.safetensors", framework="pt") as file:
            assert list(file.keys()) == ["cells"] and file.get_tensor("cells").numel() <= float_bytes / 4


@pytest.mark.parametrize("relative", [True, False])
def test_cells_on_the_disk_are_the_model_bit_for_bit(relative) -> None:
    table = Table.of(initial_arrays())
    weights, statistics = table.flatten(initial_arrays())
    replica = Replica(torch.round(weights * 64) / 64 + 0.0, statistics, 3)
    origin = torch.cat([torch.round(weights * 8) / 8 + 0.0, statistics]) if relative else None
    cells = cells_of(Lean(), table.layout, origin)
    read = Replica(*cells.decode(cells.encode(replica), weights.numel(), statistics.numel()), 3)
    assert read.hash == replica.hash


def damage(node: Node, loss: str, saved: Path) -> None:
    """Delete or damage what a node has on its disk, or bring back what it had before."""
    folder = node.store().folder
    path = folder / ("origin.safetensors" if loss == "origin" else "replica.safetensors")
    if loss in ("disk", "older"):
        shutil.rmtree(node.folder)
    if loss == "older":
        shutil.copytree(saved, node.folder)
    elif loss == "replica":
        path.unlink()
    elif path.exists():
        data = path.read_bytes()
        path.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])


@pytest.mark.parametrize("knows", [True, False], ids=["function", "downloaded"])
@pytest.mark.parametrize("loss", ["disk", "replica", "damaged", "older", "origin"])
def test_what_a_node_has_lost_is_sent_in_the_same_round(tmp_path, knows, loss) -> None:
    grid_nodes = lean_nodes(tmp_path, initial=initial_arrays if knows else None)
    node, saved = grid_nodes[0], tmp_path / "saved"

    def meddle(place, round, reply):
        if (place, round) == (0, 1):
            shutil.copytree(node.folder, saved, dirs_exist_ok=True)
        if (place, round) == (0, 2):
            damage(node, loss, saved)
        return reply

    server, _, _ = lean(tmp_path, grid_nodes, rounds=3, meddle=meddle)
    nothing_lost = loss == "origin" and knows
    assert [i["what"] for i in incidents(server, 3)] == ([] if nothing_lost else ["needs model"])
    assert fates(server, 3)[0] == "used"
    assert check_replicas(server, grid_nodes) == [2, 2, 2, 2]
    brought = messages.ORIGIN in node.inbox[-1][messages.BODY]
    assert brought == (not knows and loss in ("disk", "origin"))


def back_and_forth(message, context):
    """Every weight moves up in odd rounds and down in even ones."""
    reply, step = train(message, context), 0.3 if message.content["config"]["server-round"] % 2 else -0.3
    old = message.content["arrays"].to_torch_state_dict()
    moved = {n: t + step if n not in ("1.running_var", "1.num_batches_tracked") else t for n, t in old.items()}
    reply.content["arrays"] = ArrayRecord(moved)
    return reply


@pytest.mark.parametrize("lost", [2, 3])
@pytest.mark.parametrize("initial", ["known", "download"])
def test_a_node_whose_answer_was_lost_is_not_left_with_what_came_back(tmp_path, lost, initial) -> None:
    """In round `lost` + 1 the server believes that node 0 holds the version before the one it holds."""
    versions = []

    def remember(round, arrays):
        versions.append(weights_of(arrays))
        return MetricRecord({})

    grid_nodes = lean_nodes(tmp_path, trains=back_and_forth)
    grid_nodes[0].meddle = lambda round, reply: None if round == lost else reply
    server = GlueFLStrategy(Uniform(4), Lean(), averaging=Averaging(0.0), initial=initial, seed=5)
    server.start(Grid(grid_nodes), initial_arrays(), num_rounds=lost + 1, timeout=0.3, evaluate_fn=remember)
    believed, held, newest = versions[lost - 2], versions[lost - 1], versions[lost]
    assert bool(((held != believed) & (newest == believed)).any())
    assert fates(server, lost)[0] == "unanswered" and fates(server, lost + 1)[0] == "used"
    assert check_replicas(server, grid_nodes) == [lost] * 4
    base = int.from_bytes(grid_nodes[0].inbox[-1].config_records[messages.OURS]["header"][10:14], "little")
    if (lost, initial) == (2, "known"):  # a package from version 0 is applied to version 0, which the node knows
        assert base == 0 and not incidents(server, 3)
    else:  # the node said which version it holds
        assert base == lost - 1 and [i["what"] for i in incidents(server, lost + 1)] == ["needs model"]


def test_a_late_answer_says_what_the_node_holds(tmp_path) -> None:
    grid_nodes = lean_nodes(tmp_path)
    grid_nodes[3].delay = lambda round: 3 if round == 2 else 0
    server, _, _ = lean(tmp_path, grid_nodes, rounds=5, sampler=Uniform(3, over_commitment=1.34))
    noted = [i for line in server.session.journal.lines for i in line["incidents"]]
    assert {"client": 3, "what": "late", "why": "of round 2"} in noted
    check_replicas(server, grid_nodes)


def test_a_server_that_is_killed_goes_on_with_its_average(tmp_path) -> None:
    grid_nodes, out = lean_nodes(tmp_path, 6), tmp_path / "run"
    lean(tmp_path, grid_nodes, rounds=2, sampler=STICKY, out=out)
    server, _, result = lean(tmp_path, grid_nodes, rounds=5, sampler=STICKY, out=out)
    assert not any(line["incidents"] for line in server.session.journal.lines)
    check_replicas(server, grid_nodes)
    other, _, whole = lean(tmp_path / "b", lean_nodes(tmp_path / "b", 6), rounds=5, sampler=STICKY)
    assert torch.equal(weights_of(result.arrays), weights_of(whole.arrays))
    assert torch.equal(server.session.state.weights, other.session.state.weights)
    # What nodes hold refers to version 0: a run cannot go on from another initial model, nor with another average.
    another = GlueFLStrategy(STICKY, Lean(), seed=5, out=out)
    with pytest.raises(UsageError, match="fixed seed"):
        another.start(Grid(grid_nodes), ArrayRecord(mlp(norm=True, seed=2).state_dict()), num_rounds=6)
    with pytest.raises(UsageError, match="other settings"):
        lean(tmp_path, grid_nodes, rounds=6, sampler=STICKY, out=out, averaging=Averaging(0.5))


def test_the_average_is_handed_over_and_the_published_version_is_sent(tmp_path) -> None:
    seen = []

    def looks(message, context):
        seen.append(weights_of(message.content["arrays"]))
        return small_steps(message, context)

    server, _, result = lean(tmp_path, lean_nodes(tmp_path, trains=looks), rounds=3)
    state, published = server.session.state, weights_of(result.arrays)
    assert torch.equal(published, state.average[0]) and not torch.equal(published, state.weights)
    plain, _, _ = lean(tmp_path / "b", lean_nodes(tmp_path / "b"), rounds=2, averaging=Averaging(0.0))
    assert torch.equal(seen[-1], plain.session.state.weights)


@pytest.mark.parametrize("strategy", [Lean(), FedAvg()], ids=["lean", "fedavg"])
@pytest.mark.parametrize("initial", ["known", "download"])
def test_both_ways_to_version_0_serve_every_strategy(tmp_path, strategy, initial) -> None:
    grid_nodes = lean_nodes(tmp_path)
    grid_nodes[2].ours = {}
    server, _, _ = lean(tmp_path, grid_nodes, strategy=strategy, initial=initial)
    asked = [i["client"] for i in incidents(server, 1)]
    assert asked == ([2] if initial == "known" else [])
    assert [line["used"] for line in server.session.journal.lines] == [4] * 4
    assert server.session.journal.lines[0]["cold"] == (0 if initial == "known" else 4)
    assert check_replicas(server, grid_nodes) == [3] * 4


class InMemoryGrid(Grid):
    """By this name of Flower's grid the strategy recognises a simulation."""


def test_nodes_of_a_simulation_know_version_0(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("gluefl.flower.mod._in_simulation", lambda: True)
    grid_nodes = lean_nodes(tmp_path, 6, initial=None)
    server = GlueFLStrategy(STICKY, Lean(), out=tmp_path / "run", seed=5)
    server.start(InMemoryGrid(grid_nodes), initial_arrays(), num_rounds=4)
    other, _, _ = lean(tmp_path / "b", lean_nodes(tmp_path / "b", 6), rounds=4, sampler=STICKY)
    assert not any(line["incidents"] for line in server.session.journal.lines)
    hashes = [[line["hash"] for line in one.session.journal.lines] for one in (server, other)]
    assert hashes[0] == hashes[1]
    assert {path.name for path in (tmp_path / "run" / "simulation").rglob("*.safetensors")} == {
        "replica.safetensors", "origin.safetensors",
    }  # fmt: skip


def test_a_model_larger_than_its_bytes_is_refused_before_it_is_allocated(tmp_path) -> None:
    _, grid_nodes, _ = lean(tmp_path, lean_nodes(tmp_path, initial=None), rounds=1)
    told, sent = messages.read_package(grid_nodes[0].inbox[-1])
    large = Table.from_json('[["w",[2000000000],"float32",false]]')
    receiver = Receiver(NodeStore(tmp_path / "empty"), Lean())
    lying = messages.Told(**{**vars(told), "table": large.to_json()})
    with pytest.raises(WireError, match="is announced"):
        receiver.synchronised(lying, sent)
    cut = messages.Parts(sent.package, sent.origin[:-1])
    with pytest.raises(WireError):
        receiver.synchronised(told, cut)
    with pytest.raises(WireError, match="was sent as version 0"):
        receiver.synchronised(messages.Told(**{**vars(told), "origin": "00" * 8}), sent)


def test_a_bad_upload_is_refused_and_the_others_are_used(tmp_path) -> None:
    def meddle(place, round, reply):
        if (place, round) == (2, 2):
            data = bytearray(messages.read_array(reply.content, messages.UPLOAD, None))
            data[-1] ^= 1
            array = messages.to_array(bytes(data))
            reply.content[messages.BODY] = ArrayRecord({messages.UPLOAD: array})
        return reply

    grid_nodes = lean_nodes(tmp_path)
    server, _, _ = lean(tmp_path, grid_nodes, rounds=3, meddle=meddle)
    assert fates(server, 2)[2] == "refused" and fates(server, 3)[2] == "used"
    third = server.session.journal.lines[2]["clients"]
    assert third["staleness"][third["id"].index(2)] == 2  # from version 0, which the node knows
    assert check_replicas(server, grid_nodes) == [2] * 4


def test_bytes_are_a_small_part_of_the_model(tmp_path) -> None:
    """A model of 40,000 weights: packages and uploads are small, and so is what lies on the disk."""

    def large():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return torch.nn.Sequential(torch.nn.Linear(150, 150), torch.nn.Linear(150, 120))

    def trains(message, context):
        arrays = message.content["arrays"].to_torch_state_dict()
        rng = np.random.default_rng(message.content["config"]["server-round"])
        moved = {n: t + torch.from_numpy(rng.normal(0, 0.003, t.shape).astype("float32")) for n, t in arrays.items()}
        reply = train(message, context)
        reply.content["arrays"] = ArrayRecord(moved)
        return reply

    grid_nodes = [Node(p, tmp_path / str(p), ours={"initial": large}, trains=trains) for p in range(4)]
    server = GlueFLStrategy(Uniform(4), Lean())
    server.start(Grid(grid_nodes), ArrayRecord(large().state_dict()), num_rounds=5, timeout=5)
    state = server.session.state
    float_bytes = 4 * state.weights.numel()
    for line in server.session.journal.lines:
        assert line["up_bytes"] < 4 * float_bytes / 25 and line["down_bytes"] < 4 * float_bytes / 25
    sizes = [(node.store().folder / "replica.safetensors").stat().st_size for node in grid_nodes]
    assert max(sizes) < float_bytes / 4
    assert check_replicas(server, grid_nodes) == [4] * 4


def test_apps_without_the_function_still_work(tmp_path) -> None:
    """`gluefl_mod` as it is, with a server that has its nodes download the model as cells."""

    grid_nodes = lean_nodes(tmp_path, initial=None)
    server, _, _ = lean(tmp_path, grid_nodes, initial="download")
    assert not any(line["incidents"] for line in server.session.journal.lines)
    assert check_replicas(server, grid_nodes) == [3] * 4
