"""How fast clients train: milliseconds per sample, from the devices in the GlueFL authors' runs."""

import functools

import numpy as np

from gluefl.fleet.noise import Floats, Ints, uniform
from gluefl.fleet.shipped import rows


@functools.cache
def _table() -> tuple[Floats, Floats]:
    ms = np.array([float(r["ms_per_sample"]) for r in rows("compute.csv")])
    weight = np.array([float(r["weight"]) for r in rows("compute.csv")])
    return ms, np.cumsum(weight) / weight.sum()


def ms_per_sample(seed: int, clients: Ints) -> Floats:
    """Milliseconds one training sample takes on each client: a fast half near 25, a slow half near 150."""
    ms, cumulated = _table()
    return ms[np.searchsorted(cumulated, uniform(seed, "compute", clients))]
