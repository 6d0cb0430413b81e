"""Values in fewer bits: codecs are exact, rounding is unbiased, and replicas are the server's model bit for bit."""

import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from federations import Unreliable, measured, simulation
from gluefl import APF, STC, Adam, FedAvg, GlueFL, Lean, Server, Sticky, Uniform
from gluefl.config import to_toml, validated
from gluefl.config.tables import strategy_of
from gluefl.errors import UsageError, WireError
from gluefl.parameters import ParameterError
from gluefl.privacy import Private
from gluefl.simulation.round import play
from gluefl.strategies import Space, Task, Upload
from gluefl.strategies.coded import Coded
from gluefl.strategies.registry import name_of, row_of
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import Masked, nothing, part_of, whole
from gluefl.wire.blocks import BLOCK, BlockIntegers, rounded, rounded_whole
from gluefl.wire.ternary import Signs
from gluefl.wire.values import FLOAT16, halved
from runs import options, small_run
from test_replicas import lose

CLIENTS = 40
STC_OF_ITS_AUTHORS = STC(0.1, "plain", server_feedback=True, ternary=True)
STC_WITH_UPDATES = replace(STC_OF_ITS_AUTHORS, cached_updates=3)
CODED = [
    *(Coded(FedAvg(), package, "rotated") for package in ("float32", "float16", "int8", "int4")),
    *(Coded(FedAvg(), "int4", upload) for upload in ("float16", "int8", "int4")),
    Coded(GlueFL(), "float16", "float16"),
    Coded(GlueFL(0.3, 0.1, 3, "plain", "tensor"), "float16", "int8"),
    Coded(STC(0.2, "rescaled"), "float16", "int4"),
    Coded(APF(0.3, 2, 0.5), "float16", "int8"),
    STC_OF_ITS_AUTHORS,
    STC_WITH_UPDATES,
    Coded(STC_OF_ITS_AUTHORS, "float16"),
]
sizes = st.sampled_from([0, 1, 2, 255, 256, 257, 700])
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=20, deadline=None)


def vector(size: int, seed: int) -> torch.Tensor:
    """Values whose magnitudes differ from block to block, some blocks of zeros."""
    draws = np.random.default_rng(seed)
    scales = np.repeat(2.0 ** draws.integers(-30, 30, -(-size // 100)) * (draws.random(-(-size // 100)) < 0.9), 100)
    return torch.from_numpy((draws.standard_normal(size) * scales[:size]).astype(np.float32))


def is_exact(codec, update) -> bool:
    """Whether the values come back bit for bit, in as many bytes as were measured."""
    data = codec.encode(update)
    assert len(data) == codec.measure(update)() <= codec.longest(update.count)
    decoded = codec.decode(memoryview(data), update.positions)
    return torch.equal(decoded.view(torch.int32), update.values.contiguous().view(torch.int32))


@few
@given(sizes, seeds)
def test_codecs_are_exact_for_rounded_values(size, seed) -> None:
    x = vector(size, seed)
    assert is_exact(FLOAT16, whole(halved(x)))
    for bits in (8, 4):
        assert is_exact(BlockIntegers(bits), rounded(whole(x), bits, np.random.default_rng(seed)))
        assert is_exact(BlockIntegers(bits), whole(rounded_whole(x, bits)))
    for codec in (Signs(), Signs(100)):
        signs = torch.from_numpy(np.random.default_rng(seed).choice([-1.0, 1.0], size).astype(np.float32))
        magnitudes = torch.arange(-(-size // 100)).repeat_interleave(100)[:size] if codec.block else 3.7
        assert is_exact(codec, whole(signs * magnitudes))


@few
@given(sizes, seeds, st.floats(-40, 40))
def test_the_difference_of_two_rounded_vectors_is_exact(size, seed, jump) -> None:
    """The server adds an update to what it published before: that must be what it publishes now."""
    x, y = vector(size, seed), vector(size, seed + 1)
    y = torch.where(torch.rand(size, generator=torch.Generator().manual_seed(seed)) < 0.5, x * 1.1, y * 2.0**jump)
    for bits in (8, 4):
        before = rounded_whole(x, bits)
        after = rounded_whole(y, bits, before)
        assert torch.equal(before + (after - before), after)
        assert is_exact(BlockIntegers(bits), whole(after))
    after = halved(x) + (halved(y) - halved(x))
    assert is_exact(FLOAT16, whole(after))
    torch.testing.assert_close(after, halved(y), rtol=0, atol=float(halved(x).abs().max()) / 2**23 if size else 0)


@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_is_nearest_down_and_unbiased_up(bits) -> None:
    x = torch.randn(3 * BLOCK + 5, generator=torch.Generator().manual_seed(1))
    step = 1.125 * x.abs().max() / (2 ** (bits - 1) - 1)  # mantissas of scales are an eighth apart
    assert float((rounded_whole(x, bits) - x).abs().max()) <= float(step / 2)
    draws = np.random.default_rng(5)
    mean = sum(rounded(whole(x), bits, draws).values.double() for _ in range(400)) / 400
    assert float((mean - x).abs().max()) < 5 * float(step) / 2 / 20  # five standard errors


@few
@given(sizes, seeds, st.booleans())
def test_masked_and_listed_values_are_rounded_alike(size, seed, counted) -> None:
    x, bits = vector(size, seed), torch.rand(size, generator=torch.Generator().manual_seed(seed)) < 0.4
    masked = Masked(Mask(bits, int(bits.sum()) if counted else None), x)
    one = rounded(masked, 8, np.random.default_rng(seed))
    other = rounded(part_of(x, Mask(bits)), 8, np.random.default_rng(seed))
    assert torch.equal(one.values, other.values)


@few
@given(
    st.sampled_from([FLOAT16, BlockIntegers(8), BlockIntegers(4), Signs(), Signs(64)]), st.binary(max_size=80), sizes
)
def test_decoding_refuses_or_gives_finite_values(codec, data, size) -> None:
    try:
        values = codec.decode(memoryview(data), torch.arange(size))
    except WireError:
        return
    assert values.shape == (size,) and values.dtype == torch.float32
    assert codec is FLOAT16 or bool(torch.isfinite(values).all())


def test_damaged_values_are_refused() -> None:
    eight, four, signs = BlockIntegers(8), BlockIntegers(4), Signs()
    for codec, data, message in (
        (eight, b"\x80\x3f\x80", "outside -127 to 127"),
        (four, b"\x80\x3f\x08", "outside -7 to 7"),
        (four, b"\x80\x3f\x11", "padding"),
        (eight, b"\x80\xbf\x01", "scale"),
        (eight, b"\xc0\x7f\x01", "scale"),
        (eight, b"\x80\x3f", "1 values take 3 bytes, 2 were found"),
        (signs, b"\0\0\x80\x3f\x03", "padding"),
        (signs, b"\0\0\x80\xbf\x01", "magnitude"),
        (FLOAT16, b"\0", "1 values take 2 bytes, 1 were found"),
    ):
        with pytest.raises(WireError, match=message):
            codec.decode(memoryview(data), torch.arange(1))
    for codec, values in ((eight, [1.0, 0.3]), (signs, [1.0, -2.0]), (FLOAT16, [1.0, 0.1])):
        with pytest.raises(ValueError):
            codec.encode(whole(torch.tensor(values)))


def test_layouts_by_example() -> None:
    values = torch.tensor([1.0, -7.0, 3.0])
    assert BlockIntegers(4).encode(whole(values)) == bytes.fromhex("803f 9103")
    assert BlockIntegers(8).encode(whole(127 * values[:1])) == bytes.fromhex("803f 7f")
    assert Signs().encode(whole(torch.tensor([2.0, -2.0, 2.0]))) == bytes.fromhex("00000040 05")
    assert FLOAT16.encode(whole(values[:1])) == bytes.fromhex("003c")
    for codec in (FLOAT16, BlockIntegers(8), BlockIntegers(4), Signs(), Signs(9)):
        assert codec.encode(nothing(5)) == b"" and codec.measure(nothing(5))() == 0
    codes = [FLOAT16.code, BlockIntegers(8).code, BlockIntegers(4).code, Signs().code, Signs(9).code]
    assert codes == [1, 2, 3, 4, 5]


# --- the strategy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", CODED, ids=repr)
def test_replicas_are_the_servers_model_over_rounds_with_misses(strategy) -> None:
    """The channel encodes and decodes every message and compares lengths and hashes on the way."""
    sampler = Sticky(6, 10, 4, over_commitment=1.5)
    momentum = 0.9 if strategy.traits(Space((1,))).optimizer_may_remember else 0.0
    for initial, optimizer in (("download", Server()), ("known", Server(0.5, momentum))):
        sim, state = simulation(
            strategy, sampler, CLIENTS, devices=Unreliable(lose), initial=initial, optimizer=optimizer
        )
        for _ in range(15):
            state, _ = play(sim, state)
        assert len(sim.channel.replicas) > CLIENTS // 4
        current = [replica for replica in sim.channel.replicas.values() if replica.version == state.ledger.version - 1]
        assert current and any(replica.version < state.ledger.version - 3 for replica in sim.channel.replicas.values())


@pytest.mark.parametrize("strategy", CODED, ids=repr)
def test_measured_messages_have_the_bytes_of_encoded_ones(strategy) -> None:
    journals = []
    for parts in ({}, {"channel": measured}):
        sim, state = simulation(strategy, Uniform(5, over_commitment=1.6), CLIENTS, devices=Unreliable(lose), **parts)
        lines = []
        for _ in range(6):
            state, record = play(sim, state)
            lines.append(record.line)
        journals.append((lines, state.weights))
    assert journals[0][0] == journals[1][0] and torch.equal(journals[0][1], journals[1][1])


@pytest.mark.parametrize("inner", [FedAvg(), STC(0.2, "plain"), APF(0.3, 2, 0.5), GlueFL()], ids=repr)
def test_float32_both_ways_is_the_strategy_inside(inner) -> None:
    results = []
    for strategy in (inner, Coded(inner)):
        sim, state = simulation(strategy, Sticky(6, 10, 4), CLIENTS, optimizer=Server(0.7, 0.9))
        lines = []
        for _ in range(12):
            state, record = play(sim, state)
            lines.append(record.line)
        results.append((lines, state.weights))
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])


def test_what_is_published_is_the_latent_model_rounded() -> None:
    for strategy, bound in ((Coded(FedAvg(), "int8"), 0.01), (Coded(FedAvg(), "int4"), 0.2)):
        sim, state = simulation(strategy, Uniform(6), CLIENTS, optimizer=Adam(0.05))
        exact, other = simulation(FedAvg(), Uniform(6), CLIENTS, optimizer=Adam(0.05))
        for _ in range(10):
            (state, _), (other, _) = play(sim, state), play(exact, other)
            assert torch.equal(state.weights, state.strategy.published)
            torch.testing.assert_close(state.strategy.latent, other.weights, atol=1e-5, rtol=1e-5)
            gap = (state.weights - state.strategy.latent).norm() / state.weights.norm()
            assert 0 < float(gap) < bound  # nothing accumulates


def test_rounding_of_an_upload_goes_into_the_residual() -> None:
    space = Space((300,))
    delta = torch.randn(300, generator=torch.Generator().manual_seed(3))
    for inner in (STC(0.2, "plain"), STC(0.2, "rescaled"), GlueFL(compensation="rescaled"), STC(0.2)):
        task = Task(2, space.mask(False), 0.25, space, 7, 1)
        sent, residual = Coded(inner, upload="int4").compress(delta, task, None)
        if inner.compensation == "none":
            assert residual is None
            continue
        factor = 0.25 if inner.compensation == "rescaled" else 1.0
        torch.testing.assert_close(residual, factor * (delta - sent.dense()))
        assert float(residual[sent.positions].abs().max()) > 0


def test_rotated_uploads_take_a_bit_and_their_mean_is_the_update() -> None:
    size, clients = 4096 + 300, 150
    space, strategy = Space((size,)), Coded(FedAvg(), upload="rotated")
    delta = torch.randn(size, generator=torch.Generator().manual_seed(3))
    uploads = []
    for client in range(clients):
        update, residual = strategy.compress(delta, Task(1, space.mask(True), 1.0, space, client, 9), None)
        assert residual is None and update.is_whole
        uploads.append(Upload(client, 1 / clients, update, torch.zeros(0), 9))
    assert strategy.traits(space).upload_codec.measure(uploads[0].update)() == size // 8 + 1 + 2 * 4
    state, _ = strategy.init(space, torch.zeros(size))
    mean, one = strategy.combine(state, uploads, 1), strategy.combine(state, [replace(uploads[0], weight=1.0)], 1)
    for part in (slice(0, 4096), slice(4096, size)):
        relative = [float((estimate - delta)[part].norm() / delta[part].norm()) for estimate in (mean, one)]
        assert relative[0] < 0.12 and 0.6 < relative[1] < 1.3


def test_ternary_values_feed_both_errors_back(monkeypatch) -> None:
    space, delta = Space((400,)), torch.randn(400, generator=torch.Generator().manual_seed(3))
    strategy = STC_OF_ITS_AUTHORS
    sent, residual = strategy.compress(delta, Task(1, space.mask(False), 0.5, space), None)
    assert sent.count == 40 and len(sent.values.abs().unique()) == 1
    torch.testing.assert_close(sent.values.abs()[0], delta[sent.positions].abs().mean())
    torch.testing.assert_close(sent.dense() + residual, delta)
    state, _ = strategy.init(space, torch.zeros(400))
    state, update = strategy.aggregate(state, delta, 1)
    torch.testing.assert_close(update.dense() + state.residual, delta)
    assert len(update.values.abs().unique()) == 1
    monkeypatch.setattr("gluefl.strategies.stc.part_of", lambda vector, mask: Masked(mask, vector))  # as on a GPU
    other, rest = strategy.compress(delta, Task(1, space.mask(False), 0.5, space), None)
    assert isinstance(other, Masked) and torch.equal(other.mask.bits, sent.mask.bits)
    torch.testing.assert_close(other.dense(), sent.dense())
    torch.testing.assert_close(rest, residual)


def test_coordinates_that_are_zero_have_no_sign(monkeypatch) -> None:
    """One bit has two signs only: what is zero among the chosen is not sent, and never moves."""
    space, delta = Space((8,)), torch.tensor([1.0, -2.0, 0, -0.0, 0, 0, 0, 0])
    strategy = STC(0.5, ternary=True)
    state, _ = strategy.init(space, torch.zeros(8))
    for form in (part_of, lambda vector, mask: Masked(mask, vector)):  # as on a CPU, and as on a GPU
        monkeypatch.setattr("gluefl.strategies.stc.part_of", form)
        for vector, expected, count in ((delta, [1.5, -1.5], 2), (torch.zeros(8), [0, 0], 4)):
            sent, _ = strategy.compress(vector, Task(1, space.mask(False), 1.0, space), None)
            _, update = strategy.aggregate(state, vector, 1)
            for ternary in (sent, update):  # one without positions could not be kept for later downloads
                assert ternary.dense().tolist() == [*expected, 0, 0, 0, 0, 0, 0] and ternary.count == count


@pytest.mark.parametrize(
    ("strategy", "codecs", "reason"),
    [
        (GlueFL(), {"package": "int8"}, "different grids"),
        (STC(), {"package": "int4"}, "different grids"),
        (APF(), {"upload": "rotated"}, "a rotation mixes"),
        (Lean(), {}, "codecs of its own"),
        (Private(FedAvg(), 1.0, 1.0, 0.5), {"upload": "rotated"}, r"belongs inside it, Private\(Coded"),
        (Coded(FedAvg(), package="int8"), {"upload": "int8"}, "around another strategy"),
        (STC_OF_ITS_AUTHORS, {"upload": "int8"}, "Signs"),
        (FedAvg(), {"package": "rotated"}, "float32', 'float16', 'int8' or 'int4'; found 'rotated'"),
        (FedAvg(), {"upload": "int2"}, "'int4' or 'rotated'; found 'int2'"),
        (3, {}, "should be an object that has"),
    ],
)
def test_combinations_that_cannot_work_are_refused(strategy, codecs, reason) -> None:
    with pytest.raises(ParameterError, match=reason):
        Coded(strategy, **codecs)


def test_a_configuration_names_codecs() -> None:
    config = validated({"strategy": {"name": "fedavg"}, "wire": {"package": "int8", "upload": "rotated"}})
    assert strategy_of(config.strategy, config.wire) == Coded(FedAvg(), "int8", "rotated")
    again = validated(tomllib.loads(to_toml(config)))
    assert again == config and tomllib.loads(to_toml(config))["wire"]["package"] == "int8"
    plain = validated({"strategy": {"name": "fedavg"}})
    assert strategy_of(plain.strategy, plain.wire) == FedAvg()
    float32 = validated({"strategy": {"name": "fedavg"}, "wire": {"package": "float32"}})
    assert strategy_of(float32.strategy, float32.wire) == FedAvg()
    for name, wire, reason in (
        ("lean", {"package": "float32"}, "wire: Lean has codecs of its own"),
        ("gluefl", {"package": "int8"}, "wire: package = 'int8' needs a strategy"),
        ("fedavg", {"upload": "drive"}, "wire.upload: input should be 'float32', 'float16'"),
    ):
        with pytest.raises(UsageError, match=reason):
            validated({"strategy": {"name": name}, "wire": wire})


def test_names_and_defaults_are_those_of_the_strategy_inside() -> None:
    assert name_of(Coded(FedAvg(), "int8", "rotated")) == "fedavg (int8 down, rotated up)" != name_of(FedAvg())
    assert row_of(Coded(GlueFL(), "float16")) is row_of(GlueFL())


@pytest.mark.parametrize("strategy", [Coded(GlueFL(regenerate_every=6), "float16", "int8"), STC_OF_ITS_AUTHORS])
def test_a_resumed_run_gives_the_same(strategy, tmp_path) -> None:
    momentum = 0.5 if strategy is STC_OF_ITS_AUTHORS else 0.0  # refused before a selection of coded packages
    parts = {"strategy": strategy, "options": options(encode=True), "server": Server(0.8, momentum)}
    expected = small_run(**parts, rounds=12)
    small_run(out=tmp_path / "run", rounds=5, **parts)
    resumed = small_run(out=tmp_path / "run", rounds=12, resume=True, **parts)
    assert resumed.summary["strategy"] == name_of(strategy)
    for name, tensor in expected.module.state_dict().items():
        assert torch.equal(resumed.module.state_dict()[name], tensor), name
