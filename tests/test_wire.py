"""Bytes: what is decoded is what was encoded, measured is encoded, and anything else is one kind of error."""

import os
import struct
import tracemalloc
import zlib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from gluefl import wire
from gluefl.accel.resources import resources
from gluefl.accel.streams import on_side_stream, recorded
from gluefl.accel.threads import submit
from gluefl.errors import GlueFLError, WireError
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import Masked, part_of
from gluefl.wire import layouts, positions
from gluefl.wire.encoder import ABSOLUTE, BESIDE_MASK, KNOWN, PositionSet, _from_gpu, _from_gpu_after
from gluefl.wire.messages import HEADER, SECTION

GOLDEN = Path(__file__).parent / "golden"
RUN, LAYOUT = b"runrunru", b"layoutla"


def mask_of(size, share, seed) -> torch.Tensor:
    """A mask with exactly ⌊share·size⌋ positions."""
    return torch.from_numpy(np.random.default_rng(seed).permutation(size) < int(share * size))


masks = st.builds(
    mask_of,
    st.integers(0, 3000),
    st.sampled_from([0, 0.005, 0.1, 0.2, 0.5, 0.9, 0.997, 1]),
    st.integers(0, 99),
)


@st.composite
def bodies(draw) -> wire.Body:
    """Any relation of positions and mask: apart, equal, inside, around, crossing; both empty or full."""
    size, seed = draw(st.integers(1, 2000)), draw(st.integers(0, 99))
    shares = st.sampled_from([0, 0.01, 0.16, 0.5, 1])
    shared = mask_of(size, draw(shares), seed)
    chosen = mask_of(size, draw(shares), seed + 1)
    chosen = draw(st.sampled_from([chosen, chosen | shared, chosen & shared, shared]))
    return body_of(chosen, shared, draw(st.integers(0, 5)), draw(st.booleans()), seed)


def body_of(chosen, shared, statistics=2, sends_mask=True, seed=0) -> wire.Body:
    rng = np.random.default_rng(seed)
    bits = torch.from_numpy(rng.integers(0, 2**32, chosen.numel(), dtype=np.uint32).view(np.float32))  # NaN included
    extra = torch.from_numpy(rng.standard_normal(statistics).astype(np.float32))
    return wire.Body(part_of(bits, Mask(chosen)), extra, wire.Shared(Mask(shared)), sends_mask)


def header_of(body, **fields) -> wire.Header:
    kind = wire.PACKAGE if body.sends_mask else wire.UPLOAD
    return wire.Header(kind, RUN, LAYOUT, **{"round": 3, "base": 1, "version": 2, **fields})


def encoded(body, **fields) -> bytes:
    return wire.encode(header_of(body, **fields), wire.encode_body(body), body.update.size, body.statistics.numel())


def expected(body) -> wire.Expected:
    kind = wire.PACKAGE if body.sends_mask else wire.UPLOAD
    shared = None if body.sends_mask else body.shared
    return wire.Expected(RUN, LAYOUT, body.update.size, body.statistics.numel(), kind, shared)


def assert_same(found: wire.Body, body: wire.Body) -> None:
    assert torch.equal(found.update.positions, body.update.positions)
    assert torch.equal(found.update.values.view(torch.int32), body.update.values.view(torch.int32))
    assert torch.equal(found.statistics, body.statistics)
    assert torch.equal(found.shared.mask.bits, body.shared.mask.bits)
    assert (found.update.size, found.sends_mask) == (body.update.size, body.sends_mask)


def signed(header: tuple, body: bytes) -> bytes:
    """A message with these header fields and this body, and checksums that are right."""
    fields = HEADER.pack(*header[:-2], len(body), zlib.crc32(body))
    return fields + struct.pack("<I", zlib.crc32(fields)) + body


def with_body(data: bytes, body: bytes) -> bytes:
    return signed(HEADER.unpack(data[: HEADER.size]), body)


# --- laws -------------------------------------------------------------------------------------------------


@given(masks)
def test_unpacking_gives_back_the_mask(mask) -> None:
    packed = wire.pack(Mask(mask))
    assert torch.equal(wire.unpack(packed, mask.numel()).bits, mask) and packed.count == int(mask.sum())
    assert len(packed.data) <= -(-mask.numel() // 8)  # a bitmap is never beaten by something longer


def test_every_codec_is_used_where_it_is_smallest() -> None:
    shapes = [(100, 0), (100, 1), (20, 0.5), (50_000, 0.2), (50_000, 0.001), (50_000, 0.999)]
    assert [wire.pack(Mask(mask_of(*shape, 0))).codec for shape in shapes] == list(range(len(positions.CODECS)))


@given(
    bodies(),
    st.integers(0, 2**32 - 1),
    st.one_of(st.none(), st.integers(0, 2**32 - 2)),
    st.booleans(),
    st.floats(allow_nan=False),
)
def test_decoding_gives_back_the_message(body, round, base, accepted, weight) -> None:
    header = header_of(
        body, round=round, base=base, version=5, base_hash=b"basebase", hash=b"hashhash", weight=weight,
        loss=-weight, samples=200, accepted=accepted,
    )  # fmt: skip
    data = wire.encode(header, wire.encode_body(body), body.update.size, body.statistics.numel())
    found_header, found = wire.decode(data, expected(body))
    assert found_header == header
    assert_same(found, body)
    assert wire.measure(body) == len(data) <= expected(body).longest


@given(bodies())
def test_positions_inside_the_mask_cost_nothing(body) -> None:
    relation, packed = PositionSet.of(body.update, body.shared).encode()
    inside = bool((body.shared.mask.bits & ~body.update.mask.bits).any())
    if relation == BESIDE_MASK:
        assert not inside and packed.count == body.update.count - body.shared.mask.count
    else:
        assert relation == ABSOLUTE and packed.count == body.update.positions.numel()
        assert inside or not body.shared.mask.count or body.update.density == 1


def test_a_hash_tells_any_bit_apart() -> None:
    weights, statistics = torch.arange(5.0), torch.arange(3.0)
    same = wire.replica_hash(weights, statistics)
    assert same == wire.replica_hash(weights.clone(), statistics.clone()) and len(same) == 8
    assert same != wire.replica_hash(weights, statistics + 2**-20)
    assert wire.replica_hash(torch.tensor([0.0]), statistics) != wire.replica_hash(torch.tensor([-0.0]), statistics)


# --- damaged, foreign and hostile messages ----------------------------------------------------------------

SMALL = body_of(mask_of(40, 0.3, 1) | mask_of(40, 0.1, 2), mask_of(40, 0.1, 2))
SMALL_UPLOAD = replace(SMALL, sends_mask=False)
SPARSE = body_of(mask_of(4000, 0.003, 1), mask_of(4000, 0.2, 2), statistics=0)


@pytest.mark.parametrize("body", [SMALL, SMALL_UPLOAD, SPARSE], ids=["package", "upload", "zstd"])
def test_every_cut_and_every_flipped_byte_is_noticed(body) -> None:
    data = encoded(body)
    for at in range(len(data)):
        for flip in (1, 0x80, 0xFF):
            with pytest.raises(WireError):
                wire.decode(data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :], expected(body))
        with pytest.raises(WireError):
            wire.decode(data[:at], expected(body))
    with pytest.raises(WireError):
        wire.decode(data + b"\0", expected(body))
    with pytest.raises(WireError):
        wire.decode(bytes(expected(body).longest + 1), expected(body))


@pytest.mark.parametrize("body", [SMALL, SMALL_UPLOAD, SPARSE], ids=["package", "upload", "zstd"])
def test_damage_with_right_checksums_is_refused_or_a_message(body) -> None:
    data = encoded(body)
    inside, refused = data[wire.HEADER_BYTES :], 0
    variants = [inside[:at] + bytes([new]) + inside[at + 1 :] for at in range(len(inside)) for new in (0, 1, 5, 0xFF)]
    variants += [inside[:at] for at in range(len(inside))] + [inside + b"\0"]
    for variant in variants:
        try:
            _, found = wire.decode(with_body(data, variant), expected(body))
            assert (
                found.update.positions.numel() == found.update.values.numel() and found.update.size == body.update.size
            )
        except WireError:
            refused += 1
    assert refused > len(inside)  # at least every cut


@given(st.binary(max_size=200))
def test_garbage_with_right_checksums_is_refused(garbage) -> None:
    for body in (SMALL, SMALL_UPLOAD):
        with pytest.raises(WireError):
            wire.decode(with_body(encoded(body), garbage), expected(body))
    with pytest.raises(WireError):
        wire.decode(garbage, expected(SMALL))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"run": b"otherrun"}, "run is"),
        ({"layout": b"otherlay"}, "layout is"),
        ({"size": 41}, "vector size is 40, 41 was expected"),
        ({"statistics": 3}, "statistics is 2, 3 was expected"),
        ({"kind": wire.UPLOAD}, "kind is 1, 2 was expected"),
    ],
)
def test_a_foreign_message_is_refused(change, says) -> None:
    with pytest.raises(WireError, match=says):
        wire.decode(encoded(SMALL), replace(expected(SMALL), **change))


@pytest.mark.parametrize(("place", "value", "says"), [(1, 2, "format"), (3, 1, "precision"), (9, 2, "flags")])
def test_what_this_build_does_not_know_is_refused(place, value, says) -> None:
    data = encoded(SMALL)
    header = list(HEADER.unpack(data[: HEADER.size]))
    header[place] = value
    with pytest.raises(WireError, match=says):
        wire.decode(signed(tuple(header), data[wire.HEADER_BYTES :]), expected(SMALL))


def sections(*parts) -> bytes:
    return b"".join(SECTION.pack(codec, relation, 0, count, len(data)) + data for codec, relation, count, data in parts)


NO_MASK = (positions.NOTHING, ABSOLUTE, 0, b"")
NO_VALUES = ((0, 0, 0, b""), (0, 0, 2, bytes(8)))  # and two statistics


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (sections((positions.EVERYTHING, ABSOLUTE, 39, b""), NO_MASK, *NO_VALUES), "39 positions were announced, 40"),
        (sections((positions.NOTHING, ABSOLUTE, 1, b""), NO_MASK, *NO_VALUES), "1 positions were announced, 0"),
        (sections((positions.NOTHING, ABSOLUTE, 0, b"x"), NO_MASK, *NO_VALUES), "carries no data"),
        (sections((positions.BITMAP, ABSOLUTE, 41, b"\xff" * 6), NO_MASK, *NO_VALUES), "41 positions are announced"),
        (sections((positions.BITMAP, ABSOLUTE, 8, b"\xff"), NO_MASK, *NO_VALUES), "has 5 bytes, 1 were found"),
        (sections((6, ABSOLUTE, 1, b""), NO_MASK, *NO_VALUES), "codec 6"),
        (sections((0, KNOWN, 0, b""), NO_MASK), "carries the shared mask"),
        (sections(NO_MASK, (0, KNOWN, 0, b"")), "relation 2"),
        (
            sections(NO_MASK, NO_MASK, (0, 0, 1, bytes(4)), (0, 0, 2, bytes(8))),
            "1 values in 4 bytes were found, 0",
        ),
        (
            sections(NO_MASK, NO_MASK, (0, 0, 0, b""), (0, 0, 3, bytes(12))),
            "3 statistics in 12 bytes were found, 2",
        ),
        (sections(NO_MASK, NO_MASK, (0, 0, 0, b""), (0, 0, 2, bytes(8))) + b"x", "1 bytes follow"),
        (
            sections(NO_MASK, NO_MASK, (7, 0, 0, b""), (0, 0, 2, bytes(8))),
            "codec 7 for values was found, 0 was expected",
        ),
        (SECTION.pack(0, ABSOLUTE, 0, 0, 2**63), "is cut off"),
        (SECTION.pack(0, ABSOLUTE, 9, 0, 0), "reserved"),
    ],
)
def test_malformed_sections_are_refused(body, says) -> None:
    with pytest.raises(WireError, match=says):
        wire.decode(with_body(encoded(SMALL), body), expected(SMALL))


def test_an_upload_cannot_bring_a_mask_of_its_own() -> None:
    with pytest.raises(WireError, match="carries none of its own"):
        wire.decode(with_body(encoded(SMALL_UPLOAD), wire.encode_body(SMALL)), expected(SMALL_UPLOAD))


def compressed(data: bytes, **options) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


def bombs():
    large = bytes(2**24)
    honest = compressed(large)
    size = honest.index(struct.pack("<I", len(large)))  # where a frame of this length declares it
    yield "declares much", honest
    yield "declares nothing", compressed(large, write_content_size=False)
    for limit in (5000 // 8, 5 * 10):
        yield "lies", honest[:size] + struct.pack("<I", limit) + honest[size + 4 :]
    yield "declares much, holds nothing", honest[: size + 4]


@pytest.mark.parametrize(("name", "bomb"), list(bombs()))
def test_a_bomb_is_refused_before_it_goes_off(name, bomb) -> None:
    for codec, count in (
        (positions.BITMAP_ZSTD, 10),
        (positions.GAPS_ZSTD, 10),
        (positions.ABSENT_GAPS_ZSTD, 4990),
    ):
        tracemalloc.start()
        try:
            with pytest.raises(WireError):
                wire.unpack(wire.Packed(codec, count, bomb), 5000)
            assert tracemalloc.get_traced_memory()[1] < 200_000, name
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    ("gaps", "count"),
    [
        (b"\x00\x80", 1),  # the last varint has no end
        (b"\x80\x80\x80\x80\x80\x00", 1),  # six bytes
        (b"\xff\xff\xff\xff\x7f", 1),  # far outside
        (b"\x63\x00", 2),  # 99, then 100 of 100
        (b"\x00\x00\x00", 2),  # one too many
        (b"", 1),
    ],
)
def test_malformed_gaps_are_refused(gaps, count) -> None:
    with pytest.raises(WireError):
        wire.unpack(wire.Packed(positions.GAPS_ZSTD, count, compressed(gaps)), 100)


def test_bits_beyond_the_end_of_a_bitmap_are_refused() -> None:
    assert wire.unpack(wire.Packed(positions.BITMAP, 1, b"\x00\x08"), 12).positions.tolist() == [11]
    with pytest.raises(WireError, match="padding"):
        wire.unpack(wire.Packed(positions.BITMAP, 1, b"\x00\x18"), 12)


# --- golden files: the format is a promise ----------------------------------------------------------------


def example(step, mask_step, size=40, sends_mask=True) -> wire.Body:
    """Every `step`-th position and a mask of every `mask_step`-th, 0 for none; no generator that may change."""
    at = torch.arange(size)
    update = part_of((at - 20) / 8, Mask(at % step == 1 % step))
    return wire.Body(
        update, torch.tensor([0.5, -3.0]), wire.Shared(Mask(at % mask_step == 1 if mask_step else at < 0)), sends_mask
    )


HASHES = {"base_hash": b"basebase", "hash": b"hashhash"}
EXAMPLES = {
    "package-whole": (example(1, 9), {"base": None}),
    "package-beside-mask": (example(3, 9), {"weight": 0.125, "accepted": False, **HASHES}),
    "package-crossing-mask": (example(3, 10), {"round": 2**31, "version": 2**32 - 2}),
    "upload-beside-mask": (example(3, 9, sends_mask=False), {"weight": 0.125, "loss": 1.5, "samples": 200}),
    "upload-no-mask": (example(7, 0, sends_mask=False), {"loss": 0.25}),
    "package-zstd": (example(100, 5, size=4000), {}),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_golden_files(name) -> None:
    body, fields = EXAMPLES[name]
    path = GOLDEN / f"{name}.bin"
    if "GLUEFL_WRITE_GOLDEN" in os.environ:
        GOLDEN.mkdir(exist_ok=True)
        path.write_bytes(encoded(body, **fields))
    header, found = wire.decode(path.read_bytes(), expected(body))
    assert header == header_of(body, **fields)
    assert_same(found, body)
    if "zstd" not in name:  # what zstd writes may change with its version, what it means does not
        assert encoded(body, **fields) == path.read_bytes()


@given(
    st.integers(1, 400) | st.integers(4090, 4400),
    st.lists(st.sampled_from([0.0, 0.004, 0.05, 0.1, 0.5, 0.9, 0.97, 1.0]), min_size=1, max_size=5),
    st.integers(0, 99),
)
def test_rows_are_laid_out_as_masks_are_one_by_one(size, densities, seed) -> None:
    rng = np.random.default_rng(seed)
    masks = torch.from_numpy(rng.random((len(densities), size)) < np.array(densities).reshape(-1, 1))
    counts = masks.sum(1).tolist()
    expected = [layouts.lay_out(Mask(mask)) for mask in masks]
    assert layouts.lay_out_rows(masks, counts)() == expected
    for mask, laid_out in zip(masks, expected):
        assert torch.equal(wire.unpack(positions.squeeze(laid_out), size).bits, mask)


@given(st.integers(1, 400) | st.integers(4090, 4400), st.sampled_from([0.0, 0.004, 0.05, 0.1, 0.5, 0.97, 1.0]))
def test_a_list_is_laid_out_as_its_mask(size, density) -> None:
    mask = mask_of(size, density, 5)
    expected = layouts.lay_out(Mask(mask))
    assert layouts.lay_out_list(np.flatnonzero(mask.numpy()).astype(np.int32), size) == expected


@pytest.mark.parametrize("apart", [1, 100, 127, 128, 129, 16_384, 16_385, 3_000_000])
def test_gaps_of_every_length_are_read_back(apart) -> None:
    mask = torch.zeros(3 * apart + 9, dtype=torch.bool)
    mask[torch.tensor([0, 1, 1 + apart, 2 * apart, 3 * apart + 5])] = True
    assert torch.equal(wire.unpack(wire.pack(Mask(mask)), mask.numel()).bits, mask)


@given(st.integers(2, 60), st.integers(0, 99), st.sampled_from([0.0, 0.3, 1.0]))
def test_a_listed_update_is_encoded_as_one_that_is_not(size, seed, density) -> None:
    """Whether the shared mask is part of it or not."""
    shared = wire.Shared(Mask(mask_of(size, 0.4, seed)))
    for mask in (shared.mask.bits | mask_of(size, density, seed + 1), mask_of(size, density, seed + 2)):
        vector = torch.arange(float(size))
        listed, masked = (
            PositionSet.of(update, shared).encode()
            for update in (part_of(vector, Mask(mask)), Masked(Mask(mask), vector))
        )
        assert listed == masked


@pytest.mark.parametrize("density", [0.001, 0.02, 0.06, 0.94, 0.98, 0.999])
def test_no_bitmap_is_made_where_it_would_not_be_sent(density) -> None:
    mask = mask_of(50_000, density, 4)
    laid_out = layouts.lay_out(Mask(mask))
    with_bitmap = replace(laid_out, bitmap=np.packbits(mask.numpy(), bitorder="little").tobytes())
    assert laid_out.bitmap is None and positions.squeeze(laid_out) == positions.squeeze(with_bitmap)


KINDS = ["with", "without", "all", "none"]


@given(st.integers(1, 60), st.lists(st.sampled_from(KINDS), max_size=6), st.integers(0, 99))
def test_bodies_are_laid_out_together_as_one_by_one(size, kinds, seed) -> None:
    assert_laid_out_alike(size, kinds, seed, 0.3, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("size", [9, 5000, 50_001])
@pytest.mark.parametrize("density", [0.01, 0.1, 0.3, 0.95])
@pytest.mark.parametrize("how", ["now", "under way", "under way and counted"])
def test_bodies_are_laid_out_on_a_gpu_as_one_by_one(how, size, density) -> None:
    assert_laid_out_alike(size, 2 * KINDS, 5, density, "cuda", how)


@given(st.integers(2, 60), st.lists(st.sampled_from(KINDS), min_size=1, max_size=6), st.integers(0, 99))
def test_what_is_counted_beforehand_is_laid_out_as_if_it_were_not(size, kinds, seed) -> None:
    assert_laid_out_alike(size, kinds, seed, 0.3, "cpu", "counted")


def test_without_memory_on_a_gpu_positions_are_encoded_when_they_are_read(monkeypatch) -> None:
    def full(*arguments):
        raise torch.cuda.OutOfMemoryError("no room")

    monkeypatch.setattr("gluefl.wire.encoder.lay_out_together", full)
    shared = wire.Shared(Mask(torch.arange(90) % 5 == 0))
    sets = [PositionSet.of(Masked(Mask(torch.arange(90) % 3 == 0), torch.ones(90)), shared)]
    assert [pending.result() for pending in _from_gpu(sets, None)] == [one.encode() for one in sets]


@given(st.integers(5_000, 30_000), st.floats(0, 1), st.floats(0, 1), st.booleans(), st.integers(0, 99))
@settings(max_examples=60)
def test_the_expected_length_of_a_message_is_nearly_its_length(size, density, shared, sends_mask, seed) -> None:
    known = mask_of(size, shared * density, seed)
    update = part_of(torch.zeros(size), Mask(known | mask_of(size, density, seed + 100)))
    body = wire.Body(update, torch.zeros(3), wire.Shared(Mask(known)), sends_mask)
    assert wire.expected_bytes(body) == pytest.approx(wire.measure(body), rel=0.03, abs=400)


@pytest.mark.gpu
def test_positions_are_counted_once_and_then_known() -> None:
    shared = wire.Shared(Mask((torch.arange(5000) % 5 == 0).cuda()))
    masks = [Mask(shared.mask.bits | mask_of(5000, density, 3).cuda()) for density in (0.0, 0.3, 1.0)]
    bodies = [wire.Body(Masked(mask, torch.zeros(5000).cuda()), torch.zeros(2), shared, True) for mask in masks]
    expected = [int(mask.bits.sum()) for mask in masks]
    with resources():
        counts = wire.count_positions(bodies)
        torch.cuda._sleep(10**9)  # a synchronisation would now wait for half a second
        busy = recorded(shared.mask.bits.device)
        assert [body.update.count for body in bodies] == expected == [count for count, _ in counts]
        with on_side_stream(shared.mask.bits.device, "encoding"):
            encodings = wire.encode_positions(bodies, counts=counts)
        found = [encoding.positions.result() for encoding in encodings]
        assert not busy.query()
    assert found == [PositionSet.of(body.update, shared).encode() for body in bodies]


class Complete:
    """An event that has happened."""

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize("cores", [1, 2, 5])
@pytest.mark.parametrize("how", ["on the pool", "from a side stream", "without a run"])
def test_positions_are_encoded_in_the_background_as_here(how, cores, monkeypatch) -> None:
    shared = wire.Shared(Mask(torch.arange(500) % 5 == 0))
    updates = [part_of(torch.arange(500.0), Mask(shared.mask.bits | mask_of(500, 0.1, i))) for i in range(9)]
    bodies = [wire.Body(update, torch.zeros(2), shared, sends_mask=True) for update in updates]
    expected = [wire.encode_body(body) for body in bodies]
    monkeypatch.setattr("gluefl.accel.threads.available", lambda: cores)
    with resources() if how != "without a run" else nullcontext():
        if how == "from a side stream":  # what is done for a GPU
            sets = [PositionSet.of(Masked(update.mask, update.dense()), shared) for update in updates]
            pending = _from_gpu_after(sets, None, Complete())
            assert [one.result() for one in pending] == [one.encode() for one in sets]
        encodings = wire.encode_positions(bodies, under_way=True)
        assert [wire.encode_body(body, encoding) for body, encoding in zip(bodies, encodings)] == expected
        assert [wire.message_bytes(one) for one in encodings] == [wire.HEADER_BYTES + len(data) for data in expected]


@pytest.mark.parametrize("cores", [1, 2])
def test_an_error_in_the_background_is_raised_where_the_result_is_read(cores, monkeypatch) -> None:
    def broken(*arguments):
        raise GlueFLError("no room")

    monkeypatch.setattr("gluefl.accel.threads.available", lambda: cores)
    monkeypatch.setattr(PositionSet, "encode", broken)
    update = part_of(torch.ones(90), Mask(torch.arange(90) % 5 == 0))
    body = wire.Body(update, torch.zeros(2), wire.Shared(Mask(torch.zeros(90, dtype=torch.bool))), False)
    with resources():
        (encoding,) = wire.encode_positions([body])
        with pytest.raises(GlueFLError, match="no room"):
            wire.message_bytes(encoding)


@pytest.mark.parametrize("density", [0.05, 0.1, 0.9])
def test_bitmap_and_gaps_are_compressed_in_parallel(density, monkeypatch) -> None:
    masks = [Mask(torch.from_numpy(np.random.default_rng(i).random(9000) < density)) for i in range(40)]
    expected = [positions.pack(mask) for mask in masks]
    monkeypatch.setattr(positions, "LONG_TO_COMPRESS", 0)
    with resources():
        tasks = [submit(positions.pack, mask) for mask in masks]  # more than threads: none may wait for another
        assert [task.result(timeout=60) for task in tasks] == expected


def assert_laid_out_alike(size, kinds, seed, density, device, how="now") -> None:
    rng = np.random.default_rng(seed)
    known = torch.from_numpy(rng.random(size) < 0.4)
    vector = torch.from_numpy(rng.standard_normal(size).astype(np.float32))

    def bodies(where) -> list[wire.Body]:
        made, shared, there = [], wire.Shared(Mask(known.to(where))), vector.to(where)
        if how.endswith("counted"):
            _ = shared.mask.count
        for number, kind in enumerate(kinds):
            bits = torch.from_numpy(np.random.default_rng([seed, number]).random(size) < density)
            bits = {"with": bits | known, "without": bits, "all": bits | True, "none": bits & False}[kind].to(where)
            mask, covers = Mask(bits), shared.mask if kind in ("with", "all") else None
            if how.endswith("counted"):
                _ = mask.count
            masked = where != "cpu" or device == "cpu"
            update = Masked(mask, there, covers) if masked else part_of(there, mask)
            made.append(wire.Body(update, there[:2], shared, sends_mask=True))
        return made

    one_by_one, together = bodies("cpu"), bodies(device)
    with resources():
        if device == "cpu" and together:
            sets = [PositionSet.of(body.update, body.shared) for body in together]
            pending = _from_gpu(sets, None)
            assert [one.result() for one in pending] == [one.encode() for one in sets]
        encodings = wire.encode_positions(together, under_way=how != "now")
        for plain, body, encoding in zip(one_by_one, together, encodings):
            assert wire.encode_body(plain) == wire.encode_body(body, encoding)
            assert wire.measure(plain) == wire.message_bytes(encoding)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 8, 77, 1000, 4099])
@pytest.mark.parametrize("density", [0.0, 0.002, 0.05, 0.5, 0.97, 0.999, 1.0])
def test_positions_are_packed_alike_on_a_gpu(size, density) -> None:
    mask = torch.from_numpy(np.random.default_rng(size).random(size) < density)
    assert positions.pack(Mask(mask.cuda())) == positions.pack(Mask(mask))
