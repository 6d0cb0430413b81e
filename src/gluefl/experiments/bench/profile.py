"""Where the time of a whole GlueFL round goes: by its parts, and on a GPU by its kernels and by what it waits for.

The parts are timed from outside: the objects that a simulation is made of are wrapped, and the round itself is the
one that everybody plays. On a GPU every part is synchronised with, so that what it launched counts as its own. What
the GPU waits for is another question: for that nothing is synchronised, the parts are only marked in a profile.
"""

import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gluefl.accel.resources import resources
from gluefl.core.server import State
from gluefl.experiments.bench.cohort import pin
from gluefl.experiments.bench.fleet import authors
from gluefl.experiments.bench.progress import counted
from gluefl.experiments.bench.round import Work, setting
from gluefl.fleet import Devices, Instant
from gluefl.simulation.parts import Simulation
from gluefl.simulation.round import Player
from gluefl.simulation.run import player

WARM_UP = 12  # rounds; the first ones compile, and only later ones have stale clients and a mask to regenerate
KERNELS = 12  # shown
MARK = "gluefl: "
Span = tuple[float, float]


def measure(work: Work, rounds: int = 20, cores: int = 1, network: str = "edge") -> dict[str, Any]:
    """Milliseconds a round by part, means of `rounds`; their sum is longer than a round that is not watched."""
    pin(cores)
    devices: Devices = Instant() if network == "instant" else authors(network, "diurnal")
    with tempfile.TemporaryDirectory(prefix="gluefl-bench-") as folder, resources():
        sim, state = setting(work, Path(folder), devices)
        synchronise = torch.cuda.synchronize if work.device != "cpu" else _nothing
        play = player(sim.core.space.device)
        state, _ = _play(play, sim, state, WARM_UP, synchronise)
        state, seconds = _play(play, sim, state, rounds, synchronise)
        watch = Stopwatch(synchronise)
        state, _ = _play(watch.around("rest of the round", play), watched(sim, watch), state, rounds, synchronise)
        times: dict[str, Any] = {
            "round_ms": 1000 * seconds / rounds,
            "parts_ms": {part: 1000 * s / rounds for part, s in sorted(watch.seconds.items(), key=lambda x: -x[1])},
        }
        if work.device != "cpu":
            times |= _kernels(sim, state, rounds, synchronise)
    return times | {"parameters": sim.core.layout.size, "device": work.device, "cores": cores}


class Stopwatch:
    """Seconds by part; what a part calls that has a name of its own is taken off it."""

    def __init__(self, synchronise: Callable[[], None]) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._synchronise = synchronise
        self._inner = [0.0]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Whatever runs inside belongs to this part."""
        self._synchronise()
        began = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            self._synchronise()
            took = time.perf_counter() - began
            self.seconds[name] += took - self._inner.pop()
            self._inner[-1] += took

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed; one that yields is run to its end."""

        def timed(*arguments: Any, **options: Any) -> Any:
            with self.part(name):
                result = function(*arguments, **options)
                return iter(list(result)) if isinstance(result, Iterator) else result

        return timed


class Marks(Stopwatch):
    """Marks the parts in a profile instead of timing them; nothing is waited for."""

    def __init__(self) -> None:
        super().__init__(_nothing)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Whatever runs inside belongs to this part."""
        with torch.profiler.record_function(MARK + name):
            yield


class Watched:
    """An object some of whose methods are timed."""

    def __init__(self, inner: Any, watch: Stopwatch, **parts: str) -> None:
        self._inner, self._watch, self._parts = inner, watch, parts

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._inner, name)
        return self._watch.around(self._parts[name], member) if name in self._parts else member

    def __setitem__(self, key: int, value: Any) -> None:
        self._watch.around(self._parts["__setitem__"], self._inner.__setitem__)(key, value)


class WatchedEngine(Watched):
    """An engine whose training and prefetching are timed."""

    def prepare(self, clients: Iterable[int], round: int) -> None:
        """Fetch data."""
        if hasattr(self._inner, "prepare"):
            self._watch.around("prefetching", self._inner.prepare)(clients, round)


def _watch(inner: Any, watch: Stopwatch, **parts: str) -> Any:
    return Watched(inner, watch, **parts)


def _engine(inner: Any, watch: Stopwatch, **parts: str) -> Any:
    return WatchedEngine(inner, watch, **parts)


def watched(sim: Simulation, watch: Stopwatch) -> Simulation:
    """A simulation whose rounds are timed by their parts."""
    core = replace(
        sim.core,
        sampler=_watch(sim.core.sampler, watch, invite="sampling", next_state="sampling"),
        strategy=_watch(
            sim.core.strategy, watch, compress="compression", combine="aggregation", aggregate="aggregation"
        ),
    )
    return replace(
        sim,
        core=core,
        devices=_watch(sim.devices, watch, is_online="devices", trip="devices"),
        engine=_engine(sim.engine, watch, train="training"),
        channel=_watch(sim.channel, watch, send="waiting for encoded packages", receive="uploads"),
        residuals=_watch(sim.residuals, watch, get="residuals", __setitem__="residuals"),
        packages=watch.around("packages", sim.packages),
    )


def _play(
    play: Player, sim: Simulation, state: State, rounds: int, synchronise: Callable[[], None]
) -> tuple[State, float]:
    began = time.perf_counter()
    for _ in counted(range(rounds), "rounds"):
        state, _ = play(sim, state)
    synchronise()  # and not before: rounds overlap on a GPU
    return state, time.perf_counter() - began


def _kernels(sim: Simulation, state: State, rounds: int, synchronise: Callable[[], None]) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile

    play = player(sim.core.space.device)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        state, _ = _play(play, sim, state, rounds, synchronise)
    kernels = sorted(seen.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
    busy_ms = {_short(k.key): k.self_device_time_total / 1000 / rounds for k in kernels[:KERNELS]}
    marks = Marks()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        _play(marks.around("rest of the round", play), watched(sim, marks), state, rounds, synchronise)
    busy, parts = [], []
    for event in seen.events():
        span = event.time_range.start, event.time_range.end
        if event.name.startswith(MARK):
            parts += [(*span, event.name.removeprefix(MARK))] if event.device_type.name == "CPU" else []
        elif event.device_type.name == "CUDA":
            busy.append(span)
    idle = sorted(idle_by_part(busy, parts).items(), key=lambda part: -part[1])
    return {
        "kernels_ms": sum(k.self_device_time_total for k in kernels) / 1000 / rounds,
        "launches": sum(k.count for k in kernels if k.device_type.name == "CUDA") / rounds,
        "idle_ms": {part: us / 1000 / rounds for part, us in idle},
        "longest_kernels_ms": busy_ms,
    }


def idle_by_part(busy: Sequence[Span], parts: Sequence[tuple[float, float, str]]) -> dict[str, float]:
    """How long nothing was busy, between the first and the last that was, by the innermost part that went on then.

    >>> idle_by_part([(0, 1), (4, 5)], [(0, 3, "outer"), (1, 2, "inner")])
    {'inner': 1.0, 'outer': 1.0, 'elsewhere': 1.0}
    """
    idle: defaultdict[str, float] = defaultdict(float)
    owners = iter(_innermost(parts))
    owner = next(owners)
    reached = min((start for start, _ in busy), default=0.0)
    for start, end in sorted(busy):
        while reached < start:  # a gap, cut where the owner changes
            while owner[1] <= reached:
                owner = next(owners)
            cut = min(start, owner[1])
            idle[owner[2]] += cut - reached
            reached = cut
        reached = max(reached, end)
    return dict(idle)


def _innermost(parts: Sequence[tuple[float, float, str]]) -> Iterator[tuple[float, float, str]]:
    """All time, cut into pieces that belong to one part each; parts lie within each other or apart."""
    parts = [part for part in parts if part[0] < part[1]]
    turns = sorted([(start, 1, -end, name) for start, end, name in parts] + [(end, 0, 0.0, "") for _, end, _ in parts])
    names, reached = ["elsewhere"], -math.inf
    for time_, begins, _, name in turns:
        yield reached, time_, names[-1]
        reached = time_
        if begins:
            names.append(name)
        else:
            names.pop()
    yield reached, math.inf, names[-1]


def _short(kernel: str) -> str:
    return kernel.removeprefix("void ").split("(")[0][:100]


def _nothing() -> None:
    pass
