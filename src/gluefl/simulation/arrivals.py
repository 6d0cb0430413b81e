"""Who is invited, how long each client takes, and who arrives in time."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gluefl.core.sampling import Group
from gluefl.core.server import State
from gluefl.errors import GlueFLError
from gluefl.fleet import Trip
from gluefl.randomness import stream
from gluefl.simulation.parts import Simulation

MOST_WAITS = 10_000  # attempts to find a client online before a round gives up


def invite(sim: Simulation, state: State, round: int) -> tuple[float, tuple[Group, ...]]:
    """The groups, and the time of the invitation: if no client is online, the round waits until one is."""
    clock_s = state.clock_s
    for attempt in range(MOST_WAITS):
        pool = replace(sim.pool, is_online=sim.devices.is_online(clock_s))
        groups = sim.core.sampler.invite(state.sampler, pool, stream(sim.core.seed, "invite", round, attempt))
        if any(group.clients for group in groups):
            return clock_s, groups
        later_s = sim.devices.next_change_s(clock_s)
        if later_s <= clock_s:
            break  # nothing will ever change
        clock_s = later_s
    raise GlueFLError(
        f"round {round}: no client was online between {state.clock_s:.0f} s and {clock_s:.0f} s. "
        "Check fleet.availability and its file."
    )


def trips(
    sim: Simulation, clock_s: float, down_bytes: Mapping[int, int], up_bytes: int | Mapping[int, int]
) -> dict[int, Trip]:
    """Download, train and upload, for every client that is sent something."""
    up = up_bytes if isinstance(up_bytes, Mapping) else dict.fromkeys(down_bytes, up_bytes)
    return {c: sim.devices.trip(c, clock_s, size, up[c], sim.engine.work(c)) for c, size in down_bytes.items()}


def first_arrivals(
    sim: Simulation, groups: Sequence[Group], trips: Mapping[int, Trip], round: int
) -> tuple[tuple[int, ...], ...]:
    """Of each group the first to arrive, up to its quota."""
    limit_s = float("inf") if sim.arrivals.deadline_s is None else sim.arrivals.deadline_s

    def in_order(group: Group) -> list[int]:
        in_time = [c for c in group.clients if trips[c].lost_s is None and trips[c].arrival_s <= limit_s]
        return sorted(in_time, key=lambda c: trips[c].arrival_s)  # stable: ties stay in the order of invitation

    used = [tuple(in_order(group)[: group.quota]) for group in groups]
    if sim.arrivals.authors_arrivals and len(groups) > 1:
        # The authors end the round when every quota is filled and then draw among the sticky that have arrived.
        end_s = max((trips[c].arrival_s for group in used for c in group), default=0.0)
        sticky = [c for c in in_order(groups[0]) if trips[c].arrival_s <= end_s]
        order = stream(sim.core.seed, "arrivals", round).permutation(len(sticky))
        used[0] = tuple(sticky[i] for i in order[: groups[0].quota])
    return tuple(used)
