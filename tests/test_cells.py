"""Cells: a package on grids comes back bit for bit, its length is known beforehand, and damage is one kind of error."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gluefl.errors import GlueFLError, WireError
from gluefl.parameters import ParameterError
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import Listed, Masked, part_of, whole
from gluefl.wire import rice
from gluefl.wire.cells import CellCodec, listed, stacked


def model(sizes, logarithmic, seed, spread=3, relative=True) -> tuple[CellCodec, torch.Tensor, torch.Tensor | None]:
    """A codec, a model on random grids and its version 0."""
    rng = np.random.default_rng(seed)
    size = sum(sizes)
    steps = np.repeat(np.ldexp(1.0, rng.integers(-128, 100, len(sizes))), sizes)
    first = rng.integers(-(2**20), 2**20, size) * relative
    last = first + rng.integers(-spread, spread + 1, size)
    first_patterns, last_patterns = rng.integers(0, 0x7F8, size) * relative, rng.integers(0, 0x7F8, size)
    finer = rng.integers(0, 2**20, size) * relative  # version 0 may lie between two cells
    on_logarithmic = np.repeat(np.array(logarithmic, bool), sizes)

    def on_grid(cells, patterns, below) -> torch.Tensor:
        other = (patterns << 20 | below).astype(np.int32).view(np.float32)
        return torch.from_numpy(np.where(on_logarithmic, other, cells * steps).astype(np.float32))

    codec = CellCodec(tuple(sizes), tuple(logarithmic))
    return codec, on_grid(last, last_patterns, 0), on_grid(first, first_patterns, finer) if relative else None


def mask_of(sizes, shares, seed) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.random(sum(sizes)) < np.repeat(np.array(shares, float), sizes))


@st.composite
def packages(draw):
    """A codec, several parts of a model, and version 0 or None."""
    sizes = draw(st.lists(st.sampled_from([0, 1, 2, 9, 130, 700]), max_size=9))
    logarithmic = draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    seed, spread = draw(st.integers(0, 999)), draw(st.sampled_from([0, 1, 3, 200, 2**23]))
    codec, vector, origin = model(sizes, logarithmic, seed, spread, draw(st.booleans()))
    shares = st.lists(st.sampled_from([0, 0.01, 0.2, 0.8, 1]), min_size=len(sizes), max_size=len(sizes))
    masks = [Mask(mask_of(sizes, draw(shares), seed + i)) for i in range(draw(st.integers(1, 3)))]
    return codec, [Masked(mask, vector) for mask in masks], origin


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@given(packages())
def test_what_is_decoded_was_encoded_and_measured(package) -> None:
    codec, updates, origin = package
    blobs = [codec.encode(update, origin) for update in updates]
    for update, blob in zip(updates, blobs):
        decoded = codec.decode(blob, origin)
        assert torch.equal(decoded.positions, update.positions) and decoded.size == update.size
        assert same_bits(decoded.values, update.values + 0.0)  # -0 is sent as 0
        assert len(blob) <= codec.longest()
    lengths = [len(blob) for blob in blobs]
    assert codec.measure(updates, origin) == lengths
    assert codec.measure([part_of(update.vector, update.mask) for update in updates], origin) == lengths
    assert codec.measure_batch(stacked(updates), origin) == lengths  # torch instead of NumPy, many at once


@given(packages())
def test_a_decoder_of_single_bits_reads_the_same(package) -> None:
    codec, updates, origin = package
    for update in updates:
        assert by_hand(codec, codec.encode(update, origin), origin) == dict(
            zip(update.positions.tolist(), (update.values + 0.0).tolist())
        )


def by_hand(codec, data, origin) -> dict[int, float]:
    """The format as another language would read it: a byte and a bit at a time."""
    head = iter(data)
    bitmap = [next(head) for _ in range(-(-len(codec.tensors) // 8))]
    entries, start = [], 0
    for i, (size, logarithmic) in enumerate(zip(codec.tensors, codec.logarithmic)):
        if bitmap[i // 8] >> i % 8 & 1:
            count, shift = 0, 0
            while True:
                byte = next(head)
                count, shift = count | (byte & 127) << shift, shift + 7
                if byte < 128:
                    break
            exponent = None if logarithmic else (next(head) ^ 128) - 128
            byte = next(head)
            cell_parameter = byte & 7 if byte & 7 < 7 else next(head)
            entries.append((start, size, count, exponent, byte >> 4, byte >> 3 & 1, cell_parameter))
        start += size
    bits = [byte >> i & 1 for byte in head for i in range(8)]
    remainders = iter(bits)
    fixed = [(e[4], e[2]) for e in entries] + [(e[6], e[2] or e[1]) for e in entries]
    low = [[sum(next(remainders) << j for j in range(k)) for _ in range(count)] for k, count in fixed]
    unary = remainders  # quotients follow the last remainder
    numbers = [[(quotient(unary) << k) + rest for rest in part] for (k, _), part in zip(fixed, low)]
    assert not any(unary), "padding"
    values = {}
    for entry, gaps, codes in zip(entries, numbers[: len(entries)], numbers[len(entries) :]):
        start, size, count, exponent, _, reordered, _ = entry
        position = start - 1
        for j, code in enumerate(codes):
            position += 1 + (gaps[j] if count else 0)
            code = (1, 2, 0)[code] if reordered and code < 3 else code
            cell = -(code + 1) // 2 if code % 2 else code // 2
            base = np.float32(0 if origin is None else origin[position])
            if exponent is None:
                pattern = np.uint32(((int(base.view(np.uint32)) >> 20) + cell) << 20)
                values[position] = float(pattern.view(np.float32))
            else:
                values[position] = float(base) + cell * 2.0**exponent
    return values


def quotient(bits) -> int:
    zeros = 0
    while not next(bits):
        zeros += 1
    return zeros


def test_the_format() -> None:
    """The example of the document, computed by hand."""
    codec = CellCodec((8, 3, 4, 2), (False, False, False, True))
    values = torch.tensor([0.5, -0.5, 1, 3, -3, 6, 0, 1])
    update = Listed(torch.tensor([1, 4, 5, 11, 12, 13, 14, 16]), values, 17)
    head = "0d03ff0800000201070a"  # tensors 0, 2, 3; then each of them
    streams = "06f0cb1a2a16"
    assert codec.encode(update, None).hex() == head + streams
    assert codec.decode(bytes.fromhex(head + streams), None).values.tolist() == values.tolist()


@given(st.lists(st.lists(st.integers(0, 2**31 - 2) | st.integers(0, 40), max_size=8), max_size=4), st.integers(1, 30))
def test_the_best_parameter_is_the_best(numbers, largest) -> None:
    flat = torch.tensor([u for segment in numbers for u in segment], dtype=torch.int32)
    offsets = torch.tensor([0, *np.cumsum([len(segment) for segment in numbers])], dtype=torch.long)
    shortest = [min(sum((u >> k) + 1 + k for u in part) for k in range(largest + 1)) for part in numbers]
    for segments in (rice.HostSegments(offsets, len(flat)), rice.DeviceSegments(offsets, len(flat))):
        parameters, bits = rice.best_parameters(flat, segments, largest)
        assert bits.tolist() == shortest
        coded = zip(parameters.tolist(), numbers)
        assert [sum((u >> k) + 1 + k for u in part) for k, part in coded] == shortest


def test_damage_is_refused_or_gives_another_update() -> None:
    codec, vector, origin = model((300, 5, 40, 0, 64, 1), (False, False, True, False, False, True), 4)
    blob = codec.encode(part_of(vector, Mask(mask_of(codec.tensors, (0.1, 1, 0.5, 0, 0, 1), 1))), origin)
    rng = np.random.default_rng(0)
    results = set()
    for trial in range(600):
        damaged = bytearray(blob)
        at = int(rng.integers(24 if trial % 2 else len(blob)))  # every second time in the head
        if trial % 5 == 0:
            damaged = damaged[:at]
        elif trial % 5 == 1:
            damaged.insert(at, int(rng.integers(256)))
        else:
            damaged[at] ^= 1 << int(rng.integers(8))
        try:
            update = codec.decode(damaged, origin)
        except WireError:
            results.add("refused")
            continue
        results.add("decoded")
        assert (update.positions.diff() > 0).all() and bool(update.finite())
        assert not update.count or 0 <= int(update.positions[0]) <= int(update.positions[-1]) < codec.size
    assert results == {"refused", "decoded"}
    for end in range(len(blob)):
        with pytest.raises(WireError):
            codec.decode(blob[:end], origin)
    with pytest.raises(WireError, match="follow"):
        codec.decode(blob + b"\0", origin)


def blob_of(head, bits="") -> bytes:
    return (
        bytes.fromhex(head) + np.packbits(np.array(list(bits.replace(" ", "")), np.uint8), bitorder="little").tobytes()
    )


# A tensor of 8 on a linear grid, and one of 3 on a logarithmic grid. Bits are those of the gaps, then of the cells.
@pytest.mark.parametrize(
    ("head", "bits", "message"),
    [
        ("", "", "which of 2 tensors"),
        ("04 01 00 00", "1 1", "which of 2 tensors"),  # a third one
        ("01 01", "", "longer than the 2 bytes"),
        ("01 ff ff ff ff ff 01", "", "more than 5 bytes"),
        ("01 08 00 00", "1 1", "8 positions are announced for tensor 0, needed fewer than 8"),
        ("01 00 00 10", "1 1 1 1 1 1 1 1", "Rice parameters 1 and 0"),  # no gaps where all positions are sent
        ("01 01 00 07 1f", "1 1", "Rice parameters 0 and 31"),
        ("01 07 00 00", "1", "14 codes take at least 14 bits, 8 were found"),
        ("01 01 00 00", "1", "2 codes were announced, 1 were found"),
        ("01 01 00 00", "1 1 1", "2 codes were announced, 3 were found"),
        ("01 01 00 00", "1 1 000000 0", "bytes follow"),
        ("00", "0", "bytes follow"),
        ("01 01 00 00", "000000001 1", "outside"),  # position 8
        ("01 02 00 00", "00001 0001 1 1", "outside"),
        ("01 01 7f 00", "1 0001", "position 0"),  # cell -2: -2^128
        ("02 01 00", "01 01", "position 9"),  # cell -1: a variance below zero
        ("02 01 07 0b", "00001111111 01 01", "position 9"),  # cell 0x7f8: infinite
        ("01 01 00 07 1e", "1" * 30 + "1 01", "the code 2147483647"),
    ],
)
def test_what_is_refused(head, bits, message) -> None:
    with pytest.raises(WireError, match=message):
        CellCodec((8, 3), (False, True)).decode(blob_of(head, bits), None)


def test_the_edges_of_what_is_refused_are_accepted() -> None:
    codec = CellCodec((8, 3), (False, True))
    largest = float(np.uint32(0x7F7 << 20).view(np.float32))
    cases = [
        ("01 01 00 00", "00000001 1", 7, 0.0),
        ("01 01 7f 00", "1 01", 0, -(2.0**127)),
        ("02 01 00", "01 1", 9, 0.0),
        ("02 01 07 0b", "01110111111 01 01", 9, largest),
    ]
    for head, bits, position, value in cases:
        update = codec.decode(blob_of(head, bits), None)
        assert (update.positions.tolist(), update.values.tolist()) == ([position], [value])


def test_a_sum_that_float32_does_not_hold_is_refused() -> None:
    codec, data = CellCodec((1,), (False,)), blob_of("01 00 c4 00", "01")  # cell -1, exponent -60
    assert codec.decode(data, torch.zeros(1)).values.item() == -(2.0**-60)
    for base in (1.0, 2.0**-35, 2.0**-36 * 1.5):  # not exact, even where float64 holds it
        with pytest.raises(WireError, match="position 0"):
            codec.decode(data, torch.tensor([base]))


@pytest.mark.parametrize(
    ("values", "origin", "logarithmic"),
    [
        ([float("nan")], None, False),
        ([float("inf")], None, False),
        ([2.0**-140], None, False),  # the exponent does not fit
        ([2.0**30, 1.0], None, False),  # the cell does not fit
        ([1.0], [2.0**-40], False),  # the difference is rounded
        ([3e38], [-3e38], False),  # and overflows
        ([1.0 + 2**-4], None, True),  # a fourth bit of the mantissa
        ([-1.0], None, True),
        ([float("inf")], None, True),
        ([1.0], [-1.0], True),
    ],
)
def test_values_on_no_grid_are_an_error(values, origin, logarithmic) -> None:
    update = whole(torch.tensor([*values, 0.0]))
    known = None if origin is None else torch.tensor([*origin, *[0.0] * (update.size - len(origin))])
    codec = CellCodec((update.size,), (logarithmic,))
    for use in (lambda: codec.encode(update, known), lambda: codec.measure([update], known)):
        with pytest.raises(GlueFLError, match="position 0 is not on its grid"):
            use()


def test_wrong_vectors_and_codecs_are_an_error() -> None:
    codec = CellCodec((3,), (False,))
    for vector in (torch.zeros(4), torch.zeros(3, dtype=torch.float64)):
        with pytest.raises(GlueFLError, match="needed 3 float32 values"):
            codec.encode(whole(vector), None)
    with pytest.raises(WireError, match="at most"):
        codec.decode(bytes(codec.longest() + 1), None)
    for sizes in ((3, 4), (2**31,), (-1,)):
        with pytest.raises(ParameterError):
            CellCodec(sizes, (False,))


def test_zero_is_positive() -> None:
    codec, zeros = CellCodec((2, 2), (False, True)), torch.tensor([-0.0, 1, -0.0, 2])
    for origin in (None, -torch.zeros(4), torch.tensor([1.0, 0, 1, 0])):
        values = codec.decode(codec.encode(whole(zeros), origin), origin).values
        assert same_bits(values, torch.tensor([0.0, 1, 0, 2]))


def test_what_is_announced_allocates_nothing() -> None:
    codec = CellCodec((2**30, 2**30), (False, True))
    announced = bytes.fromhex("03000000feffffff0300") + bytes(1000)
    tracemalloc.start()
    with pytest.raises(WireError, match="codes take"):
        codec.decode(announced, None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("density", [0.002, 0.01, 0.05, 0.12, 0.25])
def test_positions_take_little_more_than_their_entropy(density) -> None:
    codec, positions = CellCodec((10**6,), (False,)), np.flatnonzero(np.random.default_rng(3).random(10**6) < density)
    update = Listed(torch.from_numpy(positions), torch.full((len(positions),), -0.5), 10**6)
    cell_bits = len(positions)  # a cell of -1 takes one bit
    share = len(positions) / 10**6
    entropy = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) * 10**6
    assert entropy < 8 * codec.measure([update], None)[0] - cell_bits < 1.03 * entropy


def test_cells_that_moved_by_one_take_at_most_half_a_bit_more_than_their_sign() -> None:
    codec, cells = CellCodec((10**5,), (False,)), np.random.default_rng(3).choice([-0.25, 0.25], 10**5)
    assert codec.measure([whole(torch.from_numpy(cells).float())], None)[0] < 1.52 * 10**5 / 8


@pytest.mark.gpu
def test_a_gpu_measures_and_encodes_the_same() -> None:
    codec, vector, origin = model((3000, 1, 500, 0, 64), (False, True, False, False, True), 5, 40)
    masks = [mask_of(codec.tensors, shares, 7) for shares in ((0.01,) * 5, (0.3, 1, 0, 0, 1), (1,) * 5, (0,) * 5)]
    updates = [Masked(Mask(mask), vector) for mask in masks]
    there = [Masked(Mask(mask.cuda()), on_gpu) for on_gpu in [vector.cuda()] for mask in masks]
    blobs = [codec.encode(update, origin) for update in updates]
    assert [codec.encode(update, origin.cuda()) for update in there] == blobs
    others = [
        part_of(vector.cuda(), Mask(masks[0].cuda())),
        Listed(*(t.cuda() for t in of_list(updates[1])), codec.size),
    ]
    expected = [len(blob) for blob in [*blobs, blobs[0], blobs[1]]]
    assert codec.measure([*there, *others], origin.cuda()) == expected
    with pytest.raises(GlueFLError, match="position 2 is"):
        codec.measure(
            [whole(torch.full((codec.size,), 2.0**-140).cuda().index_fill_(0, torch.arange(2).cuda(), 0))], None
        )


def of_list(update) -> tuple[torch.Tensor, torch.Tensor]:
    batch = listed(update)
    return batch.places, batch.values
