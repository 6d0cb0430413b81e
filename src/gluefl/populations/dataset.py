"""A population from a `torch.utils.data.Dataset` and the owner of every item. Items are read when they are used."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from gluefl.errors import DataError, UsageError
from gluefl.populations import Samples, inline
from gluefl.populations.grouped import enough, share_of_each
from gluefl.populations.inputs import Inputs, each, parts
from gluefl.randomness import stream

HOW = "from_dataset needs a dataset with len() and [index] whose items are (inputs, label)"


@dataclass(frozen=True, eq=False)
class OwnedDataset:
    """The items of a dataset by owner; `from_dataset` makes one."""

    dataset: Any
    rows: NDArray[np.int64]  # of the training items, client after client
    offsets: NDArray[np.int64]  # client i owns rows[offsets[i]:offsets[i + 1]]
    test_dataset: Any
    test_rows: NDArray[np.int64]
    classes: int
    shape: tuple[int, ...]
    names: tuple[str, ...] = ()
    function: Callable[[Any], Any] | None = None  # the transform of batches

    @property
    def clients(self) -> int:
        """N, the number of owners."""
        return len(self.offsets) - 1

    def size(self, client: int) -> int:
        """The number of training items of a client."""
        return int(self.offsets[client + 1] - self.offsets[client])

    def train(self, client: int) -> Samples:
        """The training items of one client, read now."""
        return read_items(self.dataset, self.rows[self.offsets[client] : self.offsets[client + 1]])

    def test(self) -> Samples:
        """The test items, read at the first call."""
        return self._test

    def transform(self, inputs: Inputs) -> Any:
        """Batches as the dataset gives them, or by the function that was given."""
        return inputs if self.function is None else self.function(inputs)

    def __repr__(self) -> str:
        return inline(self, len(self.rows))

    @cached_property
    def _test(self) -> Samples:
        return read_items(self.test_dataset, self.test_rows)


def from_dataset(
    dataset: Any,
    owners: Sequence[Hashable],
    *,
    test: Any = None,
    test_fraction: float = 0.1,
    classes: int | None = None,
    transform: Callable[[Any], Any] | None = None,
    min_samples: int = 1,
    seed: int = 0,
) -> OwnedDataset:
    """A population of the distinct owners, in order: `from_dataset(MNIST(root), owners=writers, test=MNIST(root, …))`.

    dataset: its items are (inputs, label); inputs are a tensor, an array, a number, or a dict or tuple of these.
    owners: the client of every item, ids of any one type.
    test: another dataset; without one, `test_fraction` of the items of every client.
    classes: the number of labels, where the dataset has neither `classes` nor `targets` nor tensors.
    transform: of raw batches to model inputs, on the device of the batch; without one they stay as they are.

    Threads read items of different clients at the same time.
    """
    count = _length(dataset, "dataset")
    ids = np.asarray(owners)
    if ids.shape != (count,):
        raise UsageError(f"owners must name a client per item: found {ids.shape} for {count} items.")
    if ids.dtype == object:
        raise UsageError("owners must be all of one type, names or whole numbers.")
    if not 0 < test_fraction < 1:
        raise UsageError(f"test_fraction must lie between 0 and 1, found {test_fraction}")
    if transform is not None and not callable(transform):
        raise UsageError(f"transform must be a function of a batch of inputs, found {transform!r}")
    names, numbers, sizes = np.unique(ids, return_inverse=True, return_counts=True)
    kept = enough(sizes, min_samples)
    if not len(kept):
        raise DataError(f"no client owns {min_samples} items: lower min_samples.")
    order = np.argsort(numbers, kind="stable")
    mine = order[np.isin(numbers[order], kept)]
    if test is None:
        draws, counts = stream(seed, "held out").random(len(mine)), np.bincount(numbers[mine], minlength=len(names))
        test_rows = share_of_each(mine, numbers[mine], draws, counts, test_fraction)
        mine = mine[~np.isin(mine, test_rows)]
        if not len(test_rows):
            raise DataError(f"test_fraction = {test_fraction} leaves no item for a test set: raise it, or give test.")
    else:
        test_rows = np.arange(_length(test, "test"))
    left = np.bincount(numbers[mine], minlength=len(names))[kept]
    first = read_items(dataset, mine[:1])
    return OwnedDataset(
        dataset=dataset,
        rows=mine,
        offsets=np.concatenate([[0], np.cumsum(left)]).astype(np.int64),
        test_dataset=dataset if test is None else test,
        test_rows=test_rows,
        classes=_classes(dataset, first.labels) if classes is None else _positive(classes),
        shape=_shape(first, transform),
        names=tuple(names[kept].astype(np.str_).tolist()),
        function=transform,
    )


def read_items(dataset: Any, rows: NDArray[np.int64]) -> Samples:
    """Items as one batch; floats as float32."""
    items = []
    for row in rows.tolist():
        item = dataset[row]
        if not isinstance(item, tuple | list) or len(item) != 2:
            kind = f"{len(item)} values" if isinstance(item, tuple | list) else f"a {type(item).__name__}"
            raise DataError(f"{HOW}; item {row} is {kind}.")
        items.append(tuple(item))
    if not items:
        raise DataError("a client without items has nothing to train on.")
    try:
        inputs, labels = default_collate(items)
        inputs = tuple(inputs) if isinstance(inputs, list) else inputs
        return Samples(each(_single, inputs), _single(labels))
    except UsageError:
        raise
    except Exception as error:  # of different shapes, or no numbers: images, texts
        raise DataError(
            f"items {rows[:3].tolist()} … cannot be stacked ({str(error).splitlines()[0]}): let the dataset return "
            "tensors of one shape, for instance by its own transform."
        ) from error


def _single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def _length(dataset: Any, name: str) -> int:
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise UsageError(f"{HOW}; {name} is a {type(dataset).__name__}.")
    if not len(dataset):
        raise DataError(f"{name} has no items.")
    return len(dataset)


def _classes(dataset: Any, labels: Tensor) -> int:
    """The number of labels without reading all items; of float labels, or several, how many a sample has."""
    if labels.is_floating_point() or labels.dim() > 1:
        return labels[0].numel()
    if isinstance(listed := getattr(dataset, "classes", None), list | tuple):
        return len(listed)
    targets = getattr(dataset, "targets", None)
    tensors = getattr(dataset, "tensors", None)
    known = targets if targets is not None else tensors[-1] if tensors else None
    if known is None:
        raise UsageError("from_dataset needs classes=, the number of labels: this dataset does not say it.")
    return int(torch.as_tensor(known).max()) + 1


def _positive(classes: int) -> int:
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 1:
        raise UsageError(f"classes must be a whole number, 1 or more, found {classes!r}")
    return classes


def _shape(first: Samples, transform: Callable[[Any], Any] | None) -> tuple[int, ...]:
    """Of one transformed input; of the first tensor where there are several."""
    inputs = first.inputs if transform is None else transform(first.inputs)
    return tuple(parts(inputs)[0].shape[1:])
