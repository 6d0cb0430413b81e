"""A client that applies exactly the packages it was sent holds the server's model, bit for bit."""

import dataclasses

import pytest
import torch

from federations import LAYOUT, RUN, Engine, Unreliable, delivered, measured, simulation
from gluefl import APF, STC, FedAvg, GlueFL, Lean, Sticky, Uniform, wire
from gluefl.core.replica import Replica
from gluefl.errors import WireError
from gluefl.simulation.channel import Encoded
from gluefl.simulation.round import play
from gluefl.strategies import Task
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import Listed, whole

CLIENTS = 40
EXPECTED = wire.Expected(RUN, LAYOUT.fingerprint, LAYOUT.size, LAYOUT.statistics_size, wire.PACKAGE)
STRATEGIES = [FedAvg(), STC(), APF(0.3, 2, 0.5), GlueFL(), GlueFL(0.3, 0.1, 3, "plain", "tensor")]
AND_LEAN = [*STRATEGIES, Lean(upload_block=64)]  # whose messages and statistics differ: see `test_lean.py`
SAMPLERS = [Uniform(5, over_commitment=1.6), Sticky(6, 10, 4, over_commitment=1.5)]


def lose(client: int, clock_s: int) -> float | None:
    """One in five is lost during the download, one in five after it."""
    return {0: 0.5, 1: 1.5}.get((client * 31 + clock_s * 17) % 11 % 5)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=["uniform", "sticky"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_replicas_follow_the_server_over_fifty_rounds(strategy, sampler) -> None:
    f, state = simulation(strategy, sampler, CLIENTS, devices=Unreliable(lose), channel=delivered)
    weights, versions, accepted, fates = {}, {}, {}, []
    for _ in range(50):
        f.channel.sent.clear(), f.channel.delivered.clear()
        before, (state, record) = state, play(f, state)
        clients = dict(zip(record.line["clients"]["id"], record.line["clients"]["fate"]))
        fates += clients.values()
        assert record.line["down_bytes"] == sum(len(parcel.data) for parcel in f.channel.sent)
        for client, parcel in zip(clients, f.channel.sent):  # what the server says to every invited client
            header, _ = wire.decode(parcel.data, EXPECTED)
            assert header.base == versions.get(client) and header.accepted == accepted.get(client, True)
        for client, parcel in f.channel.delivered:
            header, body = wire.decode(parcel.data, EXPECTED)
            replica = weights.setdefault(client, torch.zeros(LAYOUT.size)).clone()
            replica[body.update.positions] = body.update.values
            weights[client], versions[client] = replica, header.version
            assert torch.equal(replica.view(torch.int32), before.weights.view(torch.int32))
            assert torch.equal(body.statistics, before.statistics)
            assert header.hash == wire.replica_hash(before.weights, before.statistics)
        began_s = int(before.clock_s + record.line["waited_s"])
        lost = {client for client in clients if lose(client, began_s) == 0.5}  # during the download
        assert {client for client, _ in f.channel.delivered} == clients.keys() - lost
        assert all(state.ledger.base(client) == before.ledger.base(client) for client in lost)
        assert dict(state.ledger.held) == versions
        # Who was lost while downloading had no upload to be refused: what it was told last still holds.
        accepted |= {client: fate == "used" for client, fate in clients.items() if client not in lost}
    assert {"used", "lost", "late"} == set(fates) and len(versions) > CLIENTS // 2


def test_a_late_client_that_was_told_to_stop_keeps_its_version() -> None:
    devices = Unreliable(lambda client, clock_s: None, slow=lambda client: 60.0 if client % 3 == 0 else 1.0)
    f, state = simulation(
        STC(),
        Uniform(4, over_commitment=2.0),
        20,
        devices=devices,
        channel=delivered,
        stop_late_downloads=True,
    )
    stopped = 0
    for _ in range(12):
        f.channel.delivered.clear()
        before, (state, record) = state, play(f, state)
        late = {c for c, fate in zip(record.line["clients"]["id"], record.line["clients"]["fate"]) if fate == "late"}
        slow = {client for client in late if client % 3 == 0}
        stopped += len(slow)
        assert record.stopped == slow
        assert not slow & {client for client, _ in f.channel.delivered}
        assert all(state.ledger.base(client) == before.ledger.base(client) for client in slow)
        assert all(state.ledger.base(client) == before.ledger.version for client in late - slow)
    assert stopped


@pytest.mark.parametrize("strategy", [GlueFL(), STC(compensation="plain"), APF(0.3, 2, 0.5), AND_LEAN[-1]], ids=repr)
def test_a_round_in_which_nobody_arrives_changes_nothing_and_is_counted(strategy) -> None:
    devices = Unreliable(lambda client, clock_s: 1.5 if 20 < clock_s < 40 else None)
    f, state = simulation(strategy, Uniform(4), CLIENTS, devices=devices)
    empty = 0
    for _ in range(25):
        before, (state, record) = state, play(f, state)
        assert state.round == state.ledger.version == before.round + 1
        if not record.line["used"]:
            empty += 1
            assert torch.equal(state.weights, before.weights) and torch.equal(state.statistics, before.statistics)
            assert state.strategy is before.strategy and torch.equal(state.ledger.changed_at, before.ledger.changed_at)
            assert "no client arrived" in " ".join(record.line["notes"])
            assert record.line["down_bytes"] > 0 == record.line["up_bytes"] and record.line["loss"] is None
    assert 0 < empty < 25


def test_fewer_arrivals_enter_the_sum_with_larger_weights() -> None:
    f, state = simulation(FedAvg(), Uniform(6), CLIENTS, devices=Unreliable(lose), channel=measured)
    found = set()
    for round in range(1, 15):
        before, (state, record) = state, play(f, state)
        fates = zip(record.line["clients"]["id"], record.line["clients"]["fate"])
        used = [client for client, fate in fates if fate == "used"]
        total = sum((Engine().delta(round, client) for client in used), torch.zeros(LAYOUT.size))
        mean = total / max(len(used), 1)
        torch.testing.assert_close(state.weights - before.weights, mean, atol=1e-5, rtol=0)
        short = "weights are those of the actual counts" in " ".join(record.line["notes"])
        assert short == (0 < len(used) < 6)
        found.add(len(used))
    assert len(found) > 2


def test_residuals_are_scaled_by_the_weight_that_the_client_was_told() -> None:
    f, state = simulation(
        STC(compensation="rescaled"), Uniform(6), CLIENTS, devices=Unreliable(lose), channel=delivered
    )
    short = 0
    for round in range(1, 15):
        f.channel.sent.clear()
        old = {client: f.residuals.get(client) for client in range(CLIENTS)}
        state, record = play(f, state)
        short += record.line["used"] < 6  # the sum then has larger weights than the clients know of
        clients = zip(record.line["clients"]["id"], record.line["clients"]["fate"], f.channel.sent)
        for client, parcel in ((client, parcel) for client, fate, parcel in clients if fate == "used"):
            assert parcel.header.weight == pytest.approx(1 / 6)
            task = Task(round, f.core.space.mask(False), parcel.header.weight, f.core.space)
            _, new = f.core.strategy.compress(Engine().delta(round, client), task, old[client])
            assert torch.equal(f.residuals.get(client), new)
    assert short


def test_a_client_that_was_not_used_keeps_its_residual() -> None:
    f, state = simulation(GlueFL(), Sticky(6, 10, 4, over_commitment=1.5), CLIENTS, devices=Unreliable(lose))
    kept = 0
    for _ in range(25):
        before = {client: f.residuals.get(client) for client in range(CLIENTS)}
        state, record = play(f, state)
        for client, fate in zip(record.line["clients"]["id"], record.line["clients"]["fate"]):
            if fate != "used" and before[client] is not None:
                kept += 1
                assert torch.equal(f.residuals.get(client), before[client])
    assert kept


@pytest.mark.parametrize("missing", ["sticky", "others"])
@pytest.mark.parametrize("why", ["lost", "offline"])
def test_a_missing_group_is_reported_as_biased(missing, why) -> None:
    f, state = simulation(FedAvg(), Sticky(6, 10, 4), CLIENTS)
    assert not play(f, state)[1].line["notes"]
    gone = {client for client in range(CLIENTS) if (client in state.sampler) == (missing == "sticky")}
    devices = {
        "lost": Unreliable(lambda client, clock_s: 1.5 if client in gone else None, is_there=lambda client: True),
        "offline": Unreliable(lambda client, clock_s: None, is_there=lambda client: client not in gone),
    }
    record = play(dataclasses.replace(f, devices=devices[why]), state)[1]
    assert record.line["used"] and "biased" in " ".join(record.line["notes"])


@pytest.mark.parametrize("strategy", AND_LEAN, ids=repr)
def test_measuring_and_encoding_play_the_same_rounds(strategy) -> None:
    parts = {"devices": Unreliable(lose)}
    f, state = simulation(strategy, SAMPLERS[1], CLIENTS, channel=measured, **parts)
    g, other = simulation(strategy, SAMPLERS[1], CLIENTS, channel=Encoded, **parts)
    for _ in range(15):
        state, record = play(f, state)
        other, encoded = play(g, other)
        assert record.line == encoded.line
        assert torch.equal(state.weights, other.weights) and torch.equal(state.statistics, other.statistics)


@pytest.mark.parametrize("strategy", AND_LEAN, ids=repr)
def test_the_order_in_which_clients_are_trained_changes_no_bit(strategy) -> None:
    f, state = simulation(strategy, SAMPLERS[1], CLIENTS, channel=measured)
    g, other = simulation(strategy, SAMPLERS[1], CLIENTS, channel=measured, engine=Engine(reverse=True))
    for _ in range(15):
        state, record = play(f, state)
        other, reversed_ = play(g, other)
        assert record.line == reversed_.line
        assert torch.equal(state.weights, other.weights) and torch.equal(state.statistics, other.statistics)


def test_statistics_are_the_plain_mean_of_the_used_clients() -> None:
    f, state = simulation(GlueFL(), Sticky(6, 10, 4, over_commitment=1.5), CLIENTS, devices=Unreliable(lose))
    for round in range(1, 12):
        state, record = play(f, state)
        clients = zip(record.line["clients"]["id"], record.line["clients"]["fate"])
        used = sorted(client for client, fate in clients if fate == "used")
        mean = torch.stack([Engine().statistics(round, client) for client in used]).mean(0)
        assert torch.equal(state.statistics, mean)


@pytest.mark.parametrize("strategy", AND_LEAN, ids=repr)
def test_clients_that_know_the_initial_model_download_what_changed_since(strategy) -> None:
    """Replicas follow bit for bit (the channel compares hashes), and a newcomer misses what changed since version 0."""
    parts = {"devices": Unreliable(lose), "initial": "known"}
    f, state = simulation(strategy, SAMPLERS[1], CLIENTS, **parts)
    g, other = simulation(strategy, SAMPLERS[1], CLIENTS, channel=measured, **parts)
    whole_f, whole_state = simulation(strategy, SAMPLERS[1], CLIENTS, channel=measured, devices=Unreliable(lose))
    down, whole_down = 0, 0
    for round in range(15):
        before = state
        state, record = play(f, state)
        other, same = play(g, other)
        whole_state, whole_record = play(whole_f, whole_state)
        assert record.line == same.line and torch.equal(state.weights, whole_state.weights)
        assert record.line["cold"] == 0
        for client, age in zip(record.line["clients"]["id"], record.line["clients"]["staleness"]):
            assert age == before.ledger.version - before.ledger.held.get(client, 0)
        down, whole_down = down + record.line["down_bytes"], whole_down + whole_record.line["down_bytes"]
        if round == 0:  # nothing has changed: a package is its headers, the statistics and a mask
            assert record.line["down_bytes"] < 0.4 * whole_record.line["down_bytes"]
    assert down < whole_down
    assert f.channel.replicas and all(replica.version is not None for replica in f.channel.replicas.values())


# --- one replica ------------------------------------------------------------------------------------------


def package(replica: Replica, base, version, update, **fields) -> tuple[wire.Header, wire.Body]:
    body = wire.Body(
        update, torch.full_like(replica.statistics, 7.0), wire.Shared(Mask(torch.zeros(5, dtype=torch.bool))), True
    )
    return wire.Header(wire.PACKAGE, RUN, LAYOUT.fingerprint, 1, base, version, **fields), body


def test_a_package_brings_a_replica_to_the_next_version() -> None:
    nothing = Replica(torch.zeros(5), torch.zeros(2))
    assert nothing.hash == wire.NO_HASH
    first = nothing.apply(*package(nothing, None, 3, whole(torch.arange(5.0))))
    assert first.version == 3 and torch.equal(first.weights, torch.arange(5.0)) and first.statistics.tolist() == [7, 7]
    patch = Listed(torch.tensor([1, 4]), torch.tensor([9.0, -0.0]), 5)
    announced = wire.replica_hash(torch.tensor([0, 9.0, 2, 3, -0.0]), first.statistics)
    patched = first.apply(*package(first, 3, 8, patch, hash=announced))
    assert patched.version == 8 and patched.weights.tolist() == [0, 9, 2, 3, 0] and patched.hash == announced
    assert torch.equal(first.weights, torch.arange(5.0))  # the old one is as it was


def test_a_package_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    replica = Replica(torch.arange(5.0), torch.zeros(2), 3)
    patch = Listed(torch.tensor([1]), torch.tensor([9.0]), 5)
    for header, body, says in [
        (*package(replica, 2, 8, patch), "starts from version 2, this replica holds 3"),
        (*package(replica, None, 8, patch), "whole model"),
        (*package(replica, 3, 8, patch, hash=b"another!"), "was announced"),
    ]:
        with pytest.raises(WireError, match=says):
            replica.apply(header, body)
    assert torch.equal(replica.weights, torch.arange(5.0)) and replica.version == 3


def test_packages_name_the_hash_of_what_the_client_holds() -> None:
    f, state = simulation(STC(), Uniform(CLIENTS), CLIENTS, channel=delivered)
    held = wire.NO_HASH
    for _ in range(3):
        f.channel.sent.clear()
        now = wire.replica_hash(state.weights, state.statistics)
        state, _ = play(f, state)
        assert {(p.header.base_hash, p.header.hash) for p in f.channel.sent} == {(held, now)}
        held = now
