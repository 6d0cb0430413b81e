"""One reply of a node: what it says, and whether its upload may enter the model. Nothing in it is trusted."""

import math
from dataclasses import dataclass
from typing import Literal

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord

from gluefl import wire
from gluefl.errors import WireError
from gluefl.flower.messages import BODY, UPLOAD, Said, digest, is_ours, read_array, read_said
from gluefl.vectors.sparse import all_finite

Fate = Literal["good", "held", "needs model", "failed", "refused"]
LONGEST_REASON = 300
LONGEST_REST = 2**20  # bytes of a reply beside its upload: metrics and what the node says


@dataclass(frozen=True)
class Sent:
    """A message that was sent to a node and may be answered."""

    client: int
    round: int
    version: int
    hash: bytes


@dataclass(frozen=True)
class Received:
    """An upload that passed all checks."""

    body: wire.Body
    loss: float
    size_bytes: int
    digest: str


@dataclass(frozen=True)
class Answer:
    """What became of a message: "good" has an upload, "held" has none and was not asked for one."""

    sent: Sent
    fate: Fate
    why: str = ""
    holds: int | None = None  # the version that the node has proved to hold
    upload: Received | None = None
    said: Said | None = None  # what a node says that needs a model


def read_reply(message: Message, sent: Sent, expected: wire.Expected | None) -> Answer:
    """Decode a reply to a message; without `expected`, only the version that the node holds is read."""
    try:
        if message.has_error():
            return Answer(sent, "failed", f"error {message.error.code}: {message.error.reason}"[:LONGEST_REASON])
        return _read(message, sent, expected)
    except WireError as error:
        return Answer(sent, "refused", str(error)[:LONGEST_REASON])
    except Exception as error:  # bytes from another machine: whatever they cause, the round continues without them
        return Answer(sent, "refused", f"{type(error).__name__}: {error}"[:LONGEST_REASON])


def _read(message: Message, sent: Sent, expected: wire.Expected | None) -> Answer:
    if not is_ours(message):
        raise WireError("the reply was not made by gluefl_mod: add it to the ClientApp's mods, before all others")
    rest = sum(_bytes_of(record) for name, record in message.content.items() if name != BODY)
    if rest > LONGEST_REST:
        raise WireError(f"{rest} bytes beside the upload; {LONGEST_REST} are allowed")
    said = read_said(message.content)
    if said.needs_model is not None:
        return Answer(sent, "needs model", said.needs_model[:LONGEST_REASON], said=said)
    if (said.version, said.hash) != (sent.version, sent.hash.hex()):
        raise WireError(
            f"the node says it holds version {said.version} with hash {said.hash}; "
            f"it was sent version {sent.version} with hash {sent.hash.hex()}"
        )
    if expected is None:
        return Answer(sent, "held", holds=sent.version)
    if said.round != sent.round:
        raise WireError(f"a reply for round {said.round}, round {sent.round} was asked for")
    return Answer(sent, "good", holds=sent.version, upload=_read_upload(message, sent, expected))


def _bytes_of(record: ArrayRecord | ConfigRecord | MetricRecord) -> int:
    """The size of a record. Flower's own count of texts and numbers fails where one is empty."""
    if isinstance(record, ArrayRecord):
        return int(record.count_bytes())
    total = 0
    for name, value in record.items():
        values = value if isinstance(value, list) else [value]
        total += len(name) + sum(len(one) if isinstance(one, str | bytes) else 8 for one in values)
    return total


def _read_upload(message: Message, sent: Sent, expected: wire.Expected) -> Received:
    data = read_array(message.content, UPLOAD, expected.longest)
    header, body = wire.decode(data, expected)
    announced = (header.round, header.base, header.version, header.hash)
    if announced != (sent.round, sent.version, sent.version, sent.hash):
        raise WireError(f"an upload of round {header.round} on version {header.base} in a reply for round {sent.round}")
    if not bool(body.update.finite() & all_finite(body.statistics)):
        raise WireError("values that are NaN or infinite")
    if not math.isfinite(header.loss):
        raise WireError("a loss that is NaN or infinite")
    return Received(body, header.loss, len(data), digest(data))
