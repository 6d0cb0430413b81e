"""What our messages look like inside Flower's: a ConfigRecord and a uint8 array of ours, and the records of the app.

The body of a package is the same for all nodes that hold the same version. It travels as an array of its own, so
that Flower's object store holds it once; the header, which differs from node to node, travels in the ConfigRecord.
"""

import hashlib
import io
import json
import re
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from gluefl import __version__, wire
from gluefl.errors import WireError
from gluefl.storage.described import described
from gluefl.strategies import Strategy
from gluefl.strategies.coded import Coded
from gluefl.strategies.registry import STRATEGIES

OURS = "gluefl"  # the name of our ConfigRecord
BODY = "gluefl-body"  # the name of our ArrayRecord
# The arrays in it: different names, so that mods that alter arrays refuse. ORIGIN is version 0, for a node without it.
PACKAGE, UPLOAD, ORIGIN = "package", "upload", "origin"
LOSSES = ("train_loss", "train-loss", "loss")  # the names under which apps report it
FORMAT = 1  # of our records; a change that the other side would misread takes the next number
RUN_ID = re.compile("[0-9a-f]{16}")
NPY_HEADER_BYTES = 256  # numpy writes 128 before a flat array
OPTIONAL = {"accepted", "table", "store", "version", "needs_model", "origin"}  # left out where they are None
LONGEST_TEXT = 2**22  # of a task: the names of the arrays make most of it


@dataclass(frozen=True)
class Told:
    """What the server tells a node beside the package."""

    run: str  # hex
    client: int  # the node's place in this run
    seed: int  # of the run: both sides draw the same random stream for a client and a round
    arrays: str  # the name under which the app expects the model
    strategy: dict[str, Any]  # name and parameters: the client's half runs with the server's values
    accepted: str | None  # the digest of the node's last upload that was used
    table: str | None = None  # names and shapes, with a whole model
    origin: str | None = None  # the hash of version 0, hex, where the package starts from it or refers to it
    store: str | None = None  # in a simulation: where the server keeps its newest version


@dataclass(frozen=True)
class Said:
    """What a node says beside its upload."""

    round: int
    version: int | None  # the version it holds, None if none
    hash: str  # of its replica, hex
    needs_model: str | None = None  # why it cannot use the package it was sent
    origin: str | None = None  # the hash of version 0, hex, if it needs a model and can start from that version


@dataclass(frozen=True)
class Parts:
    """What a task carries beside what it tells, not yet checked."""

    package: bytes
    origin: bytes | None = None  # version 0 as a message of its own


def package(told: Told, header: bytes, body: Array, origin: Array | None = None) -> tuple[RecordDict, int]:
    """The records of a task, and the bytes that are not the package itself."""
    text = _text(told)
    ours = ConfigRecord({"format": FORMAT, "task": text, "header": header})
    arrays = {PACKAGE: body} | ({} if origin is None else {ORIGIN: origin})
    return RecordDict({OURS: ours, BODY: ArrayRecord(arrays)}), len(text)


def read_package(records: RecordDict) -> tuple[Told, Parts]:
    """What a node was told, and what it was sent."""
    _check_format(records, "the server", "this node")
    told: Told = _read(Told, records, "task")
    if told.client < 0 or told.seed < 0 or not RUN_ID.fullmatch(told.run):
        raise WireError("the task names no run, no client or no seed")
    header = records.config_records[OURS].get("header")
    # A compact header is shorter; which one it is follows from the strategy, and is checked when it is decoded.
    if not isinstance(header, bytes) or not 0 < len(header) <= wire.HEADER_BYTES:
        raise WireError("the task carries no header")
    brings_origin = ORIGIN in records.array_records.get(BODY, ArrayRecord())
    origin = read_array(records, ORIGIN, None) if brings_origin else None
    return told, Parts(header + read_array(records, PACKAGE, None), origin)


def upload(said: Said, data: bytes | None) -> RecordDict:
    """The records of an answer."""
    records = RecordDict({OURS: ConfigRecord({"format": FORMAT, "answer": _text(said)})})
    if data is not None:
        records[BODY] = ArrayRecord({UPLOAD: to_array(data)})
    return records


def read_said(records: RecordDict) -> Said:
    """What a node says of itself."""
    _check_format(records, "the node", "this server")
    said: Said = _read(Said, records, "answer")
    return said


def is_ours(message: Message) -> bool:
    """Whether a message comes from a gluefl strategy or mod."""
    return message.has_content() and OURS in message.content.config_records


def digest(data: bytes) -> str:
    """A name for an upload, by which the server says which one it used. The header holds the body's checksum."""
    return hashlib.blake2b(data[: wire.HEADER_BYTES], digest_size=8).hexdigest()


def to_array(data: bytes) -> Array:
    """Bytes as an array: a ConfigRecord is meant for small values."""
    return Array(np.frombuffer(data, np.uint8))


def read_array(records: RecordDict, name: str, longest: int | None) -> bytes:
    """The bytes of an array of ours. The length is checked before the content is read; nothing is unpickled."""
    if name not in records.array_records.get(BODY, ArrayRecord()):
        raise WireError(f"the message has no array '{name}'")
    array = records.array_records[BODY][name]
    if longest is not None and len(array.data) > longest + NPY_HEADER_BYTES:
        raise WireError(f"a message of {len(array.data)} bytes; {longest} are allowed here")
    try:
        return _flat_bytes(array)
    except WireError:
        raise
    except Exception as error:  # bytes from another machine: numpy may raise anything
        raise WireError(f"the array '{name}' cannot be read: {error}") from error


def _flat_bytes(array: Array) -> bytes:
    """The content of a flat array of bytes in numpy's format. `numpy.load` would allocate what its header announces."""
    if array.stype != "numpy.ndarray":
        raise WireError(f"an array of the kind '{array.stype}' was found, 'numpy.ndarray' was expected")
    file = io.BytesIO(array.data)
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise WireError(f"an array in numpy's format {version} was found, (1, 0) was expected")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    data = array.data[file.tell() :]
    if dtype != np.uint8 or shape != (len(data),):
        raise WireError(f"{len(data)} bytes are announced as {dtype} {shape}, flat bytes were expected")
    return bytes(data)


def _check_format(records: RecordDict, sender: str, receiver: str) -> None:
    """Refuse records of another format by its number, before anything else of them is read."""
    # Versions of gluefl that wrote no number have the first format.
    format_ = records.config_records.get(OURS, ConfigRecord()).get("format", 1)
    if format_ != FORMAT:
        raise WireError(
            f"{sender} writes messages of format {format_!r:.40}, {receiver} (gluefl {__version__}) reads format "
            f"{FORMAT}: install the same version of gluefl on both"
        )


def _text(fields: Told | Said) -> str:
    present = {name: value for name, value in asdict(fields).items() if value is not None}
    return json.dumps(present, separators=(",", ":"))


def _read(kind: Any, records: RecordDict, name: str) -> Any:
    text = records.config_records.get(OURS, ConfigRecord()).get(name)
    if not isinstance(text, str) or len(text) > LONGEST_TEXT:
        raise WireError(f"the message carries no {name} of gluefl")
    try:
        fields = kind(**{**dict.fromkeys(OPTIONAL & kind.__annotations__.keys()), **json.loads(text)})
        for field, annotation in kind.__annotations__.items():
            value = getattr(fields, field)
            if not isinstance(value, getattr(annotation, "__origin__", annotation)):
                raise TypeError(f"{field} is {value!r}")
    except (ValueError, TypeError, RecursionError) as error:
        raise WireError(f"the {name} of a message cannot be read: {error}") from error
    return fields


def loss_in(metrics: MetricRecord) -> float | None:
    """The training loss that an app reports, None if it reports none."""
    return next((float(value) for name in LOSSES if isinstance(value := metrics.get(name), int | float)), None)


def described_strategy(strategy: Strategy) -> dict[str, Any]:
    """A strategy by its name and parameters, as a node can build it; one with codecs must be given to the node."""
    if isinstance(strategy, Coded):
        return {**described_part(strategy), "strategy": described_strategy(strategy.strategy)}
    name = next((name for name, kind in STRATEGIES.items() if type(strategy) is kind), type(strategy).__name__)
    return {**described_part(strategy), "name": name}


def described_part(part: object) -> dict[str, Any]:
    """A part by its type and parameters, as JSON can hold them."""
    table = described(part)
    named: dict[str, Any] = json.loads(json.dumps({"name": table.pop("type"), **table}))
    return named
