"""Format 2 by a decoder written from docs/wire-format.md alone, golden files of it, and the examples of that page."""

import json
import os
import re
import zlib
from dataclasses import replace
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gluefl import wire
from gluefl.errors import WireError
from gluefl.strategies import Space, Statistic
from gluefl.strategies.lean import Lean
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import part_of, whole
from gluefl.wire import compact
from gluefl.wire.floats8 import rounded
from gluefl.wire.rotated import RotatedCodec
from test_wire import GOLDEN, LAYOUT, RUN
from test_wire_document import PAGE, fields, need, table

HEADER = table("A compact message")

# --- the decoder ------------------------------------------------------------------------------------------


def read_header(data, known, kind, codec):
    need(len(data) >= 42 and data[:3] == b"GL\x02")
    header, body = fields(data, HEADER), data[42:]
    need((header["kind"], header["codec"]) == (kind, codec) and header["flags"] <= 1)
    need(header["checksum"] == zlib.crc32(body + data[:38] + known))
    return header, body


def read_package(data, known, sizes, logarithmic, origin):
    """The header, and values by position."""
    header, body = read_header(data, known, 1, 6)
    need(len(body) <= -(-len(sizes) // 8) + 8 * len(sizes) + -(-33 * sum(sizes) // 8))
    tensors, at = read_table(body, sizes, logarithmic)
    bits = [byte >> i & 1 for byte in body[at:] for i in range(8)]
    coded = [(t["k_gaps"], t["gaps"]) for t in tensors] + [(t["k_cells"], t["cells"]) for t in tensors]
    numbers, end = sum(count for _, count in coded), sum(k * count for k, count in coded)
    need(end + numbers <= len(bits))
    ones = [i for i, bit in enumerate(bits[end:]) if bit]
    need(len(ones) == numbers and (-(-(end + ones[-1] + 1) // 8) if ones else 0) == len(body) - at)
    remainder, quotient = iter(bits), (b - a - 1 for a, b in zip([-1, *ones], ones))
    low = [[sum(bit << i for i, bit in enumerate(islice(remainder, k))) for _ in range(count)] for k, count in coded]
    decoded = [[(next(quotient) << k) + rest for rest in part] for (k, _), part in zip(coded, low)]
    values = {}
    for tensor, gaps, codes in zip(tensors, decoded, decoded[len(tensors) :]):
        index = -1
        for code, gap in zip(codes, gaps or [0] * len(codes)):
            index += 1 + gap
            need(index < tensor["size"] and code <= 2**31 - 2)
            base = np.float32(0) if origin is None else origin[tensor["start"] + index]
            values[tensor["start"] + index] = value_of(cell_of(code, tensor["order"]), tensor["exponent"], base)
    return header, values


def read_table(body, sizes, logarithmic):
    def byte(at):
        need(at < len(body))
        return body[at]

    at, start, tensors = -(-len(sizes) // 8), 0, []
    need(not any(byte(i // 8) >> i % 8 & 1 for i in range(len(sizes), 8 * at)))
    for i, size in enumerate(sizes):
        if byte(i // 8) >> i % 8 & 1:
            count, length = 0, 0
            while length == 0 or byte(at - 1) >= 128:
                need(length < 5)
                count, at, length = count | (byte(at) & 127) << 7 * length, at + 1, length + 1
            exponent = None
            if not logarithmic[i]:
                exponent, at = int(np.uint8(byte(at)).view(np.int8)), at + 1
            parameters, at = byte(at), at + 1
            k_cells = parameters & 7
            if k_cells == 7:
                k_cells, at = byte(at), at + 1
            need(count < size and k_cells <= 30 and (count or parameters < 16))
            tensors.append(
                {"start": start, "size": size, "gaps": count, "cells": count or size, "exponent": exponent,
                 "k_gaps": parameters >> 4, "order": parameters >> 3 & 1, "k_cells": k_cells}
            )  # fmt: skip
        start += size
    return tensors, at


def cell_of(code, order):
    first = ((0, -1, 1), (-1, 1, 0))[order]
    return first[code] if code < 3 else -(code + 1) // 2 if code % 2 else code // 2


def value_of(cell, exponent, base):
    if exponent is None:
        pattern = (int(base.view(np.uint32)) >> 20) + cell
        need(0 <= pattern < 0x7F8)
        return np.uint32(pattern << 20).view(np.float32)
    exact = Fraction(float(base)) + cell * Fraction(2) ** exponent
    need(abs(exact) < 2**128)
    value = np.float32(float(exact))
    need(Fraction(float(value)) == exact)
    return value


def read_upload(data, known, d, statistics, block, bits, share):
    """The header, the codes and scales of every block, and the change of the statistics."""
    header, body = read_header(data, known, 2, 7)
    count, sent = division(d, block, share)
    packed = -(-count * sent * bits // 8)
    need(len(body) == 4 * count + packed + len(statistics) + sum(statistics))
    scales = np.frombuffer(body[: 4 * count], "<f4")
    need(np.isfinite(scales).all() and not np.signbit(scales).any())
    stream = [byte >> i & 1 for byte in body[4 * count : 4 * count + packed] for i in range(8)]
    need(not any(stream[count * sent * bits :]))
    codes = [sum(stream[i * bits + j] << j for j in range(bits)) for i in range(count * sent)]
    exponents = np.frombuffer(body[4 * count + packed :], np.int8)[: len(statistics)]
    need((exponents <= 110).all())
    floats = [e4m3(byte) for byte in body[4 * count + packed + len(statistics) :]]
    return header, np.array(codes).reshape(count, sent), scales, floats * np.repeat(2.0**exponents, statistics)


def division(d, block, share):
    entries = 64
    while entries < min(d, block):
        entries *= 2
    return -(-d // entries), int(np.ceil(share * entries))


def e4m3(byte):
    need(byte & 0x7F != 0x7F)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    return -size if byte >> 7 else size


POSITIVE = {
    1: [1],
    2: [0.4528, 1.510],
    3: [0.2451, 0.7560, 1.344, 2.152],
    4: [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733],
}


def rotated_back(codes, scales, d, entries, bits, seed, round, client):
    """The estimate of the change of the weights."""
    levels = np.array([-level for level in reversed(POSITIVE[bits])] + POSITIVE[bits])
    at = np.arange(entries)
    hadamard = np.array([[(-1) ** int(i & j).bit_count() for j in at] for i in at]) / np.sqrt(entries)
    blocks = []
    for block, (row, scale) in enumerate(zip(codes, scales)):
        y = np.zeros(entries)
        y[: len(row)] = scale * levels[row]
        calls = -(-entries // 128)
        first, second = (signs(entries, block, client, round, seed, stage * calls) for stage in (0, 1))
        blocks.append(first * (hadamard @ (second * (hadamard @ y))))
    return np.concatenate(blocks)[:d]


def signs(entries, block, client, round, seed, first):
    words = [w for call in range(-(-entries // 128)) for w in philox([first + call, block, client, round], seed)]
    return np.array([1 - 2 * (words[j // 32] >> j % 32 & 1) for j in range(entries)])


def philox(counter, seed):
    c0, c1, c2, c3 = counter
    k0, k1 = seed % 2**32, seed >> 32
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b % 2**32, (a >> 32) ^ c3 ^ k1, a % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def version_0(initial, weights, statistics, kinds):
    def power(x):
        mantissa, exponent = np.frexp(np.float32(x))
        return 0.0 if x == 0 else 2.0 ** (exponent - (mantissa < np.float32(0.70710677)))

    parts = np.split(initial, np.cumsum([*weights, *statistics])[:-1])
    for i, part in enumerate(parts[: len(weights)]):
        step = power(np.float32(0.5) * np.float32(np.std(part.astype(np.float64))))
        fine = (step or power(np.abs(part).max()) / 256) / 4 or 1.0
        parts[i] = np.rint(part / fine) * fine + 0.0
    for i, kind in enumerate(kinds, len(weights)):
        if kind == "variance":
            bits = np.maximum(parts[i], 0).view(np.uint32)
            parts[i] = (((bits + 2**19) >> 20) << 20).view(np.float32)
        else:
            fine = power(np.abs(parts[i]).max()) / 4096 or 1.0
            parts[i] = np.rint(parts[i] / fine) * fine + 0.0
    return np.concatenate(parts).astype(np.float32)


# --- golden files: the inputs -----------------------------------------------------------------------------

SIZES, LOGARITHMIC = (90, 10, 10, 10, 1), (False, False, False, True, False)
SPACE = Space((90, 10), statistics=(Statistic(10, "mean"), Statistic(10, "variance"), Statistic(1, "counter")))
D, S = 100, 21
KNOWN = RUN + LAYOUT + D.to_bytes(8, "little") + S.to_bytes(4, "little")
SHARED = wire.Shared(SPACE.mask(False))


def model(version: int) -> torch.Tensor:
    """Version 0 or 2 of a model, in numbers that need no generator."""
    at, ten = torch.arange(90), torch.arange(10)
    weights = (at * 7 % 31 - 15) / 16
    if version == 0:
        return torch.cat([weights, torch.zeros(20), torch.ones(10), torch.zeros(1)])
    weights += (at % 9 == 4) * torch.where(at % 2 == 0, 0.125, -0.25)
    bias = (ten % 4 == 2) * (ten - 5) / 64
    variances = 1 - (ten == 3) / 2 + (ten == 7) / 8
    return torch.cat([weights, bias, (ten - 12) / 8, variances, torch.zeros(1)])


def package(relative: bool) -> tuple[wire.Header, wire.Body]:
    """From version 0 to 2, relative to version 0; or all of version 2, absolute."""
    origin, vector, codec = model(0) if relative else None, model(2), Lean().traits(SPACE).package_codec
    update = part_of(vector, Mask(vector != model(0))) if relative else whole(vector)
    digest = wire.replica_hash(vector[:D], vector[D:])
    header = wire.Header(
        wire.PACKAGE, RUN, LAYOUT, round=3, base=0 if relative else None, version=2, hash=digest, weight=0.125
    )
    return header, wire.Body(update, torch.zeros(0), SHARED, False, codec, origin)


def upload(lean: Lean) -> tuple[wire.Header, wire.Body]:
    """Codes, two scales, and changes of the statistics that eight bits round."""
    codec, ten = lean.traits(SPACE).upload_codec, torch.arange(10)
    codes = (5 * torch.arange(2 * lean.rotated.blocks(D).sent) + 3) % 7 % 2**lean.upload_bits
    changes = torch.cat([(ten - 4) * 0.3, ten * 0.01, torch.tensor([10.0])])
    vector = torch.cat([codes, torch.tensor([0.75, 0.03125]), rounded(changes, SPACE.statistics_segments)])
    header = wire.Header(
        wire.UPLOAD, RUN, LAYOUT, round=3, base=2, version=2, hash=b"hashhash", weight=0.125, loss=1.5, samples=200
    )
    return header, wire.Body(whole(vector), torch.zeros(0), SHARED, False, codec)


ONE_BIT, THREE_BITS = Lean(upload_block=64), Lean(upload_block=64, upload_bits=3, upload_share=0.5)
PACKAGES = {"lean-package": package(True), "lean-package-whole": package(False)}
UPLOADS = {"lean-upload": (ONE_BIT, *upload(ONE_BIT)), "lean-upload-3-bits": (THREE_BITS, *upload(THREE_BITS))}
MESSAGES = PACKAGES | {name: message for name, (_, *message) in UPLOADS.items()}
DESCRIPTION = {
    "run": RUN.hex(),
    "layout": LAYOUT.hex(),
    "d": D,
    "s": S,
    "tensors": [{"size": size, "logarithmic": kind} for size, kind in zip(SIZES, LOGARITHMIC)],
}


def encoded(header: wire.Header, body: wire.Body) -> bytes:
    return wire.encode(header, wire.encode_body(body), D, S, body.codec)


def expected(header: wire.Header, body: wire.Body) -> wire.Expected:
    return wire.Expected(RUN, LAYOUT, D, S, header.kind, None, body.codec, body.origin)


def golden(name: str) -> bytes:
    return (GOLDEN / f"{name}.bin").read_bytes()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("name", MESSAGES)
def test_golden_files(name) -> None:
    header, body = MESSAGES[name]
    if "GLUEFL_WRITE_GOLDEN" in os.environ:
        (GOLDEN / f"{name}.bin").write_bytes(encoded(header, body))
    assert encoded(header, body) == golden(name)
    found, decoded = wire.decode(golden(name), expected(header, body))
    assert found == header
    assert torch.equal(decoded.update.positions, body.update.positions)
    assert same_bits(decoded.update.values, body.update.values)


def test_the_golden_description() -> None:
    path, version = GOLDEN / "lean-model.json", GOLDEN / "lean-version-0.bin"
    if "GLUEFL_WRITE_GOLDEN" in os.environ:
        path.write_text(json.dumps(DESCRIPTION, indent=2) + "\n", encoding="utf-8")
        version.write_bytes(model(0).numpy().tobytes())
    assert json.loads(path.read_text(encoding="utf-8")) == DESCRIPTION
    assert version.read_bytes() == model(0).numpy().tobytes()


# --- against ours -----------------------------------------------------------------------------------------


def read_like(data: bytes, header: wire.Header, body: wire.Body):
    origin = None if body.origin is None else body.origin.numpy()
    return read_package(data, KNOWN, SIZES, LOGARITHMIC, origin)


def assert_package_read_alike(data: bytes, header: wire.Header, body: wire.Body) -> None:
    read, values = read_like(data, header, body)
    found, decoded = wire.decode(data, expected(header, body))
    assert_same_header(read, found)
    assert list(values) == decoded.update.positions.tolist()
    assert np.array(list(values.values()), np.float32).tobytes() == decoded.update.values.numpy().tobytes()


def assert_same_header(read, found: wire.Header) -> None:
    for name in ("kind", "round", "version", "hash", "weight", "loss", "samples"):
        assert np.array_equal(read[name], getattr(found, name), equal_nan=name in ("weight", "loss")), name
    assert (None if read["base"] == 0xFFFFFFFF else read["base"]) == found.base
    assert bool(read["flags"]) == found.accepted


def test_the_table_of_the_page_is_complete() -> None:
    ends = [at + length for at, length, _, _ in HEADER]
    assert [at for at, _, _, _ in HEADER] == [0, *ends[:-1]] and ends[-1] == compact.HEADER_BYTES


@pytest.mark.parametrize("name", PACKAGES)
def test_golden_packages(name) -> None:
    assert_package_read_alike(golden(name), *PACKAGES[name])


@pytest.mark.parametrize("name", UPLOADS)
def test_golden_uploads(name) -> None:
    lean, header, body = UPLOADS[name]
    bits, seed, round, client = lean.upload_bits, 2**40 + 7, 3, 5
    read, codes, scales, statistics = read_upload(golden(name), KNOWN, D, (10, 10, 1), 64, bits, lean.upload_share)
    found, decoded = wire.decode(golden(name), expected(header, body))
    assert_same_header(read, found)
    vector, split = decoded.update.values, lean.rotated.size(D)
    assert np.concatenate([codes.reshape(-1), scales]).tolist() == vector[:split].tolist()
    assert statistics.tolist() == vector[split:].tolist()
    estimate = rotated_back(codes, scales, D, 64, bits, seed, round, client)
    theirs = lean.rotated.decompress(vector[:split], D, seed, round, client)
    assert np.abs(estimate - theirs.numpy()).max() < 1e-5 < np.abs(estimate).max() / 100


@given(st.integers(0, 999), st.sampled_from([0, 0.03, 0.4, 1]), st.booleans(), st.sampled_from([1, 40, 2**20]))
def test_any_package(seed, density, relative, spread) -> None:
    rng = np.random.default_rng(seed)
    steps = np.repeat(np.ldexp(1.0, rng.integers(-30, 5, len(SIZES))), SIZES)
    patterns = rng.integers(0, 0x7F8, (2, D + S)).astype(np.int32) << 20
    first, last = rng.integers(-spread, spread + 1, (2, D + S)) * steps
    on_logarithmic = np.repeat(LOGARITHMIC, SIZES)
    origin, vector = (
        torch.from_numpy(np.where(on_logarithmic, pattern.view(np.float32), linear).astype(np.float32))
        for pattern, linear in zip(patterns, (first, last))
    )
    body = replace(package(relative)[1], update=part_of(vector, Mask(torch.from_numpy(rng.random(D + S) < density))))
    body = replace(body, origin=origin if relative else None)
    header = replace(package(relative)[0], loss=0.5, accepted=False)
    assert_package_read_alike(encoded(header, body), header, body)


def with_body(data: bytes, body: bytes) -> bytes:
    """A message with another body and a checksum that is right."""
    return data[:38] + zlib.crc32(body + data[:38] + KNOWN).to_bytes(4, "little") + body


def damaged(data: bytes) -> list[bytes]:
    inside = data[42:]
    variants = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(42)]
    variants += [
        with_body(data, inside[:at] + bytes([new]) + inside[at + 1 :])
        for at in range(len(inside))
        for new in (0, 1, 7, 0x10, 0x7F, 0x80, 0xFF)
    ]
    return variants + [with_body(data, inside[:at]) for at in range(len(inside))] + [with_body(data, inside + b"\0")]


@pytest.mark.parametrize("name", PACKAGES)
def test_both_refuse_the_same_packages(name) -> None:
    header, body = PACKAGES[name]
    refused = 0
    for variant in damaged(golden(name)):
        try:
            wire.decode(variant, expected(header, body))
        except WireError:
            refused += 1
            with pytest.raises(ValueError, match="malformed"):
                read_like(variant, header, body)
        else:
            assert_package_read_alike(variant, header, body)
    assert refused > len(golden(name))


@pytest.mark.parametrize("name", UPLOADS)
def test_both_refuse_the_same_uploads(name) -> None:
    lean, header, body = UPLOADS[name]
    settings = (KNOWN, D, (10, 10, 1), 64, lean.upload_bits, lean.upload_share)
    refused = 0
    for variant in damaged(golden(name)):
        try:
            decoded = wire.decode(variant, expected(header, body))[1].update.values
        except WireError:
            refused += 1
            with pytest.raises(ValueError, match="malformed"):
                read_upload(variant, *settings)
        else:
            _, codes, scales, statistics = read_upload(variant, *settings)
            vector = np.concatenate([codes.reshape(-1), scales, statistics]).astype(np.float32)
            assert vector.tobytes() == decoded.numpy().tobytes()
    assert refused > len(golden(name))


@given(st.integers(0, 999), st.sampled_from([0.0, 1e-3, 1.0, 50.0]), st.booleans())
def test_version_0(seed, spread, shifted) -> None:
    rng = np.random.default_rng(seed)
    weights = np.concatenate([spread * rng.standard_normal(90), np.full(10, rng.standard_normal() * shifted)])
    statistics = np.concatenate([rng.standard_normal(10), rng.exponential(1, 10), [3]])
    initial = np.concatenate([weights, statistics]).astype(np.float32)
    kinds = [statistic.kind for statistic in SPACE.statistics]
    computed = version_0(initial, (90, 10), (10, 10, 1), kinds)
    assert computed.tobytes() == Lean().init(SPACE, torch.from_numpy(initial))[1].numpy().tobytes()


# --- what the page shows ----------------------------------------------------------------------------------


def listing(after: str) -> bytes:
    """The bytes at the beginning of the lines of the next block."""
    lines = PAGE.split(after)[1].split("```")[1].splitlines()
    shown = [re.match(r"(?:[0-9a-f]{2}(?: |$)+)+", line) for line in lines]
    return b"".join(bytes.fromhex(line[0]) for line in shown if line)


@pytest.mark.parametrize("name", ["lean-package", "lean-upload"])
def test_the_messages_of_the_page(name) -> None:
    assert listing(f"\n`{name}.bin`") == golden(name)
    assert f"{len(golden(name))} bytes:" in PAGE.split(f"\n`{name}.bin`")[1].split("```")[0]


def test_the_body_of_the_page() -> None:
    body = listing("The body of a package of the tensors 8, 3, 4 and 2")
    data = with_body(golden("lean-package")[:42], body)
    _, values = read_package(data, KNOWN, (8, 3, 4, 2), (False, False, False, True), None)
    assert values == {1: 0.5, 4: -0.5, 5: 1, 11: 3, 12: -3, 13: 6, 14: 0, 16: 1}


def test_the_codes_of_the_page() -> None:
    shown = re.search(r"codes 1, 2, 3 and 4, 5, 6 in three bits: `([0-9a-f ]+)`", PAGE)[1]
    assert RotatedCodec(2, 3, 3).encode(torch.tensor([1.0, 2, 3, 4, 5, 6, 0.5, 2])).hex(" ") == shown


def test_the_levels_of_the_page() -> None:
    for bits, positive in POSITIVE.items():
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| {bits} | {positive[0]:g}"))
        assert [float(level) for level in row.split("|")[2].split(",")] == positive
        values = Lean(upload_bits=bits).rotated.levels.values
        assert list(values) == [-level for level in reversed(positive)] + positive


def test_the_words_of_the_page() -> None:
    rows = re.findall(r"^\| ((?:[0-9a-f]{8} ){4})\| ((?:[0-9a-f]{8} ){2})\| ((?:[0-9a-f]{8} ?)+)", PAGE, re.MULTILINE)
    assert len(rows) == 4
    for counter, key, words in rows:
        low, high = (int(word, 16) for word in key.split())
        numbers = [int(word, 16) for word in words.split()]
        assert list(philox([int(word, 16) for word in counter.split()], high << 32 | low))[: len(numbers)] == numbers
    assert signs(64, 2, 5, 3, 7, 0)[:8].tolist() == [1, -1, 1, 1, 1, -1, -1, -1]
