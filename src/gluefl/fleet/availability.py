"""Availability: which clients are online at a moment, and until when.

`Diurnal`: every client has a standard normal process that is constant in steps, and is online while the process is
below a threshold that depends on the time of day. The expected share of clients online is then exactly the calibrated
curve, and the lengths of the steps determine how long a client stays online. The process is noise by address: one
query costs a few hashes, for a thousand clients or for a billion. Only the last results are kept."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gluefl.fleet.curve import DAY_S, OnlineCurve
from gluefl.fleet.noise import Floats, Ints, Noise
from gluefl.fleet.shipped import rows
from gluefl.fleet.traces import Sessions, lines, sessions

SLOT_S = 1_800.0  # the time step of the FLASH measurements
ASK_AGAIN_S = 300.0  # within five minutes 1.5% of the clients online leave, and as many arrive
SEARCH_S = 14 * DAY_S  # a client that stays for two weeks is assumed to stay for ever
REMEMBERED = 1 << 16  # clients whose last results are kept


class Availability(Protocol):
    """Which clients are online, from the arguments alone."""

    def online(self, clients: Ints, clock_s: float) -> NDArray[np.bool_]:
        """Whether each client is online at this moment."""
        ...

    def is_online(self, client: int, clock_s: float) -> bool:
        """The same for one client: a round asks for few clients, and often for the same ones."""
        ...

    def online_until(self, client: int, clock_s: float, horizon_s: float) -> float:
        """When the client goes offline: `inf` if not before `horizon_s`, `clock_s` if it is offline now."""
        ...

    def next_change_s(self, clock_s: float) -> float:
        """The next moment at which the result may differ."""
        ...


@dataclass(frozen=True)
class Always:
    """All clients are always online."""

    def online(self, clients: Ints, clock_s: float) -> NDArray[np.bool_]:
        """All of them."""
        return np.ones(len(clients), np.bool_)

    def is_online(self, client: int, clock_s: float) -> bool:
        """True."""
        return True

    def online_until(self, client: int, clock_s: float, horizon_s: float) -> float:
        """Never."""
        return math.inf

    def next_change_s(self, clock_s: float) -> float:
        """Nothing changes."""
        return clock_s


@dataclass(frozen=True)
class Diurnal:
    """The daily cycle of the authors' runs, with sessions as long as those of FLASH's phones."""

    seed: int

    @cached_property
    def curve(self) -> OnlineCurve:
        """The share of clients online over the day."""
        return OnlineCurve.shipped()

    @cached_property
    def _noise(self) -> tuple[Noise, Noise, Noise]:
        return Noise(self.seed, "phase"), Noise(self.seed, "shift"), Noise(self.seed, "availability")

    @cached_property
    def _steps(self) -> tuple[Ints, Ints, Floats]:
        # Length and period of the step functions in slots, and their amplitudes; 0 in the table means never.
        never, table = 1 << 62, rows("sessions.csv")
        slots = np.array([int(row["slots"]) or never for row in table], np.int64)
        repeat = np.array([int(row["repeat_slots"]) or never for row in table], np.int64)
        share = np.array([float(row["share"]) for row in table])
        return slots, repeat, np.sqrt(share / share.sum())

    @cached_property
    def _phase_of(self) -> Callable[[int], float]:
        def phase_s(client: int) -> float:
            return float(self._phase_s(np.array([client], np.int64))[0])

        return functools.lru_cache(REMEMBERED)(phase_s)

    @cached_property
    def _latent_of(self) -> Callable[[int, int], float]:
        # A round takes a minute or two and a slot half an hour: the next rounds ask for the same slot.
        def latent(client: int, slot: int) -> float:
            return float(self.latent(np.array([client], np.int64), np.array([slot], np.int64))[0])

        return functools.lru_cache(REMEMBERED)(latent)

    def _phase_s(self, clients: Ints) -> Floats:
        return SLOT_S * self._noise[0].uniform(clients)  # so that slots of different clients are not aligned

    def latent(self, clients: Ints, slots: Ints) -> Floats:
        """The process of each client in its slot, or of one client in several: a sum of step functions."""
        length, repeat, amplitude = self._steps
        _, shifts, process = self._noise
        owner, part = clients[:, None], np.arange(len(length))
        shift = (shifts.uniform(owner, part) * np.minimum(length, repeat)).astype(np.int64)
        step = ((slots[:, None] + shift) % repeat) // length
        return process.normal(owner, part, step) @ amplitude

    def online(self, clients: Ints, clock_s: float) -> NDArray[np.bool_]:
        """Whether the process of each client is below the threshold of this moment."""
        slots = np.floor((clock_s + self._phase_s(clients)) / SLOT_S).astype(np.int64)
        return self.latent(clients, slots) < self.curve.thresholds(np.array([clock_s]))

    def is_online(self, client: int, clock_s: float) -> bool:
        """The same for one client."""
        slot = math.floor((clock_s + self._phase_of(client)) / SLOT_S)
        return self._latent_of(client, slot) < self.curve.threshold(clock_s)

    def online_until(self, client: int, clock_s: float, horizon_s: float) -> float:
        """The first moment at which process and threshold cross, searched day by day."""
        phase_s = self._phase_of(client)
        end_s = min(horizon_s, clock_s + SEARCH_S)
        start_s = clock_s
        slot = math.floor((clock_s + phase_s) / SLOT_S)
        if end_s < min((slot + 1) * SLOT_S - phase_s, self.curve.next_knot_s(clock_s)):
            # Most trips end within one step and between two knots: a straight line that is above a constant at both
            # ends does not cross it.
            process = self._latent_of(client, slot)
            if self.curve.threshold(clock_s) > process and self.curve.threshold(end_s) > process:
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
        points = np.sort(np.concatenate([[start_s], inside, self.curve.knots_between(start_s, stop_s), [stop_s]]))
        left, right = points[:-1], points[1:]
        # Between two points the process is constant and the threshold is a straight line.
        slots = np.floor(((left + right) / 2 + phase_s) / SLOT_S).astype(np.int64)
        process = self.latent(one, slots)
        at = self.curve.thresholds(points)
        gap, gap_right = at[:-1] - process, at[1:] - process
        gone = (gap <= 0) | (gap_right <= 0)
        if not gone.any():
            return math.inf
        k = int(np.argmax(gone))
        if gap[k] <= 0:
            return float(left[k])
        return float(left[k] + (right[k] - left[k]) * gap[k] / (gap[k] - gap_right[k]))

    def next_change_s(self, clock_s: float) -> float:
        """Clients change at every moment; a query every five minutes is enough."""
        return (math.floor(clock_s / ASK_AGAIN_S) + 1) * ASK_AGAIN_S


def _session_end_s(record: tuple[Floats, Floats, float], clock_s: float) -> float | None:
    # The end of the session that contains this moment, None if there is none.
    starts_s, ends_s, period_s = record
    within_s = clock_s % period_s
    k = int(np.searchsorted(starts_s, within_s, side="right")) - 1
    return clock_s + float(ends_s[k] - within_s) if k >= 0 and within_s < ends_s[k] else None


@dataclass(frozen=True)
class RecordedSessions:
    """Sessions from a file; each client's record repeats after its own length."""

    path: str
    repeat_clients: bool = False

    @cached_property
    def trace(self) -> Sessions:
        """The content of the file, read once."""
        return sessions(self.path)

    def online(self, clients: Ints, clock_s: float) -> NDArray[np.bool_]:
        """Whether each client is within one of its sessions."""
        return np.array([self.is_online(int(c), clock_s) for c in clients], np.bool_)

    def is_online(self, client: int, clock_s: float) -> bool:
        """Whether this moment is within one of its sessions."""
        return _session_end_s(self._record(client), clock_s) is not None

    def _record(self, client: int) -> tuple[Floats, Floats, float]:
        return self.trace.of(int(lines(self.trace, np.array([client], np.int64), self.repeat_clients)[0]))

    def online_until(self, client: int, clock_s: float, horizon_s: float) -> float:
        """The end of the session; adjacent sessions count as one, also across the end of the record."""
        record = self._record(client)
        until_s = _session_end_s(record, clock_s)
        if until_s is None:
            return clock_s
        # A client that is online for a whole record is always online.
        while until_s < min(horizon_s, clock_s + record[2]):
            # One microsecond later, because sums and remainders of moments are rounded.
            joined_s = _session_end_s(record, until_s + 1e-6)
            if joined_s is None:
                return until_s
            until_s = joined_s
        return math.inf

    def next_change_s(self, clock_s: float) -> float:
        """The next moment at which a client comes online."""
        return self.trace.next_start_s(clock_s)
