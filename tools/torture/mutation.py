"""Messages of every format, and mutations of them whose checksums are right."""

import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

import test_updates as updates
import test_wire as plain
import test_wire_document_lean as lean
from gluefl import wire
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import Listed, part_of
from gluefl.wire import compact
from gluefl.wire.blocks import BlockIntegers, rounded
from gluefl.wire.messages import HEADER
from gluefl.wire.ternary import Signs
from gluefl.wire.values import FLOAT16

LARGE = 10**7  # weights of the model for which memory is measured
NUMBERS = (0, 1, 2, 3, 7, 8, 39, 40, 41, 127, 128, 255, 256, 4000, 65535, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**63)


FORMATS = {
    "float16": "half precision",
    "int": "block integers",
    "signs": "ternary",
    "updates": "ternary updates",
    "": "masks and sparse float32",
}


class Subject(Protocol):
    """Something that a process receives from another machine, and mutants of it."""

    @property
    def format(self) -> str:
        """The format as which its messages are counted."""
        ...

    @property
    def whole(self) -> Any:
        """What was sent, without a change."""
        ...

    def mutant(self, others: "list[Seed]", rng: random.Random) -> Any:
        """A changed copy."""
        ...

    def is_sound(self, mutant: Any) -> bool:
        """Read a mutant; whether what was read is sound. Raises `WireError` for one that is refused."""
        ...


@dataclass(frozen=True)
class Seed:
    """A message that a receiver accepts, what it expects, and its format."""

    data: bytes
    expected: wire.Expected
    format: str

    @property
    def whole(self) -> bytes:
        """The message."""
        return self.data

    def mutant(self, others: "list[Seed]", rng: random.Random) -> bytes:
        """A message with one to four changes; mostly of the body, with checksums that are right."""
        where, (fields, body) = rng.random(), self.parts
        if where < 0.1:
            return changed(self.data, others, rng)
        if where < 0.2:
            return self.signed(changed(fields, others, rng)[: len(fields)].ljust(len(fields), b"\0"), body)
        return self.signed(fields, changed(body, others, rng))

    def is_sound(self, mutant: bytes) -> bool:
        """Whether positions lie in the model, ascend, and have a value each."""
        _, body = wire.decode(mutant, self.expected)
        positions, values = body.update.positions, body.update.values
        if positions.numel() != values.numel() or values.dtype != torch.float32:
            return False
        if not positions.numel() or self.is_compact:
            return True
        within = int(positions[0]) >= 0 and int(positions[-1]) < self.expected.size
        return within and bool((positions.diff() > 0).all())

    @property
    def is_compact(self) -> bool:
        """Whether it has the short header."""
        return self.data[:4] != b"GLUE"

    def signed(self, fields: bytes, body: bytes) -> bytes:
        """A message with these header fields and this body, and checksums that are right."""
        if self.is_compact:
            known = compact.BOTH_KNOW.pack(
                self.expected.run, self.expected.layout, self.expected.size, self.expected.statistics
            )
            return fields + struct.pack("<I", zlib.crc32(known, zlib.crc32(fields, zlib.crc32(body)))) + body
        fields = fields[:-12] + struct.pack("<QI", len(body), zlib.crc32(body))
        return fields + struct.pack("<I", zlib.crc32(fields)) + body

    @property
    def parts(self) -> tuple[bytes, bytes]:
        """Header fields and body."""
        size = compact.HEADER.size if self.is_compact else HEADER.size
        return self.data[:size], self.data[size + 4 :]


def seeds() -> dict[str, Seed]:
    """Golden files of both formats, and a message of every codec of values."""
    messages = {}
    for name, (body, _) in plain.EXAMPLES.items():
        messages[name] = Seed((plain.GOLDEN / f"{name}.bin").read_bytes(), plain.expected(body), format_of(name))
    for name, (header, body) in lean.MESSAGES.items():
        messages[name] = Seed(lean.golden(name), lean.expected(header, body), format_of(name))
    for name, body in coded_bodies().items():
        data = wire.encode(plain.header_of(body), wire.encode_body(body), body.update.size, 2, body.codec)
        messages[name] = Seed(data, replace(plain.expected(body), codec=body.codec), format_of(name))
    body, held = updates.golden()
    expected = replace(plain.expected(body), codec=body.codec).holding(held)
    messages["package-updates"] = Seed(updates.message(), expected, format_of("package-updates"))
    return messages


def format_of(name: str) -> str:
    """The format of a message by its name."""
    if "lean" in name:
        return "compact: rotated, 8-bit statistics" if "upload" in name else "compact: cells"
    return next(format_ for part, format_ in FORMATS.items() if part in name)


def coded_bodies() -> dict[str, wire.Body]:
    """Bodies whose values take sixteen, eight, four or one bit."""
    example, draws = plain.example(3, 9, size=400), plain.np.random.default_rng(0)
    update = Listed(example.update.positions, example.update.values, 400)
    halves = update.with_values(update.values.half().float())
    signs = update.with_values(torch.where(update.values < 0, -0.5, 0.5))
    values: dict[str, tuple[Any, Any]] = {
        "float16": (FLOAT16, halves),
        "int8": (BlockIntegers(8), rounded(update, 8, draws)),
        "int4": (BlockIntegers(4), rounded(update, 4, draws)),
        "signs": (Signs(), signs),
        "signs-blocks": (Signs(9), signs),
    }
    bodies = {}
    for name, (codec, sent) in values.items():
        bodies[f"package-{name}"] = replace(example, update=sent, codec=codec)
        bodies[f"upload-{name}"] = replace(example, update=sent, codec=codec, sends_mask=False)
    return bodies


def large_seeds() -> dict[str, Seed]:
    """Short messages for a model of ten million weights."""
    size = LARGE
    mask = Mask(torch.zeros(size, dtype=torch.bool).index_fill_(0, torch.arange(0, size, 10**4), True))
    vector = torch.zeros(size)
    messages = {}
    for name, sends_mask in (("large-package", True), ("large-upload", False)):
        body = wire.Body(part_of(vector, mask), torch.zeros(2), wire.Shared(mask), sends_mask)
        messages[name] = Seed(plain.encoded(body), plain.expected(body), format_of(name))
    for name, codec in (("large-int8", BlockIntegers(8)), ("large-signs", Signs())):
        update = Listed(mask.positions, torch.full((mask.count,), 0.5), size)
        body = wire.Body(update, torch.zeros(2), wire.Shared(mask), True, codec)
        data = wire.encode(plain.header_of(body), wire.encode_body(body), size, 2, codec)
        messages[name] = Seed(data, replace(plain.expected(body), codec=codec), format_of(name))
    traits = lean.Lean().traits(lean.Space((size,)))
    update = Listed(mask.positions, torch.ones(mask.count), size)
    shared = wire.Shared(Mask.uniform(size, False, torch.device("cpu")))
    body = wire.Body(update, torch.zeros(0), shared, True, traits.package_codec)
    header = wire.Header(wire.PACKAGE, plain.RUN, plain.LAYOUT, 3, None, 2)
    data = wire.encode(header, wire.encode_body(body), size, 0, body.codec)
    expected = wire.Expected(plain.RUN, plain.LAYOUT, size, 0, wire.PACKAGE, None, body.codec)
    messages["large-lean-package"] = Seed(data, expected, format_of("lean-package"))
    return messages


def changed(data: bytes, others: list[Seed], rng: random.Random) -> bytes:
    """One to four changes, often one."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        data = rng.choice(CHANGES)(data, others, rng)
    return data


def _flip(data: bytes, others: list[Seed], rng: random.Random) -> bytes:
    at = rng.randrange(8 * len(data)) if data else 0
    return data[: at // 8] + bytes([data[at // 8] ^ 1 << at % 8]) + data[at // 8 + 1 :] if data else b"\0"


def _byte(data: bytes, others: list[Seed], rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + bytes([rng.choice((0, 1, 7, 0x10, 0x7F, 0x80, 0xFF))]) + data[at + 1 :]


def _number(data: bytes, others: list[Seed], rng: random.Random) -> bytes:
    width, at = rng.choice((2, 4, 8)), rng.randrange(len(data) + 1)
    number = (rng.choice(NUMBERS) if rng.random() < 0.7 else rng.getrandbits(64)) % (1 << 8 * width)
    return data[:at] + number.to_bytes(width, "little") + data[at + width :]


def _cut(data: bytes, others: list[Seed], rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _remove(data: bytes, others: list[Seed], rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start + rng.randrange(1, 9) :]


def _insert(data: bytes, others: list[Seed], rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.randrange(1, 17)) + data[at:]


def _repeat(data: bytes, others: list[Seed], rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[: start + rng.randrange(1, 33)] + data[start:]


def _splice(data: bytes, others: list[Seed], rng: random.Random) -> bytes:
    other = rng.choice(others).parts[1] if others else data
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


CHANGES: tuple[Callable[[bytes, list[Seed], random.Random], bytes], ...] = (
    _flip, _flip, _byte, _byte, _number, _number, _cut, _remove, _insert, _repeat, _splice,
)  # fmt: skip
