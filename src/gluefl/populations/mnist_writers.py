"""MNIST by the person who wrote it: 28×28 grey digits, with QMNIST's writer ids (Yadav and Bottou, 2019).

Reads an npz file with x_train, y_train, writer_train, x_test, y_test, writer_test, or a folder with MNIST's
four IDX files (gzipped or not) and QMNIST's two label files, whose third column is the writer."""

import gzip
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gluefl.errors import DataError
from gluefl.populations import files
from gluefl.populations.grouped import Grouped, Selection, grouped, skewed, source

MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
QMNIST = "https://raw.githubusercontent.com/facebookresearch/qmnist/master"
HOW = (
    f"curl --remote-name-all {MNIST}/{{train,t10k}}-{{images-idx3,labels-idx1}}-ubyte.gz "
    f"{QMNIST}/qmnist-{{train,test}}-labels-idx2-int.gz, and path = their folder"
)
NPZ = ("x_train", "y_train", "writer_train", "x_test", "y_test", "writer_test")
DTYPES: dict[int, np.dtype[Any]] = {
    8: np.dtype(np.uint8),
    12: np.dtype(">i4"),
}  # IDX codes


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    clients: int | None = None,
    seed: int = 0,
    min_samples: int = 22,
    held_out: str = "samples",
    test_fraction: float = 0.1,
    skew: float | None = None,
    skew_keep: float = 0.4,
    channels: int = 1,
) -> Grouped:
    """`load("mnist_by_writer.npz", skew=0.3)`: the 679 writers of both of MNIST's sets.

    `held_out="official"` has only the writers of the 60,000 images, and MNIST's own 10,000 to test on. `skew`
    is the Dirichlet parameter of a label skew within each writer, who keeps `skew_keep` of the images.
    """
    root = files.find(path, "mnist_writers", HOW)
    files.check_channels(channels)
    data = files.read_npz(root, NPZ) if root.is_file() else _read_idx_folder(root)
    for part in ("train", "test"):
        shapes = [data[f"{name}_{part}"].shape for name in ("x", "y", "writer")]
        samples = shapes[0][:1]
        if shapes != [(*samples, 28, 28), samples, samples]:
            raise DataError(
                f"{root}: the {part} images, labels and writers do not fit together: they have the shapes {shapes}; "
                "needed: (samples, 28, 28), (samples,) and (samples,)"
            )
    both = {name: np.concatenate([data[f"{name}_train"], data[f"{name}_test"]]) for name in ("x", "y", "writer")}
    official = np.arange(len(both["y"])) >= len(data["y_train"])
    population = grouped(
        source(both["x"], both["y"], both["writer"], official),
        root,
        Selection(
            clients=clients,
            seed=seed,
            min_samples=min_samples,
            held_out=held_out,
            test_fraction=test_fraction,
        ),
        classes=10,
        channels=channels,
    )
    return population if skew is None else skewed(population, skew, skew_keep, seed)


def _read_idx_folder(root: Path) -> dict[str, NDArray[Any]]:
    data = {}
    for part, mnist in (("train", "train"), ("test", "t10k")):
        data[f"x_{part}"] = read_idx(_either(root / f"{mnist}-images-idx3-ubyte"))
        data[f"y_{part}"] = read_idx(_either(root / f"{mnist}-labels-idx1-ubyte"))
        extended = _either(root / f"qmnist-{part}-labels-idx2-int")
        columns = read_idx(extended)[: len(data[f"y_{part}"])]  # QMNIST's test set continues after MNIST's
        if columns.ndim != 2 or columns.shape[1] < 3 or not np.array_equal(columns[:, 0], data[f"y_{part}"]):
            raise DataError(f"{extended}: its labels are not those of MNIST's {part} set, in MNIST's order")
        data[f"writer_{part}"] = columns[:, 2]
    return data


def read_idx(path: Path) -> NDArray[Any]:
    """An IDX file: two zero bytes, type, number of dimensions, the dimensions, the values, big-endian."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        dtype, dimensions = DTYPES[raw[2]], raw[3]
        if not dimensions:
            raise ValueError("it has no dimensions")
        shape = np.frombuffer(raw, ">i4", dimensions, offset=4)
        values = np.frombuffer(raw, dtype, offset=4 + 4 * dimensions).reshape(shape)
    except (OSError, EOFError, ValueError, KeyError, IndexError, zlib.error) as error:
        raise DataError(f"{path}: not a whole IDX file ({error})") from error
    return values.astype(dtype.newbyteorder("="))


def _either(path: Path) -> Path:
    zipped = path.with_name(path.name + ".gz")
    return zipped if zipped.exists() else files.need(path, "mnist_writers", HOW)
