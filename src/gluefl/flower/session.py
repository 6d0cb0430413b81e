"""The server's side of a run on Flower: its state, its packages, its journal and its checkpoints."""

import json
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from gluefl import wire
from gluefl.clients.residuals import Residuals
from gluefl.core.federation import Federation, State, start
from gluefl.core.optimizer import Server
from gluefl.core.records import Played, record
from gluefl.core.replica import Replica
from gluefl.core.sampling import Group, Pool, Sampler
from gluefl.errors import GlueFLError, UsageError
from gluefl.flower import content
from gluefl.flower.arrays import Table
from gluefl.flower.bodies import Bodies, Elsewhere
from gluefl.flower.device import Device
from gluefl.flower.exchange import Exchange
from gluefl.flower.nodes import Nodes
from gluefl.simulation.channel import Parcel
from gluefl.simulation.round import aggregate, check_finite, encoded_updates, packages, publish
from gluefl.storage import checkpoint
from gluefl.storage.journal import Journal, Line
from gluefl.strategies import Space, Strategy, Upload
from gluefl.strategies.registry import STRATEGIES


@dataclass
class Session:
    """One run: what stays the same (`federation`), what a round changes (`state`), and what it knows of the nodes."""

    federation: Federation
    state: State
    nodes: Nodes
    table: Table
    folder: Path | None
    store: Path | None  # in a simulation, where nodes find the newest version
    journal: Journal
    accepted: dict[int, tuple[int, str]] = field(default_factory=dict)  # client → round and digest of its last used one
    arrays_name: str = "arrays"

    @property
    def hashes(self) -> dict[int, bytes]:
        """The hash of every version."""
        return self.channel.hashes

    @property
    def channel(self) -> Bodies:
        """Where packages are encoded."""
        channel = self.federation.channel
        assert isinstance(channel, Bodies)
        return channel

    def told(self, client: int, base: int | None) -> content.Told:
        """What a node is told beside its package; names and shapes only with the whole model."""
        return content.Told(
            run=self.federation.run.hex(),
            client=client,
            arrays=self.arrays_name,
            strategy=described(self.federation.strategy),
            accepted=self.accepted.get(client, (0, None))[1],
            table=self.table.to_json() if base is None else None,
            store=str(self.store.absolute()) if self.store else None,
        )

    def pack(self, groups: Sequence[Group], shared: wire.Shared, round: int) -> dict[int, tuple[Parcel, Any]]:
        """For every invited client: its parcel, charged with all that is sent, and the records of its message."""
        packed, channel = {}, self.channel
        missing = encoded_updates(self.state, groups, shared, {})
        for client, parcel in packages(self.federation, self.state, groups, missing, round).items():
            key = (parcel.header.version, parcel.header.base, shared.packed.count)
            assert parcel.data is not None
            records, extra = content.package(
                self.told(client, parcel.header.base), parcel.data, channel.encoded[key][1]
            )
            packed[client] = replace(parcel, size_bytes=parcel.size_bytes + extra), records
        return packed

    def forget(self, clients: Iterable[int]) -> None:
        """These nodes hold nothing that can be built on."""
        self._hold(dict.fromkeys(clients))

    def settle(self, exchange: Exchange) -> Line:
        """Close a round: aggregate what is good of it, publish the next version, and write everything down."""
        f, state, round = self.federation, self.state, exchange.round
        exchange.close()
        assert exchange.shared is not None
        settled = {
            c: w for g in exchange.groups for c, w in g.settled([c for c in g.clients if c in exchange.used]).items()
        }
        uploads = []
        for client in sorted(exchange.used):
            answer = exchange.used[client]
            assert answer.body is not None and answer.header is not None
            uploads.append(
                Upload(client, settled[client], answer.body.update, answer.body.statistics, answer.header.loss)
            )
        up_bytes = {client: exchange.used[client].up_bytes for client in sorted(exchange.used)}
        try:
            aggregated = aggregate(f, state, uploads, round)
            check_finite(bool(aggregated.finite), round)
        except GlueFLError as error:
            # Each upload was finite and their sum is not. The round counts as one in which nobody arrived.
            exchange.note(None, "refused", str(error))
            uploads, up_bytes = [], {}
            aggregated = aggregate(f, state, uploads, round)
        self.nodes.trips = dict(exchange.trips)
        written = record(
            f,
            state,
            Played(
                round=round,
                clock_s=exchange.clock_s,
                groups=exchange.groups,
                parcels=exchange.parcels,
                trips=exchange.trips,
                uploads=uploads,
                up_bytes=up_bytes,
                expected_up_bytes=state.up_bytes or 0,
                shared=exchange.shared,
                update=aggregated.update,
            ),
        )
        self._hold(exchange.holds)
        unused = exchange.parcels.keys() - up_bytes.keys()
        self.state = publish(f, self.state, round, written.clock_s, aggregated, (), up_bytes, unused)
        self.accepted |= {client: (round, exchange.used[client].digest) for client in up_bytes}
        line = written.line
        fates = {c: "refused" if fate == "used" and c not in up_bytes else fate for c, fate in exchange.fates.items()}
        line["clients"]["fate"] = [fates[client] for client in exchange.parcels]
        return line | {
            "incidents": exchange.incidents,
            "nodes": len(self.nodes.places),
            "hash": self.publish_version().hex(),
        }

    def evaluated(self, exchange: Exchange) -> None:
        """Remember who downloaded the version for an evaluation."""
        exchange.close()
        self._hold(exchange.holds)

    def publish_version(self) -> bytes:
        """The hash of the newest version; a simulation also puts the version where its nodes find it."""
        version, weights, statistics = self.state.ledger.version, self.state.weights, self.state.statistics
        self.channel.encoded.clear()
        if self.store is not None:
            Device(self.store).keep(Replica(weights, statistics, version), self.table)
        return self.channel.hash(version, weights, statistics)

    def save(self, line: Line) -> None:
        """Journal first, then the nodes, then the state: whatever moment the server is killed at, it can go on."""
        self.journal.append(line)
        if self.folder is not None:
            remember(self)
            checkpoint.save(self.folder / "checkpoint", self.state, self.federation.residuals)

    def grow(self) -> list[int]:
        """Look who is there. N is the number of nodes seen so far; new ones enter the pool of the next draw."""
        new = self.nodes.refresh()
        size = len(self.nodes.places)
        self.federation = replace(self.federation, pool=Pool(size, lambda client: 1 / size))
        return new

    def _hold(self, holds: dict[int, int | None]) -> None:
        held = dict(self.state.ledger.held)
        for client, version in holds.items():
            if version is None:
                held.pop(client, None)
            else:
                # An answer that comes late may speak of an older version than one that has been heard of since.
                held[client] = max(version, held.get(client, version))
        self.state = replace(self.state, ledger=replace(self.state.ledger, held=held))


def described(strategy: Strategy) -> dict[str, Any]:
    """A strategy by its name and parameters, as a node can build it."""
    name = next((name for name, kind in STRATEGIES.items() if type(strategy) is kind), type(strategy).__name__)
    return {"name": name, **asdict(strategy)}  # type: ignore[call-overload]


def remember(session: Session) -> None:
    """What a checkpoint does not hold: the run's name, the nodes' places, accepted rounds, hashes."""
    assert session.folder is not None
    known = {
        "run": session.federation.run.hex(),
        "settings": settings(session.federation, session.table),
        "places": session.nodes.places,
        "accepted": {str(client): list(last) for client, last in session.accepted.items()},
        "hashes": {str(version): hash_.hex() for version, hash_ in session.hashes.items()},
    }
    temporary = session.folder / "federation.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(known, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, session.folder / "federation.json")


def settings(f: Federation, table: Table) -> dict[str, Any]:
    """What must be the same for a run to go on."""
    parts: dict[str, Any] = {"sampler": f.sampler, "server": f.server}
    return {
        "seed": f.seed,
        "layout": table.layout.fingerprint.hex(),
        "strategy": described(f.strategy),
        **{name: {"name": type(part).__name__, **asdict(part)} for name, part in parts.items()},
    }


def recall(folder: Path | None) -> dict[str, Any] | None:
    """What `remember` wrote, None where nothing was written."""
    if folder is None or not checkpoint.exists(folder / "checkpoint"):
        return None
    try:
        known: dict[str, Any] = json.loads((folder / "federation.json").read_text(encoding="utf-8"))
        return known
    except (OSError, ValueError) as error:
        raise GlueFLError(f"{folder}/federation.json is damaged ({error}). Start the run in another folder.") from error


def open_session(
    strategy: Strategy,
    sampler: Sampler,
    server: Server,
    seed: int,
    nodes: Nodes,
    table: Table,
    weights: Tensor,
    statistics: Tensor,
    folder: Path | None,
    store: Path | None,
) -> Session:
    """A new run, or the one that the folder holds."""
    known = recall(folder)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    size = len(nodes.places)
    federation = Federation(
        seed=seed,
        run=bytes.fromhex(known["run"]) if known else secrets.token_bytes(8),
        layout=table.layout,
        space=Space(tuple(part.size for part in table.layout.weights)),
        pool=Pool(size, lambda client: 1 / size),
        sampler=sampler,
        strategy=strategy,
        server=server,
        devices=nodes,
        engine=Elsewhere(),
        channel=Bodies(table, {int(v): bytes.fromhex(h) for v, h in known["hashes"].items()} if known else {}),
        residuals=Residuals(table.layout.size, folder / "checkpoint" if folder else None),
    )
    if known and json.loads(json.dumps(settings(federation, table))) != known["settings"]:
        raise UsageError(
            f"{folder} holds a run with other settings; it cannot go on with these. Choose another folder.\n"
            f"  there: {json.dumps(known['settings'])}\n  now:   {json.dumps(settings(federation, table))}"
        )
    state = start(federation, weights, statistics)
    journal = Journal(folder / "journal.jsonl" if folder else None)
    if known:
        assert folder is not None
        state = checkpoint.load(folder / "checkpoint", state, federation.residuals)
        journal.cut(state.round)
    session = Session(federation, state, nodes, table, folder, store, journal)
    if known:
        # What was written after the checkpoint belongs to a round that is played again.
        session.accepted = {int(c): (r, digest) for c, (r, digest) in known["accepted"].items() if r <= state.round}
        for version in [v for v in session.hashes if v > state.ledger.version]:
            del session.hashes[version]
    session.publish_version()
    return session
