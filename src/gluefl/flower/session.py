"""The server's side of a run on Flower: the core and its state, the nodes, the journal and the checkpoints."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, Message
from flwr.common.logger import log

from gluefl import files, wire
from gluefl.core.records import Played, record
from gluefl.core.replica import Replica, remembered_hash
from gluefl.core.sampling import Group
from gluefl.core.server import Aggregate, Closed, Core, State, aggregate, publish, start
from gluefl.errors import Damaged, GlueFLError
from gluefl.flower.arrays import Table
from gluefl.flower.exchange import Exchange
from gluefl.flower.guarding import Protection
from gluefl.flower.messages import loss_in, to_array
from gluefl.flower.node_store import NodeStore
from gluefl.flower.nodes import Nodes
from gluefl.flower.replies import Received
from gluefl.flower.run_folder import Saved, settings_of
from gluefl.randomness import stream
from gluefl.storage import checkpoint
from gluefl.storage.client_log import ClientLog
from gluefl.storage.journal import Journal, Line, keep_rounds
from gluefl.storage.names import CHECKPOINT, EVALUATIONS, JOURNAL
from gluefl.strategies import Upload
from gluefl.vectors.sparse import Sparse, all_finite, whole

WAIT_S = 1.0  # between two attempts to invite, while no node is connected
MOST_WAITS = 10_000
NOT_FINITE = "Every upload is finite, their sum is not: lower the learning rate of the app or of the server."


@dataclass(frozen=True)
class Invitation:
    """Who is invited, and the clients that were seen for the first time."""

    clock_s: float
    groups: tuple[Group, ...]
    joined: list[int]


@dataclass
class Session:
    """One run: what stays the same (`core`), what a round changes (`state`), and what the server knows of the nodes."""

    core: Core
    state: State
    nodes: Nodes
    table: Table
    journal: Journal
    folder: Path | None = None
    store: Path | None = None  # in a simulation, where nodes find the newest version
    accepted: dict[int, tuple[int, str]] = field(default_factory=dict)  # client → round and digest of its last used one
    hashes: dict[int, bytes] = field(default_factory=dict)  # of every version
    checkpoints_kept: int = checkpoint.KEPT  # in the folder
    protection: Protection = field(default_factory=lambda: Protection(None))
    log: ClientLog = field(default_factory=ClientLog)
    types: dict[str, Any] | None = None  # of the state before round 1
    version_0: Array | None = None  # as a message, where packages refer to it: for nodes that do not know it

    @property
    def arrays(self) -> ArrayRecord:
        """The model to evaluate and to hand over: the newest version, or the average over versions."""
        return self.table.arrays(*self.state.model)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What must be the same for the run to go on."""
        return settings_of(self.core)

    def invite(self, round: int) -> Invitation:
        """Draw the clients of a round from the connected nodes; while there is none, wait."""
        clock_s, before = self.state.clock_s, len(self.nodes.places)
        for attempt in range(MOST_WAITS):
            self.nodes.refresh()
            rng = stream(self.core.seed, "invite", round, attempt)
            groups = self.core.sampler.invite(self.state.sampler, self.nodes.pool, rng)
            if any(group.clients for group in groups):
                return Invitation(clock_s, groups, list(range(before, len(self.nodes.places))))
            time.sleep(WAIT_S)
            clock_s += WAIT_S
        raise GlueFLError(
            f"round {round}: no node was connected for {MOST_WAITS * WAIT_S:.0f} s. Start the SuperNodes, then the app "
            "again: with the same folder the run goes on."
        )

    def close_round(self, exchange: Exchange) -> Line:
        """Aggregate the uploads of a round and publish the next version; returns the line of the journal."""
        exchange.close()
        uploads, result = self._aggregate(exchange)
        earlier = self.protection.watch(self.core, self.state, exchange, uploads)
        if earlier is not None:
            uploads, result = {}, earlier
        written = record(self.core, self.state, _played(self.state, exchange, uploads, result.update))
        self.note_holders(exchange.holds)
        up_bytes = {client: upload.size_bytes for client, upload in uploads.items()}
        # The holders are those that have proved it (`note_holders`): who merely was sent a package may not have got it.
        closed = Closed(exchange.round, written.clock_s, (), up_bytes, exchange.parcels.keys() - up_bytes.keys())
        self.state = publish(self.core, self.state, result, closed)
        self.accepted |= {client: (exchange.round, upload.digest) for client, upload in uploads.items()}
        line = written.line
        line["clients"]["fate"] = [_fate(exchange, client, uploads) for client in exchange.parcels]
        line["refused"] = line["clients"]["fate"].count("refused")
        line |= {"incidents": exchange.incidents, "nodes": len(self.nodes.places)}
        return line | {"hash": self.publish_version().hex()}

    def _aggregate(self, exchange: Exchange) -> tuple[dict[int, Received], Aggregate]:
        """The uploads that count, in the order of the clients, and what they amount to."""
        received, round = dict(sorted(exchange.uploads.items())), exchange.round
        weights: dict[int, float] = {}
        for group in exchange.groups:  # a client of a group that is short of its quota weighs more
            weights |= group.actual_weights([client for client in group.clients if client in received])
        seed = self.core.seed
        uploads = [Upload(c, weights[c], one.body.update, one.body.statistics, seed) for c, one in received.items()]
        try:
            result = aggregate(self.core, self.state, uploads, round)
            if bool(result.finite & all_finite(result.weights)):
                return received, result
            why = f"round {round}: the update is not finite. {NOT_FINITE}"
        except GlueFLError as error:
            why = str(error)
        # The round counts as one in which no client arrived.
        exchange.note(None, "refused", why)
        return {}, aggregate(self.core, self.state, [], round)

    def note_holders(self, holds: Mapping[int, int | None]) -> None:
        """Enter into the ledger which version nodes have proved to hold; None for a node that must start anew."""
        ledger = self.state.ledger
        proved: dict[int, int | None] = {}
        for client, version in holds.items():
            # A late answer may name an older version than an answer that was received before it.
            before = ledger.held_by(client)
            proved[client] = version if version is None or before is None else max(version, before)
        self.state = replace(self.state, ledger=ledger.holding(proved))

    def publish_version(self) -> bytes:
        """The hash of the newest version; a simulation also writes the version where its nodes find it."""
        version, weights, statistics = self.state.ledger.version, self.state.weights, self.state.statistics
        if self.store is not None:
            NodeStore(self.store).write_replica(Replica(weights, statistics, version), self.table)
        return remembered_hash(self.hashes, version, weights, statistics)

    def save(self, line: Line) -> None:
        """Journal first, then the checkpoint, which relies on it: a server that is killed at any moment can go on."""
        self.journal.append(line)
        self.journal.sync()
        self.save_state()

    def save_state(self) -> None:
        """Write a checkpoint, if there is a folder."""
        if self.folder is not None:
            guard = None if self.core.guard is None else self.protection.state.to_json()
            saved = Saved(self.core.run, self.settings, self.nodes.places, self.accepted, self.hashes[0], guard)
            keep = self.protection.kept(self.state.round, self.checkpoints_kept)
            checkpoint.save(
                self.folder / CHECKPOINT, self.state, notes=saved.notes(), keep=keep, log=self.log, types=self.types
            )


def open_session(
    core: Core,
    nodes: Nodes,
    table: Table,
    folder: Path | None,
    store: Path | None,
    saved: Saved | None,
    checkpoints_kept: int = checkpoint.KEPT,
) -> Session:
    """A new run, or the one that was saved in the folder."""
    state = start(core, nodes.pool)
    journal = Journal(folder / JOURNAL if folder else None)
    session = Session(core, state, nodes, table, journal, folder, store, checkpoints_kept=checkpoints_kept)
    session.protection = Protection(core.guard)
    if folder is not None:
        session.types = checkpoint.check(state)
        files.make_folder(folder)
        if saved is not None:
            saved.check(session.settings, folder)
            _restore(session, saved)
    session.publish_version()
    if core.initial == "known":
        _publish_version_0(session)
    if saved is None:  # from here on a run without a checkpoint is a damaged one
        session.journal.cut(0)
        session.save_state()
    return session


def _publish_version_0(session: Session) -> None:
    """Keep version 0 as a message, where packages refer to it; a simulation writes it where its nodes find it."""
    core, layout = session.core, session.core.layout
    vector, codec = core.first[1], core.traits.package_codec
    weights, statistics = core.parts(vector, core.statistics)
    session.hashes.setdefault(0, wire.replica_hash(weights, statistics))
    if session.store is not None:
        NodeStore(session.store).write_origin(Replica(weights, statistics, 0), session.table)
    if core.origin is not None:
        shared = wire.Shared(core.space.mask(False))
        body = wire.encode_body(wire.Body(whole(vector), statistics[:0], shared, True, codec))
        head = wire.Header(wire.PACKAGE, core.run, layout.fingerprint, 0, None, 0, hash=session.hashes[0])
        session.version_0 = to_array(wire.encode(head, body, layout.size, layout.statistics_size, codec))


def _restore(session: Session, saved: Saved) -> None:
    """Go back to the checkpoint: what was written after it belongs to a round that is played again."""
    if saved.found is None:
        return
    if saved.found.warning is not None:
        log(WARNING, "%s: %s", session.folder, saved.found.warning)
    fresh = session.state
    session.state = state = checkpoint.load(saved.found, fresh)
    session.protection.restore(saved.guard, saved.found.folder, fresh)
    session.journal.cut(state.round)
    keep_rounds(saved.found.folder.parent / EVALUATIONS, state.round)
    session.accepted = dict(saved.accepted)
    session.hashes = {0: saved.version_0}
    session.hashes |= {line["round"]: bytes.fromhex(line["hash"]) for line in session.journal.stored()}
    if session.hashes[state.ledger.version] != wire.replica_hash(state.weights, state.statistics):
        raise Damaged(
            f"{session.folder}: the model of the checkpoint is not the one that the journal has for it. "
            "Copy the folder back from a backup, or choose another folder."
        )


def _played(state: State, exchange: Exchange, uploads: Mapping[int, Received], update: Sparse) -> Played:
    return Played(
        round=exchange.round,
        clock_s=exchange.clock_s,
        groups=exchange.groups,
        parcels=exchange.parcels,
        trips=exchange.trips,
        losses={client: upload.loss for client, upload in uploads.items() if _reports_loss(exchange.replies[client])},
        supports=[upload.body.update.support for upload in uploads.values()],
        up_bytes={client: upload.size_bytes for client, upload in uploads.items()},
        expected_up_bytes=state.up_bytes or 0,
        shared=exchange.shared,
        update=update,
    )


def _reports_loss(reply: Message) -> bool:
    return any(loss_in(metrics) is not None for metrics in reply.content.metric_records.values())


def _fate(exchange: Exchange, client: int, uploads: Mapping[int, Received]) -> str:
    """What became of a client; its upload may have been refused only when all were added up."""
    fate = exchange.fates[client]
    return "refused" if fate == "used" and client not in uploads else fate
