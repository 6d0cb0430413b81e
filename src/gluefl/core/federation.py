"""What a federation is made of, and what its rounds change."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gluefl import wire
from gluefl.clients.cohort import Engine, Outcome
from gluefl.clients.residuals import Residuals
from gluefl.core.ledger import Ledger
from gluefl.core.optimizer import Server
from gluefl.core.sampling import Pool, Sampler
from gluefl.fleet import Devices
from gluefl.randomness import stream
from gluefl.simulation.channel import Channel
from gluefl.strategies import Space, Strategy
from gluefl.vectors.layout import Layout


@dataclass(frozen=True)
class Federation:
    """Everything that stays the same from round to round."""

    seed: int
    run: bytes  # eight bytes that every message of the run carries
    layout: Layout
    space: Space
    pool: Pool
    sampler: Sampler
    strategy: Strategy
    server: Server
    devices: Devices
    engine: Engine
    channel: Channel
    residuals: Residuals
    deadline_s: float | None = None  # arrivals after it are not used
    authors_arrivals: bool = False  # use a random choice of the sticky clients that were fast enough
    stop_late_downloads: bool = False  # a late client is told to stop: charge what it had when the round ended


@dataclass(frozen=True)
class Ahead:
    """What a round will send and who will train in it, as far as the one before could tell."""

    federation: Federation
    guess: "State"  # that it is of; of its clock and books only nearly right
    shared: wire.Shared
    missing: Mapping[int | None, wire.Body]  # by the version a client holds
    training: dict[tuple[int, ...], Iterator[Outcome]]  # by the cohort it was begun with

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy of a state does without

    def fits(self, federation: Federation, state: "State") -> bool:
        """Whether nobody has changed anything since."""
        same = ((getattr(self.guess, name), getattr(state, name)) for name in ("weights", "statistics", "strategy"))
        return federation is self.federation and state.round == self.guess.round and all(a is b for a, b in same)

    def take(self, cohort: tuple[int, ...]) -> Iterator[Outcome] | None:
        """The training of this cohort, for who goes on with it; another that was begun in vain is given up."""
        found = self.training.get(cohort)
        self.training.clear()
        return found


@dataclass(frozen=True)
class State:
    """Everything that a round changes. (Residuals change in place: they may be larger than the memory.)"""

    round: int  # rounds done
    clock_s: float
    weights: Tensor
    statistics: Tensor
    ledger: Ledger
    sampler: tuple[int, ...]
    strategy: Any
    velocity: Tensor | None = None
    up_bytes: int | None = None  # what an upload took in the last round
    ahead: Ahead | None = None  # nothing that could not be made again


def start(federation: Federation, weights: Tensor, statistics: Tensor) -> State:
    """The state before round 1."""
    f = federation
    return State(
        round=0,
        clock_s=0.0,
        weights=weights.to(f.space.device),
        statistics=statistics.to(f.space.device),
        ledger=Ledger.init(f.space.size, f.space.device),
        sampler=f.sampler.init(f.pool, stream(f.seed, "sampler")),
        strategy=f.strategy.init(f.space),
        velocity=f.server.init(f.space),
    )
