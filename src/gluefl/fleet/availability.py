"""Who is online when.

`Diurnal`: every client has a standard normal process that moves in steps, and is online while it is below a
threshold that follows the clock. The share of clients online is then the calibrated curve, exactly, while
the steps decide how long a client stays. The process is noise by address, so one question costs a few hashes,
whether the fleet has a thousand clients or a billion; only the last answers are remembered."""

import functools
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gluefl.fleet.noise import Floats, Ints, normal, uniform
from gluefl.fleet.shipped import rows
from gluefl.fleet.traces import lines, sessions

DAY_S = 86_400.0
SLOT_S = 1_800.0  # the step of the FLASH measurements; within it nothing is known of a client
ASK_AGAIN_S = 300.0  # in five minutes 1.5% of the clients online go, and as many come
SEARCH_S = 14 * DAY_S  # a client that stays two weeks stays for ever


class Availability(Protocol):
    """Anything that knows who is online."""

    def online(self, clients: Ints, clock_s: float) -> NDArray[np.bool_]:
        """Whether each client is online at this moment."""
        ...

    def is_online(self, client: int, clock_s: float) -> bool:
        """Whether one client is: a round asks for few, and often for the same ones."""
        ...

    def online_until(self, client: int, clock_s: float, horizon_s: float) -> float:
        """When the client goes offline, `inf` if not before `horizon_s`; `clock_s` if it is off."""
        ...

    def next_change_s(self, clock_s: float) -> float:
        """The next moment at which it is worth asking again."""
        ...


@dataclass(frozen=True)
class Always:
    """Everyone, always."""

    def online(self, clients: Ints, clock_s: float) -> NDArray[np.bool_]:
        """Everyone."""
        return np.ones(len(clients), np.bool_)

    def is_online(self, client: int, clock_s: float) -> bool:
        """Yes."""
        return True

    def online_until(self, client: int, clock_s: float, horizon_s: float) -> float:
        """Nobody ever goes."""
        return math.inf

    def next_change_s(self, clock_s: float) -> float:
        """Nothing ever changes."""
        return clock_s


@functools.cache
def _curve() -> tuple[Floats, Floats]:
    # As normal quantiles, so that a crossing between two knots is that of two straight lines.
    table = rows("online_fraction.csv")
    threshold = [NormalDist().inv_cdf(float(r["fraction"])) for r in table]
    return np.array([float(r["clock_s"]) for r in table]), np.array(threshold)


@functools.cache
def _steps() -> tuple[Ints, Ints, Floats]:
    never = 1 << 62
    table = rows("sessions.csv")
    slots = np.array([int(r["slots"]) or never for r in table], np.int64)
    repeat = np.array([int(r["repeat_slots"]) or never for r in table], np.int64)
    share = np.array([float(r["share"]) for r in table])
    return slots, repeat, np.sqrt(share / share.sum())


def _day(clock_s: Floats) -> Floats:
    # The table holds the first day, which starts low, and then the day that repeats.
    return np.where(clock_s < DAY_S, clock_s, DAY_S + clock_s % DAY_S)


def threshold(clock_s: Floats) -> Floats:
    """The normal quantile of the share online."""
    return np.interp(_day(clock_s), *_curve())


@functools.lru_cache(maxsize=1 << 10)  # all clients of a round are asked for at the same moment
def _threshold_at(clock_s: float) -> float:
    return float(np.interp(clock_s if clock_s < DAY_S else DAY_S + clock_s % DAY_S, *_curve()))


def online_fraction(clock_s: float) -> float:
    """The share of clients online, as in the authors' runs: 30% at the start, then 40–66% over the day."""
    return NormalDist().cdf(_threshold_at(clock_s))


def _knots(start_s: float, end_s: float) -> Floats:
    # The moments between start and end at which the curve bends.
    at = _curve()[0]
    first_day, daily = at[at < DAY_S], at[at >= DAY_S] - DAY_S
    days = np.arange(max(1, start_s // DAY_S), end_s // DAY_S + 1)
    every = np.concatenate([first_day, (days[:, None] * DAY_S + daily).ravel()])
    return every[(every > start_s) & (every < end_s)]


@functools.lru_cache(maxsize=1 << 4)
def _next_knot_s(clock_s: float) -> float:
    at = _curve()[0]
    day = 0.0 if clock_s < DAY_S else clock_s // DAY_S * DAY_S - DAY_S  # the table's second day, moved to this one
    later = np.searchsorted(at, clock_s - day, side="right")
    return float(at[later]) + day if later < len(at) else day + 2 * DAY_S


@dataclass(frozen=True)
class Diurnal:
    """The daily cycle of the authors' runs, with sessions as long as those of FLASH's phones."""

    seed: int

    def _phase_s(self, clients: Ints) -> Floats:
        return SLOT_S * uniform(self.seed, "phase", clients)  # clients do not change all at once

    def latent(self, clients: Ints, slots: Ints) -> Floats:
        """The process of each client in its slot, or of one client in several: a sum of step functions."""
        length, repeat, amplitude = _steps()
        owner, part = clients[:, None], np.arange(len(length))
        shift = (uniform(self.seed, "shift", owner, part) * np.minimum(length, repeat)).astype(np.int64)
        step = ((slots[:, None] + shift) % repeat) // length
        return normal(self.seed, "availability", owner, part, step) @ amplitude

    def online(self, clients: Ints, clock_s: float) -> NDArray[np.bool_]:
        """Whether the process of each client is below the threshold of this moment."""
        slots = np.floor((clock_s + self._phase_s(clients)) / SLOT_S).astype(np.int64)
        return self.latent(clients, slots) < threshold(np.array([clock_s]))

    def is_online(self, client: int, clock_s: float) -> bool:
        """The same for one client."""
        slot = math.floor((clock_s + _phase_of(self, client)) / SLOT_S)
        return _latent_of(self, client, slot) < _threshold_at(clock_s)

    def online_until(self, client: int, clock_s: float, horizon_s: float) -> float:
        """The first moment at which process and threshold cross, searched day by day."""
        phase_s = _phase_of(self, client)
        end_s = min(horizon_s, clock_s + SEARCH_S)
        start_s = clock_s
        slot = math.floor((clock_s + phase_s) / SLOT_S)
        if end_s < min((slot + 1) * SLOT_S - phase_s, _next_knot_s(clock_s)):
            # Most trips end before anything bends: both ends of a straight line above the process are enough.
            process = _latent_of(self, client, slot)
            if _threshold_at(clock_s) > process and _threshold_at(end_s) > process:
                return math.inf
        one = np.array([client], np.int64)
        while start_s < end_s:
            stop_s = min(end_s, start_s + DAY_S)
            gone_s = self._first_crossing_s(one, phase_s, start_s, stop_s)
            if gone_s < math.inf:
                return gone_s
            start_s = stop_s
        return math.inf

    def _first_crossing_s(self, one: Ints, phase_s: float, start_s: float, stop_s: float) -> float:
        first = math.floor((start_s + phase_s) / SLOT_S)
        steps = np.arange(first + 1, math.floor((stop_s + phase_s) / SLOT_S) + 1) * SLOT_S - phase_s
        inside = steps[(steps > start_s) & (steps < stop_s)]
        points = np.sort(np.concatenate([[start_s], inside, _knots(start_s, stop_s), [stop_s]]))
        left, right = points[:-1], points[1:]
        # Between two points the process rests and the threshold is a straight line.
        slots = np.floor(((left + right) / 2 + phase_s) / SLOT_S).astype(np.int64)
        process = self.latent(one, slots)
        at = threshold(points)
        gap, gap_right = at[:-1] - process, at[1:] - process
        gone = (gap <= 0) | (gap_right <= 0)
        if not gone.any():
            return math.inf
        k = int(np.argmax(gone))
        if gap[k] <= 0:
            return float(left[k])
        return float(left[k] + (right[k] - left[k]) * gap[k] / (gap[k] - gap_right[k]))

    def next_change_s(self, clock_s: float) -> float:
        """Some client changes at every moment; asking every five minutes is enough."""
        return (math.floor(clock_s / ASK_AGAIN_S) + 1) * ASK_AGAIN_S


@functools.lru_cache(maxsize=1 << 16)
def _phase_of(process: Diurnal, client: int) -> float:
    return float(process._phase_s(np.array([client], np.int64))[0])


@functools.lru_cache(maxsize=1 << 16)
def _latent_of(process: Diurnal, client: int, slot: int) -> float:
    # A round takes a minute or two and a slot half an hour: the next rounds ask again.
    return float(process.latent(np.array([client], np.int64), np.array([slot], np.int64))[0])


def _session_end_s(record: tuple[Floats, Floats, float], clock_s: float) -> float | None:
    # The end of the session this moment is in, None if it is in none.
    starts_s, ends_s, period_s = record
    within_s = clock_s % period_s
    k = int(np.searchsorted(starts_s, within_s, side="right")) - 1
    return clock_s + float(ends_s[k] - within_s) if k >= 0 and within_s < ends_s[k] else None


@dataclass(frozen=True)
class RecordedSessions:
    """Sessions from a file; each client's record repeats after its own length."""

    path: str
    repeat_clients: bool = False

    def online(self, clients: Ints, clock_s: float) -> NDArray[np.bool_]:
        """Whether each client is within one of its sessions."""
        return np.array([self.is_online(int(c), clock_s) for c in clients], np.bool_)

    def is_online(self, client: int, clock_s: float) -> bool:
        """Whether this moment is within one of its sessions."""
        return _session_end_s(self._record(client), clock_s) is not None

    def _record(self, client: int) -> tuple[Floats, Floats, float]:
        trace = sessions(self.path)
        return trace.of(int(lines(trace, np.array([client], np.int64), self.repeat_clients)[0]))

    def online_until(self, client: int, clock_s: float, horizon_s: float) -> float:
        """The end of the session; sessions that join on, also over the end of the record, are one."""
        record = self._record(client)
        until_s = _session_end_s(record, clock_s)
        if until_s is None:
            return clock_s
        # Whoever stays for a whole record stays for ever.
        while until_s < min(horizon_s, clock_s + record[2]):
            # A microsecond later, because adding and dividing moments is exact only to rounding.
            joined_s = _session_end_s(record, until_s + 1e-6)
            if joined_s is None:
                return until_s
            until_s = joined_s
        return math.inf

    def next_change_s(self, clock_s: float) -> float:
        """The next moment at which anybody comes online."""
        return sessions(self.path).next_start_s(clock_s)
