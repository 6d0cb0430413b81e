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


@dataclass(frozen=True)
class Updates:
    """Ternary updates, the oldest first: a sign (−1, 0, 1) for every coordinate, and a magnitude for each of them."""

    signs: Tensor  # int8, (updates, d)
    magnitudes: Tensor  # float32


class Plan(NamedTuple):
    """What is written of updates; positions are numbered among those that any of them changed."""

    counts: Tensor
    parameters: Tensor
    gap_bytes: Tensor
    gaps: Tensor
    plus: Tensor
    length: int


class Record(NamedTuple):
    """One update as it is read."""

    magnitude: np.float32
    plus: np.ndarray
    places: np.ndarray | slice


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
        counts, parameters, gap_bytes = plan.counts.tolist(), plan.parameters.tolist(), plan.gap_bytes.tolist()
        gaps, plus = plan.gaps.cpu().numpy(), plan.plus.cpu().numpy()
        data, at = bytearray(UPDATES), 0
        for i, magnitude in enumerate(self.updates.magnitudes.tolist()):
            here, at = slice(at, at + counts[i]), at + counts[i]
            data += struct.pack("<f", magnitude)
            if counts[i] == update.count:
                data += rice.varint(0) + _packed(plus[here])
                continue
            coded = rice.Coded(np.array([counts[i]]), np.array([parameters[i]]))
            data += rice.varint(counts[i]) + bytes([parameters[i]]) + rice.varint(gap_bytes[i])
            data += _packed(plus[here]) + rice.encode_streams([(coded, gaps[here])])
        return bytes(data)

    def decode(self, data: memoryview, positions: Tensor) -> Tensor:
        """The weights after the updates, or `WireError`. Updates are read one after the other, in little memory."""
        form, rest, count = bytes(data[:1]), data[1:], positions.numel()
        if form == WEIGHTS:
            return floats(rest, count)
        if form != UPDATES:
            raise WireError(f"the form {form.hex() or 'of no bytes'} of weights is unknown")
        if self.held is None:
            raise WireError("updates were sent, which only a client that holds an earlier version can apply")
        if not rest:
            raise WireError("no update was found")
        values = self.held.cpu()[positions].numpy()
        while rest:
            try:
                record, rest = _read(rest, count)
            except (IndexError, struct.error):
                raise WireError("an update is cut off") from None
            with np.errstate(over="ignore"):  # who uses the weights refuses what is not finite
                values[record.places] += np.where(record.plus, record.magnitude, -record.magnitude)
        return torch.from_numpy(values)

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
        gap_bytes, partial = (bits + 7) // 8, counts < size
        of_gaps = rice.varint_bytes(counts) + 1 + rice.varint_bytes(gap_bytes) + gap_bytes
        length = 1 + int((4 + torch.where(partial, of_gaps, 1) + (counts + 7) // 8).sum())
        if length >= self.longest(size):
            return None
        return Plan(counts, parameters, gap_bytes, gaps, flat[places] > 0, length)


def _packed(plus: np.ndarray) -> bytes:
    return np.packbits(plus, bitorder="little").tobytes()


def _read(data: memoryview, size: int) -> tuple[Record, memoryview]:
    """The update that the data begin with, of some of `size` positions or of all, and what follows it."""
    magnitude = np.float32(struct.unpack_from("<f", data)[0])
    if not np.isfinite(magnitude) or np.signbit(magnitude):
        raise WireError("a magnitude is negative or not finite")
    count, at = rice.read_varint(data, 4)
    parameter = gap_bytes = 0
    if count:
        parameter = data[at]
        gap_bytes, at = rice.read_varint(data, at + 1)
    if count >= size or parameter > LARGEST_PARAMETER:
        raise WireError(f"{count} of {size} positions with parameter {parameter} are announced")
    signs_end = at + -(-(count or size) // 8)
    if signs_end + gap_bytes > len(data):
        raise WireError(f"an update of {signs_end + gap_bytes} bytes is cut off after {len(data)}")
    plus = np.unpackbits(np.frombuffer(data[at:signs_end], np.uint8), bitorder="little")
    if plus[count or size :].any():
        raise WireError("the padding of the signs is not zero")
    rest = data[signs_end + gap_bytes :]
    if not count:
        return Record(magnitude, plus[:size], slice(None)), rest
    coded = rice.Coded(np.array([count]), np.array([parameter]))
    (gaps,) = rice.decode_streams([coded], data[signs_end : signs_end + gap_bytes])
    places = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if places[-1] >= size:
        raise WireError(f"a position lies outside the {size} that were sent")
    return Record(magnitude, plus[:count], places), rest
