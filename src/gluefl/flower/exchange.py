"""One round in progress: who was sent what, who has answered, and when enough have."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from flwr.app import Message
from flwr.serverapp import Grid

from gluefl import wire
from gluefl.core.sampling import Group
from gluefl.fleet import Trip
from gluefl.flower.nodes import POLL_S
from gluefl.flower.replies import Answer, Sent, read_reply
from gluefl.simulation.channel import Parcel


@dataclass
class Exchange:
    """The messages of one round (or one evaluation) and their answers.

    `outstanding` is shared by all rounds: an answer that comes too late is still an answer, and says which version
    its node holds.
    """

    round: int
    groups: Sequence[Group]
    parcels: dict[int, Parcel]
    expected: wire.Expected | None
    outstanding: dict[str, Sent]
    sent: dict[int, Sent]  # by node id
    resend: Callable[[int], Message]  # the whole model, for a node that cannot use its package
    shared: wire.Shared | None = None
    clock_s: float = 0.0
    began: float = field(default_factory=time.monotonic)
    used: dict[int, Answer] = field(default_factory=dict)
    replies: dict[int, Message] = field(default_factory=dict)  # of the used clients
    fates: dict[int, str] = field(default_factory=dict)
    trips: dict[int, Trip] = field(default_factory=dict)
    holds: dict[int, int | None] = field(default_factory=dict)  # what was learned: client → version, None: nothing
    incidents: list[dict[str, object]] = field(default_factory=list)
    resent: set[int] = field(default_factory=set)

    @property
    def waiting(self) -> bool:
        """Whether a quota is open that somebody who has not answered could still fill."""
        return any(
            len([c for c in group.clients if c in self.used]) < group.quota
            and any(client not in self.fates for client in group.clients)
            for group in self.groups
        )

    def receive(self, message: Message) -> Message | None:
        """Take one reply in; returns a message to send at once, if the node needs another."""
        sent = self.outstanding.pop(message.metadata.reply_to_message_id, None)
        if sent is None:
            self.note(None, "refused", "a reply to no message that is waited for: a duplicate, or foreign")
            return None
        current = any(sent is one for one in self.sent.values())
        answer = read_reply(message, sent, self.expected if current else None)
        if answer.holds is not None:
            self.holds[sent.client] = max(answer.holds, self.holds.get(sent.client) or 0)
        if not current:
            self.note(sent.client, "late" if answer.fate == "held" else answer.fate, f"of round {sent.round}")
            return None
        return self._settle(message, answer)

    def _settle(self, message: Message, answer: Answer) -> Message | None:
        client, seconds = answer.sent.client, time.monotonic() - self.began
        group = next(group for group in self.groups if client in group.clients)
        if answer.fate == "needs model" and client not in self.resent:
            self.resent.add(client)
            self.holds[client] = None
            self.note(client, "needs model", answer.why)
            return self.resend(client)
        good = answer.fate in ("good", "held")
        if client in self.fates:
            self.note(client, "refused", "a second reply in the same round")
        elif good and len([c for c in group.clients if c in self.used]) < group.quota:
            self.used[client], self.replies[client] = answer, message
            self.fates[client], self.trips[client] = "used", Trip(0.0, seconds, 0.0)
        elif good:
            self.fates[client], self.trips[client] = "late", Trip(0.0, seconds, 0.0)
        else:
            self.fates[client], self.trips[client] = answer.fate, Trip(0.0, seconds, 0.0, lost_s=seconds)
            self.note(client, answer.fate, answer.why)
            if answer.fate == "refused":
                self.holds[client] = None  # whatever it holds, it is not to be trusted
        return None

    def close(self) -> None:
        """The round is over. Who has not answered may still do so, but not for this round."""
        seconds = time.monotonic() - self.began
        for client in self.parcels:
            if client not in self.fates:
                self.fates[client] = "unanswered"
            self.trips.setdefault(client, Trip(0.0, seconds, 0.0, lost_s=seconds))

    def note(self, client: int | None, what: str, why: str) -> None:
        """Something that the journal should tell."""
        self.incidents.append({"client": client, "what": what, "why": why})


def converse(grid: Grid, exchange: Exchange, messages: Iterable[Message], timeout_s: float) -> list[Message]:
    """Send, and receive until enough have answered, all have, or the time is up."""
    replies: list[Message] = []
    register(grid, exchange, messages)
    ends = time.monotonic() + timeout_s
    while exchange.waiting and time.monotonic() < ends:
        for reply in grid.pull_messages(list(exchange.outstanding)):
            replies.append(reply)
            again = exchange.receive(reply)
            if again is not None:
                register(grid, exchange, [again])
        if exchange.waiting:
            time.sleep(POLL_S)
    return replies


def register(grid: Grid, exchange: Exchange, messages: Iterable[Message]) -> None:
    """Push messages one by one, and remember to which client each id belongs."""
    for message in messages:
        sent = exchange.sent[message.metadata.dst_node_id]
        message_id = next(iter(grid.push_messages([message])), None)
        if message_id:
            exchange.outstanding[message_id] = sent
        else:
            exchange.fates[sent.client] = "failed"
            exchange.note(sent.client, "failed", "the SuperLink did not take the message")
