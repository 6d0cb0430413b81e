"""The only place that knows bytes. `docs/wire-format.md` is the description for other languages."""

from gluefl.wire.bodies import Body, BodyCodec, Shared
from gluefl.wire.encoder import count_positions, encode_positions
from gluefl.wire.headers import NO_HASH, PACKAGE, UPLOAD, Expected, Header
from gluefl.wire.large import LARGE, stored
from gluefl.wire.lengths import Encoding
from gluefl.wire.messages import (
    HEADER_BYTES,
    arrived,
    decode,
    encode,
    encode_body,
    expected_bytes,
    header_bytes,
    measure,
    message_bytes,
    replica_hash,
)
from gluefl.wire.positions import Packed, pack, unpack
from gluefl.wire.values import FLOAT32, ValueCodec

__all__ = [
    "FLOAT32",
    "HEADER_BYTES",
    "LARGE",
    "NO_HASH",
    "PACKAGE",
    "UPLOAD",
    "Body",
    "BodyCodec",
    "Encoding",
    "Expected",
    "Header",
    "Packed",
    "Shared",
    "ValueCodec",
    "arrived",
    "count_positions",
    "decode",
    "encode",
    "encode_body",
    "encode_positions",
    "expected_bytes",
    "header_bytes",
    "measure",
    "message_bytes",
    "pack",
    "replica_hash",
    "stored",
    "unpack",
]
