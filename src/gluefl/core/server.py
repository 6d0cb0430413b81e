"""The server's half of a round: packages, the aggregate of the uploads, the next version.

A simulation and a real federation call the same functions; nothing here knows how messages travel or who trains.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

from gluefl import wire
from gluefl.core.averaging import Average, Averaging
from gluefl.core.guard import Guard
from gluefl.core.ledger import Ledger
from gluefl.core.optimizer import Optimizer, Server, check_memory, move
from gluefl.core.recurrence import Recurrence
from gluefl.core.register import MOST_CLIENTS
from gluefl.core.sampling import Group, Pool, Sampler
from gluefl.errors import UsageError
from gluefl.randomness import stream
from gluefl.strategies import PARTS, KeepsUpdates, Space, Strategy, Traits, Upload, mean_statistics
from gluefl.strategies.hooks import Hook, hooked_sum
from gluefl.vectors.layout import Layout
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import Masked, Sparse, all_finite, nothing, whole
from gluefl.wire.updates import TernaryUpdates

# How a client comes to version 0: it downloads the model, or it knows the initial model, from the seed or with the app.
Initial = Literal["download", "known"]


@dataclass(frozen=True)
class Core:
    """What both sides of a federation agree on and rounds do not change."""

    seed: int
    run: bytes  # eight bytes that every message of the run carries
    layout: Layout
    space: Space
    sampler: Sampler
    strategy: Strategy
    weights: Tensor  # of the initial model
    statistics: Tensor
    optimizer: Optimizer = Server()  # noqa: RUF009 - frozen
    averaging: Averaging = Averaging()  # noqa: RUF009 - frozen
    hooks: tuple[Hook, ...] = ()
    initial: Initial = "download"
    guard: Guard | None = None  # bounds on uploads in a real federation; the laboratory has none

    def __post_init__(self) -> None:
        if isinstance(self.strategy, type):
            raise UsageError(f"{self.strategy.__name__} is a class: pass an object of it, {self.strategy.__name__}(…).")
        missing = [name for name in PARTS if not hasattr(self.strategy, name)]
        if missing:
            raise UsageError(
                f"{type(self.strategy).__name__} is no strategy: it has no {', '.join(missing)}. "
                "docs/your-own-strategy.md shows what a strategy needs."
            )
        check_memory(self.optimizer, self.strategy, self.space)
        for place, hook in enumerate(self.hooks):
            if place and getattr(hook, "replaces_sum", False):
                first, name = type(self.hooks[0]).__name__, type(hook).__name__
                raise UsageError(f"{name} replaces the sum, so that what {first} did to it is lost: give {name} first.")
            if hasattr(hook, "check"):  # a hook that does not go with every strategy
                hook.check(self.strategy, self.space)

    @cached_property
    def traits(self) -> Traits:
        """What the strategy declares for this model."""
        return self.strategy.traits(self.space)

    def expected(self, kind: int, shared: wire.Shared | None = None) -> wire.Expected:
        """What a receiver of a message checks it against."""
        layout = self.layout
        codec = self.traits.upload_codec if kind == wire.UPLOAD else self.traits.package_codec
        sizes = layout.size, layout.statistics_size
        return wire.Expected(self.run, layout.fingerprint, *sizes, kind, shared, codec, self.origin)

    @cached_property
    def first(self) -> tuple[Any, Tensor]:
        """The strategy's state before round 1, and version 0 of what it publishes."""
        device = self.space.device
        initial = self.traits.vector(self.weights.to(device), self.statistics.to(device))
        return self.strategy.init(self.space, initial)

    @cached_property
    def origin(self) -> Tensor | None:
        """Version 0, where every client knows it and packages may refer to it."""
        return self.first[1] if self.initial == "known" and self.traits.covers == "everything" else None

    def parts(self, vector: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and statistics of a published vector; `statistics` are those beside it, if it holds none."""
        if self.traits.covers == "weights":
            return vector, statistics
        return vector[: self.space.size], vector[self.space.size :]


@dataclass(frozen=True)
class State:
    """Everything on the server that a round changes."""

    round: int  # rounds done
    clock_s: float
    weights: Tensor
    statistics: Tensor
    ledger: Ledger
    sampler: tuple[int, ...]
    strategy: Any
    optimizer: Any = None
    up_bytes: int | None = None  # mean length of an upload in the last round
    average: Average | None = None  # of the versions so far, if the server averages them

    @property
    def model(self) -> tuple[Tensor, Tensor]:
        """The weights and statistics to evaluate and to hand over."""
        return (self.weights, self.statistics) if self.average is None else (self.average[0], self.average[1])


def start(core: Core, pool: Pool) -> State:
    """The state before round 1."""
    most = min(MOST_CLIENTS, core.traits.most_clients or MOST_CLIENTS)
    if pool.size > most:
        kind = type(core.strategy).__name__
        raise UsageError(f"a population of {pool.size} clients is too large: {kind} supports at most {most}.")
    device = core.space.device
    strategy, version_0 = core.first
    weights, statistics = core.parts(version_0, core.statistics.to(device))
    ledger = Ledger.init(version_0.numel(), device, core.initial == "known")
    if core.traits.covers == "everything":
        ledger = replace(ledger, recurrence=Recurrence.init(version_0))
    return State(
        round=0,
        clock_s=0.0,
        weights=weights,
        statistics=statistics,
        ledger=ledger,
        sampler=core.sampler.init(pool, stream(core.seed, "sampler")),
        strategy=strategy,
        optimizer=core.optimizer.init(core.space),
        average=core.averaging.init(weights, statistics),
    )


@dataclass(frozen=True)
class Packages:
    """What a round sends: the shared mask, and one body for all clients that hold the same version."""

    shared: wire.Shared
    bodies: Mapping[int | None, wire.Body]  # by the version a client holds, None for none
    encodings: Mapping[int | None, wire.Encoding]


def bodies_for(
    core: Core, state: State, bases: Iterable[int | None], shared: wire.Shared
) -> dict[int | None, wire.Body]:
    """What a client misses, for each version that clients hold."""
    traits = core.traits
    vector, statistics = traits.vector(state.weights, state.statistics), traits.beside(state.statistics)
    missing = _missing(core, state, set(bases), vector)
    return {
        base: wire.Body(
            Masked(missing[base], vector),
            statistics,
            shared,
            True,
            _codec(core, state, base),
            core.origin,
        )
        for base in sorted(missing, key=lambda base: -1 if base is None else base)
    }


def _codec(core: Core, state: State, base: int | None) -> wire.ValueCodec | wire.BodyCodec:
    """The codec of a package; one that sends updates is given those that a client misses."""
    codec, strategy = core.traits.package_codec, core.strategy
    if base is None or not isinstance(codec, TernaryUpdates) or not isinstance(strategy, KeepsUpdates):
        return codec
    return codec.sending(strategy.updates(state.strategy, base))


def _missing(core: Core, state: State, bases: Set[int | None], vector: Tensor) -> dict[int | None, Mask]:
    """What clients miss. Those that hold version 0 do not miss what has come back to its first value."""
    if 0 not in bases or core.origin is None:
        return state.ledger.missing_by(bases)
    return {0: Mask(vector != core.origin), **state.ledger.missing_by(bases - {0})}


def packages(core: Core, state: State, bases: Iterable[int | None], round: int) -> Packages:
    """The packages for clients that hold these versions; their positions are encoded in the background."""
    shared = wire.Shared(core.strategy.mask(state.strategy, round))
    bodies = bodies_for(core, state, bases, shared)
    return Packages(shared, bodies, dict(zip(bodies, wire.encode_positions([*bodies.values()]))))


def header(core: Core, state: State, client: int, weight: float, hash: bytes) -> wire.Header:
    """The header of a client's package."""
    return wire.Header(
        kind=wire.PACKAGE,
        run=core.run,
        layout=core.layout.fingerprint,
        round=state.round + 1,
        base=state.ledger.base(client),
        version=state.ledger.version,
        hash=hash,
        weight=weight,
        accepted=state.ledger.was_used(client),
    )


def invited(groups: Sequence[Group]) -> list[int]:
    """The clients of all groups."""
    return [client for group in groups for client in group.clients]


@dataclass(frozen=True)
class Aggregate:
    """What the uploads of a round amount to. On an asynchronous device all of it may still be computed."""

    strategy: Any
    optimizer: Any
    update: Sparse
    weights: Tensor  # the model after it
    statistics: Tensor
    average: Average | None  # over the versions up to it
    changed_at: Tensor  # of the ledger after it
    recurrence: Recurrence | None
    finite: Tensor  # whether all of it is finite


def aggregate(core: Core, state: State, uploads: Sequence[Upload], round: int) -> Aggregate:
    """The update to publish; without an upload, nothing changes."""
    strategy, optimizer, statistics = state.strategy, state.optimizer, state.statistics
    vector = core.traits.vector(state.weights, statistics)
    update = nothing(vector.numel(), core.space.device)
    if uploads:
        strategy, optimizer, update = _update(core, state, uploads, round)
        statistics = mean_statistics(uploads, statistics, core.layout.exchanged, core.sampler.cohort)
    published, recurrence = update.add_to(vector.clone()), state.ledger.recurrence
    weights, statistics = core.parts(published, statistics)
    return Aggregate(
        strategy,
        optimizer,
        update,
        weights=weights,
        statistics=statistics,
        average=core.averaging.step(state.average, weights, statistics, round),
        changed_at=state.ledger.changed_by(update),
        recurrence=recurrence.step(vector, published) if recurrence is not None else None,
        finite=update.finite() & all_finite(statistics),
    )


def _update(core: Core, state: State, uploads: Sequence[Upload], round: int) -> tuple[Any, Any, Sparse]:
    """Sum, hooks, optimiser and selection, in the order that the strategy declares."""
    total, optimizer = core.strategy.combine(state.strategy, uploads, round), state.optimizer
    total, statistics = total[: core.space.size], total[core.space.size :]
    total = hooked_sum(core.hooks, total, uploads, round)
    if core.traits.optimizer_acts_on == "sum":
        optimizer, stepped = move(core.optimizer, optimizer, whole(total))
        total = stepped.dense()
    total = core.traits.vector(total, statistics)
    strategy, update = core.strategy.aggregate(state.strategy, total, round)
    if core.traits.optimizer_acts_on == "update":
        optimizer, update = move(core.optimizer, optimizer, update)
    return strategy, optimizer, update


@dataclass(frozen=True)
class Closed:
    """What the server knows at the end of a round beside the aggregate."""

    round: int
    clock_s: float
    holders: Iterable[int]  # clients that hold the version this round sent
    up_bytes: Mapping[int, int]  # of the used clients
    unused: Iterable[int] = ()  # clients whose upload was not used


def publish(core: Core, state: State, result: Aggregate, closed: Closed) -> State:
    """The next version, who holds which, and who is in the sticky group."""
    up_bytes = closed.up_bytes
    ledger = state.ledger.synchronised(closed.holders).answered(up_bytes, closed.unused)
    return State(
        round=closed.round,
        clock_s=closed.clock_s,
        weights=result.weights,
        statistics=result.statistics,
        ledger=ledger.publish(result.changed_at, result.recurrence),
        sampler=core.sampler.next_state(state.sampler, up_bytes, stream(core.seed, "settle", closed.round)),
        strategy=result.strategy,
        optimizer=result.optimizer,
        average=result.average,
        up_bytes=sum(up_bytes.values()) // len(up_bytes) if up_bytes else state.up_bytes,
    )
