"""Training speed of clients: milliseconds per sample, from the devices in the GlueFL authors' runs."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gluefl.fleet.noise import Floats, Ints, Noise
from gluefl.fleet.shipped import rows


@dataclass(frozen=True)
class MeasuredCompute:
    """Speeds drawn from the shipped histogram: about half of the clients near 25 ms, the others near 150 ms."""

    seed: int

    @cached_property
    def _noise(self) -> Noise:
        return Noise(self.seed, "compute")

    @cached_property
    def _histogram(self) -> tuple[Floats, Floats]:
        table = rows("compute.csv")
        ms = np.array([float(row["ms_per_sample"]) for row in table])
        weight = np.array([float(row["weight"]) for row in table])
        return ms, np.cumsum(weight) / weight.sum()

    def ms_per_sample(self, clients: Ints) -> Floats:
        """Milliseconds one training sample takes on each client."""
        ms, cumulated = self._histogram
        return ms[np.searchsorted(cumulated, self._noise.uniform(clients))]
