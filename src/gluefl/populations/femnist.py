"""FEMNIST (Caldas et al., 2018): 28×28 grey characters, 62 labels, by writer.

Reads what LEAF's preprocess.sh leaves behind (train/*.json and test/*.json, or all_data/*.json), or the
parquet files of flwrlabs/femnist on Hugging Face (columns image, writer_id, character)."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gluefl.errors import DataError, MissingExtra
from gluefl.populations import files
from gluefl.populations.grouped import Grouped, Selection, Source, cached_source, grouped, source

HOW = (
    "hf download flwrlabs/femnist --repo-type dataset --local-dir femnist, and path = that folder; or in "
    "LEAF's data/femnist: ./preprocess.sh -s niid --sf 1.0 -k 0 -t sample, and path = its folder data"
)
LABELS = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
SIDE = 28

Part = tuple[str, NDArray[np.uint8], NDArray[np.int64], bool]  # writer, images, labels, in the test set


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    clients: int | None = None,
    seed: int = 0,
    min_samples: int = 22,
    held_out: str | None = None,
    test_fraction: float = 0.1,
    channels: int = 1,
    skip_broken: bool = False,
    progress: files.Progress | None = None,
) -> Grouped:
    """`load("femnist", clients=2800, channels=3)`, the paper's setting.

    `held_out` is LEAF's own test folder where there is one ("official"), otherwise a share of every writer's
    samples ("samples").
    """
    root = files.find(path, "femnist", HOW)
    files.check_channels(channels)
    data = cached_source(
        "femnist",
        [root],
        {"skip_broken": skip_broken},
        lambda: _read(root, files.Broken(skip_broken), progress),
    )
    return grouped(
        data,
        root,
        Selection(
            clients=clients,
            seed=seed,
            min_samples=min_samples,
            held_out=held_out or ("official" if data.official.any() else "samples"),
            test_fraction=test_fraction,
        ),
        classes=len(LABELS),
        channels=channels,
        label_names=LABELS,
    )


def _read(root: Path, broken: files.Broken, progress: files.Progress | None) -> Source:
    jsons = [(file, part == "test") for part in ("train", "test") for file in _sorted(root / part, "*.json")]
    jsons = jsons or [(file, False) for file in _sorted(root / "all_data", "*.json")]
    parquets = [] if jsons else [*_sorted(root, "*.parquet"), *_sorted(root / "data", "*.parquet")]
    if not jsons and not parquets:
        raise DataError(f"{root}: holds no train/*.json, all_data/*.json or *.parquet. To get them: {HOW}")
    parts: list[Part] = []
    todo = len(jsons) + len(parquets)
    for done, (file, test) in enumerate(jsons, start=1):
        parts += _leaf(file, test, broken)
        if progress:
            progress(done, todo)
    for done, file in enumerate(parquets, start=1):
        parts += _parquet(file, broken)
        if progress:
            progress(done, todo)
    if not parts:
        raise DataError(f"{root}: no sample could be read ({broken.count} broken)")
    sizes = [len(labels) for _, _, labels, _ in parts]
    return source(
        np.concatenate([images for _, images, _, _ in parts]),
        np.concatenate([labels for _, _, labels, _ in parts]),
        np.repeat([writer for writer, _, _, _ in parts], sizes),
        np.repeat([test for _, _, _, test in parts], sizes),
        broken.count,
    )


def _leaf(file: Path, test: bool, broken: files.Broken) -> Iterator[Part]:
    """LEAF: {"users": […], "user_data": {user: {"x": [784 numbers in 0…1, …], "y": [label, …]}}}."""
    try:
        content = json.loads(file.read_bytes())
        users = [(user, content["user_data"][user]) for user in content["users"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        broken.report(file, f"not a LEAF JSON file ({type(error).__name__}: {error})")
        return
    for user, data in users:
        where = f"{file}, user {user}"
        try:
            pixels, labels = np.asarray(data["x"], np.float32), np.asarray(data["y"], np.int64)
            if labels.ndim != 1:
                raise ValueError(f"y has the shape {labels.shape}, not one label for each image")
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            broken.report(where, f"x and y are not arrays of numbers ({error})")
            continue
        if not len(labels):
            broken.report(where, "has no samples")
        elif pixels.shape != (len(labels), SIDE * SIDE) or not (np.abs(pixels - 0.5) <= 0.5).all():
            broken.report(where, f"x is {pixels.shape}, not {len(labels)} images of 784 numbers in 0…1")
        else:
            images = np.rint(pixels * 255).astype(np.uint8).reshape(-1, SIDE, SIDE)
            good = _in_range(labels, where, broken)
            yield str(user), images[good], labels[good], test


def _parquet(file: Path, broken: files.Broken) -> Iterator[Part]:
    """Rows of {"image": {"bytes": PNG}, "writer_id": str, "character": label}, a batch at a time."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra("data", "reading parquet files") from None
    try:
        table = pyarrow.parquet.ParquetFile(file)
        batches = table.iter_batches(batch_size=4096, columns=["image", "writer_id", "character"])
        for batch in batches:
            yield from _batch(file, batch.to_pydict(), broken)
    except (OSError, pyarrow.ArrowException, KeyError) as error:
        broken.report(file, f"not a parquet file with image, writer_id and character ({error})")


def _batch(file: Path, columns: dict[str, list[object]], broken: files.Broken) -> Iterator[Part]:
    images: dict[str, list[NDArray[np.uint8]]] = {}
    labels: dict[str, list[np.int64]] = {}
    for image, writer, label in zip(columns["image"], columns["writer_id"], columns["character"]):
        where = f"{file}, writer {writer}"
        try:
            pixels = files.decode_image(image["bytes"], channels=1)  # type: ignore[index]
            if pixels.shape != (SIDE, SIDE):
                raise ValueError(f"is {pixels.shape}, not {SIDE}×{SIDE}")
            number = np.int64(-1 if label is None else int(label))  # type: ignore[call-overload]
        except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
            broken.report(where, f"an image or its label does not decode ({error})")
            continue
        images.setdefault(str(writer), []).append(pixels)
        labels.setdefault(str(writer), []).append(number)
    for writer, written in images.items():
        numbers = np.array(labels[writer], np.int64)
        good = _in_range(numbers, f"{file}, writer {writer}", broken)
        yield writer, np.stack(written)[good], numbers[good], False


def _in_range(labels: NDArray[np.int64], where: str, broken: files.Broken) -> NDArray[np.bool_]:
    good = (labels >= 0) & (labels < len(LABELS))
    for label in labels[~good]:
        broken.report(where, f"the label {label} is outside 0…{len(LABELS) - 1}")
    return good


def _sorted(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern))
