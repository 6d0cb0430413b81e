"""The nodes of a federation as the clients 0 … N−1 of our samplers."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from flwr.serverapp import Grid

from gluefl.core.sampling import Pool, Sampler
from gluefl.errors import UsageError

POLL_S = 0.2


@dataclass
class Nodes:
    """The nodes that were ever connected in this run. A node keeps its place: one that leaves may come back.

    Places are given in the order of registration. With node keys a node is recognised by its key, so that it keeps
    its place when the SuperLink forgets its id; in a simulation, whose keys are random, by its number.
    """

    grid: Grid
    simulated: bool = False
    places: dict[str, int] = field(default_factory=dict)  # key → client
    ids: dict[int, int] = field(default_factory=dict)  # client → node id, as last seen
    online: frozenset[int] = frozenset()

    @property
    def pool(self) -> Pool:
        """N is the number of nodes seen so far; those that are connected can be invited."""
        size, online = len(self.places), self.online
        return Pool(size, lambda client: 1 / size, lambda client: client in online)

    def suffice(self, sampler: Sampler, least: int) -> bool:
        """Whether a sampler can draw from them, and at least so many are connected."""
        try:
            sampler.check(len(self.places))
        except UsageError:
            return False
        return len(self.online) >= max(1, least)

    def refresh(self) -> list[int]:
        """Ask the SuperLink who is connected; returns the clients seen for the first time."""
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
        """Poll until a condition on the nodes holds or the time is up; returns whether it holds."""
        ends = time.monotonic() + timeout_s
        while True:
            self.refresh()
            if ready():
                return True
            if time.monotonic() > ends:
                return False
            time.sleep(POLL_S)


def _key(info: object) -> str:
    key = getattr(info, "public_key", b"")
    return key.hex() if key else f"id-{info.node_id}"  # type: ignore[attr-defined]
