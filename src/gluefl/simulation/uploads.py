"""The clients' half of a round in a simulation: updates are compressed, encoded and sent."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gluefl import wire
from gluefl.clients.cohort import Cohort, Outcome
from gluefl.clients.compression import Compression, check_loss, not_finite
from gluefl.clients.remote import Broadcast, Kept, UploadingEngine
from gluefl.core.sampling import Group, nominal_weights
from gluefl.core.server import State
from gluefl.errors import UsageError, WireError
from gluefl.randomness import stream
from gluefl.simulation.channel import on_device
from gluefl.simulation.parts import Simulation
from gluefl.simulation.turns import Turns
from gluefl.strategies import Task, Upload
from gluefl.vectors.mask import Mask

ENCODED_TOGETHER = 8  # uploads: fewer make more launches, with more the cores wait longer for the last


@dataclass(frozen=True)
class Sent:
    """What the used clients sent, in the order of the clients."""

    uploads: Sequence[Upload]
    encodings: Mapping[int, wire.Encoding]
    losses: Mapping[int, float | Tensor]  # a tensor is a number on an asynchronous device
    notes: Sequence[str] = ()  # of the engine, for the journal
    forgotten: int | None = None  # residuals, if the run forgets any


def expected_upload(sim: Simulation, shared: wire.Shared, round: int) -> int:
    """The likely length of an upload before any client has trained: a random update is compressed."""
    core = sim.core
    noise = stream(core.seed, "expected upload").standard_normal(core.space.size, dtype="float32")
    task = Task(round, shared.mask, 1.0, core.space, seed=core.seed)
    statistics = torch.zeros(core.layout.statistics_size)
    delta = core.traits.vector(torch.from_numpy(noise), statistics)
    update, _ = core.strategy.compress(delta.to(core.space.device), task, None)
    return wire.measure(wire.Body(update, statistics, shared, False, core.traits.upload_codec))


def sent_by_clients(
    sim: Simulation, state: State, groups: Sequence[Group], shared: wire.Shared, cohort: Cohort
) -> Sent:
    """The clients' half of a round: they train, compress and send, here or where the engine has them."""
    forgotten = sim.residuals.begin(cohort.round)
    if isinstance(sim.engine, UploadingEngine):
        sent = collect(sim, sim.engine, state, groups, shared, cohort)
    else:
        outcomes = sim.engine.train(cohort)
        try:
            sent = compress(sim, state, groups, shared, cohort.clients, outcomes)
        finally:
            if isinstance(outcomes, Generator):  # after an error, too, its trainer ends here
                outcomes.close()
    return replace(sent, forgotten=forgotten)


def compress(
    sim: Simulation,
    state: State,
    groups: Sequence[Group],
    shared: wire.Shared,
    clients: Sequence[int],
    outcomes: Iterable[Outcome],
) -> Sent:
    """Compress and send the updates of the clients that trained."""
    core, round, nominal = sim.core, state.round + 1, nominal_weights(groups)
    compression = Compression(core.strategy, core.traits, core.layout, core.hooks)
    losses: dict[int, float | Tensor] = {}
    encodings, waiting = dict[int, wire.Encoding](), dict[int, wire.Body]()

    def receive(client: int, body: wire.Body) -> wire.Body:
        return _received(sim, state, client, nominal[client], body, encodings[client], losses[client])

    turns = Turns(core, groups, clients, receive)

    def encode() -> None:
        encodings.update(zip(waiting, wire.encode_positions([*waiting.values()], under_way=True)))
        turns.take({client: wire.stored(body) for client, body in waiting.items()})
        waiting.clear()

    for outcome in outcomes:
        client = outcome.client
        _check_client(client, nominal, losses, round)
        losses[client] = outcome.loss
        if not isinstance(outcome.loss, Tensor):
            check_loss(outcome.loss, client, round)
        task = Task(round, shared.mask, nominal[client], core.space, client, core.seed)
        residual = sim.residuals.get(client, core.space.device)
        waiting[client], residual = compression.body(outcome, state.statistics, shared, task, residual)
        sim.keep(client, residual, outcome.memory)
        if len(waiting) == ENCODED_TOGETHER or core.space.size >= wire.LARGE:
            encode()
    encode()
    return Sent(turns.all(round), dict(sorted(encodings.items())), dict(sorted(losses.items())))


def collect(
    sim: Simulation,
    engine: UploadingEngine,
    state: State,
    groups: Sequence[Group],
    shared: wire.Shared,
    cohort: Cohort,
) -> Sent:
    """Read the uploads that clients made where they trained."""
    core, nominal, device = sim.core, nominal_weights(groups), sim.core.space.device
    near = wire.Shared(Mask(shared.mask.bits.cpu()))  # messages are read on a CPU, wherever the model is
    expected = core.expected(wire.UPLOAD, near)
    losses, encodings = dict[int, float](), dict[int, wire.Encoding]()
    turns = Turns(core, groups, cohort.clients, lambda client, body: body)

    def kept(client: int) -> Kept:
        return Kept(sim.residuals.get(client), cohort.memories.get(client))

    broadcast = Broadcast.of(cohort, shared.mask, state.ledger.version)
    for reply in engine.upload(broadcast, {client: nominal[client] for client in cohort.clients}, kept):
        client = reply.client
        _check_client(client, nominal, losses, cohort.round)
        losses[client] = reply.loss
        check_loss(reply.loss, client, cohort.round)
        sim.keep(client, reply.kept.residual, reply.kept.memory)
        received = wire.decode(reply.message, expected)[1]
        encodings[client] = wire.arrived(reply.message, received)
        turns.take({client: on_device(device, received, shared)})
    return Sent(turns.all(cohort.round), dict(sorted(encodings.items())), dict(sorted(losses.items())), engine.notes())


def _check_client(client: int, nominal: Mapping[int, float], losses: Mapping[int, object], round: int) -> None:
    if client not in nominal or client in losses:
        raise UsageError(
            f"round {round}: the engine returned client {client}, which was "
            f"{'returned before' if client in losses else 'not invited'}: it must return each client of the "
            "cohort once."
        )


def _received(
    sim: Simulation,
    state: State,
    client: int,
    weight: float,
    body: wire.Body,
    encoding: wire.Encoding,
    loss: float | Tensor,
) -> wire.Body:
    """What arrives of an upload."""
    core, version = sim.core, state.ledger.version
    header = wire.Header(
        kind=wire.UPLOAD,
        run=core.run,
        layout=core.layout.fingerprint,
        round=state.round + 1,
        base=version,
        version=version,
        weight=weight,
        samples=sim.engine.work(client),
    )
    try:
        return sim.channel.receive(header, loss, body, encoding)
    except WireError as error:
        if body.update.finite():
            raise
        raise not_finite(client, header.round) from error
