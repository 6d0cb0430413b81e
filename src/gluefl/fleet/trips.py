"""What a round asks of the devices, and the fleet that costs no time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Trip:
    """One client's way through one round, in seconds from the start of the round.

    A client that goes offline before it has uploaded is lost at that moment: `lost_s` says when.
    """

    download_s: float
    compute_s: float
    upload_s: float
    lost_s: float | None = None

    @property
    def arrival_s(self) -> float:
        """When the upload is complete, if the client is not lost before."""
        return self.download_s + self.compute_s + self.upload_s

    @property
    def downloaded(self) -> bool:
        """Whether the client finished its download, and so holds the version it was sent."""
        return self.lost_s is None or self.lost_s >= self.download_s


@dataclass(frozen=True)
class Arrivals:
    """Which arrivals a round uses, and what it charges for the others."""

    deadline_s: float | None = None  # arrivals after it are not used
    authors_arrivals: bool = False  # use a random choice of the sticky clients that were fast enough
    stop_late_downloads: bool = False  # a late client is told to stop: charge what it had when the round ended


class Devices(Protocol):
    """What a round needs to know of the devices. `Instant` and `Fleet` answer from the arguments alone."""

    @property
    def timed(self) -> bool:
        """Whether the seconds mean anything; journals of untimed fleets hold null."""
        ...

    def is_online(self, clock_s: float) -> Callable[[int], bool]:
        """Who can be invited at this moment."""
        ...

    def next_change_s(self, clock_s: float) -> float:
        """The next moment at which it is worth asking again, when too few are online."""
        ...

    def trip(self, client: int, clock_s: float, down_bytes: int, up_bytes: int, samples: int) -> Trip:
        """Download, train on `samples` samples (batch times steps), upload: starting at `clock_s`."""
        ...


@dataclass(frozen=True)
class Instant:
    """The fleet that costs no time: everyone is online, everything arrives at once."""

    timed: bool = False

    def is_online(self, clock_s: float) -> Callable[[int], bool]:
        """Everyone."""
        return lambda client: True

    def next_change_s(self, clock_s: float) -> float:
        """Nothing ever changes."""
        return clock_s

    def trip(self, client: int, clock_s: float, down_bytes: int, up_bytes: int, samples: int) -> Trip:
        """No time passes."""
        return Trip(0.0, 0.0, 0.0)
