"""The only place that knows bytes. `docs/wire-format.md` is the description for other languages."""

from gluefl.wire.bodies import Body, Shared
from gluefl.wire.encoding import count_positions, encode_positions
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
    foresee,
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
    "count_positions",
    "decode",
    "encode",
    "encode_body",
    "encode_positions",
    "foresee",
    "measure",
    "pack",
    "replica_hash",
    "unpack",
]
