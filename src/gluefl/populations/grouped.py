"""The population most loaders return: arrays, and for every client the rows it owns. A loader only reads its
format into a `Source`; filtering, holding out and skew are done here, on row numbers, so that the arrays
themselves can stay on disk."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gluefl.errors import DataError, UsageError
from gluefl.populations import Samples, cache, partition
from gluefl.randomness import stream

HELD_OUT = ("official", "samples", "clients")
MEASURED = 10_000  # samples over which mean and deviation are measured, at most
CHUNK = 2**16  # values that are made float64 at a time


@dataclass(frozen=True, eq=False)
class Source:
    """All samples of a data set as its reader found them, and who owns each."""

    inputs: NDArray[Any]  # (M, H, W) grey or (M, C, H, W) colour bytes, (M, T) tokens, or float features
    labels: NDArray[Any]  # (M,)
    owners: NDArray[Any]  # (M,) positions in `names`, −1 for what belongs to nobody
    names: NDArray[Any]  # of the clients, in order
    official: NDArray[Any]  # (M,) bool: in the test set that the data come with
    mean: NDArray[Any]  # of the raw inputs, one number or one per channel
    std: NDArray[Any]
    skipped: int = 0


@dataclass(frozen=True, eq=False)
class Grouped:
    """A population in arrays, in memory or memory-mapped."""

    inputs: NDArray[Any]
    labels: NDArray[Any]
    rows: NDArray[np.int64]  # of the training samples, client after client
    offsets: NDArray[np.int64]  # client i owns rows[offsets[i]:offsets[i + 1]]
    test_rows: NDArray[np.int64]
    classes: int
    shape: tuple[int, ...]
    mean: tuple[float, ...] = ()  # of the raw inputs, per channel; () for tokens, which stay whole numbers
    std: tuple[float, ...] = ()
    names: tuple[str, ...] = ()  # the clients' own: writers, speakers, roles
    label_names: tuple[str, ...] = ()
    skipped: int = 0  # broken samples left out on opening

    @property
    def clients(self) -> int:
        """N, the number of clients."""
        return len(self.offsets) - 1

    def size(self, client: int) -> int:
        """How many training samples a client holds."""
        return int(self.offsets[client + 1] - self.offsets[client])

    def train(self, client: int) -> Samples:
        """The training samples of one client."""
        return self._samples(self.rows[self.offsets[client] : self.offsets[client + 1]])

    def test(self) -> Samples:
        """The held-out samples."""
        return self._samples(self.test_rows)

    def transform(self, inputs: Tensor) -> Tensor:
        """Normalised float32 of the population's shape; tokens as int64. Any leading dimensions."""
        if not self.mean:
            return inputs.long()
        x = inputs.float()
        if self.inputs.ndim == len(self.shape):  # grey images are stored without a channel
            x = x.unsqueeze(-len(self.shape))
        x = standardised(x, self.mean, self.std, axis=-len(self.shape))
        return x.expand(*x.shape[: -len(self.shape)], *self.shape)

    def _samples(self, rows: NDArray[np.int64]) -> Samples:
        inputs = self.inputs[rows]  # a copy: the source may be read-only
        return Samples(torch.from_numpy(inputs), torch.from_numpy(self.labels[rows].astype(np.int64)))


def standardised(x: Tensor, mean: tuple[float, ...], std: tuple[float, ...], axis: int) -> Tensor:
    """(x − mean) / std per channel, with plain numbers: nothing is copied to the device on the way."""
    if len(mean) == 1:
        return (x - mean[0]) / std[0]
    parts = torch.split(x, 1, dim=axis)
    return torch.cat([(part - m) / s for part, m, s in zip(parts, mean, std)], dim=axis)


def source(
    inputs: NDArray[Any],
    labels: NDArray[Any],
    ids: NDArray[Any],
    official: NDArray[np.bool_] | None = None,
    skipped: int = 0,
    test_is_owned: bool = True,
) -> Source:
    """Samples with the id of their client: the clients are the distinct ids, in order.

    Where the official test set is nobody's, no client gets its samples, whatever else is held out.
    """
    owned = np.ones(len(ids), bool) if test_is_owned or official is None else ~official
    owners = np.full(len(ids), -1, np.int32)
    names, owners[owned] = np.unique(ids[owned], return_inverse=True)
    mean, std = _moments(inputs)
    if not (np.isfinite(mean).all() and np.isfinite(std).all()):
        raise DataError("the inputs hold numbers that are not finite (NaN or infinity)")
    official = np.zeros(len(labels), bool) if official is None else official
    return Source(inputs, labels, owners, names.astype(np.str_), official, mean, std, skipped)


def cached_source(
    name: str, sources: Iterable[Path], options: Mapping[str, object], make: Callable[[], Source]
) -> Source:
    """A source through the cache, stored client after client so that a client's pages lie together."""

    def arrays() -> cache.Arrays:
        made = make()
        order = np.argsort(made.owners, kind="stable")
        per_sample = ("inputs", "labels", "owners", "official")
        return {
            name: np.asarray(value)[order] if name in per_sample else np.asarray(value)
            for name, value in vars(made).items()
        }

    found = cache.cached(name, sources, options, arrays)
    return Source(**{**found, "skipped": int(found["skipped"])})  # type: ignore[arg-type]


def grouped(
    found: Source,
    where: object,
    classes: int,
    *,
    clients: int | None,
    seed: int,
    min_samples: int,
    held_out: str,
    test_fraction: float,
    channels: int = 1,
    tokens: bool = False,
    label_names: tuple[str, ...] = (),
) -> Grouped:
    """The clients that own at least `min_samples` of a source, the first `clients` of them, and a test set.

    `held_out` is "official" (the test set the data come with, which belongs to no client), "samples" (a share
    of every client's samples) or "clients" (all samples of a share of the clients). `min_samples` counts what
    a client owns before a share is held out.
    """
    check_labels(found.labels, classes, where)
    if held_out not in HELD_OUT:
        raise UsageError(f"held_out must be one of {', '.join(HELD_OUT)}, found {held_out!r}")
    if not 0 < test_fraction < 1:
        raise UsageError(f"test_fraction must lie between 0 and 1, found {test_fraction}")
    official = held_out == "official"
    if official and not found.official.any():
        raise DataError(f'{where}: has no test set of its own; set held_out = "samples" or "clients"')
    owned = np.flatnonzero((found.owners >= 0) & ~(found.official if official else False))
    sizes = np.bincount(found.owners[owned], minlength=len(found.names))
    kept = enough(sizes, min_samples)
    rng = stream(seed, "held out")
    aside = rng.permutation(kept)[: max(1, round(test_fraction * len(kept)))] if held_out == "clients" else kept[:0]
    kept = first(np.setdiff1d(kept, aside), clients, f"{where} with at least {min_samples} samples")
    if held_out == "samples":
        # Draws do not depend on `clients`: a smaller population holds out the same samples.
        test_rows = _share_of_each(owned, found.owners[owned], rng.random(len(owned)), sizes, test_fraction)
        test_rows = test_rows[np.isin(found.owners[test_rows], kept)]
        owned = np.setdiff1d(owned, test_rows, assume_unique=True)
    else:
        test_rows = np.flatnonzero(found.official if official else np.isin(found.owners, aside))
    if not len(test_rows):
        raise DataError(f"{where}: nothing is left for a test set; raise test_fraction above {test_fraction}")
    rows, offsets = _rows_of(kept, owned, found.owners, len(found.names))
    return Grouped(
        inputs=found.inputs,
        labels=found.labels,
        rows=rows,
        offsets=offsets,
        test_rows=test_rows,
        classes=classes,
        shape=_shape(found.inputs.shape[1:], channels, tokens),
        mean=() if tokens else tuple(found.mean.tolist()),
        std=() if tokens else tuple(found.std.tolist()),
        names=tuple(found.names[kept].tolist()),
        label_names=label_names,
        skipped=found.skipped,
    )


def _share_of_each(
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


def dealt(found: Source, kind: str, clients: int | None, seed: int, alpha: float, shards_per_client: int) -> Source:
    """A source without clients of its own, dealt out to `clients` by a scheme of `partition`."""
    if clients is None:
        raise UsageError(f"partition = {kind!r} needs clients = how many to make")
    mine = np.flatnonzero(~found.official)
    owners = np.full(len(found.labels), -1, np.int32)
    rng = stream(seed, "partition")
    owners[mine] = partition.owners(kind, found.labels[mine], clients, rng, alpha, shards_per_client)
    return dataclasses.replace(found, owners=owners, names=np.arange(clients).astype(np.str_))


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
    """The first `clients` of those that were kept; all of them for None."""
    if not len(kept):
        raise DataError(f"there are no clients in {where}: lower min_samples, or get more of the data")
    if clients is not None and not 1 <= clients <= len(kept):
        raise UsageError(f"clients = {clients}, but there are {len(kept)} clients in {where}")
    return kept[:clients]


def check_labels(labels: NDArray[Any], classes: int, where: object) -> None:
    """Labels are whole numbers from 0 to classes − 1."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(f"{where}: labels must be one whole number a sample, found {labels.dtype} {labels.shape}")
    bad = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(bad):
        raise DataError(
            f"{where}: sample {bad[0]} has the label {labels[bad[0]]}, outside 0…{classes - 1} ({len(bad)} such)"
        )


def _rows_of(
    kept: NDArray[np.int64], owned: NDArray[np.int64], owners: NDArray[Any], total: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows of the kept clients, in their order, and where each begins."""
    mine = owned[np.isin(owners[owned], kept)]
    rows = mine[np.argsort(owners[mine], kind="stable")]
    sizes = np.bincount(owners[mine], minlength=total)[kept]
    return rows, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _shape(single: tuple[int, ...], channels: int, tokens: bool) -> tuple[int, ...]:
    """Of one transformed input: grey images get the channels asked for, all else stays as it is."""
    if tokens or len(single) not in (2, 3) or (len(single) == 3 and single[0] != 1):
        return single
    return (channels, *single[-2:])


def _moments(inputs: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and deviation of the raw inputs, per channel for colour, over at most `MEASURED` samples."""
    some = inputs[:: max(1, math.ceil(len(inputs) / MEASURED))]
    mean = _average(some, lambda x: x)
    # A second pass: from the sum of squares alone, inputs far from zero would lose their deviation to rounding.
    std = np.sqrt(_average(some, lambda x: np.square(x - mean)))
    return mean.reshape(-1), np.where(std > 0, std, 1.0).reshape(-1)


def _average(inputs: NDArray[Any], of: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> NDArray[np.float64]:
    """The average of a function of every value, per channel for colour, in a shape that fits the inputs.

    Chunk by chunk: only a chunk is ever held as float64, eight times the size of bytes.
    """
    axes = (0, 2, 3) if inputs.ndim == 4 else tuple(range(inputs.ndim))
    step = max(1, CHUNK // max(1, math.prod(inputs.shape[1:])))
    chunks = (np.asarray(inputs[start : start + step], np.float64) for start in range(0, len(inputs), step))
    sums = [of(chunk).sum(axis=axes, keepdims=True) for chunk in chunks]
    return np.asarray(np.sum(sums, axis=0) / math.prod(inputs.shape[axis] for axis in axes))
