"""The fleet: network speeds, compute speeds and availability, behind the three queries of a round."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import Field

from gluefl.fleet.availability import Always, Availability, Diurnal, RecordedSessions
from gluefl.fleet.compute import MeasuredCompute
from gluefl.fleet.networks import MEASURED, Measured, Network, RecordedSpeeds, UniformSpeeds
from gluefl.fleet.noise import Floats, Ints, Noise
from gluefl.fleet.traces import lines
from gluefl.fleet.trips import Trip
from gluefl.parameters import ClosedShare, File, NonNegative, OneOf, Range, Seed, checked

NETWORKS = (*MEASURED, "uniform", "file")
Factor = Annotated[float, Field(ge=1e-9, le=1e9)]
AVAILABILITIES = ("always", "diurnal", "file")
MEGABITS_PER_BYTE = 8e-6
REMEMBERED = 1 << 16  # clients whose speeds are kept
Numbers = TypeVar("Numbers", float, Floats)  # of one client, or of many


@dataclass(frozen=True, eq=False)
class Speeds:
    """Speeds of clients, factors included: arrays with one entry per client."""

    down_mbps: Floats
    up_mbps: Floats
    ms_per_sample: Floats


@checked
@dataclass(frozen=True)
class Fleet:
    """Simulated devices. Client i is a pure function of (seed, i): memory does not grow with the number of clients.

    `Fleet("edge", "diurnal", seed=1).trip(7, clock_s=0.0, down_bytes=10**7, up_bytes=10**7, samples=200)`
    """

    network: Annotated[str, OneOf(NETWORKS)] = "edge"
    availability: Annotated[str, OneOf(AVAILABILITIES)] = "diurnal"  # who is online when; docs/fleet.md
    seed: Seed = 0  # of the devices; independent of the seed of the run
    down_factor: Factor = 1.0  # multiplies download speeds; the authors' runs: 0.8
    up_factor: Factor = 1.0  # multiplies upload speeds; the authors' runs: 1.2
    compute_factor: Factor = 1.0  # multiplies compute times; the authors' runs: 0.4
    model_cost: Factor = 1.0  # time per sample, relative to the model of the authors' logs
    latency_s: NonNegative = 0.0  # seconds, added once per direction
    failure_share: ClosedShare = 0.0  # share of the invited clients that fail while they download, train or upload
    uniform_down_mbps: Range = (40.0, 40.0)  # with network uniform: lowest and highest speed
    uniform_up_mbps: Range = (15.0, 15.0)  # the same for uploads
    network_file: File | None = None  # a trace, with network file
    availability_file: File | None = None  # a trace, with availability file
    repeat_traces: bool = False  # repeat a trace that has fewer clients than the population
    timed: bool = field(default=True, init=False)

    def problems(self) -> Iterator[str]:
        """A trace needs its file, and a lowest speed is not above the highest."""
        for name in ("network", "availability"):
            if getattr(self, name) == "file" and getattr(self, f"{name}_file") is None:
                yield f'{name} = "file" needs {name}_file, the path of a .csv or pickle trace'
        for name in ("uniform_down_mbps", "uniform_up_mbps"):
            lowest, highest = getattr(self, name)
            if lowest > highest:
                yield f"{name} = [{lowest}, {highest}]: needs the lowest speed before the highest, in Mbit/s"

    def check(self, clients: int) -> None:
        """Refuse traces too short for `clients`."""
        last = np.array([max(0, clients - 1)], np.int64)
        for source in (self._network, self._availability):
            if isinstance(source, RecordedSpeeds | RecordedSessions):
                lines(source.trace, last, self.repeat_traces)

    def speeds(self, clients: Ints) -> Speeds:
        """Speeds of many clients: `fleet.speeds(np.arange(2800)).down_mbps`."""
        recorded = self._network.ms_per_sample(clients) if isinstance(self._network, RecordedSpeeds) else None
        ms = self._compute.ms_per_sample(clients) if recorded is None else recorded
        down_mbps, up_mbps = self._network.mbps(clients)
        return Speeds(
            down_mbps * self.down_factor, up_mbps * self.up_factor, ms * self.compute_factor * self.model_cost
        )

    def durations(self, clients: Ints, down_bytes: int, up_bytes: int, samples: int) -> tuple[Floats, Floats, Floats]:
        """Download, compute and upload seconds of many clients that stay online: ranks a whole population."""
        speeds = self.speeds(clients)
        return self._durations((speeds.down_mbps, speeds.up_mbps, speeds.ms_per_sample), down_bytes, up_bytes, samples)

    def _durations(
        self, speeds: tuple[Numbers, Numbers, Numbers], down_bytes: int, up_bytes: int, samples: int
    ) -> tuple[Numbers, Numbers, Numbers]:
        down_mbps, up_mbps, ms_per_sample = speeds
        return (
            self.latency_s + down_bytes * MEGABITS_PER_BYTE / down_mbps,
            samples * ms_per_sample / 1000.0,
            self.latency_s + up_bytes * MEGABITS_PER_BYTE / up_mbps,
        )

    def is_online(self, clock_s: float) -> Callable[[int], bool]:
        """Which clients can be invited at this moment."""
        is_online = self._availability.is_online
        return lambda client: is_online(client, clock_s)

    def next_change_s(self, clock_s: float) -> float:
        """The next moment at which `is_online` may differ; `clock_s` itself if it never does."""
        return self._availability.next_change_s(clock_s)

    def trip(self, client: int, clock_s: float, down_bytes: int, up_bytes: int, samples: int) -> Trip:
        """Download, train, upload; a client that goes offline or fails before the end is lost at that moment."""
        durations = self._durations(self._speeds_of(client), down_bytes, up_bytes, samples)
        arrival_s = sum(durations)
        stays_s = self._availability.online_until(client, clock_s, clock_s + arrival_s) - clock_s
        if self.failure_share:
            stays_s = min(stays_s, self._fails_s(client, clock_s, durations))
        return Trip(*durations, stays_s if stays_s < arrival_s else None)

    def _fails_s(self, client: int, clock_s: float, durations: tuple[float, float, float]) -> float:
        """When a client fails, `inf` if it does not: in a random phase, at a random moment of it.

        Whether and in which phase depends on client and time alone: a round asks again when it has the real sizes.
        """
        keys = client, int(np.float64(clock_s).view(np.int64))
        if self._failures[0].uniform(*keys)[0] >= self.failure_share:
            return math.inf
        phase, share = divmod(3 * float(self._failures[1].uniform(*keys)[0]), 1)
        return sum(durations[: int(phase)]) + share * durations[int(phase)]

    @cached_property
    def _network(self) -> Network:
        if self.network in MEASURED:
            return Measured(self.network, self.seed)
        if self.network == "uniform":
            return UniformSpeeds(self.uniform_down_mbps, self.uniform_up_mbps, self.seed)
        return RecordedSpeeds(str(self.network_file), self.repeat_traces)

    @cached_property
    def _availability(self) -> Availability:
        if self.availability == "always":
            return Always()
        if self.availability == "diurnal":
            return Diurnal(self.seed)
        return RecordedSessions(str(self.availability_file), self.repeat_traces)

    @cached_property
    def _compute(self) -> MeasuredCompute:
        return MeasuredCompute(self.seed)

    @cached_property
    def _failures(self) -> tuple[Noise, Noise]:
        return Noise(self.seed, "failure"), Noise(self.seed, "moment of failure")

    @cached_property
    def _speeds_of(self) -> Callable[[int], tuple[float, float, float]]:
        # A round asks twice for every client it uses, and sticky clients return in later rounds.
        def speeds_of(client: int) -> tuple[float, float, float]:
            speeds = self.speeds(np.array([client], np.int64))
            return float(speeds.down_mbps[0]), float(speeds.up_mbps[0]), float(speeds.ms_per_sample[0])

        return functools.lru_cache(REMEMBERED)(speeds_of)

    def __getstate__(self) -> dict[str, Any]:
        """The options without the kept results: a copy in another process starts without them."""
        return {option.name: getattr(self, option.name) for option in fields(self)}
