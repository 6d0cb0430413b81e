"""The compact header and the codecs of whole bodies: what is sent is what arrives, and nothing else is accepted."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gluefl import Lean, wire
from gluefl.errors import WireError
from gluefl.strategies import Space, Statistic, Task
from gluefl.vectors.grid import Segments
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import Listed, Masked, whole
from gluefl.wire import compact
from gluefl.wire.bodies import BodyCodec
from gluefl.wire.floats8 import LARGEST, Floats8, rounded

CPU = torch.device("cpu")
STATISTICS = (Statistic(5, "mean"), Statistic(5, "variance"), Statistic(1, "counter"))
SPACE = Space((40, 7, 1), statistics=STATISTICS)
TRAITS = Lean(upload_block=64).traits(SPACE)
RUN, LAYOUT = b"this run", b"a layout"
SHARED = wire.Shared(SPACE.mask(False))
UINT32, FLOAT32 = st.integers(0, 2**32 - 2), st.floats(width=32, allow_nan=False)
HEADERS = st.builds(
    wire.Header, st.sampled_from([wire.PACKAGE, wire.UPLOAD]), st.just(RUN), st.just(LAYOUT), UINT32,
    st.none() | UINT32, UINT32, hash=st.binary(min_size=8, max_size=8), weight=FLOAT32, loss=FLOAT32, samples=UINT32,
    accepted=st.booleans(),
)  # fmt: skip


def expected(kind: int, **changes) -> wire.Expected:
    codec = TRAITS.package_codec if kind == wire.PACKAGE else TRAITS.upload_codec
    return replace(wire.Expected(RUN, LAYOUT, SPACE.size, SPACE.statistics_size, kind, None, codec), **changes)


def model(seed: int) -> torch.Tensor:
    """On grids: steps of 1/8, positive variances of three bits, a counter."""
    generator = torch.Generator().manual_seed(seed)
    weights, mean = (
        (torch.randn(SPACE.size + 5, generator=generator) * 8).round().div(8).add(0.0).split([SPACE.size, 5])
    )
    return torch.cat([weights, mean, torch.rand(5, generator=generator).mul(8).round().add(1) / 8, torch.ones(1)])


def package(density: float = 0.3, origin: torch.Tensor | None = None) -> bytes:
    vector = model(1)
    mask = Mask(torch.rand(vector.numel(), generator=torch.Generator().manual_seed(2)) < density)
    body = wire.Body(Masked(mask, vector), torch.zeros(0), SHARED, True, TRAITS.package_codec, origin)
    header = wire.Header(wire.PACKAGE, RUN, LAYOUT, 7, 3, 6, hash=b"12345678", weight=0.25, accepted=False)
    return wire.encode(header, wire.encode_body(body), SPACE.size, SPACE.statistics_size, body.codec)


def upload(delta: torch.Tensor | None = None) -> bytes:
    update, _ = Lean(upload_block=64).compress(
        model(3) if delta is None else delta, Task(7, SHARED.mask, 1, SPACE), None
    )
    body = wire.Body(update, torch.zeros(0), SHARED, False, TRAITS.upload_codec)
    header = wire.Header(wire.UPLOAD, RUN, LAYOUT, 7, 6, 6, loss=0.5, samples=20)
    return wire.encode(header, wire.encode_body(body), SPACE.size, SPACE.statistics_size, body.codec)


MESSAGES = [(wire.PACKAGE, package), (wire.UPLOAD, upload)]
both = pytest.mark.parametrize("kind, message", MESSAGES, ids=["package", "upload"])


# --- headers ----------------------------------------------------------------------------------------------


@given(HEADERS, st.binary(max_size=20))
def test_a_header_arrives_as_it_was_sent(header, body) -> None:
    data = compact.encode(header, body, SPACE.size, SPACE.statistics_size, expected(header.kind).codec.code)
    assert len(data) == compact.HEADER_BYTES + len(body)
    received, rest = compact.read(data, expected(header.kind))
    assert received == header and bytes(rest) == body


def test_the_hash_of_the_base_is_not_sent_and_numbers_are_float32() -> None:
    header = wire.Header(wire.PACKAGE, RUN, LAYOUT, 1, 0, 1, base_hash=b"the base", weight=0.1, loss=1e300)
    data = compact.encode(header, b"", SPACE.size, SPACE.statistics_size, TRAITS.package_codec.code)
    received, _ = compact.read(data, expected(wire.PACKAGE))
    assert received.base_hash == wire.NO_HASH and received.weight == float(torch.tensor(0.1))
    assert received.loss == math.inf  # a server that reads it sees that the client diverged


@both
def test_every_flipped_bit_is_seen(kind, message) -> None:
    data = message()
    wire.decode(data, expected(kind))
    for bit in range(8 * len(data)):
        mutated = bytearray(data)
        mutated[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            wire.decode(bytes(mutated), expected(kind))


@both
def test_a_message_that_is_cut_off_or_goes_on_is_refused(kind, message) -> None:
    data = message()
    for other in [*(data[:end] for end in range(len(data))), data + b"\0", b"\0" + data, data * 2, data + bytes(10**5)]:
        with pytest.raises(WireError):
            wire.decode(other, expected(kind))


@both
@pytest.mark.parametrize(
    "changes",
    [{"run": b"that run"}, {"layout": b"a leyout"}, {"size": SPACE.size + 1}, {"statistics": 12}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_message_of_another_run_layout_or_size_is_refused(kind, message, changes) -> None:
    with pytest.raises(WireError, match="of another run or model"):
        wire.decode(message(), expected(kind, **changes))


@both
def test_a_message_of_the_other_kind_or_codec_is_refused(kind, message) -> None:
    other = wire.PACKAGE + wire.UPLOAD - kind
    with pytest.raises(WireError, match="kind is"):
        wire.decode(message(), expected(other))
    with pytest.raises(WireError, match="codec is"):
        wire.decode(message(), expected(kind, codec=expected(other).codec))


@both
def test_the_two_formats_are_not_taken_for_each_other(kind, message) -> None:
    long = replace(expected(kind), codec=wire.FLOAT32, shared=SHARED)
    with pytest.raises(WireError, match="do not start with a gluefl header"):
        wire.decode(message() + bytes(200), long)
    body = wire.Body(whole(torch.ones(SPACE.size)), torch.zeros(11), SHARED, kind == wire.PACKAGE)
    old = wire.encode(wire.Header(kind, RUN, LAYOUT, 1, 0, 1), wire.encode_body(body), SPACE.size, 11)
    wire.decode(old, long)
    with pytest.raises(WireError, match="format is"):
        wire.decode(old, expected(kind))


@both
def test_bodies_of_noise_are_refused_or_read(kind, message) -> None:
    """Past the checksum, so that the codecs themselves see it."""
    header, body = compact.read(message(), expected(kind))
    generator = torch.Generator().manual_seed(5)
    for trial in range(300):
        noise = bytearray(body)
        for _ in range(1 + trial % 3):
            noise[int(torch.randint(len(noise), (), generator=generator))] = trial % 256
        noise = noise[: len(noise) - trial % 2]
        data = compact.encode(header, bytes(noise), SPACE.size, SPACE.statistics_size, expected(kind).codec.code)
        try:
            update = wire.decode(data, expected(kind))[1].update
        except WireError:
            continue
        assert torch.isfinite(update.values).all() and update.count <= update.size


# --- bodies -----------------------------------------------------------------------------------------------


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@settings(max_examples=40)
@given(st.floats(0, 1), st.integers(0, 99), st.sampled_from([None, "near", "far"]), st.booleans())
@example(0.0, 0, None, False)
@example(1.0, 0, "near", True)
def test_a_package_is_measured_as_it_is_encoded_and_arrives(density, seed, relative, listed) -> None:
    vector, codec = model(seed), TRAITS.package_codec
    origin = {
        None: None,
        "near": vector - torch.cat([torch.full((53,), 0.125), torch.zeros(6)]),
        "far": model(seed + 1),
    }
    mask = Mask(torch.rand(vector.numel(), generator=torch.Generator().manual_seed(seed)) <= density)
    update = Listed(mask.positions, vector[mask.positions], vector.numel()) if listed else Masked(mask, vector)
    body = wire.Body(update, torch.zeros(0), SHARED, True, codec, origin[relative])
    data = wire.encode_body(body)
    assert len(data) == codec.measure([body])[0] == wire.measure(body) - compact.HEADER_BYTES
    assert len(data) <= codec.longest(vector.numel())
    received = codec.decode(memoryview(data), origin[relative])
    assert torch.equal(received.positions, mask.positions) and same(received.values, vector[mask.positions])
    assert codec.measure([body, body]) == 2 * [len(data)] and codec.measure([]) == []


@settings(max_examples=40)
@given(st.integers(0, 99), st.integers(1, 4), st.sampled_from([0.01, 0.3, 1.0]), st.sampled_from([0.0, 1e-30, 1, 1e20]))
def test_an_upload_is_measured_as_it_is_encoded_and_arrives(seed, bits, share, scale) -> None:
    strategy = Lean(upload_bits=bits, upload_share=share, upload_block=64)
    codec = strategy.traits(SPACE).upload_codec
    delta = torch.randn(59, generator=torch.Generator().manual_seed(seed)) * scale
    update, residual = strategy.compress(delta, Task(seed, SHARED.mask, 1.0, SPACE, seed), None)
    body = wire.Body(update, torch.zeros(0), SHARED, False, codec)
    data = wire.encode_body(body)
    assert len(data) == codec.measure([body])[0] == codec.fixed_bytes == codec.estimate(update) == codec.longest(59)
    assert wire.measure(body) == wire.expected_bytes(body) == compact.HEADER_BYTES + len(data)
    assert same(codec.decode(memoryview(data), None).values, update.values) and residual is None
    with pytest.raises(WireError):
        codec.decode(memoryview(data)[:-1], None)


@pytest.mark.parametrize("density", [0.002, 0.01, 0.1, 0.4])
def test_estimates_are_close_where_positions_are_random(density) -> None:
    space, generator = Space((40000, 300, 20000)), torch.Generator().manual_seed(1)
    codec = Lean().traits(space).package_codec
    moved = torch.randn(space.size, generator=generator).mul(1.5).round()
    mask = Mask(torch.rand(space.size, generator=generator) < density)
    body = wire.Body(Masked(mask, moved), torch.zeros(0), wire.Shared(space.mask(False)), True, codec)
    assert wire.expected_bytes(body) == pytest.approx(wire.measure(body), rel=0.1)


def test_codecs_of_bodies_are_such() -> None:
    assert isinstance(TRAITS.package_codec, BodyCodec) and isinstance(TRAITS.upload_codec, BodyCodec)
    assert not isinstance(wire.FLOAT32, BodyCodec)


# --- statistics in eight bits -----------------------------------------------------------------------------


@given(st.lists(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), max_size=6), max_size=5), st.integers(-100, 0))
def test_statistics_arrive_as_they_were_rounded(tensors, exponent) -> None:
    sizes = tuple(map(len, tensors))
    values = torch.tensor([value for tensor in tensors for value in tensor]) * 2.0**exponent
    near, codec = rounded(values, Segments(sizes, CPU)), Floats8(sizes)
    data = codec.encode(near)
    assert len(data) == codec.length and same(codec.decode(memoryview(data)), near)
    assert same(rounded(near, Segments(sizes, CPU)), near)
    for part, rest in zip(values.split(list(sizes)), near.split(list(sizes))):
        largest = float(part.abs().max()) if part.numel() else 0.0
        tolerance = part.double().abs() / 16 + largest / LARGEST * 2.0**-9 + 2.0**-128
        assert ((part.double() - rest.double()).abs() <= tolerance).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_and_spoils_no_other_value(value) -> None:
    values, segments = torch.tensor([1.0, value, 3.0, 5.0]), Segments((3, 1), CPU)
    near = rounded(values, segments)
    assert not near[1].isfinite() and near[[0, 2, 3]].tolist() == [1, 3, 5]
    with pytest.raises(WireError, match="not a finite number"):
        Floats8((3, 1)).decode(memoryview(Floats8((3, 1)).encode(near)))
