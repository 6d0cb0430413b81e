"""What a GPU does beside the training gives the same bytes and masks as NumPy does.

On a GPU the kernels run as they are; elsewhere Triton interprets them, slowly and with the same results."""

import os

import numpy as np
import pytest
import torch

from gluefl.accel.philox import Rotation
from gluefl.vectors.grid import Segments
from gluefl.vectors.mask import Mask
from gluefl.vectors.rotation import Rotated
from gluefl.vectors.selection import _magnitude_bits, _salt, _top_by_numpy
from gluefl.vectors.sparse import add_all, part_of
from gluefl.wire import floats8, layouts

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Positions of a block: the usual number where a GPU can do it, and so few that the interpreter can do several.
BLOCKS = (64, 4096) if DEVICE.type == "cuda" else (64,)

VALUES = {
    "all different": lambda rng, size: rng.standard_normal(size),
    "many alike": lambda rng, size: (2 * rng.standard_normal(size)).round(),
    "mostly zero": lambda rng, size: rng.standard_normal(size) * (rng.random(size) < 0.2),
    "tiny and huge": lambda rng, size: rng.standard_normal(size) * 10.0 ** rng.integers(-44, 38, size),
    "not all numbers": lambda rng, size: np.where(rng.random(size) < 0.1, np.nan, rng.standard_normal(size)),
}


@pytest.mark.parametrize("sample", [None, 16, 256, pytest.param(1024, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("among", [False, True])
@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("size", [1, 63, 1000, pytest.param(100_003, marks=pytest.mark.gpu)])
def test_the_largest_are_those_of_numpy(size, kind, among, block, sample) -> None:
    """With a sample of a few the threshold is often not where it should be, and nearly all are alike in one kind."""
    from gluefl.accel.kernels.largest import largest

    rng = np.random.default_rng(size)
    values = torch.from_numpy(VALUES[kind](rng, size).astype(np.float32))
    eligible = torch.from_numpy(rng.random(size) < 0.6) if among else torch.ones(size, dtype=torch.bool)
    bits = _magnitude_bits(values.nan_to_num(torch.inf, torch.inf, -torch.inf).clamp(-3e38, 3e38))
    bits[values.isnan()] = int(_magnitude_bits(torch.tensor([3.4e38])))  # the same for all: kernels see NaN's own bits
    bits[~eligible] = -1
    for keep, start, round in ((0, 0, 1), (1, 0, 1), (size // 5, 12_345, 7), (size // 2, 1, 400_000), (size + 2, 0, 2)):
        some = eligible.to(DEVICE) if among else None
        sampled = {} if sample is None else {"sample": sample, "long": sample}
        found = largest(values.to(DEVICE), keep, start, _salt(round), some, block=block, **sampled)
        assert torch.equal(found.cpu(), _top_by_numpy(bits, keep, round, start)), (keep, start, round)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("present", [True, False])
@pytest.mark.parametrize("size", [1, 64, 65, 20_000])
def test_gaps_are_those_of_numpy(size, present, known) -> None:
    from gluefl.accel.kernels.positions import gaps

    rng = np.random.default_rng(size)
    masks = torch.from_numpy(rng.random((5, size)) < np.array([[0.0], [0.0005], [0.05], [0.6], [1.0]]))
    masks[2, size // 3 :] = False
    beside = torch.from_numpy(rng.random(size) < 0.3) if known else torch.zeros(size, dtype=torch.bool)
    block = BLOCKS[-1] if size < 1000 else 8192  # so that gaps of two and three bytes occur, in a block and between two
    listed = (((masks == present) & ~beside).sum(1)).tolist()
    short = 64 if size < 1000 else 1024
    found = gaps(masks.to(DEVICE), beside.to(DEVICE) if known else None, present, listed, block=block, short=short)
    for row, data, length in zip(masks, *found):
        numbered = (row if present else ~row)[~beside]
        expected = layouts._gaps(Mask(numbered), int(numbered.sum())) if numbered.any() else b""
        assert data[:length].cpu().numpy().tobytes() == expected


def test_the_longest_varints_have_room() -> None:
    """Gaps of 128, two bytes each, and nothing else."""
    from gluefl.accel.kernels.positions import gaps

    mask = torch.arange(1, 129 * 50 + 1) % 129 == 0
    data, lengths = gaps(mask.unsqueeze(0).to(DEVICE), None, True, [50], block=64, short=64)
    assert lengths.tolist() == [100] and data[0, :100].cpu().numpy().tobytes() == layouts._gaps(Mask(mask), 50)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("size", [1, 8, 9, 1000])
def test_bitmaps_are_those_of_numpy(size, known) -> None:
    from gluefl.accel.kernels.positions import bitmaps

    rng = np.random.default_rng(size)
    masks = torch.from_numpy(rng.random((3, size)) < 0.4)
    outside = torch.from_numpy(rng.permutation(size)[: size // 2 + 1].copy()).sort().values if known else None
    found = bitmaps(masks.to(DEVICE), None if outside is None else outside.to(DEVICE), block=64)
    some = masks if outside is None else masks[:, outside]
    assert np.array_equal(found.cpu().numpy(), np.packbits(some.numpy(), axis=1, bitorder="little"))


@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_absent_positions_are_listed(density) -> None:
    from gluefl.accel.kernels.positions import absent

    mask = torch.from_numpy(np.random.default_rng(4).random(300) < density)
    found = absent(mask.to(DEVICE), int((~mask).sum()), block=64)
    assert found.tolist() == np.flatnonzero(~mask.numpy()).tolist()


@pytest.mark.parametrize("size", [1, 200])
def test_positions_are_counted(size) -> None:
    from gluefl.accel.kernels.positions import counts

    rng = np.random.default_rng(size)
    masks, known = torch.from_numpy(rng.random((3, size)) < 0.4), torch.from_numpy(rng.random(size) < 0.3)
    found = counts(masks.to(DEVICE), known.to(DEVICE), block=BLOCKS[-1])
    assert found.tolist() == [masks.sum(1).tolist(), (masks & known).sum(1).tolist()]


@pytest.mark.parametrize("parts", [1, 3, 8, 9])
def test_parts_are_added_bit_for_bit(parts) -> None:
    from gluefl.accel.kernels.add import add

    rng = np.random.default_rng(5)
    total, *vectors = (torch.from_numpy(rng.standard_normal(5000).astype(np.float32)) for _ in range(parts + 1))
    masks = [torch.from_numpy(rng.random(5000) < 0.4) for _ in vectors]
    weights = [1.0, 0.3, -1e-9, *rng.random(6).tolist()][:parts]
    total[::7], vectors[-1][::11] = -0.0, torch.nan
    expected = add_all(total.clone(), [part_of(part[1], Mask(part[0])) for part in zip(masks, vectors)], weights)
    found = add(total.to(DEVICE), [v.to(DEVICE) for v in vectors], [m.to(DEVICE) for m in masks], weights)
    assert torch.equal(found.cpu().isnan(), expected.isnan())  # which NaN it is may differ
    number = ~expected.isnan()
    assert torch.equal(found.cpu()[number].view(torch.int32), expected[number].view(torch.int32))


@pytest.mark.parametrize("weight", [1, 0.3, -1e-9])
def test_the_rest_is_what_a_part_leaves(weight) -> None:
    from gluefl.accel.kernels.add import rest

    rng = np.random.default_rng(6)
    vector, mask = (
        torch.from_numpy(rng.standard_normal(5000).astype(np.float32)),
        torch.from_numpy(rng.random(5000) < 0.4),
    )
    vector[::7], vector[::11] = -0.0, torch.nan
    expected = part_of(vector, Mask(mask)).rest_of(vector, weight)
    found = rest(vector.to(DEVICE), mask.to(DEVICE), weight).cpu()
    assert torch.equal(found.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(found[number].view(torch.int32), expected[number].view(torch.int32))


@pytest.mark.parametrize("places", [[], [0], [61, 0, 7, 62]])
def test_clear_bits_are_those_of_torch(places) -> None:
    from gluefl.accel.kernels.small import clear_bits

    words = torch.from_numpy(np.random.default_rng(7).integers(0, 2**63, 5000))
    found = clear_bits(words.to(DEVICE), places)
    assert len(found) == len(places)
    assert all(torch.equal(row.cpu(), words >> place & 1 == 0) for row, place in zip(found, places))


@pytest.mark.parametrize("kind", VALUES)
def test_statistics_are_rounded_bit_for_bit(kind) -> None:
    """Tensors of none, one and many values; zeros, numbers below the smallest of eight bits and ties."""
    from gluefl.accel.kernels.small import round_tensors

    rng = np.random.default_rng(8)
    segments = Segments((1, 0, 3000, 5, 16, 1024), torch.device("cpu"))
    values = torch.from_numpy(VALUES[kind](rng, sum(segments.sizes)).astype(np.float32))
    values[3001:3006], values[3006], values[7:9] = 0.0, torch.inf, torch.tensor([-0.0, -torch.inf])
    values[3007:3022] = torch.arange(15) / 16 * 2.0**-6  # ties between the numbers below the smallest normal one
    limits = floats8.LARGEST, floats8.LEAST_EXPONENT, floats8.MOST_EXPONENT
    found = round_tensors(values.to(DEVICE), segments.bounds.to(DEVICE), *limits).cpu()
    expected = floats8.rounded(values, segments)
    assert torch.equal(found.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(found[number].view(torch.int32), expected[number].view(torch.int32))


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_codes_are_rotated_back_and_added_in_order(share, bits) -> None:
    from gluefl.accel.kernels.rotate import add_back

    rotated, d, key, clients = Rotated(bits, share, block=256), 256 * 3 + 7, (2**45 + 3, 2**31 + 7), (3, 2**32 - 2, 4)
    rng = np.random.default_rng(9)
    vectors = [torch.from_numpy(rng.standard_normal(d).astype(np.float32)) for _ in clients]
    sent = [rotated.compress(vector, *key, client) for vector, client in zip(vectors, clients)]
    weights = [0.5, -2.0, 1e-3]
    total, blocks = torch.zeros(d, device=DEVICE), rotated.blocks(d)
    rotations = [Rotation(*key, client) for client in clients]
    add_back(total, [one.to(DEVICE) for one in sent], blocks, rotations, rotated.levels, weights)
    expected = rotated.combine(sent, weights, d, *key, clients)
    torch.testing.assert_close(total.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_far_apart_positions_have_long_gaps() -> None:
    from gluefl.accel.kernels.positions import gaps

    mask = torch.zeros(1, 9_000_000, dtype=torch.bool)
    mask[0, [3, 130, 20_000, 2_200_000, 8_999_999]] = True  # one to four bytes
    data, lengths = gaps(mask.to(DEVICE), None, True, [5])
    assert lengths.tolist() == [13] and data[0, :13].cpu().numpy().tobytes() == layouts._gaps(Mask(mask[0]), 5)
