"""The devices: bandwidth, compute speed, availability. Bytes become seconds here."""

from gluefl.fleet.devices import Fleet
from gluefl.fleet.trips import Arrivals, Devices, Instant, Trip

__all__ = ["Arrivals", "Devices", "Fleet", "Instant", "Trip"]
