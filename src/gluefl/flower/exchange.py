"""The messages of one round in progress: who was sent what, who has answered, and when enough have."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from flwr.app import Message
from flwr.serverapp import Grid

from gluefl import wire
from gluefl.core.records import Parcel
from gluefl.core.sampling import Group
from gluefl.fleet import Trip
from gluefl.flower.messages import Said
from gluefl.flower.nodes import POLL_S
from gluefl.flower.replies import Answer, Received, Sent, read_reply


@dataclass
class Exchange:
    """The messages of one round (or one evaluation) and their answers.

    `outstanding` is shared by all rounds: an answer that comes too late for its round still says which version its
    node holds.
    """

    round: int
    groups: Sequence[Group]
    shared: wire.Shared
    parcels: dict[int, Parcel]
    sent: dict[int, Sent]  # by node id
    expected: wire.Expected | None  # of an upload; None in an evaluation, which asks for none
    outstanding: dict[str, Sent]  # by message id
    resend: Callable[[int, Said], tuple[Parcel, Message]]  # for a node that cannot use its package, by what it says
    clock_s: float = 0.0  # of the invitation
    began: float = field(default_factory=time.monotonic)
    replies: dict[int, Message] = field(default_factory=dict)  # of the clients that are used
    uploads: dict[int, Received] = field(default_factory=dict)  # of the same
    fates: dict[int, str] = field(default_factory=dict)
    trips: dict[int, Trip] = field(default_factory=dict)
    holds: dict[int, int | None] = field(default_factory=dict)  # client → version that it proved to hold, None: none
    incidents: list[dict[str, object]] = field(default_factory=list)
    resent: set[int] = field(default_factory=set)

    @property
    def waiting(self) -> bool:
        """Whether a quota is open that a client without an answer could still fill."""
        return any(
            self._is_open(group) and any(client not in self.fates for client in group.clients) for group in self.groups
        )

    def receive(self, message: Message) -> Message | None:
        """Read one reply; returns a message to send at once, if the node needs another."""
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
        if answer.said is not None and sent.client not in self.resent:
            return self._send_again(sent.client, answer.said, answer.why)
        self._take(message, answer)
        return None

    def _send_again(self, client: int, said: Said, why: str) -> Message:
        self.resent.add(client)
        self.holds[client] = None
        self.note(client, "needs model", why)
        parcel, message = self.resend(client, said)
        both = parcel.size_bytes + self.parcels[client].size_bytes
        self.parcels[client] = replace(parcel, size_bytes=both)
        return message

    def _take(self, message: Message, answer: Answer) -> None:
        """Decide what becomes of a client by its answer."""
        client, seconds = answer.sent.client, time.monotonic() - self.began
        if client in self.fates:
            self.note(client, "refused", "a second reply in the same round")
        elif answer.fate in ("good", "held"):
            group = next(group for group in self.groups if client in group.clients)
            self.trips[client] = Trip(0.0, seconds, 0.0)
            self.fates[client] = "used" if self._is_open(group) else "late"
            if self.fates[client] == "used":
                self.replies[client] = message
                if answer.upload is not None:
                    self.uploads[client] = answer.upload
        else:
            self.fates[client], self.trips[client] = answer.fate, Trip(0.0, seconds, 0.0, lost_s=seconds)
            self.note(client, answer.fate, answer.why)
            if answer.fate == "refused":
                self.holds[client] = None  # nothing it says about its replica can be relied on

    def refuse(self, client: int, why: str) -> None:
        """Take back a reply that was to be used: the client counts as lost."""
        self.replies.pop(client, None)
        self.uploads.pop(client, None)
        self.fates[client] = "refused"
        self.trips[client] = replace(self.trips[client], lost_s=self.trips[client].arrival_s)
        self.note(client, "refused", why)

    def _is_open(self, group: Group) -> bool:
        """Whether a group has fewer used clients than its quota."""
        return sum(client in self.replies for client in group.clients) < group.quota

    def close(self) -> None:
        """The round is over. Clients that have not answered may still do so, but not for this round."""
        seconds = time.monotonic() - self.began
        for client in self.parcels:
            if client not in self.fates:
                self.fates[client] = "unanswered"
            self.trips.setdefault(client, Trip(0.0, seconds, 0.0, lost_s=seconds))

    def note(self, client: int | None, what: str, why: str) -> None:
        """Add an incident to the journal line of the round."""
        self.incidents.append({"client": client, "what": what, "why": why})


def send_and_receive(grid: Grid, exchange: Exchange, messages: Iterable[Message], timeout_s: float) -> list[Message]:
    """Send messages, and receive until enough nodes have answered, all have, or the time is up."""
    replies: list[Message] = []
    _push(grid, exchange, messages)
    ends = time.monotonic() + timeout_s
    while exchange.waiting and time.monotonic() < ends:
        for reply in grid.pull_messages(list(exchange.outstanding)):
            replies.append(reply)
            again = exchange.receive(reply)
            if again is not None:
                _push(grid, exchange, [again])
        if exchange.waiting:
            time.sleep(POLL_S)
    return replies


def _push(grid: Grid, exchange: Exchange, messages: Iterable[Message]) -> None:
    """Push messages one by one: only so is it certain which id belongs to which client."""
    for message in messages:
        sent = exchange.sent[message.metadata.dst_node_id]
        message_id = next(iter(grid.push_messages([message])), None)
        if message_id:
            exchange.outstanding[message_id] = sent
        else:
            exchange.fates[sent.client] = "failed"
            exchange.note(sent.client, "failed", "the SuperLink did not take the message")
