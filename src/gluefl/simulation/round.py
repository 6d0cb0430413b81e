"""One round, top to bottom: Algorithm 3 of the paper, for every strategy, sampler and fleet alike."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gluefl import wire
from gluefl.accel.streams import fetched
from gluefl.clients.cohort import Cohort
from gluefl.clients.compression import DIVERGED, check_loss
from gluefl.core.records import Parcel, Played, Record, record
from gluefl.core.sampling import Group, nominal_weights
from gluefl.core.server import Aggregate, Closed, Packages, State, aggregate, header, invited, publish
from gluefl.errors import Diverged
from gluefl.fleet import Trip
from gluefl.simulation.arrivals import first_arrivals, invite, trips
from gluefl.simulation.parts import Simulation
from gluefl.simulation.uploads import expected_upload, sent_by_clients

Player = Callable[[Simulation, State], tuple[State, Record]]


def play(sim: Simulation, state: State) -> tuple[State, Record]:
    """One round: the next state and its line in the journal."""
    return close(sim, state, begin(sim, state))


def player(device: torch.device) -> Player:
    """Plays rounds one after the other, on any device."""
    return play


@dataclass(frozen=True)
class Plan:
    """Who takes part in a round and what they were sent."""

    round: int
    clock_s: float  # of the invitation
    groups: tuple[Group, ...]
    packages: Packages
    parcels: Mapping[int, Parcel]
    trips: Mapping[int, Trip]
    used: tuple[tuple[int, ...], ...]  # of each group
    expected_up_bytes: int
    cohort: Cohort


@dataclass(frozen=True)
class Begun:
    """A round up to its aggregate. On an asynchronous device all of it may still be computed."""

    plan: Plan
    encodings: Mapping[int, wire.Encoding]  # of the uploads, by client
    result: Aggregate
    answers: Callable[[], list[float]]  # the losses of the clients, and whether the result is finite
    notes: Sequence[str] = ()
    forgotten: int | None = None  # residuals


def begin(sim: Simulation, state: State) -> Begun:
    """Invite, train, compress and aggregate."""
    plan = prepare(sim, state)
    sent = sent_by_clients(sim, state, plan.groups, plan.packages.shared, plan.cohort)
    result = aggregate(sim.core, state, sent.uploads, plan.round)
    return Begun(plan, sent.encodings, result, _answers(sent.losses, result), sent.notes, sent.forgotten)


def prepare(sim: Simulation, state: State) -> Plan:
    """Server: who is invited, what each of them is sent, and who will arrive in time."""
    core, round = sim.core, state.round + 1
    # Sample C clients from the sticky group and K−C from outside it, or K of N.
    clock_s, groups = invite(sim, state, round)
    # Synchronise w^t with them and send the shared mask M^t.
    sent = sim.packages(core, state, map(state.ledger.base, invited(groups)), round)
    hash_ = sim.channel.hash(state.ledger.version, state.weights, state.statistics)
    parcels = {}
    for client, weight in nominal_weights(groups).items():
        head = header(core, state, client, weight, hash_)
        parcels[client] = sim.channel.send(head, sent.bodies[head.base], sent.encodings[head.base])
    expected = state.up_bytes or expected_upload(sim, sent.shared, round)
    expected_trips = trips(sim, clock_s, {client: parcel.size_bytes for client, parcel in parcels.items()}, expected)
    used = first_arrivals(sim, groups, expected_trips, round)
    return Plan(
        round, clock_s, groups, sent, parcels, expected_trips, used, expected,
        cohort_of(sim, state, used, sent.shared, round),
    )  # fmt: skip


def cohort_of(sim: Simulation, state: State, used: Iterable[Iterable[int]], shared: wire.Shared, round: int) -> Cohort:
    """The used clients of all groups, and the model they train from."""
    frozen = sim.core.strategy.frozen(shared.mask)
    clients = tuple(sorted(client for group in used for client in group))
    memories = sim.kept(clients)
    return Cohort(round, clients, state.weights, state.statistics, None if frozen is None else frozen.bits, memories)


def close(sim: Simulation, state: State, begun: Begun) -> tuple[State, Record]:
    """Server: write the round down and publish the next version."""
    plan, result = begun.plan, begun.result
    losses = _checked(begun)
    up_bytes = {client: wire.message_bytes(encoding) for client, encoding in begun.encodings.items()}
    sizes = {client: plan.parcels[client].size_bytes for client in up_bytes}
    actual = {**plan.trips, **trips(sim, plan.clock_s, sizes, up_bytes)}
    played = Played(
        plan.round, plan.clock_s, plan.groups, plan.parcels, actual, losses,
        [encoding.support for encoding in begun.encodings.values()], up_bytes, plan.expected_up_bytes,
        plan.packages.shared, result.update, sim.arrivals, sim.devices.timed, begun.notes, begun.forgotten,
    )  # fmt: skip
    line = record(sim.core, state, played)
    holders = [client for client, trip in actual.items() if trip.downloaded and client not in line.stopped]
    for client in holders:
        sim.channel.deliver(client, plan.parcels[client])
    unused = [client for client in holders if client not in up_bytes]  # clients lost earlier had nothing to send
    closed = Closed(plan.round, line.clock_s, holders, up_bytes, unused)
    return publish(sim.core, state, result, closed), line


def _answers(losses: Mapping[int, float | Tensor], result: Aggregate) -> Callable[[], list[float]]:
    """Start to fetch the losses and whether the result is finite; the returned function waits for them."""
    values, finite = list(losses.values()), result.finite
    numbers = (
        torch.stack([value for value in values if isinstance(value, Tensor)]).double()
        if values and all(isinstance(value, Tensor) for value in values)
        else torch.tensor([float(value) for value in values], dtype=torch.float64)
    )
    copy = fetched(torch.cat([numbers.to(finite.device), finite.double().view(1)]))
    return lambda: copy().tolist()


def _checked(begun: Begun) -> dict[int, float]:
    """The losses of the clients; refuses a loss or an update that is not finite."""
    *losses, finite = begun.answers()
    for client, loss in zip(begun.encodings, losses):
        check_loss(loss, client, begun.plan.round)
    if not finite:
        raise Diverged(f"round {begun.plan.round}: the update is not finite. {DIVERGED}")
    return dict(zip(begun.encodings, losses))
