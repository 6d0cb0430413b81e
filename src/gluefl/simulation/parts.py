"""What a simulated federation is made of: the core that it shares with a real one, and what stands for the world."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

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
    residuals: Residuals
    arrivals: Arrivals = Arrivals()  # noqa: RUF009 - frozen
    packages: Packing = packages
