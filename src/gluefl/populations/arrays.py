"""Your own arrays: inputs, labels, and the client of every sample.

From Python, or from a file: an npz, or a folder of npy files (memory-mapped, for data larger than memory),
with the arrays inputs, labels, and owners unless `partition` deals the samples out. A test set of its own
comes as test_inputs and test_labels, or as test, true for the samples that are in it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gluefl.errors import DataError, UsageError
from gluefl.populations import files
from gluefl.populations.grouped import Grouped, Selection, dealt, grouped, source
from gluefl.populations.inputs import each, parts
from gluefl.populations.labels import count_classes

HOW = "np.savez(path, inputs=…, labels=…, owners=…), or inputs.npy, labels.npy and owners.npy in a folder"
NAMES = ("inputs", "labels", "owners", "test", "test_inputs", "test_labels")
Arrays = ArrayLike | Mapping[str, ArrayLike] | tuple[ArrayLike, ...]
DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")  # torch has them too


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    inputs: Arrays | None = None,
    labels: ArrayLike | None = None,
    owners: ArrayLike | None = None,
    test: ArrayLike | None = None,
    test_inputs: Arrays | None = None,
    test_labels: ArrayLike | None = None,
    clients: int | None = None,
    seed: int = 0,
    min_samples: int = 22,
    held_out: str | None = None,
    test_fraction: float = 0.1,
    classes: int | None = None,
    channels: int = 1,
    channels_last: bool = False,
    tokens: bool = False,
    partition: str | None = None,
    alpha: float = 0.5,
    shards_per_client: int = 2,
) -> Grouped:
    """`load(inputs=x, labels=y, owners=user)`, or `load("cifar.npz", partition="dirichlet", clients=100)`.

    Images are (M, H, W) or (M, C, H, W), bytes or floats; (M, H, W, C) with `channels_last`. Whole numbers
    that are words, not pixels, need `tokens=True`. A dict or tuple of arrays is given to the model as keyword or
    positional arguments, without normalisation. Labels may be floats, and several per sample.
    """
    given = (inputs, labels, owners, test, test_inputs, test_labels)
    named: dict[str, Any] = {
        name: each(np.asanyarray, value) if name.endswith("inputs") else np.asanyarray(value)
        for name, value in zip(NAMES, given)
        if value is not None
    }
    where: Path | str = "the arrays"
    if not named:
        where = files.find(path, "arrays", HOW)
        named = _read_folder(where) if where.is_dir() else files.read_npz(where, NAMES[:2])
    if missing := [name for name in NAMES[:2] if name not in named]:
        raise DataError(f"{where}: {' and '.join(missing)} missing. {HOW}")
    for name in ("labels", "test_labels", "owners", "test"):
        shape = named[name].shape if name in named else (0,)
        if not shape or (len(shape) > 1 and not name.endswith("labels")):
            raise DataError(f"{where}: {name} have the shape {shape}; needed: one entry for each sample")
    if ("owners" in named) == (partition is not None):
        raise UsageError(f"{where}: give either owners, the client of every sample, or partition = a scheme")
    apart = "test_inputs" in named
    named = _with_test_set(named, where) if apart else named
    x, y = named["inputs"], named["labels"]
    x = each(lambda array: np.moveaxis(array, -1, 1) if channels_last and array.ndim == 4 else array, x)
    who, held = named.get("owners", np.zeros(len(y), np.int32)), named.get("test", np.zeros(len(y), bool))
    _check(x, y, who, held, where)
    classes = count_classes(y, tokens) if classes is None else classes
    data = source(x, y, who, held.astype(bool), test_is_owned=not apart)
    if partition is not None:
        data, clients = dealt(data, partition, clients, seed, alpha, shards_per_client), None
    return grouped(
        data,
        where,
        Selection(
            clients=clients,
            seed=seed,
            min_samples=1 if partition is not None else min_samples,
            held_out=held_out or ("official" if held.any() else "samples"),
            test_fraction=test_fraction,
        ),
        classes=classes,
        channels=channels,
        tokens=tokens,
    )


def _read_folder(folder: Path) -> dict[str, NDArray[Any]]:
    try:
        present = [name for name in NAMES if (folder / f"{name}.npy").exists()]
        return {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in present}
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{folder}: holds an npy file that cannot be read ({error})") from error


def _with_test_set(named: dict[str, NDArray[Any]], where: object) -> dict[str, NDArray[Any]]:
    """Both sets in one array, with the mask that tells them apart."""
    if "test_labels" not in named or "test" in named:
        raise DataError(f"{where}: a test set is test_inputs with test_labels, or the mask test, not both")
    sizes = [len(named["labels"]), len(named["test_labels"])]
    owners = named.get("owners", np.zeros(sizes[0], np.int32))
    try:
        return {
            "inputs": each(lambda *both: np.concatenate(both), named["inputs"], named["test_inputs"]),
            "labels": np.concatenate([named["labels"], named["test_labels"]]),
            "owners": np.concatenate([owners, np.repeat(owners[:1], sizes[1])]),  # placeholders
            "test": np.repeat([False, True], sizes),
        }
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(f"{where}: training and test arrays do not fit together ({error})") from error


def _check(inputs: Any, labels: NDArray[Any], owners: NDArray[Any], test: NDArray[Any], where: object) -> None:
    several = isinstance(inputs, Mapping | tuple)
    if several and (not inputs or (isinstance(inputs, Mapping) and not all(isinstance(key, str) for key in inputs))):
        raise DataError(f"{where}: several inputs need names of arguments, or places in a tuple, at least one")
    for array in parts(inputs):
        lengths = [len(one) if one.ndim else 0 for one in (array, labels, owners, test)]
        if len(set(lengths)) != 1 or not lengths[0]:
            raise DataError(f"{where}: inputs, labels, owners and test have {lengths} entries: they must be as many")
        _check_array(array, 1 if several else 2, where)


def _check_array(inputs: NDArray[Any], least: int, where: object) -> None:
    known = inputs.dtype.name in DTYPES or (least == 1 and inputs.dtype.name == "bool")
    if inputs.ndim < least or not known or not inputs.dtype.isnative:
        raise DataError(
            f"{where}: inputs are {inputs.dtype} {inputs.shape}; needed: (samples, …) of {', '.join(DTYPES)}"
        )
    in_memory = not isinstance(inputs, np.memmap)
    if in_memory and inputs.dtype.kind == "f" and not np.isfinite(inputs).all():
        row = int(np.flatnonzero(~np.isfinite(inputs).reshape(len(inputs), -1).all(axis=1))[0])
        raise DataError(f"{where}: sample {row} holds numbers that are not finite (NaN or infinity)")
