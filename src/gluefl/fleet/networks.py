"""Network speeds of clients: download and upload of client i, drawn together from (seed, i).

`edge` is M-Lab NDT (CC0), North America, June 2022, with the GlueFL authors' filter; `5g` and `cloud` are
their other two networks. docs/fleet.md names the source of every figure."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from gluefl.fleet.noise import Floats, Ints, Noise
from gluefl.fleet.shipped import rows
from gluefl.fleet.traces import Capacity, capacity, lines

MEASURED = ("edge", "5g", "cloud")


class Network(Protocol):
    """Network speeds of all clients."""

    def mbps(self, clients: Ints) -> tuple[Floats, Floats]:
        """Download and upload of each client, in 10^6 bit/s."""
        ...


@dataclass(frozen=True)
class Percentiles:
    """Quantiles of both directions, and the joint distribution of their ranks."""

    percent: Floats
    down_mbps: Floats
    up_mbps: Floats
    rank_edges: Floats  # 0 … 1, the bins of both ranks
    up_given_down: Floats  # cumulated share of upload bins, one row per download bin


def percentiles(name: str) -> Percentiles:
    """Read the shipped table of one network."""
    table = [r for r in rows("networks.csv") if r["network"] == name]
    percent, down, up = (np.array([float(r[column]) for r in table]) for column in ("percent", "down_mbps", "up_mbps"))
    # Only the edge measurements hold both directions of one client; elsewhere the ranks are independent.
    copula = rows("edge_copula.csv") if name == "edge" else [{"down_percent": "100", "100": "1"}]
    edges = np.array([0.0, *(float(r["down_percent"]) / 100 for r in copula)])
    share = np.array([[float(v) for k, v in r.items() if k != "down_percent"] for r in copula])
    cumulated = np.cumsum(share, axis=1)
    cumulated = np.hstack([np.zeros((len(share), 1)), cumulated / cumulated[:, -1:]])
    return Percentiles(percent / 100, down, up, edges, cumulated)


@dataclass(frozen=True)
class Measured:
    """`edge`, `5g` or `cloud`: drawn from measured percentiles, both directions together."""

    name: str
    seed: int

    @cached_property
    def _percentiles(self) -> Percentiles:
        return percentiles(self.name)

    @cached_property
    def _noise(self) -> tuple[Noise, Noise]:
        return Noise(self.seed, "download"), Noise(self.seed, "upload")

    def mbps(self, clients: Ints) -> tuple[Floats, Floats]:
        """Download by its rank; upload by a rank drawn from the bin of the download's rank."""
        table = self._percentiles
        down_rank, draw = (noise.uniform(clients) for noise in self._noise)
        row = table.up_given_down[np.searchsorted(table.rank_edges, down_rank) - 1]
        column = (row[:, 1:] <= draw[:, None]).sum(axis=1)
        each = np.arange(len(draw))
        low, high = row[each, column], row[each, column + 1]
        left, right = table.rank_edges[column], table.rank_edges[column + 1]
        up_rank = left + (right - left) * (draw - low) / (high - low)
        return (
            np.interp(down_rank, table.percent, table.down_mbps),
            np.interp(up_rank, table.percent, table.up_mbps),
        )


@dataclass(frozen=True)
class UniformSpeeds:
    """Speeds drawn evenly between two bounds; equal bounds make every client the same."""

    down_mbps: tuple[float, float]
    up_mbps: tuple[float, float]
    seed: int

    def mbps(self, clients: Ints) -> tuple[Floats, Floats]:
        """Both directions by the same rank: a fast client is fast both ways."""
        rank = Noise(self.seed, "download").uniform(clients)
        (d0, d1), (u0, u1) = self.down_mbps, self.up_mbps
        return d0 + (d1 - d0) * rank, u0 + (u1 - u0) * rank


@dataclass(frozen=True)
class RecordedSpeeds:
    """Speeds from a file."""

    path: str
    repeat_clients: bool = False

    @cached_property
    def trace(self) -> Capacity:
        """The content of the file, read once."""
        return capacity(self.path)

    def mbps(self, clients: Ints) -> tuple[Floats, Floats]:
        """The speeds in the file."""
        line = lines(self.trace, clients, self.repeat_clients)
        return self.trace.down_mbps[line], self.trace.up_mbps[line]

    def ms_per_sample(self, clients: Ints) -> Floats | None:
        """The compute speeds in the file, None if it has no such column."""
        line = lines(self.trace, clients, self.repeat_clients)
        return None if self.trace.ms_per_sample is None else self.trace.ms_per_sample[line]
