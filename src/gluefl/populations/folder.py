"""Your own images: one folder per client, in it one folder per label.

CLIENT/LABEL/image.png with a share held out, or train/CLIENT/LABEL/image.png and test/LABEL/image.png. With
`partition`, images that have no clients: LABEL/image.png, or that under train/ and under test/."""

import dataclasses
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gluefl.errors import DataError, UsageError
from gluefl.populations import files
from gluefl.populations import partition as schemes
from gluefl.populations.grouped import Grouped, Selection, Source, cached_source, dealt, grouped, source

HOW = "put one folder per client at the path, in it one folder per label with the images"
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
NO_OWNER = ""  # of the images of test/


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    clients: int | None = None,
    seed: int = 0,
    min_samples: int = 22,
    held_out: str | None = None,
    test_fraction: float = 0.1,
    channels: int = 3,
    image_size: int | None = None,
    partition: str | None = None,
    alpha: float = 0.5,
    shards_per_client: int = 2,
    skip_broken: bool = False,
    progress: files.Progress | None = None,
) -> Grouped:
    """`load("photos", image_size=64)`, or `load("cifar", partition="dirichlet", clients=100, alpha=0.3)`."""
    root = files.find(path, "folder", HOW)
    files.check_channels(channels)
    if image_size is not None and image_size < 1:
        raise UsageError(f"image_size must be 1 or more, found {image_size}")
    if partition is not None and partition not in schemes.KINDS:
        raise UsageError(f"unknown partition {partition!r}. Known: {', '.join(schemes.KINDS)}")
    empty = files.Broken(skip_broken)
    images = _list(root, partition is None, empty)
    labels = tuple(sorted({label for _, label, _ in images}))
    options = {"channels": channels, "image_size": image_size, "skip_broken": skip_broken}
    options["by_client"] = partition is None
    data = cached_source(
        "folder",
        [root],
        options,
        lambda: _read(root, images, labels, channels, image_size, files.Broken(skip_broken), progress),
    )
    data = dataclasses.replace(data, skipped=data.skipped + empty.count)
    if partition is not None:
        data, clients = dealt(data, partition, clients, seed, alpha, shards_per_client), None
    return grouped(
        data,
        root,
        Selection(
            clients=clients,
            seed=seed,
            min_samples=1 if partition is not None else min_samples,
            held_out=held_out or ("official" if data.official.any() else "samples"),
            test_fraction=test_fraction,
        ),
        classes=len(labels),
        channels=channels,
        label_names=labels,
    )


def _list(root: Path, by_client: bool, broken: files.Broken) -> list[tuple[str, str, Path]]:
    """Client, label and file of every image; the test images have no owner."""
    split = (root / "train").is_dir() and (root / "test").is_dir()
    top = root / "train" if split else root
    images = []
    for client in _folders(top) if by_client else [top]:
        mine = [(client.name, label.name, file) for label in _folders(client) for file in _images(label)]
        if not mine:
            broken.report(client, f"an empty client, no LABEL/image in it; {HOW}")
        images += mine
    if split:
        images += [(NO_OWNER, label.name, file) for label in _folders(root / "test") for file in _images(label)]
    if not images:
        raise DataError(f"{root}: holds no images; {HOW}")
    return images


def _read(
    root: Path,
    images: list[tuple[str, str, Path]],
    labels: tuple[str, ...],
    channels: int,
    image_size: int | None,
    broken: files.Broken,
    progress: files.Progress | None,
) -> Source:
    size = None if image_size is None else (image_size, image_size)
    pixels: list[NDArray[np.uint8]] = []
    kept = []
    for done, image in enumerate(images, start=1):
        try:
            array = files.decode_image(image[2], channels, size)
            if pixels and array.shape != pixels[0].shape:
                raise ValueError(f"is {array.shape}, the first image {pixels[0].shape}: set image_size")
            pixels.append(array)
            kept.append(image)
        except (OSError, ValueError) as error:
            broken.report(image[2], f"does not decode as an image ({error})")
        if progress and (done % 256 == 0 or done == len(images)):
            progress(done, len(images))
    if not kept:
        raise DataError(f"{root}: no image could be read ({broken.count} broken)")
    position = {label: number for number, label in enumerate(labels)}
    return source(
        np.stack(pixels),
        np.array([position[label] for _, label, _ in kept]),
        np.array([client for client, _, _ in kept]),
        np.array([client == NO_OWNER for client, _, _ in kept]),
        broken.count,
        test_is_owned=False,
    )


def _folders(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _images(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.suffix.lower() in SUFFIXES)
