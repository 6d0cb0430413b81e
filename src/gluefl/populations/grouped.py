"""The population that most loaders return: arrays, and for every client the rows it owns.

A loader reads its format into a `Source`. Filtering, holding out and skew are done here, on row numbers, so that the
arrays themselves can stay on disk.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gluefl.errors import DataError, UsageError
from gluefl.populations import Samples, cache, inline, partition
from gluefl.populations.inputs import each, parts
from gluefl.populations.labels import check_labels
from gluefl.populations.moments import moments, transformed
from gluefl.randomness import stream

HELD_OUT = ("official", "samples", "clients")


@dataclass(frozen=True, eq=False)
class Source:
    """All samples of a data set as they were read, and the owner of each."""

    inputs: Any  # (M, H, W) grey or (M, C, H, W) colour bytes, (M, T) tokens, or float features; or several arrays
    labels: NDArray[Any]  # (M,) or (M, …)
    owners: NDArray[Any]  # (M,) positions in `names`, −1 for samples without an owner
    names: NDArray[Any]  # of the clients, in order
    official: NDArray[Any]  # (M,) bool: in the test set of the data
    skipped: int = 0


@dataclass(frozen=True, eq=False)
class Grouped:
    """A population in arrays, in memory or memory-mapped."""

    inputs: Any  # an array, or a dict or tuple of arrays
    labels: NDArray[Any]
    rows: NDArray[np.int64]  # of the training samples, client after client
    offsets: NDArray[np.int64]  # client i owns rows[offsets[i]:offsets[i + 1]]
    test_rows: NDArray[np.int64]
    classes: int
    shape: tuple[int, ...]
    mean: tuple[float, ...] = ()  # of the raw inputs that train, per channel; () for tokens and several arrays
    std: tuple[float, ...] = ()
    names: tuple[str, ...] = ()  # the clients' own: writers, speakers, roles
    label_names: tuple[str, ...] = ()
    skipped: int = 0  # broken samples left out on opening

    @property
    def clients(self) -> int:
        """N, the number of clients."""
        return len(self.offsets) - 1

    def size(self, client: int) -> int:
        """The number of training samples of a client."""
        return int(self.offsets[client + 1] - self.offsets[client])

    def train(self, client: int) -> Samples:
        """The training samples of one client."""
        return self._samples(self.rows[self.offsets[client] : self.offsets[client + 1]])

    def test(self) -> Samples:
        """The held-out samples."""
        return self._samples(self.test_rows)

    def transform(self, inputs: Any) -> Any:
        """Normalised float32 of the population's shape; tokens as int64. Any leading dimensions.

        Several arrays are not normalised: floats become float32, whole numbers int64.
        """
        return transformed(inputs, self.shape, self.mean, self.std, self.adds_channel)

    @property
    def adds_channel(self) -> bool:
        """Whether the inputs are grey images, which are stored without a channel."""
        return bool(self.mean) and self.inputs.ndim == len(self.shape)

    def __repr__(self) -> str:
        return inline(self, len(self.rows))

    def _samples(self, rows: NDArray[np.int64]) -> Samples:
        inputs = each(lambda array: torch.from_numpy(array[rows]), self.inputs)  # copies: a source may be read-only
        kind = np.float32 if self.labels.dtype.kind == "f" else np.int64
        return Samples(inputs, torch.from_numpy(self.labels[rows].astype(kind)))


def source(
    inputs: Any,
    labels: NDArray[Any],
    ids: NDArray[Any],
    official: NDArray[np.bool_] | None = None,
    skipped: int = 0,
    test_is_owned: bool = True,
) -> Source:
    """Samples with the id of their client: the clients are the distinct ids, in order.

    If the official test set has no owners, no client gets its samples, whatever else is held out.
    """
    owned = np.ones(len(ids), bool) if test_is_owned or official is None else ~official
    owners = np.full(len(ids), -1, np.int32)
    names, owners[owned] = np.unique(ids[owned], return_inverse=True)
    official = np.zeros(len(labels), bool) if official is None else official
    return Source(inputs, labels, owners, names.astype(np.str_), official, skipped)


def cached_source(
    name: str, sources: Iterable[Path], options: Mapping[str, object], make: Callable[[], Source]
) -> Source:
    """A source through the cache, ordered by client so that the pages of a client are adjacent."""

    def arrays() -> cache.Arrays:
        made = make()
        order = np.argsort(made.owners, kind="stable")
        per_sample = ("inputs", "labels", "owners", "official")
        return {
            name: np.asarray(value)[order] if name in per_sample else np.asarray(value)
            for name, value in vars(made).items()
        }

    stored = cache.cached(name, sources, options, arrays)
    kept = {field.name: stored[field.name] for field in dataclasses.fields(Source)}
    return Source(**{**kept, "skipped": int(stored["skipped"])})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Selection:
    """The clients of a population and its test set.

    The first `clients` that own at least `min_samples` samples, counted before a share is held out. `held_out` is
    "official" (the test set of the data, which belongs to no client), "samples" (a share of every client's samples)
    or "clients" (all samples of a share of the clients).
    """

    clients: int | None
    seed: int
    min_samples: int
    held_out: str
    test_fraction: float

    def __post_init__(self) -> None:
        if self.held_out not in HELD_OUT:
            raise UsageError(f"held_out must be one of {', '.join(HELD_OUT)}, found {self.held_out!r}")
        if not 0 < self.test_fraction < 1:
            raise UsageError(f"test_fraction must lie between 0 and 1, found {self.test_fraction}")


def grouped(
    data: Source,
    where: object,
    selection: Selection,
    *,
    classes: int,
    channels: int = 1,
    tokens: bool = False,
    label_names: tuple[str, ...] = (),
) -> Grouped:
    """The population of the selected clients of a source."""
    check_labels(data.labels, classes, where)
    held_out, min_samples, test_fraction = selection.held_out, selection.min_samples, selection.test_fraction
    official = held_out == "official"
    if official and not data.official.any():
        raise DataError(f'{where}: has no test set of its own; set held_out = "samples" or "clients"')
    owned = np.flatnonzero((data.owners >= 0) & ~(data.official if official else False))
    sizes = np.bincount(data.owners[owned], minlength=len(data.names))
    kept = enough(sizes, min_samples)
    rng = stream(selection.seed, "held out")
    aside = rng.permutation(kept)[: max(1, round(test_fraction * len(kept)))] if held_out == "clients" else kept[:0]
    kept = first(np.setdiff1d(kept, aside), selection.clients, f"{where} with at least {min_samples} samples")
    if held_out == "samples":
        # Draws do not depend on `clients`: a smaller population holds out the same samples.
        test_rows = share_of_each(owned, data.owners[owned], rng.random(len(owned)), sizes, test_fraction)
        test_rows = test_rows[np.isin(data.owners[test_rows], kept)]
        owned = np.setdiff1d(owned, test_rows, assume_unique=True)
    else:
        test_rows = np.flatnonzero(data.official if official else np.isin(data.owners, aside))
    if not len(test_rows):
        raise DataError(f"{where}: nothing is left for a test set; raise test_fraction above {test_fraction}")
    rows, offsets = _rows_of(kept, owned, data.owners, len(data.names))
    raw = tokens or isinstance(data.inputs, Mapping | tuple)
    mean, std = ((), ()) if raw else _moments(data.inputs, rows, where)
    return Grouped(
        inputs=data.inputs,
        labels=data.labels,
        rows=rows,
        offsets=offsets,
        test_rows=test_rows,
        classes=classes,
        shape=_shape(parts(data.inputs)[0].shape[1:], channels, raw),
        mean=mean,
        std=std,
        names=tuple(data.names[kept].tolist()),
        label_names=label_names,
        skipped=data.skipped,
    )


def _moments(inputs: NDArray[Any], rows: NDArray[np.int64], where: object) -> tuple[tuple[float, ...], ...]:
    mean, std = moments(inputs, rows)
    if not (np.isfinite(mean).all() and np.isfinite(std).all()):
        raise DataError(f"{where}: the inputs hold numbers that are not finite (NaN or infinity)")
    return tuple(mean.tolist()), tuple(std.tolist())


def share_of_each(
    rows: NDArray[np.int64],
    owners: NDArray[np.int64],
    draws: NDArray[np.float64],
    sizes: NDArray[np.int64],
    share: float,
) -> NDArray[np.int64]:
    """A share of every owner's rows, those with the lowest draws."""
    order = np.lexsort((draws, owners))
    rank = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.sort(rows[order[rank < np.repeat((sizes * share).astype(np.int64), sizes)]])


def dealt(data: Source, kind: str, clients: int | None, seed: int, alpha: float, shards_per_client: int) -> Source:
    """A source without clients of its own, distributed over `clients` by a scheme of `partition`."""
    if clients is None:
        raise UsageError(f"partition = {kind!r} needs clients = the number to make")
    if kind in ("dirichlet", "shards") and (data.labels.ndim > 1 or data.labels.dtype.kind == "f"):
        raise UsageError(f"partition = {kind!r} needs one class per sample: use 'iid' or 'quantity' for other labels")
    mine = np.flatnonzero(~data.official)
    owners = np.full(len(data.labels), -1, np.int32)
    rng = stream(seed, "partition")
    owners[mine] = partition.owners(kind, data.labels[mine], clients, rng, alpha, shards_per_client)
    return dataclasses.replace(data, owners=owners, names=np.arange(clients).astype(np.str_))


def skewed(population: Grouped, alpha: float, keep: float, seed: int) -> Grouped:
    """Every client keeps a share of its training samples, by Dirichlet(alpha) weights on the labels."""
    parts = []
    for client in range(population.clients):
        rows = population.rows[population.offsets[client] : population.offsets[client + 1]]
        rng = stream(seed, "label skew", client)
        parts.append(rows[partition.thinned(population.labels[rows], population.classes, alpha, keep, rng)])
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
    return dataclasses.replace(population, rows=np.concatenate(parts), offsets=offsets)


def enough(sizes: NDArray[Any], min_samples: int) -> NDArray[np.int64]:
    """The clients with at least `min_samples` samples."""
    if min_samples < 1:
        raise UsageError(f"min_samples must be 1 or more, found {min_samples}")
    return np.flatnonzero(sizes >= min_samples)


def first(kept: NDArray[np.int64], clients: int | None, where: str) -> NDArray[np.int64]:
    """The first `clients` of the kept ones; all of them for None."""
    if not len(kept):
        raise DataError(f"there are no clients in {where}: lower min_samples, or get more of the data")
    if clients is not None and not 1 <= clients <= len(kept):
        raise UsageError(f"clients = {clients}, but there are {len(kept)} clients in {where}")
    return kept[:clients]


def _rows_of(
    kept: NDArray[np.int64], owned: NDArray[np.int64], owners: NDArray[Any], total: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows of the kept clients, in their order, and the offset of each client."""
    mine = owned[np.isin(owners[owned], kept)]
    rows = mine[np.argsort(owners[mine], kind="stable")]
    sizes = np.bincount(owners[mine], minlength=total)[kept]
    return rows, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _shape(single: tuple[int, ...], channels: int, tokens: bool) -> tuple[int, ...]:
    """Of one transformed input: grey images get `channels` channels, other inputs keep their shape."""
    if tokens or len(single) not in (2, 3) or (len(single) == 3 and single[0] != 1):
        return single
    return (channels, *single[-2:])
