"""Rotated uploads: the same signs everywhere, unbiased estimates on difficult blocks, exact bytes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gluefl.accel import kernels
from gluefl.accel.hadamard import add_rotated_back, butterflies, pieces, rotate, rotate_back, served
from gluefl.accel.philox import SHARED, Rotation, philox, sign_bits, sign_bytes
from gluefl.errors import WireError
from gluefl.parameters import ParameterError
from gluefl.vectors.rotation import CENTROIDS, Rotated
from gluefl.wire.rotated import RotatedCodec, rotated_codec

CPU = torch.device("cpu")
SEED, ROUND, CLIENT = 7, 3, 5


def bits_of(rotation, blocks, entries) -> np.ndarray:
    return np.unpackbits(sign_bytes(rotation, blocks, entries), axis=2, bitorder="little")


def normal(size, seed=0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(size).astype(np.float32))


def relative_error(estimate, vector) -> float:
    return float((estimate - vector).square().sum() / vector.square().sum())


# --- Philox and the signs

KNOWN_ANSWERS = [  # Random123, kat_vectors, philox4x32 10
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize("counter, key, expected", KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, expected) -> None:
    words, (k0, k1), answer = ([int(word, 16) for word in text.split()] for text in (counter, key, expected))
    assert [int(word[0]) for word in philox([np.array([word], np.uint64) for word in words], (k0, k1))] == answer
    assert [int(word[0]) for word in philox([torch.tensor([word]) for word in words], (k0, k1))] == answer


def test_the_first_signs_are_those_of_the_document() -> None:
    stages = bits_of(Rotation(SEED, ROUND, CLIENT), 3, 4096)[2, :, :64]
    assert ["".join("+-"[bit] for bit in stage) for stage in stages] == [
        "+-+++----++--+-++-+++++---+-+++--++--++-+-+++++--+-++--+-+--+--+",
        "-++-+-----+--+++---++-++-+-++-++--+-+--+-++------+--+-+++--++-++",
    ]


def test_signs_follow_the_written_rule() -> None:
    """One entry at a time, from the sentence in the docstring of `philox`."""
    rotation = Rotation(2**40 + 9, 11, SHARED)
    for entries in (64, 128, 512):
        bits, calls = bits_of(rotation, 4, entries), -(-entries // 128)
        for block, stage, i in [(0, 0, 0), (3, 0, entries - 1), (1, 1, 0), (2, 1, 37), (3, 1, entries - 1)]:
            counter = (stage * calls + i // 128, block, rotation.client, rotation.round)
            words = philox([np.array([word], np.uint64) for word in counter], (9, 2**8))
            assert bits[block, stage, i] == int(words[i % 128 // 32][0]) >> i % 32 & 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("entries", [64, 128, 4096])
def test_signs_do_not_depend_on_length_and_device(entries, device) -> None:
    rotation = Rotation(2**63 + 5, 2**32 - 1, 2**31 + 1)
    bits = bits_of(rotation, 9, entries)
    assert np.array_equal(bits[:4], bits_of(rotation, 4, entries))
    on_device = sign_bits(rotation, 4, 5, entries, torch.device(device))
    assert np.array_equal(bits[4:], on_device.cpu().numpy())
    assert abs(float(bits.mean()) - 0.5) < 3 / math.sqrt(bits.size)


def test_signs_depend_on_seed_round_client_and_block() -> None:
    rotations = [Rotation(1, 2, 3), Rotation(2, 2, 3), Rotation(1 + 2**32, 2, 3), Rotation(1, 3, 3), Rotation(1, 2, 4)]
    rows = np.concatenate([bits_of(rotation, 2, 128).reshape(4, 128) for rotation in rotations])
    assert len(np.unique(rows, axis=0)) == len(rows) == 20


@pytest.mark.parametrize("key", [(-1, 1, 1), (2**64, 1, 1), (1, 2**32, 1), (1, -1, 1), (1, 1, 2**32)])
def test_a_rotation_that_has_no_counter_is_refused(key) -> None:
    with pytest.raises(ValueError, match="must lie between"):
        Rotation(*key)


# --- The rotation


@given(st.integers(1, 700), st.sampled_from([64, 128, 256]), st.integers(0, 2**32 - 2))
@settings(max_examples=20)
def test_a_rotation_keeps_norms_and_can_be_inverted(d, block, client) -> None:
    vector, blocks = normal(d), Rotated(block=block).blocks(d)
    for rows, signs in pieces(blocks, Rotation(SEED, ROUND, client), CPU):
        part = blocks.of(vector, rows)
        rotated = rotate(part, signs)
        torch.testing.assert_close(rotate_back(rotated, signs), part, rtol=0, atol=2e-6)
        torch.testing.assert_close(rotated.norm(dim=1), part.norm(dim=1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("entries", [64, 128, 4096, 65536])
def test_butterflies_and_products_are_the_same_transform(entries) -> None:
    """Entry j of the transform of the unit vector i is (−1)^(number of ones in i & j), over √B."""
    i, j = np.random.default_rng(1).integers(0, entries, (2, 16))
    units = torch.zeros(16, entries)
    units[torch.arange(16), torch.from_numpy(i)] = 1
    twice = rotate(units, torch.ones(16, 2, entries))  # without signs, two stages are the identity
    assert torch.equal(twice, units)
    expected = [(-1) ** (int(a) & int(b)).bit_count() for a, b in zip(i, j)]
    assert butterflies(units)[torch.arange(16), torch.from_numpy(j)].tolist() == expected
    vector, signs = normal(2 * entries).view(2, -1), 1 - 2.0 * (normal(4 * entries, 1).view(2, 2, -1) > 0)
    by_additions = butterflies(butterflies(vector * signs[:, 0] / entries) * signs[:, 1])
    torch.testing.assert_close(rotate(vector, signs), by_additions, rtol=1e-5, atol=1e-5)


def test_a_vector_is_divided_into_whole_blocks() -> None:
    rotated = Rotated(share=0.1)
    for d, count, entries in [(0, 0, 64), (1, 1, 64), (65, 1, 128), (4000, 1, 4096), (4096, 1, 4096), (4097, 2, 4096)]:
        blocks = rotated.blocks(d)
        assert (blocks.count, blocks.entries, blocks.sent) == (count, entries, math.ceil(0.1 * entries))
        assert rotated.compress(normal(d), 1, 1, 1).shape == (rotated.size(d),)
        assert rotated.decompress(torch.zeros(rotated.size(d)), d, 1, 1, 1).tolist() == [0.0] * d


# --- The estimate


def estimates(rotated, vector, count) -> torch.Tensor:
    """The sum over many rotations of the estimate of one vector."""
    clients = range(count)
    sent = [rotated.compress(vector, SEED, ROUND, client) for client in clients]
    return rotated.combine(sent, [1 / count] * count, len(vector), SEED, ROUND, clients)


def spiky() -> torch.Tensor:
    vector = normal(4096, 2)
    vector[1234] = 135
    return vector


def sparse() -> torch.Tensor:
    vector = torch.zeros(4096)
    vector[::300] = normal(14, 3)
    return vector


DIFFICULT = {
    "gaussian": lambda: normal(4096, 1),
    "spiky": spiky,
    "sparse": sparse,
    "two entries": lambda: torch.cat([torch.tensor([1.0, 2.0]), torch.zeros(4094)]),
}


@pytest.mark.parametrize(
    "kind, options", [*((kind, {}) for kind in DIFFICULT), ("spiky", {"bits": 2}), ("sparse", {"share": 0.25})], ids=str
)
def test_estimates_are_unbiased_on_difficult_blocks(kind, options) -> None:
    """The estimate along the vector, and along what is left of it without its largest entry."""
    vector = DIFFICULT[kind]()
    mean = estimates(Rotated(**options), vector, 300)
    along = 1e-4 if "share" not in options else 0.01  # of a part the length is right in the mean
    assert abs(float(mean @ vector / (vector @ vector)) - 1) < along
    rest = vector.clone()
    rest[vector.abs().argmax()] = 0
    # The standard error of the projection: the error of one estimate has about this norm, in a random direction.
    noise = {1: math.pi / 2 / options.get("share", 1) - 1, 2: 0.14}[options.get("bits", 1)]
    deviation = math.sqrt(noise / 300 / 4096) * float(vector.norm() / rest.norm())
    assert abs(float(mean @ rest / (rest @ rest)) - 1) < 0.01 + 3 * deviation


def trained_embedding() -> torch.Tensor:
    """What ten steps of SGD on words by Zipf's law change: few rows of the embedding, the frequent ones far more."""
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(5)
    module = torch.nn.Sequential(torch.nn.EmbeddingBag(2000, 16), torch.nn.Linear(16, 8))
    words = torch.multinomial(1 / torch.arange(1.0, 2001), 200 * 12, True, generator=generator).view(200, 12)
    return trained_change(module, words, words[:, 0] % 8, 0.5)


def trained_adapters() -> torch.Tensor:
    """What ten steps change of two adapters of rank 4, whose second factors begin at zero."""
    torch.manual_seed(6)
    module = torch.nn.Sequential(Adapted(64, 128), torch.nn.ReLU(), Adapted(128, 10))
    inputs = normal(200 * 64, 6).view(200, 64)
    return trained_change(module, inputs, inputs[:, :10].argmax(1), 0.1)


class Adapted(torch.nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.base = torch.nn.Linear(before, after).requires_grad_(False)
        self.a = torch.nn.Parameter(torch.randn(4, before) / before**0.5)
        self.b = torch.nn.Parameter(torch.zeros(after, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def trained_change(module, inputs, labels, lr) -> torch.Tensor:
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    before = torch.cat([weight.detach().flatten() for weight in weights])
    optimizer = torch.optim.SGD(weights, lr, momentum=0.9)
    for batch in range(10):
        optimizer.zero_grad()
        rows = slice(20 * batch, 20 * batch + 20)
        torch.nn.functional.cross_entropy(module(inputs[rows]), labels[rows]).backward()
        optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in weights]) - before


@pytest.mark.parametrize("trained", [trained_embedding, trained_adapters])
def test_estimates_are_unbiased_on_what_training_changes(trained) -> None:
    """Along the update, and along what is left of it without the largest entries of every block."""
    vector, count = trained(), 300
    mean = estimates(Rotated(), vector, count)
    assert abs(float(mean @ vector / (vector @ vector)) - 1) < 1e-3
    for kept in (0.99, 0.5):
        rest = torch.where(vector.abs() <= torch.quantile(vector.abs(), kept), vector, 0)
        if not rest.any():
            continue  # half of the embedding was not touched
        deviation = math.sqrt((math.pi / 2 - 1) / count / 4096) * float(vector.norm() / rest.norm())
        assert abs(float(mean @ rest / (rest @ rest)) - 1) < 0.01 + 3 * deviation


def test_one_stage_would_be_biased() -> None:
    """The test above can fail: with the signs of stage 1 alone, (1, 2, 0, …) decodes to (0, 2.5, 0, …)."""
    vector = torch.zeros(4096)
    vector[:2] = torch.tensor([1.0, 2.0])
    signs = 1 - 2 * torch.from_numpy(bits_of(Rotation(1, 1, 1), 300, 4096)[:, 0].astype(np.float32))
    once = butterflies(vector * signs) / 64
    scales = once.square().sum(1, keepdim=True) / once.abs().sum(1, keepdim=True)
    mean = (butterflies(once.sign() * scales) / 64 * signs).mean(0)
    torch.testing.assert_close(mean[:2], torch.tensor([0.0, 2.5]), rtol=0, atol=1e-3)


@pytest.mark.parametrize("bits", CENTROIDS)
def test_levels_are_the_centroids_of_a_normal_variable(bits) -> None:
    levels = Rotated(bits=bits).levels
    edges = [-math.inf, *levels.boundaries, math.inf]
    unit = math.sqrt(2 / math.pi) if bits == 1 else 1.0
    for value, low, high in zip(levels.values, edges, edges[1:]):
        density = [math.exp(-edge * edge / 2) / math.sqrt(2 * math.pi) for edge in (low, high)]
        mass = (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
        assert value * unit == pytest.approx((density[0] - density[1]) / mass, abs=1.5e-3)


# For a quantiser with the distortion D, the unbiased scale makes the error 1/(1 − D) − 1.
@pytest.mark.parametrize(
    "options, theory",
    [
        ({}, math.pi / 2 - 1),
        ({"share": 0.25}, 2 * math.pi - 1),
        ({"bits": 2}, 1 / (1 - 0.1175) - 1),
        ({"bits": 3}, 1 / (1 - 0.03454) - 1),
        ({"bits": 4}, 1 / (1 - 0.009497) - 1),
    ],
    ids=str,
)
def test_errors_are_those_of_theory(options, theory) -> None:
    rotated, vector = Rotated(**options), normal(10 * 4096)
    error = relative_error(rotated.decompress(rotated.compress(vector, 1, 1, 1), len(vector), 1, 1, 1), vector)
    assert error == pytest.approx(theory, rel=0.05)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_errors_fall_with_bits_and_share(rounding) -> None:
    vector = normal(3 * 1024, 4)

    def error(**options) -> float:
        rotated = Rotated(block=1024, rounding=rounding, **options)
        return relative_error(rotated.decompress(rotated.compress(vector, 1, 1, 1), 3072, 1, 1, 1), vector)

    by_bits = [error(bits=bits) for bits in (1, 2, 3, 4)]
    assert by_bits == sorted(by_bits, reverse=True) and by_bits[3] < by_bits[0] / 10
    assert error(share=0.1) > 2 * error(share=0.5) > 2 * error()


@pytest.mark.parametrize("bits", [1, 3])
def test_stochastic_rounding_is_unbiased_for_a_fixed_rotation(bits) -> None:
    """A shared rotation stays the same while the draws differ by client; the rotated block is far from normal."""
    vector, count = torch.zeros(64), 1000
    vector[:3] = torch.tensor([1.0, 2.0, -8.0])
    rotated = Rotated(bits=bits, rotation="round", rounding="stochastic")
    sent = [rotated.compress(vector, SEED, ROUND, client) for client in range(count)]
    assert len({float(one[-1]) for one in sent}) == 1
    mean = rotated.combine(sent, [1 / count] * count, 64, SEED, ROUND, range(count))
    spacing = 2 * float(sent[0][-1]) / (2**bits - 1)
    # A rounding has a deviation of at most half a spacing, and a rotation keeps it.
    assert float((mean - vector).abs().max()) < 4 * spacing / 2 / math.sqrt(count)
    assert not torch.equal(sent[0], sent[1])


def test_stochastic_rounding_with_a_share_is_unbiased_over_rotations() -> None:
    vector = normal(256, 5)
    mean = estimates(Rotated(bits=4, share=0.5, rounding="stochastic"), vector, 800)
    assert float(mean @ vector / (vector @ vector)) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("options", [{}, {"bits": 3, "share": 0.3}, {"bits": 2, "rounding": "stochastic"}], ids=str)
@pytest.mark.parametrize("rotation", ["client", "round"])
def test_combine_is_the_sum_of_the_estimates(rotation, options) -> None:
    rotated, d, weights = Rotated(block=128, rotation=rotation, **options), 500, [0.5, -2.0, 0.125]
    clients = [4, 0, 4_000_000_000]
    vectors = [normal(d, client % 7) for client in clients]
    sent = [rotated.compress(vector, SEED, ROUND, client) for vector, client in zip(vectors, clients)]
    total = sum(
        weight * rotated.decompress(one, d, SEED, ROUND, client) for one, weight, client in zip(sent, weights, clients)
    )
    combined = rotated.combine(sent, weights, d, SEED, ROUND, clients)
    torch.testing.assert_close(combined, total, rtol=1e-5, atol=1e-5)
    assert torch.equal(combined, rotated.combine(sent, weights, d, SEED, ROUND, clients))
    assert torch.equal(sent[0], rotated.compress(vectors[0], SEED, ROUND, clients[0]))


@given(st.integers(1, 300), st.integers(1, 4), st.sampled_from([0.01, 0.5, 1.0]), st.booleans(), st.data())
@settings(max_examples=30)
def test_what_is_not_finite_is_never_hidden(d, bits, share, nearest, data) -> None:
    rotated = Rotated(bits=bits, share=share, block=64, rounding="nearest" if nearest else "stochastic")
    vector = normal(d)
    place = data.draw(st.integers(0, d - 1))
    vector[place] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    sent = rotated.compress(vector, 1, 1, 1)
    blocks = rotated.blocks(d)
    codes, scales = sent[: -blocks.count], sent[-blocks.count :]
    assert scales.isnan().nonzero().flatten().tolist() == [place // 64]
    assert bool(((codes >= 0) & (codes < 2**bits) & (codes == codes.round())).all())
    estimate = rotated.decompress(sent, d, 1, 1, 1)
    assert bool(estimate[place].isnan()) and not bool(rotated.decompress(sent.nan_to_num(0), d, 1, 1, 1).isnan().any())
    with pytest.raises(WireError):
        codec = rotated_codec(rotated, d)
        codec.decode(codec.encode(sent))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("bits", [1, 4])
@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
def test_tiny_and_huge_vectors_are_estimated_too(bits, rounding, magnitude) -> None:
    rotated, vector = Rotated(bits=bits, rounding=rounding, block=64), normal(640)
    large = rotated.decompress(rotated.compress(vector * magnitude, 1, 1, 1), 640, 1, 1, 1)
    expected = rotated.decompress(rotated.compress(vector, 1, 1, 1), 640, 1, 1, 1)
    torch.testing.assert_close(large / magnitude, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_zero_block_has_the_scale_zero(rounding) -> None:
    vector = torch.cat([torch.zeros(64), normal(64)])
    for bits in (1, 2):
        rotated = Rotated(bits=bits, block=64, rounding=rounding)
        sent = rotated.compress(vector, 1, 1, 1)
        assert sent[-2] == 0 < sent[-1] and rotated.decompress(sent, 128, 1, 1, 1)[:64].tolist() == [0.0] * 64


@pytest.mark.parametrize(
    "options", [{"block": 100}, {"block": 32}, {"block": 2**17}, {"bits": 0}, {"bits": 5}, {"share": 0}]
)
def test_wrong_options_are_refused(options) -> None:
    with pytest.raises(ParameterError, match=next(iter(options))):
        Rotated(**options)


def test_a_vector_may_have_gaps_in_memory_and_another_precision() -> None:
    wide = normal(600).double().view(300, 2)
    for column in wide.unbind(1):
        sent = Rotated().compress(column, 1, 1, 1)
        assert torch.equal(
            sent, Rotated().compress(column.float().clone(memory_format=torch.contiguous_format), 1, 1, 1)
        )


def test_a_vector_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="were expected for 100 entries"):
        Rotated().decompress(torch.zeros(100), 100, 1, 1, 1)
    with pytest.raises(ValueError, match="all clients share"):
        Rotated().compress(torch.zeros(100), 1, 1, SHARED)


# --- The bytes

codecs = st.builds(RotatedCodec, st.integers(0, 5), st.integers(1, 70), st.integers(1, 4))


def coded(codec, seed) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**codec.bits, codec.codes)
    return torch.from_numpy(np.concatenate([codes, rng.exponential(size=codec.blocks)]).astype(np.float32))


@given(codecs, st.integers(0, 99))
def test_what_is_decoded_is_what_was_encoded(codec, seed) -> None:
    vector = coded(codec, seed)
    data = codec.encode(vector)
    assert len(data) == codec.measure()
    assert torch.equal(codec.decode(data), vector) and torch.equal(codec.decode(memoryview(data)), vector)


def test_the_bytes_are_those_of_the_document() -> None:
    codec = RotatedCodec(2, 3, 3)
    assert codec.encode(torch.tensor([1.0, 2, 3, 4, 5, 6, 0.5, 2])).hex(" ") == "00 00 00 3f 00 00 00 40 d1 58 03"


@given(codecs, st.integers(0, 99), st.data())
def test_damaged_bytes_are_refused_or_are_valid_codes(codec, seed, data) -> None:
    encoded = codec.encode(coded(codec, seed))
    for damaged in (encoded + b"\0", encoded[:-1]):
        if damaged != encoded:
            with pytest.raises(WireError):
                codec.decode(damaged)
    if not encoded:
        return
    damaged = bytearray(encoded)
    damaged[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        vector = codec.decode(bytes(damaged))
    except WireError:
        return
    assert codec.encode(vector) == damaged
    assert bool((vector[: codec.codes] < 2**codec.bits).all() and vector.isfinite().all() and (vector >= 0).all())


@pytest.mark.parametrize("scale", ["0000c07f", "0000807f", "000080bf"])
def test_a_scale_that_no_client_computes_is_refused(scale) -> None:
    with pytest.raises(WireError, match="scale"):
        RotatedCodec(1, 8, 1).decode(bytes.fromhex(scale) + b"\1")


def test_padding_must_be_clean() -> None:
    codec = RotatedCodec(1, 3, 3)
    assert codec.measure() == 6 and codec.decode(bytes(4) + b"\xff\x01").tolist() == [7, 7, 7, 0]
    with pytest.raises(WireError, match="padding"):
        codec.decode(bytes(4) + b"\xff\x03")


@given(st.integers(1, 500), st.integers(1, 4), st.sampled_from([0.07, 1.0]), st.sampled_from(["nearest", "stochastic"]))
@settings(max_examples=30)
def test_what_a_compressor_returns_can_be_encoded(d, bits, share, rounding) -> None:
    rotated = Rotated(bits=bits, share=share, rounding=rounding, block=128)
    sent, codec = rotated.compress(normal(d), 1, 1, 1), rotated_codec(rotated, d)
    assert torch.equal(codec.decode(codec.encode(sent)), sent)


# --- Kernels

KERNEL_OPTIONS = [
    {"bits": bits, "block": block, "share": share}
    for bits, block, share in [(1, 4096, 1), (1, 256, 0.3), (2, 4096, 0.5), (3, 1024, 1), (4, 16384, 1), (1, 8192, 1)]
]


def without_kernels(monkeypatch, function, *arguments) -> torch.Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "HAS_TRITON", False)
        return function(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("options", KERNEL_OPTIONS, ids=str)
@pytest.mark.parametrize("d", [70_000, 16_384 * 3])
def test_kernels_give_what_torch_gives(d, options, monkeypatch) -> None:
    assert kernels.HAS_TRITON
    rotated, vector = Rotated(**options), normal(d)
    key = (2**45 + 3, 2**31 + 7, 2**32 - 2)
    on_cpu = rotated.compress(vector, *key)
    by_kernel = rotated.compress(vector.cuda(), *key)
    by_torch = without_kernels(monkeypatch, rotated.compress, vector.cuda(), *key)
    blocks = rotated.blocks(d)
    codes = blocks.count * blocks.sent
    for other in (on_cpu, by_torch.cpu()):
        steps = (by_kernel[:codes].cpu() - other[:codes]).abs().view(blocks.count, -1)
        assert float(steps.max()) <= 1 and float(steps.mean()) < 1e-4  # entries within rounding of a boundary
        same = steps.amax(1) == 0  # a scale depends on the codes of its block
        assert same.float().mean() > 0.9
        torch.testing.assert_close(by_kernel[codes:].cpu()[same], other[codes:][same], rtol=1e-5, atol=0)
        torch.testing.assert_close(by_kernel[codes:].cpu(), other[codes:], rtol=2 / blocks.sent, atol=0)
    estimate = rotated.decompress(by_kernel, d, *key)
    for other in (
        rotated.decompress(by_kernel.cpu(), d, *key),
        without_kernels(monkeypatch, rotated.decompress, by_kernel, d, *key).cpu(),
    ):
        torch.testing.assert_close(estimate.cpu(), other, rtol=1e-5, atol=1e-5)
    assert torch.equal(by_kernel, rotated.compress(vector.cuda(), *key))


@pytest.mark.gpu
@pytest.mark.parametrize("rotation", ["client", "round"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_kernels_combine_as_a_cpu_does(rounding, rotation) -> None:
    rotated, d, weights, clients = Rotated(bits=2, rounding=rounding, rotation=rotation), 20_000, [0.5, 2.0], [3, 4]
    sent = [rotated.compress(normal(d, client), SEED, ROUND, client) for client in clients]
    on_cpu = rotated.combine(sent, weights, d, SEED, ROUND, clients)
    combined = rotated.combine([one.cuda() for one in sent], weights, d, SEED, ROUND, clients)
    torch.testing.assert_close(combined.cpu(), on_cpu, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("number", [0.0, math.nan, math.inf])
def test_kernels_hide_nothing_that_is_not_finite(number) -> None:
    for bits in (1, 2):
        vector = torch.cat([torch.full((256,), number), normal(256)]).cuda()
        rotated = Rotated(bits=bits, block=256)
        sent = rotated.compress(vector, 1, 1, 1)
        assert bool(sent[-1].isfinite()) and (float(sent[-2]) == 0 if number == 0 else bool(sent[-2].isnan()))
        assert bool(((sent[:-2] >= 0) & (sent[:-2] < 2**bits)).all())
        assert bool(rotated.decompress(sent, 512, 1, 1, 1)[256:].isfinite().all())


@pytest.mark.gpu
def test_the_signs_of_kernels_are_those_of_numpy() -> None:
    """Small integers are rotated without rounding: one wrong sign, and the results differ."""
    d, rotation = 3 * 4096, Rotation(2**45 + 3, 2**31 + 7, SHARED)
    blocks = Rotated().blocks(d)
    rows = torch.from_numpy(np.random.default_rng(0).integers(-8, 9, (3, 4096)).astype(np.float32))
    total = torch.zeros(d, device="cuda")
    assert served(total, blocks)
    add_rotated_back(total, [rows.flatten().cuda()], blocks, [rotation], None, [1.0])
    ((_, signs),) = pieces(blocks, rotation, CPU)
    assert torch.equal(total.cpu(), rotate_back(rows, signs).flatten())


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_the_length_is_known_without_rotating_back(bits, share, rounding) -> None:
    rotated, d = Rotated(bits, share, 64, rounding), 64 * 5  # whole blocks
    delta = torch.from_numpy(np.random.default_rng(1).standard_normal(d, dtype="float32"))
    sent = rotated.compress(delta, 1, 2, 3)
    estimate = rotated.decompress(sent, d, 1, 2, 3)
    assert rotated.length(sent, d) == pytest.approx(float(estimate.double().norm()), rel=1e-5)


@pytest.mark.parametrize("vector", [[1.0], [1.0, 1.000001], [1.0, 1.0, 1.0]], ids=str)
def test_a_part_of_a_block_whose_entries_are_near_zero_is_not_blown_up(vector) -> None:
    """The tail of a vector: a few entries of a rotated block of 64 stand for all of them."""
    rotated, x = Rotated(share=len(vector) / 64, block=64), torch.tensor(vector)
    found = torch.stack(
        [rotated.decompress(rotated.compress(x, SEED, round, 0), len(x), SEED, round, 0) for round in range(2000)]
    )
    assert float(found.abs().max()) < 64 * float(x.norm())
    spread = found.std(0) / 2000**0.5
    assert ((found.mean(0) - x).abs() <= 5 * spread + 0.02).all()
