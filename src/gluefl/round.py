"""One round, top to bottom: Algorithm 3 of the paper, for every strategy, sampler and fleet alike."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gluefl import wire
from gluefl.channel import Parcel
from gluefl.cores import still_works, wait_for, works_by_itself
from gluefl.errors import GlueFLError
from gluefl.federation import Ahead, Federation, State
from gluefl.fleet import Trip
from gluefl.randomness import stream
from gluefl.records import Played, Record, record
from gluefl.sampling import Group
from gluefl.selection import Sparse
from gluefl.strategies import Task, Upload

DIVERGED = "The training diverged, or the model returns NaN: lower training.lr, or look at the model and its data."
ENCODED_TOGETHER = 8  # uploads: fewer are more calls to a GPU, of more the cores have to wait for the last
MOST_WAITS = 10_000  # how often a round asks again who is online before it gives up


def play(federation: Federation, state: State) -> tuple[State, Record]:
    """One round: the next state and its line in the journal."""
    f, round = federation, state.round + 1

    # Server: sample C clients from the sticky group and K−C from outside it, or K of N.
    clock_s, groups = invite(f, state, round)

    # Server: synchronise w^t with them and send the shared mask M^t.
    ahead = state.ahead if state.ahead and state.ahead.fits(state) else None
    shared = ahead.shared if ahead else wire.Shared(f.strategy.mask(state.strategy, round))
    missing = encoded_updates(state, groups, shared, ahead.missing if ahead else {})
    f.engine.prepare([client for group in groups for client in group.clients], round)  # while they are encoded
    parcels = packages(f, state, groups, missing, round)
    expected = state.up_bytes or expected_upload(f, shared, round)
    trips = {
        client: f.devices.trip(client, clock_s, parcel.size_bytes, expected, f.engine.work(client))
        for client, parcel in parcels.items()
    }
    used = [first_arrivals(f, group, groups, trips, round) for group in groups]

    # Clients: train, mask and compress.
    uploads, sent = collect(f, state, groups, used, shared, round)

    # Server: aggregate; statistics are the plain mean of the used clients.
    aggregated = aggregate(f, state, uploads, round)

    # While a GPU is busy with all of this: who is likely to be invited next, and what will they be sent?
    ahead = look_ahead(f, state, aggregated, used, trips, clock_s)

    # Only now does anybody wait for a GPU; the encoding went on meanwhile.
    uploads = asked(uploads, f.space.device, round)
    wire.wait_until_started(ahead.missing.values() if ahead else ())
    up_bytes = {client: wire.measure(body) for client, body in sent.items()}

    # Server: publish the next version and update the sticky group.
    trips |= {
        client: f.devices.trip(client, clock_s, parcels[client].size_bytes, size_bytes, f.engine.work(client))
        for client, size_bytes in up_bytes.items()
    }
    played = Played(round, clock_s, groups, parcels, trips, uploads, up_bytes, expected, shared, aggregated.update)
    line = record(f, state, played)
    check_finite(aggregated, round)
    holders = [c for c, trip in trips.items() if trip.downloaded and c not in line.stopped]
    for client in holders:
        f.channel.deliver(client, parcels[client])
    unused = [client for client in holders if client not in up_bytes]  # who never got so far had nothing to send
    published = publish(f, state, round, line.clock_s, aggregated, holders, up_bytes, unused)
    return replace(published, ahead=ahead), line


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


def encoded_updates(
    state: State,
    groups: Sequence[Group],
    shared: wire.Shared,
    known: Mapping[int | None, wire.Body],
    under_way: bool = False,
) -> dict[int | None, wire.Body]:
    """What a client lacks that holds a version, for each that somebody holds; their encoding is started."""
    bases = {state.ledger.base(client) for group in groups for client in group.clients}
    new = {
        base: wire.Body(
            Sparse.view(state.ledger.missing(base), state.weights), state.statistics, shared, sends_mask=True
        )
        for base in bases - known.keys()
    }
    wire.encode_positions([*new.values()], under_way)
    return {**known, **new}


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


def collect(
    f: Federation,
    state: State,
    groups: Sequence[Group],
    used: Sequence[Sequence[int]],
    shared: wire.Shared,
    round: int,
) -> tuple[list[Upload], dict[int, wire.Body]]:
    """Train the used clients and receive what they send: uploads and their bodies, in the order of the clients."""
    nominal = {client: w for group in groups for client, w in zip(group.clients, group.weights)}
    settled = {client: w for group, some in zip(groups, used) for client, w in group.settled(some).items()}
    frozen = f.strategy.frozen(shared.mask)
    losses: dict[int, float | Tensor] = {}
    sent, waiting = dict[int, wire.Body](), list[wire.Body]()
    for outcome in f.engine.train(state.weights, state.statistics, sorted(settled), round, frozen):
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


def asked(uploads: Sequence[Upload], device: torch.device, round: int) -> list[Upload]:
    """The uploads with losses that are numbers: what is still on a device is asked for all at once."""
    tensors = {upload.client: upload.loss for upload in uploads if isinstance(upload.loss, Tensor)}
    losses = torch.stack([*tensors.values()]) if tensors else torch.empty(0)
    wait_for(device)
    answers = dict(zip(tensors, losses.tolist()))
    for client, loss in answers.items():
        check_loss(loss, client, round)
    return [replace(upload, loss=answers.get(upload.client, upload.loss)) for upload in uploads]


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
    return Aggregated(strategy, velocity, update, update.add_to(state.weights.clone()), statistics, finite)


def look_ahead(
    f: Federation,
    state: State,
    aggregated: Aggregated,
    used: Sequence[Sequence[int]],
    trips: Mapping[int, Trip],
    clock_s: float,
) -> Ahead | None:
    """Beside a GPU there is time for it: start what the next round needs. Who will have been used is known, and nearly
    when the round will end; what is needed against expectation is made then."""
    if not works_by_itself(f.space.device):
        return None
    round, is_busy = state.round + 1, still_works(f.space.device)
    there = [client for group in used for client in group]
    ends_s = clock_s + max((trips[client].arrival_s for client in there), default=0.0)
    holders = [client for client, trip in trips.items() if trip.downloaded]
    try:
        guess = publish(f, state, round, ends_s, aggregated, holders, dict.fromkeys(there, 0), ())
        _, groups = invite(f, guess, round + 1)
        if not is_busy():
            return None  # a small model: it waits for us, not we for it
        shared = wire.Shared(f.strategy.mask(guess.strategy, round + 1))
        missing = encoded_updates(guess, groups, shared, {}, under_way=True)
    except (GlueFLError, torch.cuda.OutOfMemoryError):
        return None  # nobody will be online, as far as can be told, or there is no room beside the uploads
    f.engine.prepare([client for group in groups for client in group.clients], round + 1)
    return Ahead(guess.weights, guess.strategy, shared, missing)


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
        ledger=ledger.publish(aggregated.update),
        sampler=f.sampler.settle(state.sampler, up_bytes, stream(f.seed, "settle", round)),
        strategy=aggregated.strategy,
        velocity=aggregated.velocity,
        up_bytes=sum(up_bytes.values()) // len(up_bytes) if up_bytes else state.up_bytes,
    )


def check_finite(aggregated: Aggregated, round: int) -> None:
    """Refuse to publish a model that is not made of numbers. As late as may be: a GPU is waited for."""
    if not aggregated.finite:
        raise GlueFLError(f"round {round}: the update is not finite. {DIVERGED}")
