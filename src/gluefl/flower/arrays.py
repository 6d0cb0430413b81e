"""Flower's ArrayRecord as our two flat vectors, and back."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from pydantic import BeforeValidator
from torch import Tensor, nn

from gluefl.errors import UsageError, WireError
from gluefl.vectors.layout import LARGEST_EXACT_INTEGER, Layout, Part, split

# The names that PyTorch's normalisation layers give to what they track.
STATISTICS = ("*running_mean", "*running_var", "*num_batches_tracked")
EXACT_IN_FLOAT32 = ("float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
MOST_ENTRIES = 2**31  # of a model that a device agrees to hold


def _named(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError(f"input should be a tuple of names or patterns, ({value!r},), or a module")
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, nn.Module) else value


Statistics = Annotated[tuple[str, ...] | nn.Module, BeforeValidator(_named)]


@dataclass(frozen=True)
class Table:
    """Which array of a record lies where in the vectors, and the order of the record."""

    layout: Layout
    names: tuple[str, ...]

    @classmethod
    def of(cls, arrays: ArrayRecord, statistics: Iterable[str] | nn.Module = STATISTICS) -> "Table":
        """Floating-point arrays are weights, except those whose names match `statistics`; all others are statistics.

        Given a module, its buffers are the statistics.
        """
        if isinstance(statistics, nn.Module):
            statistics = [name for name, _ in statistics.named_buffers()]
        patterns = tuple(statistics)
        parts: dict[bool, list[Part]] = {True: [], False: []}
        starts = {True: 0, False: 0}
        for name, array in arrays.items():
            values = array.numpy()
            _check(name, values)
            tracked = values.dtype.kind != "f" or any(fnmatchcase(name, pattern) for pattern in patterns)
            parts[tracked].append(Part(name, values.shape, getattr(torch, str(values.dtype)), starts[tracked]))
            starts[tracked] += values.size
        if not parts[False]:
            raise UsageError("the initial arrays hold no floating-point array that could be trained.")
        return cls(Layout(tuple(parts[False]), tuple(parts[True])), tuple(arrays.keys()))

    def flatten(self, arrays: ArrayRecord) -> tuple[Tensor, Tensor]:
        """Copy a record into two vectors; refuses one that is not like the record of the table."""
        if set(arrays.keys()) != set(self.names):
            differing = sorted(set(arrays.keys()) ^ set(self.names))
            raise UsageError(f"the arrays are not those of the model: {differing[:5]} are too many or missing.")
        return self._join(self.layout.weights, arrays), self._join(self.layout.statistics, arrays)

    def rounded(self, weights: Tensor) -> Tensor:
        """The weights as the app is given them: its arrays may have fewer bits than float32."""
        parts = self.layout.weights
        if all(torch.promote_types(part.dtype, torch.float32) == part.dtype for part in parts):
            return weights
        return torch.cat(
            [piece.to(part.dtype).float().flatten() for part, (_, piece) in zip(parts, split(parts, weights))]
        )

    def arrays(self, weights: Tensor, statistics: Tensor) -> ArrayRecord:
        """The model as a Flower app expects it: the names, shapes, types and order of the initial arrays."""
        named = {
            part.name: Array(_typed(view, part.dtype))
            for parts, vector in ((self.layout.weights, weights), (self.layout.statistics, statistics))
            for part, (_, view) in zip(parts, split(parts, vector))
        }
        return ArrayRecord({name: named[name] for name in self.names})

    def to_json(self) -> str:
        """What a device needs to know to name the parts of the vectors."""
        tracked = {part.name for part in self.layout.statistics}
        rows = {
            part.name: [list(part.shape), str(part.dtype).removeprefix("torch."), part.name in tracked]
            for part in (*self.layout.weights, *self.layout.statistics)
        }
        return json.dumps([[name, *rows[name]] for name in self.names], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Table":
        """Read the description of a table, or raise `WireError`."""
        try:
            rows = json.loads(text)
            layout = Layout(tuple(_parts(rows, tracked=False)), tuple(_parts(rows, tracked=True)))
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise WireError(f"the description of the model's arrays cannot be read: {error}") from error
        if not 0 < layout.size + layout.statistics_size <= MOST_ENTRIES:
            raise WireError(f"a model of {layout.size + layout.statistics_size} entries is refused")
        return cls(layout, tuple(row[0] for row in rows))

    def _join(self, parts: tuple[Part, ...], arrays: ArrayRecord) -> Tensor:
        pieces = []
        for part in parts:
            values = arrays[part.name].numpy()
            if tuple(values.shape) != part.shape or values.dtype.kind != _kind(part.dtype):
                raise UsageError(
                    f"'{part.name}' came back as {values.dtype}{list(values.shape)}, "
                    f"{str(part.dtype).removeprefix('torch.')}{list(part.shape)} was sent."
                )
            pieces.append(values.reshape(-1).astype(np.float32))
        return torch.from_numpy(np.concatenate(pieces)) if pieces else torch.zeros(0)


def _parts(rows: list[list], tracked: bool) -> Iterator[Part]:  # type: ignore[type-arg]
    start = 0
    for name, shape, dtype, is_tracked in rows:
        if dtype not in EXACT_IN_FLOAT32 or not isinstance(name, str) or any(int(n) < 0 for n in shape):
            raise ValueError(f"a row for {name!r}")
        if bool(is_tracked) == tracked:
            part = Part(name, tuple(int(n) for n in shape), getattr(torch, dtype), start)
            start += part.size
            yield part


def _check(name: str, values: np.ndarray) -> None:
    if str(values.dtype) not in EXACT_IN_FLOAT32:
        raise UsageError(f"'{name}' is {values.dtype}, which float32 cannot hold exactly: convert the model first.")
    if values.dtype.kind != "f" and values.size and int(np.abs(values.astype(np.int64)).max()) > LARGEST_EXACT_INTEGER:
        raise UsageError(f"'{name}' holds integers above {LARGEST_EXACT_INTEGER}, which float32 cannot hold exactly.")


def _typed(view: Tensor, dtype: torch.dtype) -> np.ndarray:
    # An averaged batch count need not be whole; the counter of the module is.
    whole: np.ndarray = (view if dtype.is_floating_point else view.round()).to(dtype).contiguous().numpy()
    return whole


def _kind(dtype: torch.dtype) -> str:
    return str(np.dtype(str(dtype).removeprefix("torch.")).kind)
