"""A decoder written from docs/wire-format.md, with nothing of ours in it, reads what we write and refuses what we do.

Headers are read by the tables of that page itself, so that the page cannot drift away from the bytes.
`test_wire_document_lean.py` has format 2.
"""

import hashlib
import re
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given

import test_updates
import test_wire as ours
from gluefl import wire
from gluefl.errors import WireError

PAGE = (Path(__file__).parents[1] / "docs" / "wire-format.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (\d+) \| (\d+) \| (\w+) \| (\w+) \|", re.MULTILINE)
TYPES = {"uint8": "<B", "uint16": "<H", "uint32": "<I", "uint64": "<Q", "float32": "<f", "float64": "<d"}


def table(heading: str) -> list[tuple[int, int, str, str]]:
    """The rows (offset, bytes, type, field) of the table under a heading of the page."""
    part = re.split(r"\n#+ ", PAGE.split(f"\n### {heading}\n")[1])[0]
    return [(int(at), int(size), kind, name) for at, size, kind, name in ROW.findall(part)]


HEADER, SECTION = table("A message"), table("The body")


# --- the decoder ------------------------------------------------------------------------------------------


def fields(data, rows):
    cut = {name: (kind, data[at : at + size]) for at, size, kind, name in rows}
    return {n: bytes(part) if k == "bytes" else struct.unpack(TYPES[k], part)[0] for n, (k, part) in cut.items()}


def need(condition):
    if not condition:
        raise ValueError("malformed")


def read(data, run, layout, d, s, kind, known_mask=None, held=None):
    need(104 <= len(data) <= 104 + 4 * 16 + 4 * (d + s) + 2 * (d // 4 + 1024) + (held is not None))
    header, body = fields(data, HEADER), data[104:]
    need(header["magic"] == b"GLUE" and header["header_sum"] == zlib.crc32(data[:100]))
    found = [header[name] for name in ("format", "kind", "precision", "run", "layout", "size", "statistics")]
    need(found == [1, kind, 0, run, layout, d, s] and header["flags"] <= 1)
    need(header["body_bytes"] == len(body) and header["body_sum"] == zlib.crc32(body))
    sections = []
    for _ in range(4):
        need(len(body) >= 16)
        part, body = fields(body, SECTION), body[16:]
        need(part["reserved"] == 0 and part["bytes"] <= len(body))
        part["data"], body = body[: part["bytes"]], body[part["bytes"] :]
        sections.append(part)
    need(not body)
    masked, sent, *floats = sections
    if kind == 1:
        need(masked["relation"] == 0)
        mask = read_set(masked, d)
    else:
        need(masked["relation"] == 2 and masked["count"] == 0 and not masked["data"])
        mask = known_mask
    need(sent["relation"] in (0, 1))
    if sent["relation"] == 0:
        chosen = read_set(sent, d)
    else:
        chosen = mask.copy()
        chosen[~mask] = read_set(sent, d - int(mask.sum()))
    if held is not None:
        part = floats[0]
        need((part["codec"], part["relation"], part["count"]) == (8, 0, int(chosen.sum())))
        weights = read_updates(part["data"], held[chosen])
        floats[0] = {**part, "codec": 0, "bytes": weights.nbytes, "data": weights.tobytes()}
    for part, count in zip(floats, (int(chosen.sum()), s)):
        need((part["codec"], part["relation"], part["count"], part["bytes"]) == (0, 0, count, 4 * count))
    values, statistics = (np.frombuffer(part["data"], "<f4") for part in floats)
    return header, mask, np.flatnonzero(chosen), values, statistics


def read_set(part, n):
    codec, count, data = part["codec"], part["count"], part["data"]
    need(codec <= 5 and count <= n and (codec > 1 or not data))
    listed = count if codec == 4 else n - count
    if codec >= 3:
        declared = zstandard.frame_content_size(data) if data else -1
        need(declared == -(-n // 8) if codec == 3 else 0 <= declared <= 5 * listed)
        data = zstandard.ZstdDecompressor().decompress(data, max_output_size=declared, allow_extra_data=False)
    if codec <= 1:
        chosen = np.full(n, codec == 1)
    elif codec <= 3:
        need(len(data) == -(-n // 8))
        bits = [byte >> i & 1 for byte in data for i in range(8)]
        need(not any(bits[n:]))
        chosen = np.array(bits[:n], bool)
    else:
        chosen, entry, at = np.full(n, codec == 5), -1, 0
        for _ in range(listed):
            gap, length = 0, 0
            while True:
                need(at < len(data) and length < 5)
                byte, at, length = data[at], at + 1, length + 1
                gap |= (byte & 127) << 7 * (length - 1)
                if byte < 128:
                    break
            entry += gap + 1
            need(entry < n)
            chosen[entry] = codec == 4
        need(at == len(data))
    need(int(chosen.sum()) == count)
    return chosen


def read_updates(data, weights):
    """Codec 8: the weights themselves, or the updates that are added to those of the client."""
    n = weights.size
    need(data and n <= 8 * len(data) <= 8 * (1 + 4 * n) and data[0] <= 1)
    data, form = data[1:], data[0]
    if form == 0:
        need(len(data) == 4 * n)
        return np.frombuffer(data, "<f4")
    weights = weights.astype("<f4")
    need(data)
    while data:
        need(len(data) >= 4)
        magnitude, (count, data) = np.frombuffer(data[:4], "<f4")[0], read_varint(data[4:])
        need(np.isfinite(magnitude) and not np.signbit(magnitude) and count < n)
        k, size = 0, 0
        if count:
            need(data and data[0] <= 30)
            k, (size, data) = data[0], read_varint(data[1:])
        sent = count or n
        need(-(-sent // 8) + size <= len(data))
        signs, codes = bits_of(data[: -(-sent // 8)]), bits_of(data[-(-sent // 8) :][:size])
        data = data[-(-sent // 8) + size :]
        need(not any(signs[sent:]))
        places = read_gaps(codes, count, k, n) if count else range(n)
        for place, plus in zip(places, signs):
            weights[place] += magnitude if plus else -magnitude
    return weights


def read_gaps(bits, count, k, n):
    quotients, entry, places = bits[count * k :], -1, []
    need(count * k <= len(bits) and sum(quotients) == count)
    for i in range(count):
        quotient = quotients.index(1)
        quotients = quotients[quotient + 1 :]
        entry += 1 + (quotient << k) + sum(bit << j for j, bit in enumerate(bits[i * k : i * k + k]))
        need(entry < n)
        places.append(entry)
    need(len(quotients) < 8)
    return places


def read_varint(data):
    number = 0
    for i in range(5):
        need(i < len(data))
        number |= (data[i] & 127) << 7 * i
        if data[i] < 128:
            return number, data[i + 1 :]
    raise ValueError("malformed")


def bits_of(data):
    return [byte >> i & 1 for byte in data for i in range(8)]


# --- against ours -----------------------------------------------------------------------------------------


def read_like(data: bytes, body: wire.Body):
    """Read a message with the decoder above, knowing what the receiver of `body` knows."""
    mask = None if body.sends_mask else body.shared.mask.bits.numpy()
    kind = wire.PACKAGE if body.sends_mask else wire.UPLOAD
    return read(data, ours.RUN, ours.LAYOUT, body.update.size, body.statistics.numel(), kind, mask)


def assert_read_alike(data: bytes, body: wire.Body) -> None:
    header, mask, positions, values, statistics = read_like(data, body)
    found, decoded = wire.decode(data, ours.expected(body))
    for name in ("kind", "run", "layout", "round", "version", "base_hash", "hash", "weight", "loss", "samples"):
        assert header[name] == getattr(found, name), name
    assert (None if header["base"] == 0xFFFFFFFF else header["base"]) == found.base
    assert bool(header["flags"]) == found.accepted
    assert np.array_equal(mask, decoded.shared.mask.bits.numpy())
    assert np.array_equal(positions, decoded.update.positions.numpy())
    assert values.tobytes() == decoded.update.values.numpy().tobytes()  # bits: NaN included
    assert statistics.tobytes() == decoded.statistics.numpy().tobytes()


def test_updates_are_read_and_refused_alike() -> None:
    body, held = test_updates.golden()
    golden = test_updates.message()
    inside = golden[wire.HEADER_BYTES :]
    variants = [golden] + [
        ours.with_body(golden, inside[:at] + bytes([new]) + inside[at + 1 :])
        for at in range(len(inside))
        for new in (*range(9), 0x1F, 0x7F, 0x80, 0xFF, inside[at] ^ 1, inside[at] ^ 0x10)
    ]
    expected, accepted = replace(ours.expected(body), codec=body.codec).holding(held), 0
    for variant in variants:
        arguments = variant, ours.RUN, ours.LAYOUT, 40, 2, wire.PACKAGE, None, held.numpy()
        try:
            found = wire.decode(variant, expected)[1].update
        except WireError:
            with pytest.raises((ValueError, zstandard.ZstdError)):
                read(*arguments)
            continue
        accepted += 1
        _, _, positions, values, _ = read(*arguments)
        assert np.array_equal(positions, found.positions.numpy())
        assert values.tobytes() == found.values.numpy().tobytes()
    assert len(inside) < accepted < len(variants) - len(inside)


def test_the_example_of_updates() -> None:
    listing = PAGE.split("#### Updates (codec 8)")[1].split("```")[1]
    shown = b"".join(bytes.fromhex(line[:30]) for line in listing.splitlines())
    golden = test_updates.message()
    assert shown in golden and len(shown) == int.from_bytes(golden[-16 - 8 - len(shown) - 8 :][:8], "little")


def test_the_tables_of_the_page_are_complete() -> None:
    for rows, size in ((HEADER, wire.HEADER_BYTES), (SECTION, 16)):
        ends = [at + length for at, length, _, _ in rows]
        assert [at for at, _, _, _ in rows] == [0, *ends[:-1]] and ends[-1] == size


@pytest.mark.parametrize("name", ours.EXAMPLES)
def test_golden_files(name) -> None:
    data = (ours.GOLDEN / f"{name}.bin").read_bytes()
    assert_read_alike(data, ours.EXAMPLES[name][0])


@pytest.mark.parametrize("sends_mask", [True, False], ids=["package", "upload"])
@pytest.mark.parametrize("beside", [True, False], ids=["beside", "absolute"])
@pytest.mark.parametrize(
    ("codec", "size", "share"),
    [(0, 100, 0), (1, 100, 1), (2, 20, 0.5), (3, 9000, 0.2), (4, 9000, 0.001), (5, 9000, 0.999)],
)
def test_every_codec(codec, size, share, beside, sends_mask) -> None:
    some = ours.mask_of(size, share, 0)
    mask = torch.zeros(3 * size, dtype=torch.bool)
    mask[::3] = beside
    chosen = mask.clone()
    if beside:  # the same set, among the positions outside the mask
        chosen[~mask] = torch.cat([some, some])
    else:
        chosen = torch.cat([some, some, some])
    body = ours.body_of(chosen, mask, sends_mask=sends_mask)
    everything = codec == 1  # all positions are written by themselves, whatever the mask
    relation, packed = ours.PositionSet.of(body.update, body.shared).encode()
    assert packed.codec == codec
    assert relation == (ours.BESIDE_MASK if beside and not everything else ours.ABSOLUTE)
    assert_read_alike(ours.encoded(body), body)


@given(ours.bodies())
def test_any_message(body) -> None:
    assert_read_alike(ours.encoded(body, base=None, loss=0.5), body)


@pytest.mark.parametrize("body", [ours.SMALL, ours.SMALL_UPLOAD, ours.SPARSE], ids=["package", "upload", "zstd"])
def test_both_refuse_the_same(body) -> None:
    data = ours.encoded(body)
    inside = data[wire.HEADER_BYTES :]
    variants = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(wire.HEADER_BYTES)]
    variants += [
        ours.with_body(data, inside[:at] + bytes([new]) + inside[at + 1 :])
        for at in range(len(inside))
        for new in (0, 1, 2, 5, 6, 0xFF)
    ]
    variants += [ours.with_body(data, inside[:at]) for at in range(len(inside))] + [ours.with_body(data, inside + b"x")]
    refused = 0
    for variant in variants:
        try:
            wire.decode(variant, ours.expected(body))
        except WireError:
            refused += 1
            with pytest.raises((ValueError, zstandard.ZstdError)):
                read_like(variant, body)
        else:
            assert_read_alike(variant, body)
    assert refused > len(inside)


def test_hashes_of_the_page() -> None:
    weights, statistics = torch.tensor([1.0, -2.0]), torch.tensor([0.5])
    digest = hashlib.blake2b(np.array([1, -2, 0.5], "<f4").tobytes(), digest_size=8).hexdigest()
    assert wire.replica_hash(weights, statistics).hex() == digest and f"`{digest}`" in PAGE

    from gluefl.vectors.layout import Layout

    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    text = re.search(r"```json\n(.*?)\n```", PAGE, re.DOTALL)[1]
    assert Layout.of(module).fingerprint.hex() == hashlib.sha256(text.encode()).hexdigest()[:16]
    assert f"`{Layout.of(module).fingerprint.hex()}`" in PAGE


def test_the_example_of_the_page() -> None:
    listing = PAGE.split("### An example of format 1")[1].split("```")[1]
    found = [re.match(r"(?:[0-9a-f]{2}(?: |$)+)+", line) for line in listing.splitlines() if "…" not in line[:40]]
    shown = b"".join(bytes.fromhex(line[0]) for line in found if line)
    golden = (ours.GOLDEN / "package-beside-mask.bin").read_bytes()
    values = 104 + 2 * (16 + 5) + 16  # where the values begin; the page leaves most of them out
    assert shown == golden[:values] + golden[values + 13 * 4 :]
