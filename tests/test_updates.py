"""Packages of STC's ternary updates: replicas are the server's weights bit for bit, whatever a client missed."""

import os
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import test_wire as plain
from federations import LAYOUT, Unreliable, delivered, measured, simulation
from gluefl import STC, Server, Sticky, Uniform, wire
from gluefl.errors import UsageError, WireError
from gluefl.parameters import ParameterError
from gluefl.simulation.round import play
from gluefl.strategies.coded import Coded
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import Listed, Masked, nothing, part_of
from gluefl.wire.messages import AROUND_BYTES
from gluefl.wire.updates import UPDATES, WEIGHTS, TernaryUpdates, Updates
from runs import options, small_run
from test_replicas import lose

STRATEGY = STC(0.1, "plain", server_feedback=True, ternary=True, cached_updates=3)
few = settings(max_examples=40, deadline=None)


def updates_of(size: int, densities: list[float], seed: int) -> Updates:
    """Updates of these densities, each with one position at least."""
    draws = np.random.default_rng(seed)
    signs = draws.choice(np.array([-1, 1], np.int8), (len(densities), size))
    signs *= draws.random((len(densities), size)) < np.array(densities)[:, None]
    signs[np.arange(len(densities)), draws.integers(0, size, len(densities))] = 1
    magnitudes = draws.random(len(densities), np.float32) * 2.0 ** draws.integers(-20, 4, len(densities))
    return Updates(torch.from_numpy(signs), torch.from_numpy(magnitudes.astype(np.float32)))


def applied(updates: Updates, held: torch.Tensor) -> torch.Tensor:
    """The weights after the updates, added one by one as the server does."""
    for row, magnitude in zip(updates.signs, updates.magnitudes):
        held = torch.where(row != 0, held + row * magnitude, held)
    return held


cases = st.tuples(
    st.sampled_from([1, 2, 9, 64, 700]),
    st.lists(st.sampled_from([0.0, 0.01, 0.1, 0.5, 0.99, 1.0]), min_size=1, max_size=6),
    st.integers(0, 999),
)


@few
@given(cases)
def test_updates_are_exact_and_measured(case) -> None:
    size, densities, seed = case
    updates = updates_of(size, densities, seed)
    held = torch.from_numpy(np.random.default_rng(seed).standard_normal(size).astype(np.float32))
    after, changed = applied(updates, held), (updates.signs != 0).any(0)
    codec = TernaryUpdates().sending(updates)
    for update in (part_of(after, Mask(changed)), Masked(Mask(changed), after)):
        data = codec.encode(update)
        assert len(data) == codec.measure(update)() <= codec.longest(update.count)
        found = TernaryUpdates().holding(held).decode(memoryview(data), update.positions)
        assert torch.equal(found.view(torch.int32), after[changed].view(torch.int32))


def test_the_shorter_form_is_sent() -> None:
    many, one = updates_of(700, [0.5] * 30, 1), updates_of(700, [0.1], 1)
    for updates, form in ((many, WEIGHTS), (one, UPDATES), (None, WEIGHTS)):
        update = part_of(torch.zeros(700), Mask(((one if updates is None else updates).signs != 0).any(0)))
        data = TernaryUpdates(updates).encode(update)
        assert data[:1] == form and (len(data) == 1 + 4 * update.count) == (form == WEIGHTS)
    assert TernaryUpdates().encode(nothing(5)) == WEIGHTS and TernaryUpdates().measure(nothing(5))() == 1


# --- damage -----------------------------------------------------------------------------------------------


@few
@given(st.binary(max_size=80), st.sampled_from([0, 1, 2, 9, 300]))
def test_garbage_is_refused_or_gives_values(garbage, size) -> None:
    for data in (garbage, UPDATES + garbage, UPDATES + bytes(4) + garbage):
        try:
            values = TernaryUpdates(held=torch.zeros(size)).decode(memoryview(data), torch.arange(size))
        except WireError:
            continue
        assert values.shape == (size,) and values.dtype == torch.float32


@few
@given(cases, st.data())
def test_a_damaged_message_is_refused_or_gives_values(case, data) -> None:
    size, densities, seed = case
    updates = updates_of(size, densities, seed)
    update = part_of(torch.zeros(size), Mask((updates.signs != 0).any(0)))
    sent = bytearray(TernaryUpdates(updates).encode(update))
    for _ in range(data.draw(st.integers(1, 3))):
        sent[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(0, 255))
    cut = memoryview(bytes(sent))[: data.draw(st.integers(0, len(sent)))]
    for damaged in (memoryview(bytes(sent)), cut):
        try:
            values = TernaryUpdates(held=torch.zeros(size)).decode(damaged, update.positions)
        except WireError:
            continue
        assert values.shape == (update.count,) and values.dtype == torch.float32


ONE = "0000803f"  # a magnitude of 1


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("", "form of no bytes"),
        ("02", "form 02"),
        ("00 0000", "10 values take 40 bytes, 2 were found"),
        ("01", "no update"),
        ("01 0000", "cut off"),
        (f"01 {ONE}", "cut off"),
        (f"01 {ONE} 03", "cut off"),
        ("01 000080bf 00 ffff", "negative"),
        ("01 0000c07f 00 ffff", "not finite"),
        (f"01 {ONE} 0a 00 01 ff01 ff", "10 of 10 positions"),
        (f"01 {ONE} 01 1f 01 01 01", "parameter 31"),
        (f"01 {ONE} ffffffffff01", "more than 5 bytes"),
        (f"01 {ONE} 01 00 7f 01 01", "is cut off after"),
        (f"01 {ONE} 00 ffff", "padding"),
        (f"01 {ONE} 00 ff", "is cut off after"),
        (f"01 {ONE} 02 00 01 03 02", "2 codes were announced, 1"),
        (f"01 {ONE} 01 04 01 01 1a", "outside the 10"),
        (f"01 {ONE} 01 00 02 01 0100", "bytes follow"),
        (f"01 {ONE} 00 ff03 07", "cut off"),
    ],
)
def test_damaged_updates_are_refused(data, says) -> None:
    codec = TernaryUpdates(held=torch.zeros(10))
    with pytest.raises(WireError, match=says):
        codec.decode(memoryview(bytes.fromhex(data)), torch.arange(10))


def test_updates_need_a_version_to_start_from() -> None:
    with pytest.raises(WireError, match="holds an earlier version"):
        TernaryUpdates().decode(memoryview(bytes.fromhex(f"01 {ONE} 00 ff03")), torch.arange(10))


def test_a_message_takes_memory_in_proportion_to_the_model() -> None:
    """As many codes as its longest message can hold: each takes a bit, unpacked it would take eight bytes."""
    size = 100_000
    full = bytes.fromhex(ONE) + b"\0" + b"\xff" * (size // 8)
    dense = size - 1
    coded = bytes.fromhex(ONE) + wire_varint(dense) + b"\0" + wire_varint(-(-dense // 8))
    dense_record = coded + b"\xff" * (dense // 8) + b"\x7f" + b"\xff" * (dense // 8) + b"\x7f"
    codec, positions = TernaryUpdates(held=torch.zeros(size)), torch.arange(size)
    for record in (full, dense_record):
        data = memoryview(UPDATES + record * (4 * size // len(record)))
        assert len(data) > 3 * size
        tracemalloc.start()
        try:
            codec.decode(data, positions)
            assert tracemalloc.get_traced_memory()[1] < 50 * size
        finally:
            tracemalloc.stop()


def wire_varint(number: int) -> bytes:
    return bytes([number & 127 | 128, number >> 7 & 127 | 128, number >> 14])


# --- golden file ------------------------------------------------------------------------------------------


def golden() -> tuple[wire.Body, torch.Tensor]:
    """From version 1 to version 3: an update of positions 1, 9, 30 and one of all that either changed."""
    held, signs = torch.arange(40) / 8, torch.zeros(2, 40, dtype=torch.int8)
    signs[0, [1, 9, 30]] = torch.tensor([1, -1, 1], dtype=torch.int8)
    signs[1, [1, 4, 9, 30, 31]] = torch.tensor([-1, 1, 1, -1, -1], dtype=torch.int8)
    updates = Updates(signs, torch.tensor([0.5, 0.125]))
    update = part_of(applied(updates, held), Mask((signs != 0).any(0)))
    none = wire.Shared(Mask.uniform(40, False, torch.device("cpu")))
    return wire.Body(update, torch.tensor([0.5, -3.0]), none, True, TernaryUpdates(updates)), held


def message() -> bytes:
    """The golden file."""
    return (plain.GOLDEN / "package-updates.bin").read_bytes()


def test_golden_file() -> None:
    body, held = golden()
    header = plain.header_of(body, version=3)
    data = wire.encode(header, wire.encode_body(body), 40, 2, body.codec)
    if "GLUEFL_WRITE_GOLDEN" in os.environ:
        (plain.GOLDEN / "package-updates.bin").write_bytes(data)
    assert data == message() and len(data) == wire.measure(body)
    expected = replace(plain.expected(body), codec=TernaryUpdates()).holding(held)
    found_header, found = wire.decode(data, expected)
    assert found_header == header
    plain.assert_same(found, body)


# --- federations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("initial", ["download", "known"])
@pytest.mark.parametrize("strategy", [STRATEGY, Coded(STRATEGY), replace(STRATEGY, cached_updates=50)], ids=repr)
def test_newcomers_and_clients_that_missed_much_come_to_the_same_weights(strategy, initial) -> None:
    """The channel compares the hash of every replica. What a client is sent depends on what it missed."""
    sampler = Sticky(6, 10, 4, over_commitment=1.5)
    sim, state = simulation(
        strategy, sampler, 40, devices=Unreliable(lose), initial=initial, channel=delivered, optimizer=Server(0.5)
    )
    for _ in range(25):
        state, _ = play(sim, state)
    forms: dict[str, set[bytes]] = {}
    for parcel in sim.channel.sent:
        base, version = parcel.header.base, parcel.header.version
        missed = "all" if base is None else "nothing" if base == version else "few" if version - base <= 3 else "many"
        forms.setdefault(missed, set()).add(form_of(parcel))
    assert UPDATES in forms["few"]
    kept = {Coded: 3, STC: strategy.cached_updates if isinstance(strategy, STC) else 0}[type(strategy)]
    assert (UPDATES in forms["many"]) == (kept > 3)
    assert forms.get("all", {WEIGHTS}) == {WEIGHTS} and ("all" in forms) == (initial == "download")


def form_of(parcel) -> bytes:
    """The first byte of the values, which are followed by the section of the statistics."""
    statistics = 16 + 4 * LAYOUT.statistics_size
    body = parcel.data[wire.HEADER_BYTES :]
    at = 0
    for _ in range(2):  # mask and positions
        at += 16 + int.from_bytes(body[at + 8 : at + 16], "little")
    assert at + 16 + int.from_bytes(body[at + 8 : at + 16], "little") + statistics == len(body)
    return body[at + 16 : at + 17]


def test_rounds_without_uploads_publish_a_version_without_an_update() -> None:
    """Nobody answers in every third round; clients that missed it have missed no update."""
    silent = False
    devices = Unreliable(lambda client, second: 0.5 if silent else None, is_there=lambda client: True)
    sim, state = simulation(STRATEGY, Uniform(5), 12, devices=devices, channel=delivered)
    for round in range(15):
        silent = round % 3 == 1
        state, _ = play(sim, state)
    rounds = state.strategy.cache.rounds
    assert state.round == 15 and rounds == (12, 13, 15)
    assert any(form_of(parcel) == UPDATES for parcel in sim.channel.sent)


def test_a_message_without_changes_is_short() -> None:
    body = wire.Body(
        Listed(torch.zeros(0, dtype=torch.int64), torch.zeros(0), 9), torch.zeros(0),
        wire.Shared(Mask.uniform(9, False, torch.device("cpu"))), True, TernaryUpdates(),
    )  # fmt: skip
    assert wire.measure(body) == AROUND_BYTES + 1


def test_a_resumed_run_sends_the_same_updates(tmp_path) -> None:
    """The cache is in the checkpoint: lengths of all packages are those of a run that was not interrupted."""
    parts = {"strategy": STRATEGY, "options": options(encode=True), "server": Server(0.8), "sampler": Uniform(4)}
    expected = small_run(**parts, out=tmp_path / "whole", rounds=12)
    small_run(out=tmp_path / "run", rounds=5, **parts)
    resumed = small_run(out=tmp_path / "run", rounds=12, resume=True, **parts)
    for name, tensor in expected.module.state_dict().items():
        assert torch.equal(resumed.module.state_dict()[name], tensor), name
    down = [[line["down_bytes"] for line in result.journal] for result in (expected, resumed)]
    assert down[0] == down[1]
    weights = small_run(**{**parts, "strategy": replace(STRATEGY, cached_updates=0)}, rounds=12)
    assert sum(down[0]) < sum(line["down_bytes"] for line in weights.journal)


def test_updates_do_not_change_what_is_learned() -> None:
    models = []
    for strategy in (STRATEGY, replace(STRATEGY, cached_updates=0)):
        sim, state = simulation(strategy, Uniform(6), 20, channel=measured, devices=Unreliable(lose, timed=False))
        for _ in range(8):
            state, _ = play(sim, state)
        models.append(state.weights)
    assert torch.equal(*models)


def test_combinations_that_cannot_work_are_refused() -> None:
    with pytest.raises(ParameterError, match="needs ternary = true"):
        STC(cached_updates=3)
    with pytest.raises(ParameterError, match="cached_updates"):
        STC(ternary=True, cached_updates=-1)
    with pytest.raises(ParameterError, match="TernaryUpdates; remove package"):
        Coded(STRATEGY, "float16")
    with pytest.raises(UsageError, match="momentum"):
        simulation(STRATEGY, Uniform(5), 12, optimizer=Server(0.5, 0.9))


def test_on_flower_weights_are_sent() -> None:
    pytest.importorskip("flwr")
    from gluefl.flower import GlueFLStrategy

    for strategy in (STRATEGY, Coded(STRATEGY)):
        with pytest.raises(UsageError, match="cached_updates = 3"):
            GlueFLStrategy(Uniform(2), strategy)
