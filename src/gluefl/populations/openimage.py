"""OpenImage in FedScale's form (Lai et al., 2022): photographs by the person who uploaded them, 596 labels.

Reads client_data_mapping/train.csv and test.csv (client_id, sample_path, label_name, label_id) and the images
under train/ and test/. Images are decoded when a client is asked for: the whole would not fit in memory."""

import csv
import functools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gluefl.errors import DataError, UsageError
from gluefl.populations import Samples, files, inline
from gluefl.populations.cache import cached
from gluefl.populations.grouped import enough, first
from gluefl.populations.moments import standardised
from gluefl.randomness import stream

HOW = (
    "curl -O https://fedscale.eecs.umich.edu/dataset/openImage.tar.gz && tar xzf openImage.tar.gz (66 GB), "
    "and path = the folder with client_data_mapping, train and test"
)
COLUMNS = ("client_id", "sample_path", "label_id")
# Of the raw bytes. FedScale's figures (those of CIFAR-10), as in the paper's runs.
MEAN = (125.3, 123.0, 113.9)
STD = (51.6, 50.8, 51.3)


@dataclass(frozen=True, eq=False)
class OpenImage:
    """Paths and labels in arrays; pixels only on demand."""

    root: Path
    paths: NDArray[np.bytes_]  # of the training images, client after client
    labels: NDArray[Any]
    begins: NDArray[np.int64]
    sizes: NDArray[np.int64]
    test_paths: NDArray[np.bytes_]
    test_labels: NDArray[Any]
    classes: int
    image_size: int
    names: tuple[str, ...]
    skip_broken: bool
    broken_rows: int  # lines of the maps
    broken_images: set[str] = field(default_factory=set)  # grows as images are decoded

    @property
    def clients(self) -> int:
        """N, the number of clients."""
        return len(self.sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Three channels of the size asked for."""
        return (3, self.image_size, self.image_size)

    def __repr__(self) -> str:
        return inline(self, int(self.sizes.sum()))

    @property
    def skipped(self) -> int:
        """Broken lines and images met so far."""
        return self.broken_rows + len(self.broken_images)

    def size(self, client: int) -> int:
        """How many images the map gives a client."""
        return int(self.sizes[client])

    def train(self, client: int) -> Samples:
        """The images of one client, decoded now."""
        mine = slice(self.begins[client], self.begins[client] + self.sizes[client])
        return self._decoded(self.root / "train", self.paths[mine], self.labels[mine])

    def test(self) -> Samples:
        """The test images, decoded once and kept."""
        return self._test

    def transform(self, inputs: Tensor) -> Tensor:
        """Normalised float32."""
        return standardised(inputs.float(), MEAN, STD, axis=-3)

    @functools.cached_property
    def _test(self) -> Samples:
        return self._decoded(self.root / "test", self.test_paths, self.test_labels)

    def _decoded(self, folder: Path, paths: NDArray[np.bytes_], labels: NDArray[Any]) -> Samples:
        """A broken image is replaced by the last good one: a client must hold as many as `size` says."""
        inputs = np.empty((len(paths), *self.shape), np.uint8)
        chosen = np.arange(len(paths))
        for row, name in enumerate(paths):
            file = folder / os.fsdecode(bytes(name))
            try:
                inputs[row] = files.decode_image(file, 3, (self.image_size, self.image_size))
            except (OSError, ValueError) as error:
                if not self.skip_broken:
                    files.Broken(skip=False).report(file, f"does not decode as an image ({error})")
                self.broken_images.add(str(file))
                chosen[row] = -1
        good = np.flatnonzero(chosen >= 0)
        if not len(good):
            raise DataError(f"{folder}: none of {len(paths)} images decodes, the first is {paths[0]!r}")
        chosen = good[np.maximum(np.searchsorted(good, np.arange(len(paths)), side="right") - 1, 0)]
        inputs = inputs if len(good) == len(paths) else inputs[chosen]
        return Samples(torch.from_numpy(inputs), torch.from_numpy(labels[chosen].astype(np.int64)))


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    clients: int | None = None,
    seed: int = 0,
    min_samples: int = 22,
    classes: int = 596,
    image_size: int = 256,
    test_samples: int = 2000,
    skip_broken: bool = False,
) -> OpenImage:
    """`load("open_images", image_size=128)`: evaluated on `test_samples` images, drawn from the test map."""
    root = files.find(path, "openimage", HOW)
    if min(classes, image_size, test_samples) < 1:
        raise UsageError("classes, image_size and test_samples must be 1 or more")
    maps = [files.need(root / "client_data_mapping" / f"{part}.csv", "openimage", HOW) for part in ("train", "test")]
    options = {"classes": classes, "skip_broken": skip_broken}
    index = cached("openimage", maps, options, lambda: _read(maps, classes, files.Broken(skip_broken)))
    kept = first(enough(index["sizes"], min_samples), clients, f"{maps[0]} with at least {min_samples} images")
    begins = (np.cumsum(index["sizes"]) - index["sizes"])[kept]
    total = len(index["test_labels"])
    test = np.sort(stream(seed, "held out").permutation(total)[:test_samples])
    files.need(root / "train" / os.fsdecode(bytes(index["paths"][begins[0]])), "openimage", HOW)
    files.need(root / "test" / os.fsdecode(bytes(index["test_paths"][test[0]])), "openimage", HOW)
    return OpenImage(
        root=root,
        paths=index["paths"],
        labels=index["labels"],
        begins=begins,
        sizes=index["sizes"][kept],
        test_paths=index["test_paths"][test],
        test_labels=index["test_labels"][test],
        classes=classes,
        image_size=image_size,
        names=tuple(index["names"][kept].tolist()),
        skip_broken=skip_broken,
        broken_rows=int(index["skipped"]),
    )


def _read(maps: list[Path], classes: int, broken: files.Broken) -> dict[str, NDArray[Any]]:
    ids, paths, labels = _read_map(maps[0], classes, broken)
    _, test_paths, test_labels = _read_map(maps[1], classes, broken)
    names, owners = np.unique(ids, return_inverse=True)
    order = np.argsort(owners, kind="stable")
    return {
        "names": names.astype(np.str_),
        "sizes": np.bincount(owners),
        "paths": paths[order],
        "labels": labels[order],
        "test_paths": test_paths,
        "test_labels": test_labels,
        "skipped": np.array(broken.count),
    }


def _read_map(
    file: Path, classes: int, broken: files.Broken
) -> tuple[NDArray[Any], NDArray[np.bytes_], NDArray[np.int32]]:
    ids, paths, labels = [], [], []
    with open(file, newline="", encoding="utf-8", errors="surrogateescape") as lines:
        reader = csv.reader(lines)
        try:
            header = next(reader, [])
            if missing := [name for name in COLUMNS if name not in header]:
                raise DataError(f"{file}: has the columns {header}, but {missing} are needed")
            who, which, what = (header.index(name) for name in COLUMNS)
            for row in reader:
                try:
                    label = int(row[what])
                    if not 0 <= label < classes:
                        raise ValueError(f"the label {label} is outside 0…{classes - 1}")
                    if not row[who] or not row[which]:
                        raise ValueError("the client or the path is empty")
                except (IndexError, ValueError) as error:
                    broken.report(f"{file}, line {reader.line_num}", error)
                    continue
                ids.append(row[who])
                paths.append(os.fsencode(row[which]))
                labels.append(label)
        except csv.Error as error:
            where = f"{file}, line {reader.line_num}"
            raise DataError(f"{where}: not a readable CSV ({error}). Repair or remove the line") from error
    if not ids:
        raise DataError(f"{file}: names no images ({broken.count} broken lines)")
    numeric = all(name.isdecimal() for name in ids[:1000])  # FedScale numbers its clients
    try:
        clients = np.array(ids, np.int64) if numeric else np.array(ids)
    except (ValueError, OverflowError):
        clients = np.array(ids)
    return clients, np.array(paths), np.array(labels, np.int32)
