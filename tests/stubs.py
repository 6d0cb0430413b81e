"""Stand-ins that tests share: the naive twin, a population of random arrays, updates of exact values."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor, nn

from gluefl.populations import Samples
from gluefl.randomness import stream

ROOT = Path(__file__).parents[1]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


twin = load(ROOT / "examples" / "gluefl_in_one_file.py")
lean_twin = load(ROOT / "examples" / "lean_in_one_file.py")


@dataclass(frozen=True)
class Blobs:
    """Clients with random points around the centres of a few classes: a tiny network learns them."""

    clients: int = 40
    classes: int = 4
    shape: tuple[int, ...] = (6,)
    seed: int = 0
    empty: int | None = None  # a client that has no samples

    def size(self, client: int) -> int:
        return 0 if client == self.empty else 22 + client % 5

    def train(self, client: int) -> Samples:
        return self._samples(stream(self.seed, "blobs", client), self.size(client))

    def test(self) -> Samples:
        return self._samples(stream(self.seed, "test blobs"), 100)

    def transform(self, inputs: Tensor) -> Tensor:
        return inputs

    def _samples(self, rng: np.random.Generator, size: int) -> Samples:
        centres = stream(self.seed, "centres").standard_normal((self.classes, *self.shape))
        labels = rng.integers(self.classes, size=size)
        inputs = centres[labels] + 0.4 * rng.standard_normal((size, *self.shape))
        return Samples(torch.from_numpy(inputs.astype(np.float32)), torch.from_numpy(labels))


def mlp(norm: bool = False, seed: int = 0) -> nn.Sequential:
    """Six inputs, four classes; 164 weights, or 180 and 17 statistics."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hidden = [nn.BatchNorm1d(8)] if norm else []
        return nn.Sequential(nn.Linear(6, 8), *hidden, nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def dyadic(size: int, *path: int, bits: int = 6) -> Tensor:
    """Multiples of 2^−bits between −4 and 4, a function of the path: their sums are exact, ties common."""
    steps = stream(7, "dyadic", *path).integers(-4 * 2**bits, 4 * 2**bits, endpoint=True, size=size)
    return torch.from_numpy((steps / 2**bits).astype(np.float32))
