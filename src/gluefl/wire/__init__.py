"""The only place that knows bytes. `docs/wire-format.md` is the description for other languages."""

from gluefl.wire.bodies import Body, Shared
from gluefl.wire.encoding import encode_positions, wait_until_started
from gluefl.wire.messages import (
    HEADER_BYTES,
    NO_HASH,
    PACKAGE,
    UPLOAD,
    Expected,
    Header,
    decode,
    encode,
    encode_body,
    measure,
    replica_hash,
)
from gluefl.wire.positions import Packed, pack, unpack

__all__ = [
    "HEADER_BYTES",
    "NO_HASH",
    "PACKAGE",
    "UPLOAD",
    "Body",
    "Expected",
    "Header",
    "Packed",
    "Shared",
    "decode",
    "encode",
    "encode_body",
    "encode_positions",
    "measure",
    "pack",
    "replica_hash",
    "unpack",
    "wait_until_started",
]
