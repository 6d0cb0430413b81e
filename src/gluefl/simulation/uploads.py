"""The clients' half of a round in a simulation: updates are compressed, encoded and sent."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gluefl import wire
from gluefl.clients.cohort import Outcome
from gluefl.core.sampling import Group, nominal_weights
from gluefl.core.server import State
from gluefl.errors import Diverged, UsageError, WireError
from gluefl.randomness import stream
from gluefl.simulation.parts import Simulation
from gluefl.strategies import Task, Upload
from gluefl.strategies.hooks import hooked_delta

DIVERGED = "The training diverged, or the model returns NaN: lower training.lr, or look at the model and its data."
ENCODED_TOGETHER = 8  # uploads: fewer make more launches, with more the cores wait longer for the last


@dataclass(frozen=True)
class Sent:
    """What the used clients sent, in the order of the clients."""

    uploads: Sequence[Upload]
    encodings: Mapping[int, wire.Encoding]
    losses: Mapping[int, float | Tensor]  # a tensor is a number on an asynchronous device


def expected_upload(sim: Simulation, shared: wire.Shared, round: int) -> int:
    """The likely length of an upload before any client has trained: a random update is compressed."""
    core = sim.core
    noise = stream(core.seed, "expected upload").standard_normal(core.space.size, dtype="float32")
    task = Task(round, shared.mask, 1.0, core.space, seed=core.seed)
    statistics = torch.zeros(core.layout.statistics_size)
    delta = core.traits.vector(torch.from_numpy(noise), statistics)
    update, _ = core.strategy.compress(delta.to(core.space.device), task, None)
    return wire.measure(wire.Body(update, statistics, shared, False, core.traits.upload_codec))


def compress(
    sim: Simulation, state: State, groups: Sequence[Group], shared: wire.Shared, outcomes: Iterable[Outcome]
) -> Sent:
    """Compress and send the updates of the clients that trained."""
    core, round, nominal = sim.core, state.round + 1, nominal_weights(groups)
    codec = core.traits.upload_codec
    losses: dict[int, float | Tensor] = {}
    bodies, encodings, waiting = dict[int, wire.Body](), dict[int, wire.Encoding](), list[int]()

    def encode() -> None:
        started = wire.encode_positions([bodies[client] for client in waiting], under_way=True)
        encodings.update(zip(waiting, started))
        bodies.update({client: wire.stored(bodies[client]) for client in waiting})
        waiting.clear()

    for outcome in outcomes:
        client = outcome.client
        if client not in nominal or client in losses:
            raise UsageError(
                f"round {round}: the engine returned client {client}, which was "
                f"{'returned before' if client in losses else 'not invited'}: it must return each client of the "
                "cohort once."
            )
        _check_sizes(sim, outcome)
        losses[client] = outcome.loss
        if not isinstance(outcome.loss, Tensor):
            check_loss(outcome.loss, client, round)
        task = Task(round, shared.mask, nominal[client], core.space, client, core.seed)
        delta = core.traits.vector(hooked_delta(core.hooks, outcome.delta, task), outcome.statistics - state.statistics)
        update, residual = core.strategy.compress(delta, task, sim.residuals.get(client, core.space.device))
        if residual is not None:
            sim.residuals[client] = residual
        if outcome.memory is not None and sim.memories is not None:
            sim.memories[client] = outcome.memory
        bodies[client] = wire.Body(update, core.traits.beside(outcome.statistics), shared, False, codec)
        waiting.append(client)
        if len(waiting) == ENCODED_TOGETHER or core.space.size >= wire.LARGE:
            encode()
    encode()
    uploads = _received(sim, state, groups, bodies, encodings, losses)
    return Sent(uploads, dict(sorted(encodings.items())), dict(sorted(losses.items())))


def _check_sizes(sim: Simulation, outcome: Outcome) -> None:
    layout = sim.core.layout
    for name, vector, size in (
        ("delta", outcome.delta, layout.size),
        ("statistics", outcome.statistics, layout.statistics_size),
    ):
        if vector.dtype != layout.dtype or vector.shape != (size,):
            raise UsageError(
                f"the engine returned a {name} of {vector.dtype} {tuple(vector.shape)} for client {outcome.client}; "
                f"it must be {layout.dtype} ({size},): a flat vector in the order of the layout."
            )


def _received(
    sim: Simulation,
    state: State,
    groups: Sequence[Group],
    bodies: Mapping[int, wire.Body],
    encodings: Mapping[int, wire.Encoding],
    losses: Mapping[int, float | Tensor],
) -> list[Upload]:
    """What arrives of the uploads; a client of a group that is short of its quota weighs more."""
    core, version, nominal = sim.core, state.ledger.version, nominal_weights(groups)
    actual = {
        c: w for group in groups for c, w in group.actual_weights([c for c in group.clients if c in bodies]).items()
    }
    uploads = []
    for client in sorted(bodies):
        header = wire.Header(
            kind=wire.UPLOAD,
            run=core.run,
            layout=core.layout.fingerprint,
            round=state.round + 1,
            base=version,
            version=version,
            weight=nominal[client],
            samples=sim.engine.work(client),
        )
        try:
            received = sim.channel.receive(header, losses[client], bodies[client], encodings[client])
        except WireError as error:
            if bodies[client].update.finite():
                raise
            message = f"round {header.round}: the update of client {client} is not finite. {DIVERGED}"
            raise Diverged(message) from error
        uploads.append(Upload(client, actual[client], received.update, received.statistics, core.seed))
    return uploads


def check_loss(loss: float, client: int, round: int) -> None:
    """A loss that is not finite ends the run."""
    if not math.isfinite(loss):
        raise Diverged(f"round {round}: the loss of client {client} is {loss}. {DIVERGED}")
