"""The devices: bandwidth, compute speed, availability. They convert bytes into seconds."""

from gluefl.fleet.devices import Fleet
from gluefl.fleet.trips import Arrivals, Devices, Instant, Trip

__all__ = ["Arrivals", "Devices", "Fleet", "Instant", "Trip"]
