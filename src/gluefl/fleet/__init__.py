"""The devices: bandwidth, compute speed, availability. Bytes become seconds here."""

from gluefl.fleet.devices import Fleet
from gluefl.fleet.trips import Devices, Instant, Trip

__all__ = ["Devices", "Fleet", "Instant", "Trip"]
