"""One round, top to bottom: Algorithm 3 of the paper, for every strategy, sampler and fleet alike."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from gluefl import wire
from gluefl.accel.cores import fetched, overtaking, works_by_itself
from gluefl.clients.cohort import Cohort, Outcome, prefetch
from gluefl.core.federation import Ahead, Federation, State
from gluefl.core.records import Played, Record, record
from gluefl.core.sampling import Group
from gluefl.errors import GlueFLError
from gluefl.fleet import Trip
from gluefl.randomness import stream
from gluefl.simulation.channel import Parcel
from gluefl.strategies import Task, Upload
from gluefl.vectors.selection import Sparse

T = TypeVar("T")
DIVERGED = "The training diverged, or the model returns NaN: lower training.lr, or look at the model and its data."
ENCODED_TOGETHER = 8  # uploads: fewer are more calls to a GPU, of more the cores have to wait for the last
MOST_WAITS = 10_000  # how often a round asks again who is online before it gives up


def play(federation: Federation, state: State) -> tuple[State, Record]:
    """One round: the next state and its line in the journal."""
    f, round = federation, state.round + 1

    # Server: sample C clients from the sticky group and K−C from outside it, or K of N.
    clock_s, groups = invite(f, state, round)

    # Server: synchronise w^t with them and send the shared mask M^t.
    ahead = state.ahead if state.ahead and state.ahead.fits(f, state) else None
    shared = ahead.shared if ahead else wire.Shared(f.strategy.mask(state.strategy, round))
    missing = encoded_updates(state, groups, shared, ahead.missing if ahead else {})
    prefetch(f.engine, invited(groups), round)  # while they are encoded
    parcels = packages(f, state, groups, missing, round)
    expected = state.up_bytes or expected_upload(f, shared, round)
    trips = trips_of(f, clock_s, {client: parcel.size_bytes for client, parcel in parcels.items()}, expected)
    used = [first_arrivals(f, group, groups, trips, round) for group in groups]

    # Clients: train, mask and compress.
    begun = ahead.take(cohort(used)) if ahead else None
    outcomes = train(f, state, used, shared, round) if begun is None else begun
    uploads, sent = collect(f, state, groups, used, shared, outcomes, round)

    # Server: aggregate; statistics are the plain mean of the used clients.
    aggregated = aggregate(f, state, uploads, round)
    answers = ask(uploads, aggregated.finite)

    # A GPU would wait for the rest of this round: the next is begun before.
    for body in sent.values():
        body.update.release()
    next_ahead = look_ahead(f, state, aggregated, used, trips, clock_s, expected)
    uploads = answered(uploads, answers(), round)
    up_bytes = {client: wire.measure(body) for client, body in sent.items()}

    # Server: publish the next version and update the sticky group.
    trips |= trips_of(f, clock_s, {client: parcels[client].size_bytes for client in up_bytes}, up_bytes)
    played = Played(round, clock_s, groups, parcels, trips, uploads, up_bytes, expected, shared, aggregated.update)
    line = record(f, state, played)
    holders = [c for c, trip in trips.items() if trip.downloaded and c not in line.stopped]
    for client in holders:
        f.channel.deliver(client, parcels[client])
    unused = [client for client in holders if client not in up_bytes]  # who never got so far had nothing to send
    published = publish(f, state, round, line.clock_s, aggregated, holders, up_bytes, unused)
    return replace(published, ahead=next_ahead), line


def invite(f: Federation, state: State, round: int) -> tuple[float, tuple[Group, ...]]:
    """The groups, and the moment they are invited: if nobody is online, the round waits until somebody is."""
    clock_s = state.clock_s
    for attempt in range(MOST_WAITS):
        pool = replace(f.pool, is_online=f.devices.is_online(clock_s))
        groups = f.sampler.invite(state.sampler, pool, stream(f.seed, "invite", round, attempt))
        if any(group.clients for group in groups):
            return clock_s, groups
        later_s = f.devices.next_change_s(clock_s)
        if later_s <= clock_s:
            break  # nothing will ever change
        clock_s = later_s
    raise GlueFLError(
        f"round {round}: nobody was online between {state.clock_s:.0f} s and {clock_s:.0f} s. "
        "Check fleet.availability and its file."
    )


def invited(groups: Sequence[Group]) -> list[int]:
    """The clients of all groups."""
    return [client for group in groups for client in group.clients]


def encoded_updates(
    state: State, groups: Sequence[Group], shared: wire.Shared, known: Mapping[int | None, wire.Body]
) -> dict[int | None, wire.Body]:
    """`updates`, with those that are known; the encoding of the others is started."""
    new = updates(state, groups, shared, known)
    wire.encode_positions([*new.values()])
    return {**known, **new}


def updates(
    state: State, groups: Sequence[Group], shared: wire.Shared, known: Iterable[int | None] = ()
) -> dict[int | None, wire.Body]:
    """What a client lacks that holds a version, for each that somebody holds and that is not known."""
    return {
        base: wire.Body(
            Sparse.view(state.ledger.missing(base), state.weights), state.statistics, shared, sends_mask=True
        )
        for base in {state.ledger.base(client) for client in invited(groups)}.difference(known)
    }


def packages(
    f: Federation, state: State, groups: Sequence[Group], missing: Mapping[int | None, wire.Body], round: int
) -> dict[int, Parcel]:
    """What every invited client downloads: one body for all who hold the same version."""
    version = state.ledger.version
    now = f.channel.hash(version, state.weights, state.statistics)
    parcels = {}
    for group in groups:
        for client, weight in zip(group.clients, group.weights):
            base = state.ledger.base(client)
            header = wire.Header(
                kind=wire.PACKAGE,
                run=f.run,
                layout=f.layout.fingerprint,
                round=round,
                base=base,
                version=version,
                hash=now,
                weight=weight,
                accepted=client not in state.ledger.unused,
            )
            parcels[client] = f.channel.send(header, missing[base])
    return parcels


def expected_upload(f: Federation, shared: wire.Shared, round: int) -> int:
    """How long an upload is likely to be, before anybody has trained: a random update is compressed."""
    noise = stream(f.seed, "expected upload").standard_normal(f.space.size, dtype="float32")
    task = Task(round, shared.mask, 1.0, f.space)
    sent, _ = f.strategy.compress(torch.from_numpy(noise).to(f.space.device), task, None)
    return wire.measure(wire.Body(sent, torch.zeros(f.layout.statistics_size), shared, sends_mask=False))


def trips_of(
    f: Federation, clock_s: float, down_bytes: Mapping[int, int], up_bytes: int | Mapping[int, int]
) -> dict[int, Trip]:
    """Download, train and upload, for every client that is sent something."""
    up = up_bytes if isinstance(up_bytes, Mapping) else dict.fromkeys(down_bytes, up_bytes)
    return {c: f.devices.trip(c, clock_s, size, up[c], f.engine.work(c)) for c, size in down_bytes.items()}


def first_arrivals(
    f: Federation, group: Group, groups: Sequence[Group], trips: Mapping[int, Trip], round: int
) -> list[int]:
    """The first of a group to arrive, up to its quota."""

    def arrivals(clients: Sequence[int]) -> list[int]:
        limit = float("inf") if f.deadline_s is None else f.deadline_s
        there = [c for c in clients if trips[c].lost_s is None and trips[c].arrival_s <= limit]
        return sorted(there, key=lambda c: trips[c].arrival_s)  # stable: ties stay in the order of invitation

    if f.authors_arrivals and group is groups[0] and len(groups) > 1:
        # The authors end the round when every quota is filled and then draw among the sticky that have arrived.
        needed = [c for g in groups for c in arrivals(g.clients)[: g.quota]]
        end_s = max((trips[c].arrival_s for c in needed), default=0.0)
        there = [c for c in arrivals(group.clients) if trips[c].arrival_s <= end_s]
        return [there[i] for i in stream(f.seed, "arrivals", round).permutation(len(there))[: group.quota]]
    return arrivals(group.clients)[: group.quota]


def cohort(used: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The used clients of all groups, sorted."""
    return tuple(sorted(client for group in used for client in group))


def train(
    f: Federation, state: State, used: Sequence[Sequence[int]], shared: wire.Shared, round: int
) -> Iterator[Outcome]:
    """Local training of the used clients, from the model they were sent."""
    frozen = f.strategy.frozen(shared.mask)
    return f.engine.train(Cohort(round, cohort(used), state.weights, state.statistics, frozen))


def collect(
    f: Federation,
    state: State,
    groups: Sequence[Group],
    used: Sequence[Sequence[int]],
    shared: wire.Shared,
    outcomes: Iterable[Outcome],
    round: int,
) -> tuple[list[Upload], dict[int, wire.Body]]:
    """Receive what the trained clients send: uploads and their bodies, in the order of the clients."""
    nominal = {client: w for group in groups for client, w in zip(group.clients, group.weights)}
    settled = {client: w for group, some in zip(groups, used) for client, w in group.settled(some).items()}
    losses: dict[int, float | Tensor] = {}
    sent, waiting = dict[int, wire.Body](), list[wire.Body]()
    for outcome in outcomes:
        client = outcome.client
        losses[client] = outcome.loss
        if not isinstance(outcome.loss, Tensor):
            check_loss(outcome.loss, client, round)
        task = Task(round, shared.mask, nominal[client], f.space)
        update, residual = f.strategy.compress(outcome.delta, task, f.residuals.get(client, f.space.device))
        if residual is not None:
            f.residuals[client] = residual
        sent[client] = wire.Body(update, outcome.statistics, shared, sends_mask=False)
        waiting.append(sent[client])
        if len(waiting) == ENCODED_TOGETHER:
            wire.encode_positions(waiting, under_way=True)
            waiting = []
    wire.encode_positions(waiting, under_way=True)
    sent = dict(sorted(sent.items()))
    uploads = []
    for client, body in sent.items():
        header = wire.Header(
            kind=wire.UPLOAD,
            run=f.run,
            layout=f.layout.fingerprint,
            round=round,
            base=state.ledger.version,
            version=state.ledger.version,
            weight=nominal[client],
            loss=losses[client],
            samples=f.engine.work(client),
        )
        received = f.channel.receive(header, body)
        uploads.append(Upload(client, settled[client], received.update, received.statistics, losses[client]))
    return uploads, sent


def check_loss(loss: float, client: int, round: int) -> None:
    """A loss that is no number ends the run."""
    if not math.isfinite(loss):
        raise GlueFLError(f"round {round}: the loss of client {client} is {loss}. {DIVERGED}")


@dataclass(frozen=True)
class Aggregated:
    """What the uploads of a round amount to. On a GPU all of it may still be under way."""

    strategy: Any
    velocity: Tensor | None
    update: Sparse
    weights: Tensor  # the model after it
    statistics: Tensor
    changed_at: Tensor  # of the ledger after it
    finite: Tensor  # whether it is made of numbers


def aggregate(f: Federation, state: State, uploads: Sequence[Upload], round: int) -> Aggregated:
    """The update to publish; without an upload, nothing changes."""
    strategy, velocity, statistics = state.strategy, state.velocity, state.statistics
    update = Sparse.empty(f.space.size, f.space.device)
    if uploads:
        strategy, update = f.strategy.aggregate(strategy, uploads, round)
        velocity, update = f.server.step(velocity, update)
        statistics = torch.stack([upload.statistics for upload in uploads]).mean(0)
    finite = update.finite() & torch.isfinite(statistics).all()
    weights, changed_at = update.add_to(state.weights.clone()), state.ledger.changed_by(update)
    return Aggregated(strategy, velocity, update, weights, statistics, changed_at, finite)


def ask(uploads: Sequence[Upload], finite: Tensor) -> Callable[[], list[float]]:
    """The losses that are still on a device, and whether the update is made of numbers: asked for all at once, and to
    be called for the answers."""
    losses = [upload.loss for upload in uploads if isinstance(upload.loss, Tensor)]
    answers = [torch.stack(losses).to(finite.device, torch.float64)] if losses else []
    copy = fetched(torch.cat([*answers, finite.double().view(1)]))
    return lambda: copy().tolist()


def answered(uploads: Sequence[Upload], answers: Sequence[float], round: int) -> list[Upload]:
    """The uploads with losses that are numbers, after what a device has answered."""
    *losses, finite = answers
    there = iter(losses)
    found = [replace(u, loss=next(there)) if isinstance(u.loss, Tensor) else u for u in uploads]
    for upload in found:
        check_loss(float(upload.loss), upload.client, round)
    check_finite(bool(finite), round)
    return found


def look_ahead(
    f: Federation,
    state: State,
    aggregated: Aggregated,
    used: Sequence[Sequence[int]],
    trips: Mapping[int, Trip],
    clock_s: float,
    expected: int,
) -> Ahead | None:
    """Begin the next round as soon as a GPU could. Who was used is known, and nearly when this round will end and how
    long messages will be, so that a guess of who will train is mostly right; else the next round does it again."""
    if not works_by_itself(f.space.device):
        return None
    there, round = cohort(used), state.round + 2
    ends_s = clock_s + max((trips[client].arrival_s for client in there), default=0.0)
    holders = [client for client, trip in trips.items() if trip.downloaded]
    try:
        guess = publish(f, state, round - 1, ends_s, aggregated, holders, dict.fromkeys(there, expected), ())
        then_s, groups = invite(f, guess, round)
        shared = wire.Shared(f.strategy.mask(guess.strategy, round))
        missing = updates(guess, groups, shared)
        prefetch(f.engine, invited(groups), round)
        wire.count_positions([*missing.values()])  # waits for the GPU
        _ = aggregated.update.count  # for the books: later the GPU would answer after the training
        training = {}
        if not f.authors_arrivals:  # a draw among those who arrive is seldom guessed
            sizes = {client: wire.foresee(missing[guess.ledger.base(client)]) for client in invited(groups)}
            likely = trips_of(f, then_s, sizes, guess.up_bytes or expected)
            first = [first_arrivals(f, group, groups, likely, round) for group in groups]
            training[cohort(first)] = started(train(f, guess, first, shared, round))
        with overtaking(f.space.device, "encoding"):
            wire.encode_positions([*missing.values()])
    except (GlueFLError, torch.cuda.OutOfMemoryError):
        return None  # nobody will be online, as far as can be told, or there is no room
    except Exception as error:
        warnings.warn(f"the next round could not be begun while this one ends: {error!r}", stacklevel=2)
        return None  # if it matters then, that round says so
    return Ahead(f, guess, shared, missing, training)


def started(some: Iterable[T]) -> Iterator[T]:
    """The same, after whatever the first of them needs was started."""
    rest = iter(some)
    first = next(rest, None)
    return rest if first is None else chain([first], rest)


def publish(
    f: Federation,
    state: State,
    round: int,
    clock_s: float,
    aggregated: Aggregated,
    holders: Iterable[int],
    up_bytes: Mapping[int, int],
    unused: Iterable[int],
) -> State:
    """The next version. `holders` hold the one this round sent them; `up_bytes` are those of the used clients."""
    ledger = state.ledger.synchronised(holders).answered(up_bytes, unused)
    return State(
        round=round,
        clock_s=clock_s,
        weights=aggregated.weights,
        statistics=aggregated.statistics,
        ledger=ledger.publish(aggregated.changed_at),
        sampler=f.sampler.settle(state.sampler, up_bytes, stream(f.seed, "settle", round)),
        strategy=aggregated.strategy,
        velocity=aggregated.velocity,
        up_bytes=sum(up_bytes.values()) // len(up_bytes) if up_bytes else state.up_bytes,
    )


def check_finite(finite: bool, round: int) -> None:
    """Refuse to publish a model that is not made of numbers."""
    if not finite:
        raise GlueFLError(f"round {round}: the update is not finite. {DIVERGED}")
