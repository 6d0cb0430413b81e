"""What a message says of itself, and what its receiver expects; the same for both formats."""

from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from gluefl.wire.bodies import BodyCodec, Shared
from gluefl.wire.updates import TernaryUpdates
from gluefl.wire.values import FLOAT32, ValueCodec

PACKAGE, UPLOAD = 1, 2
NO_VERSION = 0xFFFFFFFF
NO_HASH = bytes(8)
ACCEPTED = 1
MOST_AROUND_BYTES = 168  # header and section headers of a message in the longer of the two formats


@dataclass(frozen=True)
class Header:
    """What a message says of itself. `base` is the version a package starts from or an upload was trained on."""

    kind: int
    run: bytes  # 8 bytes
    layout: bytes  # 8 bytes, the fingerprint of the layout
    round: int
    base: int | None  # None: the package holds the whole model
    version: int  # the version the client holds after the package; in an upload, the version it holds
    base_hash: bytes = NO_HASH  # of the replica at `base`; zeros where it was not computed
    hash: bytes = NO_HASH  # of the replica at `version`
    weight: float = 0.0  # ν_i, the nominal weight
    loss: float = 0.0
    samples: int = 0
    accepted: bool = True  # whether the client's last upload was used


@dataclass(frozen=True)
class Expected:
    """What the receiver knows before it reads a message; anything else is refused."""

    run: bytes
    layout: bytes
    size: int  # d
    statistics: int
    kind: int
    shared: Shared | None = None  # for uploads: the mask both sides know
    codec: ValueCodec | BodyCodec = FLOAT32
    origin: Tensor | None = None  # for packages: version 0, where both sides know it

    @cached_property
    def body_codec(self) -> BodyCodec | None:
        """The codec, if it encodes whole bodies. Python takes long to tell by the members of a protocol."""
        return self.codec if isinstance(self.codec, BodyCodec) else None

    def holding(self, weights: Tensor) -> "Expected":
        """What a client that holds these weights expects; only updates of them are read in another way."""
        return replace(self, codec=self.codec.holding(weights)) if isinstance(self.codec, TernaryUpdates) else self

    @property
    def longest(self) -> int:
        """No message of this federation is longer: values everywhere and a bitmap twice, with zstd's margin."""
        return MOST_AROUND_BYTES + self.codec.longest(self.size) + 4 * self.statistics + 2 * (self.size // 4 + 1024)
