"""The nodes of a federation as the clients 0 … N−1 of our samplers, and what was measured of them."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from flwr.serverapp import Grid

from gluefl.fleet import Trip

POLL_S = 0.2


@dataclass
class Nodes:
    """Who has ever been seen in this run. A place, once given, stays: a node that leaves may come back.

    Places are given in the order of registration. With node keys a node is known by its key, so that it keeps its
    place when the SuperLink forgets its id; in a simulation, whose keys are random, by its place.
    """

    simulated: bool = False
    places: dict[str, int] = field(default_factory=dict)  # key → client
    ids: dict[int, int] = field(default_factory=dict)  # client → node id, as last seen
    online: frozenset[int] = frozenset()
    trips: dict[int, Trip] = field(default_factory=dict)  # of the round in progress
    grid: Grid | None = None
    timed: bool = True

    def refresh(self) -> list[int]:
        """Ask who is connected; returns those seen for the first time."""
        assert self.grid is not None
        infos = sorted(self.grid.get_nodes(), key=lambda info: (info.registered_at, info.node_id))
        new = []
        online = set()
        for number, info in enumerate(infos):
            key = f"place-{number}" if self.simulated else _key(info)
            if key not in self.places:
                self.places[key] = len(self.places)
                new.append(self.places[key])
            self.ids[self.places[key]] = info.node_id
            online.add(self.places[key])
        self.online = frozenset(online)
        return new

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until enough nodes are there."""
        ends = time.monotonic() + timeout_s
        while True:
            self.refresh()
            if ready():
                return True
            if time.monotonic() > ends:
                return False
            time.sleep(POLL_S)

    def is_online(self, clock_s: float) -> Callable[[int], bool]:
        """Who is connected at this moment."""
        return lambda client: client in self.online

    def next_change_s(self, clock_s: float) -> float:
        """Nobody is connected: wait a little and look again."""
        time.sleep(5 * POLL_S)
        self.refresh()
        return clock_s + 5 * POLL_S

    def trip(self, client: int, clock_s: float, down_bytes: int, up_bytes: int, samples: int) -> Trip:
        """What was measured. Flower does not tell download, training and upload apart: all is compute."""
        return self.trips[client]

    def node_ids(self, clients: Iterable[int]) -> list[int]:
        """Flower's ids of clients."""
        return [self.ids[client] for client in clients]


def _key(info: object) -> str:
    key = getattr(info, "public_key", b"")
    return key.hex() if key else f"id-{info.node_id}"  # type: ignore[attr-defined]
