"""Rounds without training: exact updates, devices that lose clients, a channel that writes down."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gluefl.clients.cohort import Outcome
from gluefl.clients.residuals import Residuals
from gluefl.core.records import Parcel
from gluefl.core.sampling import Pool
from gluefl.core.server import Core, State, start
from gluefl.fleet import Arrivals, Instant, Trip
from gluefl.simulation.channel import Channel, Encoded, Measured
from gluefl.simulation.parts import Simulation
from gluefl.strategies import Space
from gluefl.vectors.layout import Layout
from stubs import dyadic, mlp

RUN = b"test run"
LAYOUT = Layout.of(mlp(norm=True))  # 180 weights, 17 statistics


@dataclass(frozen=True)
class Engine:
    """Updates that are a pure function of round and client."""

    reverse: bool = False

    def delta(self, round: int, client: int) -> Tensor:
        return dyadic(LAYOUT.size, round, client)

    def statistics(self, round: int, client: int) -> Tensor:
        return dyadic(LAYOUT.statistics_size, round, client, 1)

    def train(self, cohort):
        for client in reversed(cohort.clients) if self.reverse else cohort.clients:
            delta = self.delta(cohort.round, client)
            moved = delta if cohort.frozen is None else torch.where(cohort.frozen, 0.0, delta)
            yield Outcome(client, moved, self.statistics(cohort.round, client), 0.5)

    def work(self, client: int) -> int:
        return 200


@dataclass(frozen=True)
class Unreliable:
    """A second down, one to compute, some to send; some clients are offline, some are lost on the way."""

    lose: Callable[[int, int], float | None]  # (client, second) → when it is lost
    slow: Callable[[int], float] = lambda client: 1.0
    is_there: Callable[[int], bool] | None = None  # else six in seven, others every second
    timed: bool = True

    def is_online(self, clock_s: float):
        return self.is_there or (lambda client: (client + int(clock_s)) % 7 > 0)

    def next_change_s(self, clock_s: float) -> float:
        return clock_s + 1

    def trip(self, client: int, clock_s: float, down_bytes: int, up_bytes: int, samples: int) -> Trip:
        return Trip(self.slow(client), 1.0, 1.0 + client / 1000 + up_bytes / 1e9, self.lose(client, int(clock_s)))


@dataclass(frozen=True)
class Delivered:
    """A channel that also writes down who was sent what, and who finished the download."""

    inner: Channel
    sent: list[Parcel] = field(default_factory=list)
    delivered: list[tuple[int, Parcel]] = field(default_factory=list)

    def hash(self, version, weights, statistics):
        return self.inner.hash(version, weights, statistics)

    def send(self, header, body, encoding):
        self.sent.append(self.inner.send(header, body, encoding))
        return self.sent[-1]

    def deliver(self, client, parcel):
        self.inner.deliver(client, parcel)
        self.delivered.append((client, parcel))

    def receive(self, header, loss, body, encoding):
        return self.inner.receive(header, loss, body, encoding)


def delivered(core: Core) -> Delivered:
    """Encoded messages, written down."""
    return Delivered(Encoded(core))


def simulation(strategy: Any, sampler: Any, clients: int, **parts: Any) -> tuple[Simulation, State]:
    """A federation of stand-ins, and its state before round 1. `channel` is a function of the core."""
    of_core = {name: parts.pop(name) for name in ("optimizer", "averaging", "hooks", "initial") if name in parts}
    channel = parts.pop("channel", Encoded)
    arrivals = {name: parts.pop(name) for name in [*vars(Arrivals())] if name in parts}
    initial = dyadic(LAYOUT.size, 0, 0), dyadic(LAYOUT.statistics_size, 0, 1)
    core = Core(5, RUN, LAYOUT, Space.of(LAYOUT), sampler, strategy, *initial, **of_core)
    defaults = {"devices": Instant(), "engine": Engine(), "residuals": Residuals(LAYOUT.size)}
    pool = Pool(clients, lambda client: 1 / clients)
    sim = Simulation(core, pool, channel=channel(core), arrivals=Arrivals(**arrivals), **{**defaults, **parts})
    return sim, start(core, pool)


def measured(core: Core) -> Measured:
    """Messages that are only measured."""
    return Measured()
