"""The messages of a round: a header for every node, one body for all nodes that hold the same version."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flwr.app import Array, ConfigRecord, Message

from gluefl import wire
from gluefl.core.records import Parcel
from gluefl.core.sampling import Group, nominal_weights
from gluefl.core.server import Packages, bodies_for, header, invited, packages
from gluefl.flower.messages import Said, Told, described_strategy, package, to_array
from gluefl.flower.session import Session


@dataclass(frozen=True)
class Envelope:
    """What a message looks like to Flower and to the app."""

    kind: str  # Flower's message type
    config: ConfigRecord
    arrays_key: str  # the name under which the app expects the model
    config_key: str
    ttl_s: float


@dataclass(frozen=True)
class EncodedBody:
    """The body of a package as bytes, and as the array that all its messages share."""

    data: bytes
    array: Array
    density: float


@dataclass(frozen=True)
class Outbox:
    """Makes the messages of one round, or of one evaluation."""

    session: Session
    round: int
    envelope: Envelope
    packages: Packages
    weights: Mapping[int, float]  # ν_i
    encoded: dict[int | None, EncodedBody] = field(default_factory=dict)  # by the version a node holds

    @classmethod
    def for_training(cls, session: Session, round: int, groups: Sequence[Group], envelope: Envelope) -> "Outbox":
        """The packages of a round, with the strategy's shared mask."""
        bases = map(session.state.ledger.base, invited(groups))
        return cls(
            session, round, envelope, packages(session.core, session.state, bases, round), nominal_weights(groups)
        )

    @classmethod
    def for_evaluation(cls, session: Session, round: int, groups: Sequence[Group], envelope: Envelope) -> "Outbox":
        """The packages of an evaluation, which needs no shared mask: no upload follows."""
        core, state = session.core, session.state
        shared = wire.Shared(core.space.mask(False))
        bodies = bodies_for(core, state, map(state.ledger.base, invited(groups)), shared)
        sent = Packages(shared, bodies, dict(zip(bodies, wire.encode_positions([*bodies.values()]))))
        return cls(session, round, envelope, sent, nominal_weights(groups))

    def message(self, client: int) -> tuple[Parcel, Message]:
        """The message to a node, and its parcel, charged with all that is sent."""
        return self._message(client, self.session.state.ledger.base(client), None)

    def again(self, client: int, said: Said) -> tuple[Parcel, Message]:
        """The message to a node that cannot use its package.

        It is sent the package from another version that it holds, else from version 0, if it knows that. Where packages
        refer to version 0, a node that does not know it is sent it, too; otherwise the newest version as a whole.
        """
        session, state, failed = self.session, self.session.state, self.session.state.ledger.base(client)
        session.note_holders({client: None})
        held = said.version if said.version is not None and said.version <= state.ledger.version else None
        if held is not None and held != failed and said.hash == session.hashes.get(held, b"").hex():
            return self._message(client, held, None)
        is_known = session.core.initial == "known" and said.origin == session.hashes[0].hex()
        if is_known or session.version_0 is not None:
            return self._message(client, 0, None if is_known else session.version_0)
        return self._message(client, None, None)

    def _message(self, client: int, base: int | None, origin: Array | None) -> tuple[Parcel, Message]:
        core, state, hashes = self.session.core, self.session.state, self.session.hashes
        head = header(core, state, client, self.weights[client], hashes[state.ledger.version])
        base_hash = wire.NO_HASH if base is None else hashes.get(base, wire.NO_HASH)
        head = replace(head, round=self.round, base=base, base_hash=base_hash)
        body = self._body(base)
        layout, codec = core.layout, core.traits.package_codec
        data = wire.encode(head, body.data, layout.size, layout.statistics_size, codec)
        header_bytes = data[: wire.header_bytes(codec)]
        told = self._told(client, base, with_table=base is None or origin is not None)
        records, beside_bytes = package(told, header_bytes, body.array, origin)
        beside_bytes += len(origin.data) if origin is not None else 0
        envelope = self.envelope
        records[envelope.config_key] = ConfigRecord({**envelope.config, "server-round": self.round})
        node_id, group_id = self.session.nodes.ids[client], str(self.round)
        message = Message(records, node_id, envelope.kind, ttl=envelope.ttl_s, group_id=group_id)
        return Parcel(head, len(data) + beside_bytes, body.density), message

    def _body(self, base: int | None) -> EncodedBody:
        if base not in self.encoded:
            body, encoding = self.packages.bodies.get(base), self.packages.encodings.get(base)
            if body is None:  # for a node that cannot use what it was sent at first
                body = bodies_for(self.session.core, self.session.state, [base], self.packages.shared)[base]
            data = wire.encode_body(body, encoding)
            self.encoded[base] = EncodedBody(data, to_array(data), body.update.density)
        return self.encoded[base]

    def _told(self, client: int, base: int | None, with_table: bool) -> Told:
        """What a node is told beside its package; names and shapes only with a whole model."""
        session = self.session
        refers = session.core.origin is not None or (session.core.initial == "known" and base == 0)
        return Told(
            run=session.core.run.hex(),
            client=client,
            seed=session.core.seed,
            arrays=self.envelope.arrays_key,
            strategy=described_strategy(session.core.strategy),
            accepted=session.accepted.get(client, (0, None))[1],
            table=session.table.to_json() if with_table else None,
            origin=session.hashes[0].hex() if refers else None,
            store=str(session.store.absolute()) if session.store else None,
        )
