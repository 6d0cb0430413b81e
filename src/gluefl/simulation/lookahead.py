"""Look-ahead: begin the next round before this one is recorded, so that a GPU never waits for the host.

When a round has been aggregated, it is known who was used, and nearly when the round ends and how long messages will
be. That gives a guess of the next plan: its packages are encoded on a side stream and its cohort starts to train,
while the host measures, records and publishes the current round. The next round requests a training and packages
as always; it gets those of the guess where they are the same, and new ones otherwise. So a wrong guess costs
time and changes nothing. This file can be deleted: `run` then imports `player` from `round`.

What the guess calls (`Sampler.invite`, `Sampler.next_state`, `Devices`) is called again by the next round. Its results
depend on its arguments alone.
"""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeVar

import torch

from gluefl import wire
from gluefl.accel.streams import is_asynchronous, on_side_stream
from gluefl.clients.cohort import Cohort, Engine, Outcome, prefetch
from gluefl.core.records import Record
from gluefl.core.server import Closed, Core, Packages, State, bodies_for, invited, publish
from gluefl.errors import GlueFLError
from gluefl.simulation.arrivals import first_arrivals, invite, trips
from gluefl.simulation.parts import Simulation
from gluefl.simulation.round import Begun, Player, begin, close, cohort_of, play

T = TypeVar("T")


def player(device: torch.device) -> Player:
    """Plays rounds of a simulation, with look-ahead on an asynchronous device."""
    return LookAhead() if is_asynchronous(device) else play


@dataclass
class LookAhead:
    """A player that keeps the guess of the next round."""

    guess: "Guess | None" = None

    def __call__(self, sim: Simulation, state: State) -> tuple[State, Record]:
        """One round; begins the next."""
        guess, self.guess = self.guess, None
        begun = begin(guess.injected(sim) if guess and guess.fits(sim, state) else sim, state)
        del guess
        self.guess = guessed(sim, state, begun)
        return close(sim, state, begun)


@dataclass(frozen=True)
class Guess:
    """The next round as far as the current one could tell."""

    sim: Simulation
    state: State  # its clock and ledger are nearly right, its model is exact
    packages: Packages
    cohort: Cohort | None
    outcomes: list[Iterator[Outcome]] = field(default_factory=list)  # of the cohort; emptied when they are taken

    def fits(self, sim: Simulation, state: State) -> bool:
        """Whether it is a guess of this simulation and state."""
        same = ((getattr(self.state, name), getattr(state, name)) for name in ("weights", "statistics", "strategy"))
        return sim is self.sim and state.round == self.state.round and all(a is b for a, b in same)

    def injected(self, sim: Simulation) -> Simulation:
        """The simulation with an engine and packages that use this guess."""
        return replace(sim, engine=Trained(sim.engine, self), packages=self.packed)

    def packed(self, core: Core, state: State, bases: Iterable[int | None], round: int) -> Packages:
        """As `core.server.packages`: those of the guess, and new ones for versions it did not expect."""
        ready = self.packages
        mask = next((encoding.mask for encoding in ready.encodings.values()), None)
        bodies = bodies_for(core, state, set(bases) - ready.bodies.keys(), ready.shared)
        encodings = dict(zip(bodies, wire.encode_positions([*bodies.values()], mask)))
        return Packages(ready.shared, {**ready.bodies, **bodies}, {**ready.encodings, **encodings})


@dataclass(frozen=True)
class Trained:
    """An engine that returns the training of a guess once, if exactly that cohort is to be trained."""

    engine: Engine
    guess: Guess

    def train(self, cohort: Cohort) -> Iterator[Outcome]:
        """One outcome per client."""
        begun = self.guess.outcomes.pop() if self.guess.outcomes else None
        expected = self.guess.cohort
        if begun is not None and expected is not None and _equal(cohort, expected):
            return begun
        del begun  # frees its memory before another cohort trains
        return self.engine.train(cohort)

    def work(self, client: int) -> int:
        """Samples that pass through the model."""
        return self.engine.work(client)


def guessed(sim: Simulation, state: State, begun: Begun) -> Guess | None:
    """Begin the next round; None if that is not possible yet."""
    try:
        return _guess(sim, state, begun)
    except (GlueFLError, torch.cuda.OutOfMemoryError):
        return None  # no client is expected to be online, or there is no memory for it
    except Exception as error:
        warnings.warn(f"the next round could not be begun while this one ends: {error!r}", stacklevel=2)
        return None  # if it matters, the next round raises it again


def _guess(sim: Simulation, state: State, begun: Begun) -> Guess:
    plan, core, round = begun.plan, sim.core, begun.plan.round + 1
    ends_s = plan.clock_s + max((plan.trips[client].arrival_s for client in begun.encodings), default=0.0)
    holders = [client for client, trip in plan.trips.items() if trip.downloaded]
    up_bytes = dict.fromkeys(begun.encodings, plan.expected_up_bytes)
    expected = publish(core, state, begun.result, Closed(plan.round, ends_s, holders, up_bytes))

    clock_s, groups = invite(sim, expected, round)
    clients = invited(groups)
    shared = wire.Shared(core.strategy.mask(expected.strategy, round))
    bodies = bodies_for(core, expected, map(expected.ledger.base, clients), shared)
    prefetch(sim.engine, clients, round)
    counts = wire.count_positions([*bodies.values()])  # synchronises: after it the aggregate is complete
    for support in (begun.result.update, *(encoding.support for encoding in begun.encodings.values())):
        _ = support.count  # for the journal; counted later it would wait for the training
    cohort, outcomes = None, []
    if not sim.arrivals.authors_arrivals:  # a draw among those who arrive is seldom guessed
        sizes = {client: wire.expected_bytes(bodies[expected.ledger.base(client)]) for client in clients}
        likely = trips(sim, clock_s, sizes, expected.up_bytes or plan.expected_up_bytes)
        cohort = cohort_of(sim, expected, first_arrivals(sim, groups, likely, round), shared, round)
        outcomes = [_started(sim.engine.train(cohort))]
    with on_side_stream(core.space.device, "encoding"):
        encodings = wire.encode_positions([*bodies.values()], counts=counts or None)
    return Guess(sim, expected, Packages(shared, bodies, dict(zip(bodies, encodings))), cohort, outcomes)


def _equal(cohort: Cohort, expected: Cohort) -> bool:
    tensors = zip(
        (cohort.weights, cohort.statistics, cohort.frozen), (expected.weights, expected.statistics, expected.frozen)
    )
    memories = zip(sorted(cohort.memories.items()), sorted(expected.memories.items()))
    return (
        (cohort.round, cohort.clients, cohort.memories.keys())
        == (expected.round, expected.clients, expected.memories.keys())
        and all(a is b for a, b in tensors)
        and all(torch.equal(a, b) for (_, a), (_, b) in memories)
    )


def _started(outcomes: Iterable[T]) -> Iterator[T]:
    """The same, after the work for the first of them was launched."""
    rest = iter(outcomes)
    first = next(rest, None)
    return rest if first is None else chain([first], rest)
