"""Flower records that nodes and servers receive, and mutations of them: texts, headers and arrays of our messages."""

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from mutation import changed

import flower_nodes
from gluefl import FedAvg, GlueFL, Lean, Uniform, wire
from gluefl.errors import WireError
from gluefl.flower import exchange, messages, replies
from gluefl.flower import nodes as waiting
from gluefl.flower.node_store import NodeStore
from gluefl.flower.synchronise import Receiver
from gluefl.strategies import Strategy

STRATEGIES: dict[str, Strategy] = {"fedavg": FedAvg(), "gluefl": GlueFL(), "lean": Lean()}
KINDS = ("numpy.ndarray", "numpy.ndarray", "torch.Tensor", "")
EXPECTED = ("WireError", "GlueFLError", "UsageError")


@dataclass(frozen=True)
class Task:
    """A task of a server. A node reads it with an empty disk."""

    records: RecordDict
    strategy: Strategy
    folder: Path
    initial: ArrayRecord
    format: str = "Flower tasks"

    @property
    def whole(self) -> RecordDict:
        """The records of the task."""
        return self.records

    def mutant(self, others: list[Any], rng: random.Random) -> RecordDict:
        """One text, header or array is another one."""
        return mutated(self.records, "task", rng)

    def is_sound(self, records: RecordDict) -> bool:
        """What the node holds has the hash that the task names; raises `WireError` for a task that is refused."""
        told, sent = messages.read_package(records)
        receiver = Receiver(NodeStore(self.folder), self.strategy, lambda: self.initial)
        held = receiver.synchronised(told, sent)
        return bool(held.replica.hash == held.header.hash)


@dataclass(frozen=True)
class Reply:
    """A reply of a node, what it replies to, and the upload that the server expects."""

    message: Message
    sent: replies.Sent
    expected: wire.Expected
    format: str = "Flower replies"

    @property
    def whole(self) -> RecordDict:
        """The records of the reply."""
        return self.message.content

    def mutant(self, others: list[Any], rng: random.Random) -> RecordDict:
        """One text or array is another one."""
        return mutated(self.message.content, "answer", rng)

    def is_sound(self, records: RecordDict) -> bool:
        """Whether the reply is of a round and a version that were asked for; raises `WireError` for one refused."""
        whole = self.message.content
        self.message.content = records
        try:
            answer = replies.read_reply(self.message, self.sent, self.expected)
        finally:
            self.message.content = whole
        if answer.fate == "refused":
            kind = answer.why.split(":")[0]
            if kind.isidentifier() and kind.endswith(("Error", "Exception", "Exit")) and kind not in EXPECTED:
                raise RuntimeError(answer.why)  # the server goes on, but nobody thought of this
            raise WireError(answer.why)
        return answer.fate == "needs model" or answer.holds == self.sent.version


def mutated(records: RecordDict, text: str, rng: random.Random) -> RecordDict:
    """A copy of records in which the text, the header, an array or its description is another one."""
    ours = dict(records.config_records[messages.OURS].items())
    arrays = dict(records.array_records.get(messages.BODY, ArrayRecord()).items())
    places = [text, text, *arrays, *arrays, *(["header", "header"] if "header" in ours else []), "records"]
    place = rng.choice(places)
    if place in arrays:
        arrays[place] = _mutated_array(arrays[place], rng)
    elif place == "header":
        ours["header"] = changed(bytes(ours["header"]), [], rng)
    elif place == text:
        ours[text] = changed(str(ours[text]).encode(), [], rng).decode("utf-8", "replace")
    else:
        _mislay(ours, arrays, text, rng)
    others = {name: record for name, record in records.items() if name not in (messages.OURS, messages.BODY)}
    body = {messages.BODY: ArrayRecord(arrays)} if arrays else {}
    return RecordDict({**others, messages.OURS: ConfigRecord(ours), **body})


def _mutated_array(array: Array, rng: random.Random) -> Array:
    """Other bytes, often those of numpy's header; or another description of them."""
    data, where = array.data, rng.random()
    if where < 0.4:
        data = changed(data[:128], [], rng) + data[128:]
    elif where < 0.9:
        data = data[:128] + changed(data[128:], [], rng)
        if len(data) != len(array.data):  # numpy's header names the length, so that the content is read, too
            return messages.to_array(data[128:])
    return Array(array.dtype, (rng.randrange(2**40),), rng.choice(KINDS), data)


def _mislay(ours: dict[str, Any], arrays: dict[str, Array], text: str, rng: random.Random) -> None:
    """A value is missing, is of another type, or has the name of another."""
    values: dict[str, Any] = ours if rng.random() < 0.6 or not arrays else arrays
    name = rng.choice(sorted(values))
    value = values.pop(name)
    if rng.random() < 0.6 and values is ours:
        ours[name] = rng.choice((0, -1, 2**63 - 1, 1.5, True, "", b"", "{}", "[" * 2000, [1, 2], value))
    elif rng.random() < 0.5:
        values[rng.choice((messages.PACKAGE, messages.UPLOAD, messages.ORIGIN, text))] = value


@contextmanager
def recorded() -> Iterator[list[tuple[Message, replies.Sent, wire.Expected | None]]]:
    """The replies that servers read meanwhile."""
    read, kept = exchange.read_reply, list[tuple[Message, replies.Sent, wire.Expected | None]]()

    def keep(message: Message, sent: replies.Sent, expected: wire.Expected | None) -> replies.Answer:
        kept.append((message, sent, expected))
        return read(message, sent, expected)

    polls = exchange.POLL_S, waiting.POLL_S
    exchange.read_reply, exchange.POLL_S, waiting.POLL_S = keep, 0.0, 0.0  # type: ignore[assignment]
    try:
        yield kept
    finally:
        exchange.read_reply, (exchange.POLL_S, waiting.POLL_S) = read, polls


def record_seeds() -> dict[str, Task | Reply]:
    """The tasks and replies of one round of two nodes, with every kind of message."""
    seeds: dict[str, Task | Reply] = {}
    empty, initial = Path(tempfile.gettempdir()) / "gluefl-torture-without-a-node", flower_nodes.initial_arrays()
    for name, strategy in STRATEGIES.items():
        with tempfile.TemporaryDirectory() as folder, recorded() as received:
            _, nodes, _ = flower_nodes.federation(Path(folder), 2, 1, Uniform(2), strategy)
        seeds |= {
            f"flower-task-{name}-{number}": Task(records, strategy, empty, initial)
            for number, records in enumerate(nodes[0].inbox)
        }
        good = [(message, sent, expected) for message, sent, expected in received if messages.is_ours(message)]
        for number, (message, sent, expected) in enumerate(good):
            if expected is not None and messages.BODY in message.content:
                seeds[f"flower-reply-{name}-{number}"] = Reply(message, sent, expected)
    return seeds
