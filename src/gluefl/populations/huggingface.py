"""A Hugging Face dataset, or a flwr-datasets partitioner, as a population. Neither library is imported unless
a dataset is asked for by its name; the objects themselves are only asked for rows."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gluefl.errors import DataError, UsageError, pip_install
from gluefl.populations import files
from gluefl.populations.grouped import Grouped, Selection, dealt, grouped, source

SAVED = ("dataset_info.json", "dataset_dict.json")  # what save_to_disk leaves behind


def load(
    dataset: Any = None,
    *,
    partitioner: Any = None,
    test_dataset: Any = None,
    split: str = "train",
    test_split: str | None = None,
    input_column: str = "image",
    label_column: str = "label",
    owner_column: str | None = None,
    clients: int | None = None,
    seed: int = 0,
    min_samples: int = 22,
    held_out: str | None = None,
    test_fraction: float = 0.1,
    channels: int | None = None,
    image_size: int | None = None,
    tokens: bool = False,
    partition: str | None = None,
    alpha: float = 0.5,
    shards_per_client: int = 2,
    skip_broken: bool = False,
) -> Grouped:
    """`load("flwrlabs/femnist", label_column="character", owner_column="writer_id")`, or
    `load(partitioner=fds.partitioners["train"], test_dataset=fds.load_split("test"))`.

    `dataset` is a Dataset, a DatasetDict, the name of one, or a folder written by `save_to_disk`. Its clients
    are the values of `owner_column`, or are made by `partition`; with a partitioner, its partitions.
    """
    _check_who_owns(dataset, partitioner, owner_column, partition)
    if test_split is not None and (partitioner is not None or test_dataset is not None):
        raise UsageError("population 'huggingface': test_split is of a dataset with splits; give test_dataset alone")
    if channels is not None:
        files.check_channels(channels)
    parts: list[tuple[int | None, Any]]  # with the number of a partition
    if partitioner is not None:
        if not hasattr(partitioner, "load_partition"):
            raise UsageError(f"population 'huggingface': partitioner is an object of Flower; found {partitioner!r}")
        parts = [(i, partitioner.load_partition(i)) for i in range(partitioner.num_partitions)]
    else:
        dataset, test_dataset = _opened(dataset, split, test_split, test_dataset)
        parts = [(None, dataset)]
    read = _Read(input_column, label_column, owner_column, channels, image_size, files.Broken(skip_broken))
    for number, rows in parts:
        read.part(rows, number, official=False)
    if test_dataset is not None:
        read.part(test_dataset, None, official=True)
    if not read.labels:
        raise DataError(f"the dataset holds no readable sample ({read.broken.count} broken)")
    names, numbers = _numbered(read.labels, parts[0][1], label_column)
    ids, official = read.ids(), np.array(read.official)
    data = source(np.stack(read.inputs), numbers, ids, official, read.broken.count, test_is_owned=False)
    if partition is not None:
        data, clients = dealt(data, partition, clients, seed, alpha, shards_per_client), None
    return grouped(
        data,
        "the dataset",
        Selection(
            clients=clients,
            seed=seed,
            min_samples=1 if partition is not None else min_samples,
            held_out=held_out or ("official" if data.official.any() else "samples"),
            test_fraction=test_fraction,
        ),
        classes=len(names),
        channels=channels or 1,
        tokens=tokens,
        label_names=names,
    )


def _check_who_owns(dataset: Any, partitioner: Any, owner_column: str | None, partition: str | None) -> None:
    """Exactly one thing says who owns a row: a partitioner, a column or a scheme."""
    if (dataset is None) == (partitioner is None):
        raise UsageError("population 'huggingface' needs dataset = a name or object, or a partitioner, not both")
    if partitioner is None and (owner_column is None) == (partition is None):
        raise UsageError(
            "population 'huggingface' needs owner_column = who owns a row, or partition = a scheme, not both"
        )
    for option, value in (("owner_column", owner_column), ("partition", partition)):
        if partitioner is not None and value is not None:
            raise UsageError(
                f"population 'huggingface': found {option} = {value!r} beside a partitioner, whose partitions are the "
                f"clients. Leave out {option}, or give dataset instead of the partitioner"
            )


@dataclass
class _Read:
    """The samples that were read so far."""

    input_column: str
    label_column: str
    owner_column: str | None
    channels: int | None
    image_size: int | None
    broken: files.Broken
    inputs: list[NDArray[Any]] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    owners: list[Any] = field(default_factory=list)
    official: list[bool] = field(default_factory=list)

    def part(self, rows: Any, number: int | None, official: bool) -> None:
        """All rows of a partition, by its number, or of a dataset; those of an official test set have no owner."""
        before = len(self.labels)
        owner_column = None if official else self.owner_column
        needed = filter(None, (self.input_column, self.label_column, owner_column))
        for where, row in _rows(rows, number, *needed):
            try:
                array, label, owner = self._sample(row, owner_column, number)
            except (OSError, ValueError, TypeError, KeyError) as error:
                self.broken.report(where, f"{self.input_column} {error}")
                continue
            self.inputs.append(array)
            self.labels.append(label)
            self.owners.append(owner)
            self.official.append(official)
        if len(self.labels) == before:
            where = "the dataset" if number is None else f"partition '{number}'"
            self.broken.report(where, "an empty client, no sample in it")

    def ids(self) -> NDArray[Any]:
        """Who owns each row. What official rows get is a filler of the same type: text among numbers would make
        text of them all, and "10" would come before "2"."""
        official = np.array(self.official)
        owned = np.array([owner for owner, held in zip(self.owners, official) if not held])
        ids = np.zeros(len(official), owned.dtype)
        ids[~official] = owned
        return ids

    def _sample(self, row: Any, owner_column: str | None, number: int | None) -> tuple[NDArray[Any], Any, Any]:
        array = _array(row[self.input_column], self.channels, self.image_size)
        if self.inputs and array.shape != self.inputs[0].shape:
            raise ValueError(f"is {array.shape}, the first {self.inputs[0].shape}: set image_size or channels")
        label, owner = row[self.label_column], row[owner_column] if owner_column else number or 0
        if label is None or owner is None:
            raise ValueError("has no label or no owner")
        return array, label, owner


def _opened(dataset: Any, split: str, test_split: str | None, test: Any) -> tuple[Any, Any]:
    """The training rows, and the test rows if there are any."""
    if isinstance(dataset, str | os.PathLike):
        try:
            import datasets
        except ImportError:
            raise UsageError(f"opening the dataset {str(dataset)!r} needs: {pip_install('datasets')}") from None
        try:
            saved = any((Path(dataset) / name).exists() for name in SAVED)
            dataset = datasets.load_from_disk(dataset) if saved else datasets.load_dataset(dataset)
        except Exception as error:  # any error of the network, the hub or a loading script
            raise DataError(f"Hugging Face cannot open the dataset {str(dataset)!r}: {error}") from error
    if isinstance(dataset, Mapping):
        for name in filter(None, (split, test_split)):
            if name not in dataset:
                raise UsageError(f"the dataset has no split {name!r}. Known: {', '.join(dataset)}")
        return dataset[split], dataset[test_split] if test_split else test
    if test_split is not None:
        raise UsageError(f"the dataset has no splits, so no {test_split!r}: give its test set as test_dataset")
    return dataset, test


def _rows(rows: Any, number: int | None, *needed: str) -> Iterator[tuple[str, Any]]:
    for position in range(len(rows)):
        row = rows[position]
        if position == 0 and (missing := [column for column in needed if column not in row]):
            raise UsageError(f"the dataset has no column {missing[0]!r}. Known: {', '.join(row)}")
        yield f"row {position}" + ("" if number is None else f" of partition {number}"), row


def _array(value: Any, channels: int | None, image_size: int | None) -> NDArray[Any]:
    """A pillow image, encoded bytes, or anything numpy understands, channels first."""
    size = None if image_size is None else (image_size, image_size)
    if isinstance(value, Mapping):
        return files.decode_image(value["bytes"], channels or 3, size)
    if hasattr(value, "convert"):
        grey = channels == 1 or (channels is None and value.mode in ("1", "L", "I", "I;16", "F"))
        value = value.convert("L" if grey else "RGB")
        value = value if size is None else value.resize(size)
        pixels = np.asarray(value, np.uint8)
        return pixels if grey else pixels.transpose(2, 0, 1)
    array = np.asarray(value)
    if array.dtype.kind not in "iuf" or not array.size:
        raise ValueError(f"is neither an image nor numbers ({array.dtype})")
    return array


def _numbered(labels: list[Any], rows: Any, column: str) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Names and numbers of the labels: as the dataset names them, otherwise as they occur."""
    features = getattr(rows, "features", None) or {}
    names = getattr(features.get(column), "names", None)
    if all(isinstance(label, str) for label in labels):
        names = names or sorted(set(labels))
        positions = {name: number for number, name in enumerate(names)}
        if unknown := set(labels) - positions.keys():
            raise DataError(f"column {column!r}: {sorted(unknown)[0]!r} is none of its classes {', '.join(names)}")
        return tuple(names), np.array([positions[label] for label in labels], np.int64)
    try:
        numbers = np.array([_whole(label) for label in labels], np.int64)
    except (TypeError, ValueError, OverflowError) as error:  # int() of a list, of NaN, of infinity
        raise DataError(
            f"column {column!r}: labels are neither names nor whole numbers ({error}). Set label_column to one that "
            "holds classes, or make them names or whole numbers"
        ) from error
    return tuple(names or map(str, range(int(numbers.max()) + 1))), numbers


def _whole(label: Any) -> int:
    """int() alone would cut 0.7 down to 0."""
    if int(label) != label:
        raise ValueError(f"found {label}")
    return int(label)
