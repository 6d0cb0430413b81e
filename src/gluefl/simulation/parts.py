"""A simulated federation: the core that it shares with a real one, and what simulates the rest."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from gluefl.clients.cohort import Engine
from gluefl.clients.residuals import Residuals
from gluefl.core.sampling import Pool
from gluefl.core.server import Core, Packages, State, packages
from gluefl.fleet import Arrivals, Devices
from gluefl.simulation.channel import Channel

Packing = Callable[[Core, State, Iterable[int | None], int], Packages]


@dataclass(frozen=True)
class Simulation:
    """Everything that stays the same from round to round. (Residuals change in place: they may exceed the memory.)"""

    core: Core
    pool: Pool
    devices: Devices
    engine: Engine
    channel: Channel
    residuals: Residuals  # what strategies left out, by client
    memories: Residuals | None = None  # what the local rule keeps, by client, if it keeps anything
    arrivals: Arrivals = Arrivals()  # noqa: RUF009 - frozen
    packages: Packing = packages

    @property
    def stores(self) -> dict[str, Residuals]:
        """What is checkpointed beside the state."""
        return {"residuals": self.residuals} | ({} if self.memories is None else {"memories": self.memories})

    def kept(self, clients: Iterable[int]) -> dict[int, Tensor]:
        """What the local rule kept for these clients, as far as they trained before."""
        if self.memories is None:
            return {}
        kept = {client: self.memories.get(client, self.core.space.device) for client in clients}
        return {client: memory for client, memory in kept.items() if memory is not None}

    def keep(self, client: int, residual: Tensor | None, memory: Tensor | None) -> None:
        """Store what a client keeps from this round on."""
        if residual is not None:
            self.residuals[client] = residual
        if memory is not None and self.memories is not None:
            self.memories[client] = memory

    def close(self) -> None:
        """Finish the writes under way."""
        for store in self.stores.values():
            store.close()
