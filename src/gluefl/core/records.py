"""What a round leaves behind: its line in the journal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gluefl import wire
from gluefl.core.sampling import Group
from gluefl.core.server import Core, State
from gluefl.fleet.trips import Arrivals, Trip
from gluefl.vectors.sparse import Sparse, Support


@dataclass(frozen=True)
class Parcel:
    """A message on its way down: its size, and its bytes where they were made."""

    header: wire.Header
    size_bytes: int
    density: float  # share of the model it holds
    data: bytes | None = None


@dataclass(frozen=True)
class Record:
    """A journal line, and what the next round needs of it."""

    line: dict[str, Any]
    clock_s: float
    stopped: frozenset[int]  # late clients that were told to stop before they had downloaded everything


@dataclass(frozen=True)
class Played:
    """What happened in a round."""

    round: int
    clock_s: float  # of the invitation
    groups: Sequence[Group]
    parcels: Mapping[int, Parcel]
    trips: Mapping[int, Trip]
    losses: Mapping[int, float]  # of the used clients that report one; of the used clients is all that follows
    supports: Sequence[Support]
    up_bytes: Mapping[int, int]
    expected_up_bytes: int
    shared: wire.Shared
    update: Sparse
    arrivals: Arrivals = Arrivals()  # noqa: RUF009 - frozen
    timed: bool = True  # whether the seconds of the trips mean anything
    notes: Sequence[str] = ()  # of who carried the round out
    forgotten: int | None = None  # residuals that were dropped at its beginning, if the run drops any

    @cached_property
    def last(self) -> Trip | None:
        """The used client that arrives last: its seconds are those of the round."""
        return max((self.trips[c] for c in self.up_bytes), key=lambda trip: trip.arrival_s, default=None)

    @cached_property
    def ends_s(self) -> float:
        """Seconds after the invitation. Without an arrival, the round lasts until the last client is lost or late."""
        if self.last is not None:
            return self.last.arrival_s
        return max((_end(trip, self.arrivals.deadline_s) for trip in self.trips.values()), default=0.0)


def record(core: Core, state: State, played: Played) -> Record:
    """Bytes, seconds and who took part."""
    parcels, trips, up_bytes = played.parcels, played.trips, played.up_bytes
    ends_s, size = played.ends_s, core.space.size
    stopped = frozenset(
        client
        for client, trip in trips.items()
        if played.arrivals.stop_late_downloads and client not in up_bytes and trip.download_s > ends_s
    )
    down_bytes = {c: _charged(parcels[c].size_bytes, trips[c], ends_s, c in stopped) for c in parcels}
    fates = {c: _fate(c, trips[c], up_bytes) for c in parcels}
    staleness = {c: state.ledger.staleness(c) for c in parcels}
    ages = [age for age in staleness.values() if age is not None]
    late = sum(fate == "late" for fate in fates.values())
    used = len(up_bytes)
    line: dict[str, Any] = {
        "round": played.round,
        "invited": len(parcels),
        "used": used,
        "lost": sum(fate == "lost" for fate in fates.values()),
        "late": late,
        "notes": _notes(core, state, played),
        "down_bytes": sum(down_bytes.values()),
        "up_bytes": sum(up_bytes.values()),
        "wasted_down_bytes": sum(size for c, size in down_bytes.items() if c not in up_bytes),
        "wasted_up_bytes_estimate": late * played.expected_up_bytes,
        **_authors(core, played),
        **_seconds(state, played),
        "loss": sum(played.losses.values()) / len(played.losses) if played.losses else None,
        "accuracy": None,
        "update_density": played.update.density,
        "upload_density": sum(support.density for support in played.supports) / used if used else None,
        "mask_density": played.shared.mask.count / size,
        "cold": len(parcels) - len(ages),
        "staleness_mean": sum(ages) / len(ages) if ages else None,
        **({} if played.forgotten is None else {"forgotten_residuals": played.forgotten}),
        "clients": {
            "id": list(parcels),
            "group": [group.name for group in played.groups for _ in group.clients],
            "staleness": list(staleness.values()),
            "down_bytes": list(down_bytes.values()),
            "fate": list(fates.values()),
        },
    }
    return Record(line, played.clock_s + ends_s, stopped)


def _seconds(state: State, played: Played) -> dict[str, float | None]:
    last = played.last
    seconds: dict[str, float | None] = {
        "download_s": last.download_s if last else 0.0,
        "compute_s": last.compute_s if last else 0.0,
        "upload_s": last.upload_s if last else 0.0,
        "round_s": played.ends_s,
        "waited_s": played.clock_s - state.clock_s,
        "wasted_s": sum(_end(played.trips[c], None) for c in played.parcels if c not in played.up_bytes),
        "clock_s": played.clock_s + played.ends_s,
    }
    return seconds if played.timed else dict.fromkeys(seconds)


def _end(trip: Trip, deadline_s: float | None) -> float:
    end_s = trip.arrival_s if trip.lost_s is None else trip.lost_s
    return end_s if deadline_s is None else min(end_s, deadline_s)


def _charged(size_bytes: int, trip: Trip, ends_s: float, stopped: bool) -> int:
    return int(size_bytes * ends_s / trip.download_s) if stopped else size_bytes


def _fate(client: int, trip: Trip, used: Mapping[int, int]) -> str:
    if client in used:
        return "used"
    return "late" if trip.lost_s is None else "lost"


def _notes(core: Core, state: State, played: Played) -> list[str]:
    notes, groups, used = [], played.groups, played.up_bytes
    if played.clock_s > state.clock_s:
        notes.append(f"waited {played.clock_s - state.clock_s:.0f} s until a client was online")
    if sum(group.quota for group in groups) < core.sampler.cohort:
        notes.append(f"only {sum(len(g.clients) for g in groups)} clients could be invited")
    arrived = {group.name: sum(c in used for c in group.clients) for group in groups}
    if not used:
        notes.append("no client arrived: the model stays as it is")
    elif any(arrived[group.name] < group.quota for group in groups):
        short = ", ".join(f"{arrived[g.name]} of {g.quota} {g.name}" for g in groups)
        notes.append(f"fewer arrivals than the quota ({short}): the weights are those of the actual counts")
    if used and not all(arrived.values()):
        notes.append("a whole group is missing: this update is biased")
    return [*notes, *played.notes]


def _authors(core: Core, played: Played) -> dict[str, int]:
    """The authors' estimate of the sizes, for comparison: shares of a model of M bytes, a bitmap of M/32.

    A download is min(ρM + b, M), ρ being the share that changed; an upload uM + min((u−m)M, b) with u the share
    uploaded and m the share that both sides know. That is each of the four formulas of their code.
    """
    model_bytes = 4 * (core.space.size + core.layout.statistics_size)
    bitmap_bytes = model_bytes / 32
    shared = played.shared.mask.count / core.space.size
    down = (min(p.density * model_bytes + bitmap_bytes, model_bytes) for p in played.parcels.values())
    up = (s.density * model_bytes + min((s.density - shared) * model_bytes, bitmap_bytes) for s in played.supports)
    return {"authors_down_bytes": round(sum(down)), "authors_up_bytes": round(sum(up))}
