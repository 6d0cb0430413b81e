"""Weights that changed, as the ternary updates that changed them: STC's downloads (Sattler et al., 2019).

A client that holds version v adds the updates of the versions after v to its weights, one after the other and in
float32 as the server did, so that its replica is the server's model bit for bit. `docs/wire-format.md` has the bytes.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gluefl.errors import WireError
from gluefl.vectors.sparse import Sparse
from gluefl.wire import rice
from gluefl.wire.values import float_bytes, floats

WEIGHTS, UPDATES = b"\0", b"\1"
LARGEST_PARAMETER = 30
SHORTEST = 5  # bytes of an update in the table


@dataclass(frozen=True)
class Updates:
    """Ternary updates, the oldest first: a sign (−1, 0, 1) for every coordinate, and a magnitude for each of them."""

    signs: Tensor  # int8, (updates, d)
    magnitudes: Tensor  # float32


class Plan(NamedTuple):
    """What is written of updates; positions are numbered among those that any of them changed."""

    counts: Tensor
    parameters: Tensor
    gaps: Tensor
    plus: Tensor
    length: int


@dataclass(frozen=True)
class TernaryUpdates:
    """The codec of such values: the updates, or the weights in float32 if that is shorter or no updates are given."""

    updates: Updates | None = None  # the server's, for one package
    held: Tensor | None = None  # the weights of the client that decodes one
    code: ClassVar[int] = 8

    def sending(self, updates: Updates | None) -> "TernaryUpdates":
        """The codec of a package to clients that miss these updates."""
        return replace(self, updates=updates)

    def holding(self, weights: Tensor) -> "TernaryUpdates":
        """The codec of a client that holds these weights."""
        return replace(self, held=weights)

    def longest(self, size: int) -> int:
        """The weights are an upper bound."""
        return 1 + 4 * size

    def measure(self, update: Sparse) -> Callable[[], int]:
        """The exact length, without encoding; several clients ask for it."""

        @cache
        def length() -> int:
            plan = self._plan(update)
            return self.longest(update.count) if plan is None else plan.length

        return length

    def encode(self, update: Sparse) -> bytes:
        """The updates or the weights, whichever are shorter."""
        plan = self._plan(update)
        if plan is None:
            return WEIGHTS + float_bytes(update.values)
        assert self.updates is not None
        partial = (plan.counts < update.count).cpu().numpy()
        counts, parameters = plan.counts.cpu().numpy(), plan.parameters.cpu().numpy()
        head = bytearray(UPDATES + rice.varint(len(counts)))
        for i, magnitude in enumerate(self.updates.magnitudes.tolist()):
            head += struct.pack("<f", magnitude) + rice.varint(int(counts[i] * partial[i]))
            head += bytes([int(parameters[i])] * bool(partial[i]))
        signs = np.packbits(plan.plus.cpu().numpy(), bitorder="little").tobytes()
        gaps = plan.gaps.cpu().numpy()[np.repeat(partial, counts)]
        return bytes(head) + signs + rice.encode_streams([(rice.Coded(counts * partial, parameters), gaps)])

    def decode(self, data: memoryview, positions: Tensor) -> Tensor:
        """The weights after the updates, or `WireError`."""
        form, data, count = bytes(data[:1]), data[1:], positions.numel()
        if form == WEIGHTS:
            return floats(data, count)
        if form != UPDATES:
            raise WireError(f"the form {form.hex() or 'of no bytes'} of weights is unknown")
        if self.held is None:
            raise WireError("updates were sent, which only a client that holds an earlier version can apply")
        try:
            counts, parameters, magnitudes, rest = _read_table(data, count)
        except (IndexError, struct.error):
            raise WireError(f"the table of updates is longer than the {len(data)} bytes that were found") from None
        sign_bytes = -(-int(counts.sum()) // 8)
        if len(rest) < sign_bytes:
            raise WireError(f"{sign_bytes} bytes of signs were expected, {len(rest)} were found")
        plus = np.unpackbits(np.frombuffer(rest[:sign_bytes], np.uint8), bitorder="little")
        if plus[counts.sum() :].any():
            raise WireError("the padding of the signs is not zero")
        partial = counts < count
        (gaps,) = rice.decode_streams([rice.Coded(counts * partial, parameters)], rest[sign_bytes:])
        return _added(self.held.cpu()[positions].numpy(), counts, magnitudes, plus, gaps)

    def _plan(self, update: Sparse) -> Plan | None:
        """What to write of the updates, None if the weights are shorter."""
        if self.updates is None or not len(self.updates.signs):
            return None
        positions, device = update.positions, update.positions.device
        rows = self.updates.signs.index_select(1, positions)
        (updates, size), flat = rows.shape, rows.view(-1)
        places = flat.nonzero().squeeze(1)
        bounds = torch.arange(updates + 1, device=device) * size
        kind = rice.DeviceSegments if positions.is_cuda else rice.HostSegments
        segments = kind(torch.searchsorted(places, bounds), places.numel())
        gaps, counts = rice.gaps_of(places, bounds[:-1], segments), segments.counts
        parameters, bits = rice.best_parameters(gaps, segments, LARGEST_PARAMETER)
        partial = (counts < size).long()
        head = (4 + rice.varint_bytes(counts * partial) + partial).sum()
        body = (counts.sum() + 7) // 8 + ((bits * partial).sum() + 7) // 8
        length = 1 + len(rice.varint(updates)) + int(head + body)
        if length >= self.longest(size):
            return None
        return Plan(counts, parameters * partial, gaps, flat[places] > 0, length)


def _read_table(data: memoryview, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, memoryview]:
    """Counts, parameters and magnitudes of the updates, and what follows them."""
    updates, at = rice.read_varint(data, 0)
    if not 0 < updates * SHORTEST <= len(data):
        raise WireError(f"{updates} updates are announced in {len(data)} bytes")
    counts, parameters = np.zeros(updates, np.int64), np.zeros(updates, np.int64)
    magnitudes = np.zeros(updates, np.float32)
    for i in range(updates):
        magnitudes[i] = struct.unpack_from("<f", data, at)[0]
        counts[i], at = rice.read_varint(data, at + 4)
        if counts[i]:
            parameters[i], at = data[at], at + 1
        if counts[i] >= count or parameters[i] > LARGEST_PARAMETER:
            raise WireError(f"{counts[i]} of {count} positions with parameter {parameters[i]} are announced")
    if not np.isfinite(magnitudes).all() or np.signbit(magnitudes).any():
        raise WireError("a magnitude is negative or not finite")
    return np.where(counts > 0, counts, count), parameters, magnitudes, data[at:]


def _added(
    values: np.ndarray, counts: np.ndarray, magnitudes: np.ndarray, plus: np.ndarray, gaps: np.ndarray
) -> Tensor:
    """Weights after updates, added in their order: other orders round to other floats."""
    sign, gap = 0, 0
    for update_count, magnitude in zip(counts.tolist(), magnitudes):
        signed = np.where(plus[sign : sign + update_count], magnitude, -magnitude)
        sign += update_count
        if update_count == values.size:
            _add(values, slice(None), signed)
            continue
        places = np.cumsum(gaps[gap : gap + update_count].astype(np.int64) + 1) - 1
        gap += update_count
        if places[-1] >= values.size:
            raise WireError(f"a position lies outside the {values.size} that were sent")
        _add(values, places, signed)
    return torch.from_numpy(values)


def _add(values: np.ndarray, places: np.ndarray | slice, signed: np.ndarray) -> None:
    with np.errstate(over="ignore"):  # who uses the weights refuses what is not finite
        values[places] += signed
