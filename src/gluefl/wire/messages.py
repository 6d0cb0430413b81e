"""Messages both ways: a package (server to client) and an upload (client to server).

`docs/wire-format.md` describes the bytes. A message is a header of its own for every client and a body; the body
of a package depends only on the version a client holds, so that it is encoded once for all who hold it.
"""

import hashlib
import struct
import zlib
from typing import cast

import torch
from torch import Tensor

from gluefl.errors import WireError
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import Listed, whole
from gluefl.wire import compact
from gluefl.wire.bodies import Body, BodyCodec, Shared
from gluefl.wire.encoder import ABSOLUTE, BESIDE_MASK, KNOWN, encode_positions
from gluefl.wire.headers import ACCEPTED, NO_VERSION, PACKAGE, UPLOAD, Expected, Header
from gluefl.wire.lengths import Encoding
from gluefl.wire.positions import Packed, entropy_bytes, unpack
from gluefl.wire.values import FLOAT32, ValueCodec, float_bytes, floats

MAGIC = b"GLUE"
FORMAT = 1
PRECISION = 0  # of the vectors: float32

# magic, format, kind, precision, run, layout, round, base, version, flags, base hash, hash, weight, loss,
# samples, statistics, size, body bytes, body checksum; then the checksum of all these.
HEADER = struct.Struct("<4sHBB8s8sIIII8s8sddIIQQI")
HEADER_BYTES = HEADER.size + 4
# codec, relation, two reserved bytes, count, bytes
SECTION = struct.Struct("<BBHIQ")
SECTIONS = 4  # mask, positions, values, statistics
AROUND_BYTES = HEADER_BYTES + SECTIONS * SECTION.size


def measure(body: Body) -> int:
    """The length of the encoded message, without materialising its values."""
    return message_bytes(encode_positions([body])[0])


def message_bytes(encoding: Encoding) -> int:
    """The length of the message of a body whose positions are being encoded."""
    return (AROUND_BYTES if encoding.positions is not None else compact.HEADER_BYTES) + encoding.body_bytes


def arrived(data: bytes | memoryview, body: Body) -> Encoding:
    """The encoding of a message that was read: its length and its support, as those of a body that is measured."""
    body_bytes = len(data) - compact.HEADER_BYTES
    return Encoding(None, None, body.update.support, lambda: body_bytes)


def expected_bytes(body: Body) -> int:
    """About the length of the message, before its positions are encoded: their entropy is nearly reached."""
    if isinstance(body.codec, BodyCodec):
        return compact.HEADER_BYTES + body.codec.estimate(body.update)
    count, size, covered = body.update.count, body.update.size, body.shared.mask.count
    beside = covered if covered <= count else 0  # positions that follow from the mask
    mask_bytes = entropy_bytes(covered, size) if body.sends_mask else 0
    rest_bytes = body.codec.measure(body.update)() + 4 * body.statistics.numel()
    return AROUND_BYTES + rest_bytes + mask_bytes + entropy_bytes(count - beside, size - beside)


def header_bytes(codec: ValueCodec | BodyCodec) -> int:
    """The length of the header before a body of this codec."""
    return compact.HEADER_BYTES if isinstance(codec, BodyCodec) else HEADER_BYTES


def encode(header: Header, body: bytes, size: int, statistics: int, codec: ValueCodec | BodyCodec = FLOAT32) -> bytes:
    """A whole message from a header and a body that was encoded with this codec."""
    if isinstance(codec, BodyCodec):
        return compact.encode(header, body, size, statistics, codec.code)
    fields = HEADER.pack(
        MAGIC,
        FORMAT,
        header.kind,
        PRECISION,
        header.run,
        header.layout,
        header.round,
        NO_VERSION if header.base is None else header.base,
        header.version,
        ACCEPTED if header.accepted else 0,
        header.base_hash,
        header.hash,
        header.weight,
        header.loss,
        header.samples,
        statistics,
        size,
        len(body),
        zlib.crc32(body),
    )
    return fields + struct.pack("<I", zlib.crc32(fields)) + body


def encode_body(body: Body, encoding: Encoding | None = None) -> bytes:
    """Four sections: mask, positions, values, statistics. The positions are encoded here unless they are given."""
    if isinstance(body.codec, BodyCodec):
        return body.codec.encode(body)
    encoding = encoding or encode_positions([body])[0]
    assert encoding.positions is not None
    mask = _section(*encoding.mask.result()) if encoding.mask is not None else SECTION.pack(0, KNOWN, 0, 0, 0)
    values = _coded(body.codec.code, body.update.count, body.codec.encode(body.update))
    statistics = _coded(FLOAT32.code, body.statistics.numel(), float_bytes(body.statistics))
    return b"".join([mask, _section(*encoding.positions.result()), *values, *statistics])


def decode(data: bytes | memoryview, expected: Expected) -> tuple[Header, Body]:
    """Read a message, or raise `WireError`: nothing is allocated beyond the sizes that were checked."""
    if (bodies := expected.body_codec) is not None:
        header, body = compact.read(data, expected)
        shared = expected.shared or Shared(Mask.uniform(expected.size, False, torch.device("cpu")))
        update = bodies.decode(body, expected.origin)
        return header, Body(update, torch.zeros(0), shared, False, bodies, expected.origin)
    codec = cast(ValueCodec, expected.codec)
    header, body = _read_header(data, expected)
    reader = _Reader(body)
    covered, packed_mask = _read_mask(reader, expected)
    relation, packed = reader.section()
    if relation not in (ABSOLUTE, BESIDE_MASK):
        raise WireError(f"relation {relation} of positions to the mask is unknown")
    count = packed.count + (covered if relation == BESIDE_MASK else 0)
    coded = reader.coded(count, codec, "values")
    if count > 8 * len(coded):  # sets are decoded only if the values that belong to them are there
        raise WireError(f"{count} values are announced in {len(coded)} bytes")
    statistics = reader.coded(expected.statistics, FLOAT32, "statistics")
    reader.end()
    known = expected.shared if packed_mask is None else Shared(unpack(packed_mask, expected.size))
    assert known is not None
    positions = _read_positions(relation, packed, known)
    values = _decoded(codec, coded, positions)
    all_of_them = len(values) == expected.size
    update = whole(values) if all_of_them else Listed(positions, values, expected.size)
    return header, Body(update, floats(statistics, expected.statistics), known, expected.kind == PACKAGE, codec)


def replica_hash(weights: Tensor, statistics: Tensor) -> bytes:
    """Eight bytes by which two sides see whether they hold the same model."""
    digest = hashlib.blake2b(digest_size=8)
    for vector in (weights, statistics):
        digest.update(float_bytes(vector))
    return digest.digest()


def _read_header(data: bytes | memoryview, expected: Expected) -> tuple[Header, memoryview]:
    if len(data) < HEADER_BYTES or data[:4] != MAGIC:
        raise WireError(f"{len(data)} bytes that do not start with a gluefl header")
    if len(data) > expected.longest:
        raise WireError(f"a message of {len(data)} bytes; {expected.longest} are allowed here")
    fields = data[: HEADER.size]
    if struct.unpack_from("<I", data, HEADER.size)[0] != zlib.crc32(fields):
        raise WireError("the header's checksum is wrong: the message was damaged")
    (_, format_, kind, precision, run, layout, round_, base, version, flags, base_hash, hash_, weight, loss, samples,
     statistics, size, body_bytes, body_sum) = HEADER.unpack(fields)  # fmt: skip
    for name, actual, needed in (
        ("format", format_, FORMAT),
        ("kind", kind, expected.kind),
        ("precision", precision, PRECISION),
        ("run", run.hex(), expected.run.hex()),
        ("layout", layout.hex(), expected.layout.hex()),
        ("vector size", size, expected.size),
        ("statistics", statistics, expected.statistics),
        ("body length", body_bytes, len(data) - HEADER_BYTES),
        ("unknown flags", flags & ~ACCEPTED, 0),
    ):
        if actual != needed:
            raise WireError(f"{name} is {actual}, {needed} was expected")
    body = memoryview(data)[HEADER_BYTES:]
    if zlib.crc32(body) != body_sum:
        raise WireError("the body's checksum is wrong: the message was damaged")
    header = Header(
        kind,
        run,
        layout,
        round_,
        None if base == NO_VERSION else base,
        version,
        base_hash,
        hash_,
        weight,
        loss,
        samples,
        bool(flags & ACCEPTED),
    )
    return header, body


def _read_mask(reader: "_Reader", expected: Expected) -> tuple[int, Packed | None]:
    """How many positions the shared mask covers, and its encoding; None where both sides know it."""
    relation, packed = reader.section()
    if expected.kind == UPLOAD:
        if relation != KNOWN or packed.count or packed.data or expected.shared is None:
            raise WireError("an upload refers to the mask both sides know and carries none of its own")
        return expected.shared.mask.count, None
    if relation != ABSOLUTE:
        raise WireError("a package carries the shared mask itself")
    return packed.count, packed


def _read_positions(relation: int, packed: Packed, shared: Shared) -> Tensor:
    mask = shared.mask
    if relation == ABSOLUTE:
        absolute = unpack(packed, mask.size)
        return shared.positions if absolute.count == mask.count == mask.size else absolute.positions
    beside = unpack(packed, mask.size - mask.count)
    if not beside.count:
        return shared.positions
    return Mask(mask.bits.masked_scatter(~mask.bits, beside.bits), mask.count + beside.count).positions


class _Reader:
    """Reads sections one after the other and refuses to read past the end."""

    def __init__(self, body: memoryview) -> None:
        self.body, self.at = body, 0

    def _take(self, size: int) -> memoryview:
        if size > len(self.body) - self.at:
            raise WireError(f"a section of {size} bytes is cut off after {len(self.body) - self.at}")
        self.at += size
        return self.body[self.at - size : self.at]

    def section(self) -> tuple[int, Packed]:
        codec, relation, reserved, count, size = SECTION.unpack(self._take(SECTION.size))
        if reserved:
            raise WireError("the reserved bytes of a section are not zero")
        return relation, Packed(codec, count, bytes(self._take(size)))

    def coded(self, count: int, codec: ValueCodec, name: str) -> memoryview:
        code, relation, reserved, announced, size = SECTION.unpack(self._take(SECTION.size))
        if (relation, reserved, announced) != (0, 0, count) or size > codec.longest(count):
            raise WireError(
                f"{announced} {name} in {size} bytes were found, {count} in {codec.longest(count)} were expected"
            )
        if code != codec.code:
            raise WireError(f"codec {code} for {name} was found, {codec.code} was expected")
        return self._take(size)

    def end(self) -> None:
        if self.at != len(self.body):
            raise WireError(f"{len(self.body) - self.at} bytes follow the last section")


def _section(relation: int, packed: Packed) -> bytes:
    return SECTION.pack(packed.codec, relation, 0, packed.count, len(packed.data)) + packed.data


def _decoded(codec: ValueCodec, data: memoryview, positions: Tensor) -> Tensor:
    values = codec.decode(data, positions)
    if values.dtype != torch.float32 or values.shape != positions.shape:
        raise WireError(
            f"codec {codec.code} decoded {values.dtype} {tuple(values.shape)}, "
            f"{positions.numel()} of {torch.float32} were expected"
        )
    return values


def _coded(code: int, count: int, data: bytes) -> tuple[bytes, bytes]:
    return SECTION.pack(code, 0, 0, count, len(data)), data  # apart: values of a large model are copied once
