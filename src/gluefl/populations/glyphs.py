"""The default population: generated writers, with the letters and digits they wrote.

Nothing is downloaded and the number of clients is not limited. A writer takes the centre lines of one or two
fonts (`glyphs_atlas.npz`, drawn by tools/make_glyph_atlas.py) and distorts them into a hand of their own: slant,
size, aspect, pen, and a smooth warp for the whole hand and for each character of it. Each sample then varies a little.
62 classes, 28 x 28 grey pixels, unequal amounts, skewed labels, as in FEMNIST.

The centre lines are those of fonts carried by matplotlib: DejaVu (Bitstream Vera licence), STIX (SIL Open
Font License 1.1) and Computer Modern (BaKoMa Fonts Licence). The atlas contains their names, and no font.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache, partial
from importlib.resources import files
from math import log
from threading import Lock
from typing import Any

import numpy as np
import torch
from cachetools import LRUCache
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import grid_sample, interpolate

from gluefl.errors import UsageError
from gluefl.populations import Samples, inline
from gluefl.randomness import stream

CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
SIDE = 28  # pixels of an image
FEWEST = 22  # samples of a client, as the paper keeps only FEMNIST writers with at least 22
MOST = 500
SPREAD = 0.35  # standard deviation of log(samples), as of FEMNIST's writers
TEST_LINE = 10  # test samples by one writer: many hands matter more than many letters by each
CAPITAL, STEP = 26.0, 1 / 32  # of the atlas: pixels of a capital H, pixels per grey level
REACH = 255 * STEP  # the atlas knows the distance to a centre line up to here
HEIGHT = 20.0  # pixels, a capital H by a writer of middle size
KNOTS = 4  # a warp is this many displacements a side, smoothly joined
MEAN, DEVIATION = 0.15, 0.28  # of the pixels, measured once over some writers
BLOCK = 4096  # clients whose sizes are drawn together
BLOCKS = 1024  # blocks of sizes that are kept, 16 MB

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Atlas:
    """The centre lines of all characters in all fonts."""

    nearness: Tensor  # (fonts, 62, 48, 48) float32, REACH minus the distance to the line in atlas pixels
    extent: Floats  # (fonts, 62) the longer side of the ink
    middle: Floats  # (fonts, 62) the row of its middle, in grid_sample's [-1, 1]
    fonts: tuple[str, ...]

    @classmethod
    def shipped(cls) -> "Atlas":
        """Read the atlas of the package."""
        with files("gluefl.populations").joinpath("glyphs_atlas.npz").open("rb") as file:
            stored = np.load(file, allow_pickle=False)
            grey, fonts = stored["glyphs"], tuple(str(name) for name in stored["fonts"])
        nearness = np.float32(STEP) * grey.astype(np.float32)
        side = grey.shape[-1]
        inked = nearness > REACH - 1
        rows, columns = inked.any(axis=3), inked.any(axis=2)
        top, foot = rows.argmax(axis=2), side - rows[..., ::-1].argmax(axis=2)
        left, right = columns.argmax(axis=2), side - columns[..., ::-1].argmax(axis=2)
        extent = np.maximum(foot - top, right - left).astype(np.float32)
        middle = ((top + foot) / side - 1).astype(np.float32)
        return cls(torch.from_numpy(nearness), extent, middle, fonts)

    @property
    def side(self) -> int:
        """Pixels a side."""
        return self.nearness.shape[-1]


@dataclass(frozen=True)
class Hand:
    """What all samples of one writer have in common."""

    font: NDArray[np.int64]  # (62,) which font each character takes after
    slant: float
    rotation: float  # radians
    size: float
    aspect: float
    fit: float  # 0: letters keep their sizes, 1: each fills its box, and c is C
    pen: float  # half its width, pixels
    soft: float  # pixels from paper to ink
    ink: float  # grey level of full ink
    noise: float
    warp: Floats  # (62, 2, KNOTS, KNOTS) pixels, the hand's own plus each character's


LIMITS = {  # of the knobs: whole numbers, unless the highest is a float
    "clients": (1, 2**63 - 1), "seed": (0, 2**63 - 1), "label_skew": (1e-9, 1e3), "difficulty": (0, 3.0),
    "mislabelled": (0, 1.0), "median_samples": (FEWEST, MOST), "test_samples": (1, 10**6), "cache_mb": (0, 10**9),
}  # fmt: skip


def _fits(value: object, low: float, high: float) -> bool:
    kinds = (int, float) if isinstance(high, float) else (int,)
    return isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high


@dataclass(frozen=True)
class Glyphs:
    """Generated writers: `Glyphs(clients=100).train(7)`. Client i depends on (seed, i) and the knobs only.

    A client is generated at its first use, in about 8 ms on one core, and kept while the clients used
    last fit into `cache_mb`: all clients of the default population take about 510 MB.
    """

    clients: int = 2800  # N
    seed: int = 1
    label_skew: float = 0.5  # 1/α of the Dirichlet distribution of labels: near 0 all clients are alike
    difficulty: float = 0.96  # scales every distortion, jitter and noise; 0 is clean print
    mislabelled: float = 0.095  # share of the samples, in training and test, that show any other character
    median_samples: int = 215
    test_samples: int = 10_044
    cache_mb: int = 640
    cache: LRUCache[int, Samples] = field(init=False, repr=False, compare=False)  # by client; -1: the test samples
    lock: Any = field(init=False, repr=False, compare=False)  # several threads may produce samples

    def __post_init__(self) -> None:
        knobs = [(name, getattr(self, name), *limits) for name, limits in LIMITS.items()]
        wrong = [f"{name} = {x}, needed {low} to {high:g}" for name, x, low, high in knobs if not _fits(x, low, high)]
        if wrong:
            raise UsageError("the population glyphs cannot be made: " + "; ".join(wrong))
        cache = LRUCache[int, Samples](self.cache_mb * 2**20, getsizeof=lambda samples: samples.nbytes)
        object.__setattr__(self, "cache", cache)
        object.__setattr__(self, "lock", Lock())

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """A pickled copy has an empty cache."""
        return partial(type(self), **{f.name: getattr(self, f.name) for f in fields(self) if f.init}), ()

    @cached_property
    def atlas(self) -> Atlas:
        """The centre lines, read once."""
        return Atlas.shipped()

    @cached_property
    def _sizes(self) -> Callable[[int], NDArray[np.int32]]:
        return lru_cache(BLOCKS)(partial(sizes, self.seed, self.median_samples))

    @property
    def classes(self) -> int:
        """The characters 0-9, A-Z, a-z, in this order."""
        return len(CHARACTERS)

    @property
    def shape(self) -> tuple[int, ...]:
        """One grey picture."""
        return (1, SIDE, SIDE)

    def size(self, client: int) -> int:
        """The number of samples of a client: a table look-up."""
        if not 0 <= client < self.clients:
            raise UsageError(f"client {client} of glyphs: the clients are 0 to {self.clients - 1}")
        return int(self._sizes(client // BLOCK)[client % BLOCK])

    def train(self, client: int) -> Samples:
        """The samples of one client, uint8 of (size, 28, 28)."""
        count = self.size(client)

        def make() -> Samples:
            rng = stream(self.seed, "glyphs client", client)
            labels = draw_labels(rng, count, self.label_skew)
            shown = shown_instead(stream(self.seed, "glyphs mislabelled", client), labels, self.mislabelled)
            return Samples(self._write(rng, shown), torch.from_numpy(labels))

        return self._cached(client, make)

    def test(self) -> Samples:
        """The same number of samples of every class, by writers who are not clients, ten samples each."""
        return self._cached(-1, self._make_test)

    def transform(self, inputs: Tensor) -> Tensor:
        """Grey levels to float32 of about mean 0 and deviation 1, with a channel: (n, 1, 28, 28)."""
        return inputs.unsqueeze(-3).float().div_(255 * DEVIATION).sub_(MEAN / DEVIATION)

    def __repr__(self) -> str:
        few = self.clients <= BLOCK  # their sizes are one table
        return inline(self, sum(map(self.size, range(self.clients))) if few else None)

    def _cached(self, key: int, make: Callable[[], Samples]) -> Samples:
        with self.lock:
            if key in self.cache:
                return self.cache[key]
        samples = make()  # outside the lock: two threads may both make the same samples
        with self.lock, suppress(ValueError):  # larger than the cache
            self.cache[key] = samples
        return samples

    def _make_test(self) -> Samples:
        count = self.test_samples
        labels = stream(self.seed, "glyphs test labels").permutation(np.arange(count) % self.classes)
        shown = shown_instead(stream(self.seed, "glyphs test mislabelled"), labels, self.mislabelled)
        pictures = []
        for writer, start in enumerate(range(0, count, TEST_LINE)):
            rng = stream(self.seed, "glyphs test writer", writer)
            line = shown[start : start + TEST_LINE]
            pictures.append(self._write(rng, line))
        return Samples(torch.cat(pictures), torch.from_numpy(labels))

    def _write(self, rng: np.random.Generator, labels: NDArray[np.int64]) -> Tensor:
        hand = draw_hand(rng, len(self.atlas.fonts), self.difficulty)
        return write(rng, self.atlas, hand, labels, self.difficulty)


@dataclass(frozen=True)
class SkewedGlyphs(Glyphs):
    """Writers that use about 8 of the 62 characters each, all else as in `Glyphs`."""

    label_skew: float = 8.0


def sizes(seed: int, median: int, block: int) -> NDArray[np.int32]:
    """The samples of BLOCK clients, log-normal: drawn together, because a stream per client would take 20 µs each."""
    normal = stream(seed, "glyphs sizes", block).standard_normal(BLOCK)
    return np.clip(np.rint(np.exp(log(median) + SPREAD * normal)), FEWEST, MOST).astype(np.int32)


def draw_labels(rng: np.random.Generator, count: int, label_skew: float) -> NDArray[np.int64]:
    """Labels of one client, by its own Dirichlet distribution over the classes."""
    shares = rng.dirichlet(np.full(len(CHARACTERS), 1 / label_skew))
    return rng.choice(len(CHARACTERS), size=count, p=shares)


def shown_instead(rng: np.random.Generator, labels: NDArray[np.int64], share: float) -> NDArray[np.int64]:
    """The characters to draw: a share of them drawn at random, whatever the label says."""
    return np.where(rng.random(len(labels)) < share, rng.integers(len(CHARACTERS), size=len(labels)), labels)


def draw_hand(rng: np.random.Generator, fonts: int, difficulty: float) -> Hand:
    """A writer with two of the fonts; most characters come from the first."""
    first, second = rng.integers(fonts, size=2)
    second_share = rng.uniform(0, 0.5)
    slant, rotation, size, aspect, pen, noise = difficulty * rng.standard_normal(6)
    fit, soft, ink = rng.uniform(size=3)
    own = rng.standard_normal((1, 2, KNOTS, KNOTS), dtype=np.float32)
    each = rng.standard_normal((len(CHARACTERS), 2, KNOTS, KNOTS), dtype=np.float32)
    return Hand(
        font=np.where(rng.uniform(size=len(CHARACTERS)) < second_share, second, first),
        slant=0.2 * slant,
        rotation=0.08 * rotation,
        size=float(np.exp(0.12 * size)),
        aspect=float(np.exp(0.15 * aspect)),
        fit=0.2 + 0.6 * fit,
        pen=float(np.clip(1.15 * np.exp(0.3 * pen), 0.6, 2.2)),
        soft=0.8 + 0.8 * soft,
        ink=1 - 0.18 * difficulty * ink,
        noise=difficulty * 0.05 * float(np.exp(0.5 * noise)),
        warp=np.float32(difficulty) * (np.float32(0.8) * own + np.float32(1.0) * each),
    )


def write(rng: np.random.Generator, atlas: Atlas, hand: Hand, labels: NDArray[np.int64], difficulty: float) -> Tensor:
    """Characters in one hand, uint8 of (n, 28, 28), with a single look-up into the atlas."""
    n = len(labels)
    fonts = hand.font[labels]
    extent, middle = atlas.extent[fonts, labels], atlas.middle[fonts, labels]
    jitter = np.float32(difficulty) * rng.standard_normal((7, n), dtype=np.float32)
    shake = np.float32(0.7 * difficulty) * rng.standard_normal((n, 2, KNOTS, KNOTS), np.float32)
    noise = rng.standard_normal((n, SIDE, SIDE), np.float32)

    # From picture to atlas: unbend and shift back, turn back, make upright, scale (atlas pixels per pixel).
    scale = extent**hand.fit * CAPITAL ** (1 - hand.fit) / (HEIGHT * hand.size * np.exp(0.08 * jitter[0]))
    turn = hand.rotation + 0.08 * jitter[1]
    lean = hand.slant + 0.08 * jitter[2]
    wide = np.sqrt(hand.aspect * np.exp(0.06 * jitter[3]))
    cos, sin = np.cos(turn), np.sin(turn)
    xx, xy = (cos + lean * sin) / wide, (sin - lean * cos) / wide
    yx, yy = -sin * wide, cos * wide
    grid = bent(torch.from_numpy(hand.warp[labels] + shake + 0.8 * jitter[4:6].T[:, :, None, None]))
    matrix = np.stack([xx, xy, yx, yy]) * (scale * 2 / atlas.side)
    a, b, c, d = torch.from_numpy(matrix.astype(np.float32))[:, :, None, None]
    x, y = grid[:, 0], grid[:, 1]
    up = torch.from_numpy(middle)[:, None, None]
    where = torch.stack([a * x + b * y, c * x + d * y + up], dim=3)

    cells = atlas.nearness[fonts, labels].unsqueeze(1)
    distance = REACH - grid_sample(cells, where, align_corners=False).squeeze(1)  # far away beyond the cell
    pen = torch.from_numpy((hand.pen * np.exp(0.1 * jitter[6])).astype(np.float32))[:, None, None]
    pixels = torch.from_numpy(scale.astype(np.float32))[:, None, None]
    stroke = ((pen - distance / pixels) / hand.soft + 0.5).clamp_(0, 1)
    grey = stroke.mul_(hand.ink).add_(torch.from_numpy(noise), alpha=hand.noise).clamp_(0, 1)
    return grey.mul_(255).round_().byte()


def bent(warp: Tensor) -> Tensor:
    """The position that each pixel reads, in pixels from the centre: the regular grid plus a smooth displacement."""
    axis = torch.arange(SIDE) - (SIDE - 1) / 2
    plain = torch.stack(torch.meshgrid(axis, axis, indexing="xy"))
    return plain + interpolate(warp, size=(SIDE, SIDE), mode="bicubic", align_corners=True)
