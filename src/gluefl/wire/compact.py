"""Messages with a compact header: what both sides know (run, layout, sizes) is checked, not sent.

They carry bodies whose codec encodes positions and values together (`BodyCodec`). `docs/wire-format.md` describes the
bytes, as format 2.
"""

import math
import struct
import zlib

from gluefl.errors import WireError
from gluefl.wire.headers import ACCEPTED, NO_VERSION, Expected, Header

MAGIC = b"GL"
FORMAT = 2
LARGEST = (2 - 2**-23) * 2.0**127  # the largest finite float32
# magic, format, kind, flags, codec, round, base, version, hash, weight, loss, samples; then the checksum.
HEADER = struct.Struct("<2sBBBBIII8sffI")
HEADER_BYTES = HEADER.size + 4
# What the checksum covers beside the body and the header: run, layout, size, statistics.
BOTH_KNOW = struct.Struct("<8s8sQI")


def encode(header: Header, body: bytes, size: int, statistics: int, code: int) -> bytes:
    """A whole message from a header and an encoded body."""
    fields = HEADER.pack(
        MAGIC,
        FORMAT,
        header.kind,
        ACCEPTED if header.accepted else 0,
        code,
        header.round,
        NO_VERSION if header.base is None else header.base,
        header.version,
        header.hash,
        _float32(header.weight),
        _float32(header.loss),
        header.samples,
    )
    checksum = _checksum(body, fields, BOTH_KNOW.pack(header.run, header.layout, size, statistics))
    return fields + struct.pack("<I", checksum) + body


def read(data: bytes | memoryview, expected: Expected) -> tuple[Header, memoryview]:
    """The header and the encoded body of a message, or `WireError`."""
    if len(data) < HEADER_BYTES or data[:2] != MAGIC:
        raise WireError(f"{len(data)} bytes that do not start with a compact gluefl header")
    if len(data) > expected.longest:
        raise WireError(f"a message of {len(data)} bytes; {expected.longest} are allowed here")
    fields, body = data[: HEADER.size], memoryview(data)[HEADER_BYTES:]
    (_, format_, kind, flags, code, round_, base, version, hash_, weight, loss, samples) = HEADER.unpack(fields)
    for name, actual, needed in (
        ("format", format_, FORMAT),
        ("kind", kind, expected.kind),
        ("codec", code, expected.codec.code),
        ("unknown flags", flags & ~ACCEPTED, 0),
    ):
        if actual != needed:
            raise WireError(f"{name} is {actual}, {needed} was expected")
    both_know = BOTH_KNOW.pack(expected.run, expected.layout, expected.size, expected.statistics)
    if struct.unpack_from("<I", data, HEADER.size)[0] != _checksum(body, fields, both_know):
        raise WireError("the checksum is wrong: the message was damaged, or is of another run or model")
    return Header(
        kind,
        expected.run,
        expected.layout,
        round_,
        None if base == NO_VERSION else base,
        version,
        hash=hash_,
        weight=weight,
        loss=loss,
        samples=samples,
        accepted=bool(flags & ACCEPTED),
    ), body


def _float32(number: float) -> float:
    """Infinity for a number that float32 cannot hold, which `struct` refuses to pack."""
    return number if not math.isfinite(number) or abs(number) <= LARGEST else math.copysign(math.inf, number)


def _checksum(body: bytes | memoryview, fields: bytes | memoryview, both_know: bytes) -> int:
    return zlib.crc32(both_know, zlib.crc32(fields, zlib.crc32(body)))
