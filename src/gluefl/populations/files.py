"""Opening the files of a user: where they are, how to get missing ones, what is wrong with broken ones."""

import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gluefl.errors import DataError, MissingExtra, UsageError

Progress = Callable[[int, int], None]  # items done, items in total


def find(path: str | os.PathLike[str] | None, population: str, how: str) -> Path:
    """The file or folder that a `path` option means: as given, or inside the folder GLUEFL_DATA names."""
    if path is None:
        raise UsageError(f"population {population!r} needs path = where its data lie. To get them: {how}")
    given = Path(path).expanduser()
    places = [given]
    if os.environ.get("GLUEFL_DATA"):
        places.append(Path(os.environ["GLUEFL_DATA"]).expanduser() / given)
    for place in places:
        if place.exists():
            return place
    raise DataError(f"{given} does not exist; population {population!r} reads it. To get it: {how}")


def need(path: Path, population: str, how: str) -> Path:
    """A file that the user's folder must contain."""
    if not path.exists():
        raise DataError(f"{path} is missing; population {population!r} reads it. To get it: {how}")
    return path


@dataclass
class Broken:
    """The treatment of broken samples: an error, or a count."""

    skip: bool
    count: int = 0

    def report(self, where: object, reason: object) -> None:
        """Report a broken sample; raises unless broken samples are skipped."""
        if not self.skip:
            raise DataError(f"{where}: {reason}. Repair or remove it, or set skip_broken = true")
        self.count += 1


def read_npz(path: Path, needed: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """The arrays of an npz file, with those in `needed` among them."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:  # a damaged archive raises errors of zipfile, zlib or numpy
        raise DataError(f"{path}: not a readable npz file ({error})") from error
    if missing := [name for name in needed if name not in arrays]:
        raise DataError(f"{path}: has the arrays {sorted(arrays)}, but {missing} are needed")
    return arrays


def decode_image(source: Path | bytes, channels: int, size: tuple[int, int] | None = None) -> NDArray[np.uint8]:
    """An image as (H, W) grey or (3, H, W) colour bytes, resized to `size` if it is given.

    Raises ValueError or OSError with the reason when it does not decode.
    """
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtra("data", "reading image files") from None
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            mode = "L" if channels == 1 else "RGB"
            if size is not None:
                image.draft(mode, (size[1], size[0]))  # lets libjpeg decode at a fraction of the size
            pixels = image.convert(mode)
            if size is not None and pixels.size != (size[1], size[0]):
                pixels = pixels.resize((size[1], size[0]), Image.Resampling.BILINEAR)
            array = np.asarray(pixels, np.uint8)
    except (Image.DecompressionBombError, SyntaxError) as error:  # pillow's word for a broken PNG chunk
        raise ValueError(str(error)) from error
    return array if channels == 1 else np.ascontiguousarray(array.transpose(2, 0, 1))


def check_channels(channels: int) -> None:
    """Images are grey or in colour."""
    if channels not in (1, 3):
        raise UsageError(f"channels must be 1 or 3, found {channels}")
