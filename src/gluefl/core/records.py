"""What a round leaves behind: its line in the journal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gluefl import wire
from gluefl.core.federation import Federation, State
from gluefl.core.sampling import Group
from gluefl.fleet import Trip
from gluefl.simulation.channel import Parcel
from gluefl.strategies import Upload
from gluefl.vectors.selection import Sparse


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
    clock_s: float  # when it was invited to
    groups: Sequence[Group]
    parcels: Mapping[int, Parcel]
    trips: Mapping[int, Trip]
    uploads: Sequence[Upload]
    up_bytes: Mapping[int, int]  # of the used clients
    expected_up_bytes: int
    shared: wire.Shared
    update: Sparse

    @cached_property
    def last(self) -> Trip | None:
        """The used client that arrives last: its seconds are those of the round."""
        return max((self.trips[c] for c in self.up_bytes), key=lambda trip: trip.arrival_s, default=None)


def record(f: Federation, state: State, played: Played) -> Record:
    """Bytes, seconds and who took part."""
    parcels, trips, up_bytes, uploads = played.parcels, played.trips, played.up_bytes, played.uploads
    last = played.last
    # Nobody arrived: the round lasted until the last of them was lost, or too late.
    ends_s = last.arrival_s if last else max((_end(trip, f.deadline_s) for trip in trips.values()), default=0.0)
    stopped = frozenset(
        client
        for client, trip in trips.items()
        if f.stop_late_downloads and client not in up_bytes and trip.download_s > ends_s
    )
    down_bytes = {c: _charged(parcels[c].size_bytes, trips[c], ends_s, c in stopped) for c in parcels}
    fates = {c: _fate(c, trips[c], up_bytes) for c in parcels}
    staleness = {c: state.ledger.staleness(c) for c in parcels}
    known = [s for s in staleness.values() if s is not None]
    seconds = (last.download_s, last.compute_s, last.upload_s) if last else (0.0, 0.0, 0.0)
    late = sum(fate == "late" for fate in fates.values())
    line: dict[str, Any] = {
        "round": played.round,
        "invited": len(parcels),
        "used": len(up_bytes),
        "lost": sum(fate == "lost" for fate in fates.values()),
        "late": late,
        "notes": _notes(f, state, played),
        "down_bytes": sum(down_bytes.values()),
        "up_bytes": sum(up_bytes.values()),
        "wasted_down_bytes": sum(size for c, size in down_bytes.items() if c not in up_bytes),
        "wasted_up_bytes_estimate": late * played.expected_up_bytes,
        **_authors(f, played),
        "download_s": seconds[0],
        "compute_s": seconds[1],
        "upload_s": seconds[2],
        "round_s": ends_s,
        "waited_s": played.clock_s - state.clock_s,
        "wasted_s": sum(_end(trips[c], None) for c in parcels if c not in up_bytes),
        "clock_s": played.clock_s + ends_s,
        "loss": sum(float(upload.loss) for upload in uploads) / len(uploads) if uploads else None,
        "accuracy": None,
        "update_density": played.update.density,
        "upload_density": sum(u.update.density for u in uploads) / len(uploads) if uploads else None,
        "mask_density": played.shared.packed.count / f.space.size,
        "cold": len(parcels) - len(known),
        "staleness_mean": sum(known) / len(known) if known else None,
        "clients": {
            "id": list(parcels),
            "group": [group.name for group in played.groups for _ in group.clients],
            "staleness": list(staleness.values()),
            "down_bytes": list(down_bytes.values()),
            "fate": list(fates.values()),
        },
    }
    if not f.devices.timed:
        line |= dict.fromkeys(
            ("download_s", "compute_s", "upload_s", "round_s", "waited_s", "wasted_s", "clock_s"), None
        )
    return Record(line, played.clock_s + ends_s, stopped)


def _end(trip: Trip, deadline_s: float | None) -> float:
    end_s = trip.arrival_s if trip.lost_s is None else trip.lost_s
    return end_s if deadline_s is None else min(end_s, deadline_s)


def _charged(size_bytes: int, trip: Trip, ends_s: float, stopped: bool) -> int:
    return int(size_bytes * ends_s / trip.download_s) if stopped else size_bytes


def _fate(client: int, trip: Trip, used: Mapping[int, int]) -> str:
    if client in used:
        return "used"
    return "late" if trip.lost_s is None else "lost"


def _notes(f: Federation, state: State, played: Played) -> list[str]:
    notes, groups, used = [], played.groups, played.up_bytes
    if played.clock_s > state.clock_s:
        notes.append(f"waited {played.clock_s - state.clock_s:.0f} s until somebody was online")
    if sum(group.quota for group in groups) < f.sampler.cohort:
        notes.append(f"only {sum(len(g.clients) for g in groups)} clients could be invited")
    arrived = {group.name: sum(c in used for c in group.clients) for group in groups}
    if not used:
        notes.append("nobody arrived: the model stays as it is")
    elif any(arrived[group.name] < group.quota for group in groups):
        short = ", ".join(f"{arrived[g.name]} of {g.quota} {g.name}" for g in groups)
        notes.append(f"fewer arrivals than the quota ({short}): the weights are those of the actual counts")
    if used and not all(arrived.values()):
        notes.append("a whole group is missing: this update is biased")
    return notes


def _authors(f: Federation, played: Played) -> dict[str, int]:
    """The authors' estimate of the sizes, for comparison: shares of a model of M bytes, a bitmap of M/32.

    A download is min(ρM + b, M), ρ being the share that changed; an upload uM + min((u−m)M, b) with u the share
    uploaded and m the share that both sides know. That is each of the four formulas of their code.
    """
    model = 4 * (f.space.size + f.layout.statistics_size)
    bitmap = model / 32
    known = played.shared.packed.count / f.space.size
    return {
        "authors_down_bytes": round(sum(min(p.density * model + bitmap, model) for p in played.parcels.values())),
        "authors_up_bytes": round(
            sum(u.update.density * model + min((u.update.density - known) * model, bitmap) for u in played.uploads)
        ),
    }
