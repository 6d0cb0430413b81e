"""Partition schemes for data without clients of their own: pure functions of labels and a generator. Each returns one
array of row numbers per client; every row is in exactly one of them, and none is empty."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gluefl.errors import UsageError

Rows = NDArray[np.int64]
KINDS = ("iid", "dirichlet", "shards", "quantity")


def iid(samples: int, clients: int, rng: np.random.Generator) -> list[Rows]:
    """Equal shares at random: `iid(60_000, 100, stream(seed, "partition"))`."""
    _check(samples, clients, 1)
    return [np.sort(part) for part in np.array_split(rng.permutation(samples), clients)]


def dirichlet(
    labels: NDArray[Any], clients: int, alpha: float, rng: np.random.Generator, smallest: int = 1
) -> list[Rows]:
    """Label skew (Hsu et al., 2019): every label is distributed over the clients in Dirichlet(alpha) shares.

    Clients left with fewer than `smallest` samples receive samples of the largest ones.
    """
    _check(len(labels), clients, smallest)
    parts: list[list[Rows]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        cuts = (np.cumsum(_shares(clients, alpha, rng))[:-1] * len(rows)).astype(np.int64)
        for rows_of, part in zip(parts, np.split(rows, cuts)):
            rows_of.append(part)
    return _balanced([np.concatenate(rows_of) for rows_of in parts], smallest)


def shards(labels: NDArray[Any], clients: int, per_client: int, rng: np.random.Generator) -> list[Rows]:
    """Sorted by label, cut into equal shards, `per_client` of them each (McMahan et al., 2017)."""
    if per_client < 1:
        raise UsageError(f"a client needs at least one shard, found shards_per_client = {per_client}")
    _check(len(labels), clients, per_client)
    shuffled = rng.permutation(len(labels))  # so that ties within a label are broken at random
    ordered = shuffled[np.argsort(labels[shuffled], kind="stable")]
    pieces = np.array_split(ordered, clients * per_client)
    chosen = rng.permutation(len(pieces)).reshape(clients, per_client)
    return [np.sort(np.concatenate([pieces[piece] for piece in own])) for own in chosen]


def quantity(samples: int, clients: int, alpha: float, rng: np.random.Generator, smallest: int = 1) -> list[Rows]:
    """Quantity skew: the same mix of labels, sizes in Dirichlet(alpha) shares."""
    _check(samples, clients, smallest)
    spare = samples - clients * smallest
    sizes = smallest + rng.multinomial(spare, _shares(clients, alpha, rng))
    return [np.sort(part) for part in np.split(rng.permutation(samples), np.cumsum(sizes)[:-1])]


def thinned(labels: NDArray[Any], classes: int, alpha: float, keep: float, rng: np.random.Generator) -> Rows:
    """Label skew on top of natural clients: a client keeps a share of its own samples, drawn without
    replacement with Dirichlet(alpha) weights on the labels. Nothing moves between clients."""
    if not 0 < keep <= 1:
        raise UsageError(f"the share of samples to keep must lie in (0, 1], found {keep}")
    # A weight of exactly zero would make it impossible to keep enough of a client with few labels.
    weights = _shares(classes, alpha, rng)[labels] + 1e-9
    count = math.ceil(keep * len(labels))
    return np.sort(rng.choice(len(labels), size=count, replace=False, p=weights / weights.sum()))


def owners(
    kind: str, labels: NDArray[Any], clients: int, rng: np.random.Generator, alpha: float, per_client: int
) -> NDArray[np.int32]:
    """The client of every sample by the name of the scheme, as a configuration spells it."""
    if kind == "iid":
        parts = iid(len(labels), clients, rng)
    elif kind == "dirichlet":
        parts = dirichlet(labels, clients, alpha, rng)
    elif kind == "shards":
        parts = shards(labels, clients, per_client, rng)
    elif kind == "quantity":
        parts = quantity(len(labels), clients, alpha, rng)
    else:
        raise UsageError(f"unknown partition {kind!r}. Known: {', '.join(KINDS)}")
    result = np.empty(len(labels), np.int32)
    for client, rows in enumerate(parts):
        result[rows] = client
    return result


def _shares(parts: int, alpha: float, rng: np.random.Generator) -> NDArray[np.float64]:
    if not (alpha > 0 and math.isfinite(alpha)):
        raise UsageError(f"the Dirichlet parameter alpha must be a positive number, found {alpha}")
    shares: NDArray[np.float64] = rng.dirichlet(np.full(parts, alpha))
    if np.isfinite(shares).all():
        return shares
    shares = np.zeros(parts)
    shares[rng.integers(parts)] = 1.0  # a tiny alpha underflows: its limit is all to one
    return shares


def _balanced(parts: Sequence[Rows], smallest: int) -> list[Rows]:
    parts, sizes = list(parts), np.array([len(part) for part in parts])
    for poor in np.flatnonzero(sizes < smallest):
        while sizes[poor] < smallest:
            rich = int(sizes.argmax())
            moved = min(smallest - int(sizes[poor]), int(sizes[rich]) - smallest)
            parts[poor] = np.concatenate([parts[poor], parts[rich][-moved:]])
            parts[rich] = parts[rich][:-moved]
            sizes[poor] += moved
            sizes[rich] -= moved
    return [np.sort(part) for part in parts]


def _check(samples: int, clients: int, smallest: int) -> None:
    if clients < 1 or smallest < 1:
        raise UsageError(f"found {clients} clients of at least {smallest} samples: both must be 1 or more")
    if samples < clients * smallest:
        raise UsageError(f"{samples} samples are too few for {clients} clients of at least {smallest}: ask for fewer")
