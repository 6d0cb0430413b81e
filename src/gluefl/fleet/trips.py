"""The interface between a round and the devices, and devices without delays."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gluefl.parameters import Positive, checked


@dataclass(frozen=True)
class Trip:
    """One client in one round, in seconds from the start of the round.

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


@checked
@dataclass(frozen=True)
class Arrivals:
    """Which arrivals a round uses, and what it charges for the others."""

    deadline_s: Positive | None = None  # arrivals after it are not used
    authors_arrivals: bool = False  # use a random choice of the sticky clients that were fast enough
    stop_late_downloads: bool = False  # a late client is told to stop: charge what it had when the round ended


class Devices(Protocol):
    """The interface of devices; `Instant` and `Fleet` implement it. Results depend on the arguments only."""

    @property
    def timed(self) -> bool:
        """Whether trips take time; otherwise journals contain null for seconds."""
        ...

    def is_online(self, clock_s: float) -> Callable[[int], bool]:
        """Which clients can be invited at this moment."""
        ...

    def next_change_s(self, clock_s: float) -> float:
        """The next moment at which `is_online` may differ, for rounds with too few clients online."""
        ...

    def trip(self, client: int, clock_s: float, down_bytes: int, up_bytes: int, samples: int) -> Trip:
        """Download, train on `samples` samples (batch times steps), upload: starting at `clock_s`."""
        ...


@dataclass(frozen=True)
class Instant:
    """Devices without delays: all clients are online, and transfers and training take no time."""

    timed: bool = False

    def is_online(self, clock_s: float) -> Callable[[int], bool]:
        """All clients."""
        return lambda client: True

    def next_change_s(self, clock_s: float) -> float:
        """Nothing changes."""
        return clock_s

    def trip(self, client: int, clock_s: float, down_bytes: int, up_bytes: int, samples: int) -> Trip:
        """A trip of zero seconds."""
        return Trip(0.0, 0.0, 0.0)
