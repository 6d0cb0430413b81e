"""Rice codes of many whole numbers at once, in segments that have a parameter each; varints.

The code of u >= 0 with parameter k is the quotient u >> k in unary (as many zeros, then a one) and the k lowest bits
of u, the remainder. Remainders and quotients lie in streams of their own: what has a known length is read by slices,
and the ends of all quotients are found in one pass.

Signed numbers are numbered 0, -1, 1, -2, 2, ... or, where a segment has few zeros, -1, 1, 0, -2, 2, ...
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from gluefl.errors import WireError

PIECE = 2**17  # numbers, or bits, that are decoded at once
LARGEST = 2**31  # numbers are below; the largest parameter that can be of use is 30


@dataclass(frozen=True)
class DeviceSegments:
    """Consecutive segments of a list, and what is computed for each, on any device without synchronisation.

    `offsets` are where the segments start, and then the length of the list.
    """

    offsets: Tensor
    length: int

    @cached_property
    def counts(self) -> Tensor:
        """How many entries each segment has."""
        return self.offsets.diff()

    def expand(self, per_segment: Tensor) -> Tensor:
        """The number of its segment for every entry."""
        return torch.repeat_interleave(per_segment, self.counts, output_size=self.length)

    def sums(self, entries: Tensor) -> Tensor:
        """The sum of each segment: differences of prefix sums, because additions to few addresses would collide."""
        prefix = torch.zeros(self.length + 1, dtype=torch.int64, device=entries.device)
        torch.cumsum(entries, 0, dtype=torch.int64, out=prefix[1:])
        return prefix[self.offsets].diff()

    def least(self, entries: Tensor, initial: int) -> Tensor:
        """The least entry of each segment, and at most `initial`; of numbers that float32 holds."""
        lowest = torch.segment_reduce(entries.float(), "min", offsets=self.offsets, unsafe=True, initial=initial)
        return lowest.to(entries.dtype)


@dataclass(frozen=True)
class HostSegments:
    """The same on a CPU, where NumPy is several times as fast as torch."""

    offsets: Tensor
    length: int

    @cached_property
    def counts(self) -> Tensor:
        """How many entries each segment has."""
        return self.offsets.diff()

    def expand(self, per_segment: Tensor) -> Tensor:
        """The number of its segment for every entry."""
        return torch.from_numpy(np.repeat(per_segment.numpy(), self.counts.numpy()))

    def sums(self, entries: Tensor) -> Tensor:
        """The sum of each segment."""
        result = np.zeros(self._present.size, np.int64)
        result[self._present] = np.add.reduceat(entries.numpy(), self._starts, dtype=np.int64)
        return torch.from_numpy(result)

    def least(self, entries: Tensor, initial: int) -> Tensor:
        """The least entry of each segment."""
        result = np.full(self._present.size, initial, entries.numpy().dtype)
        result[self._present] = np.minimum.reduceat(entries.numpy(), self._starts)
        return torch.from_numpy(result)

    @cached_property
    def _present(self) -> np.ndarray:
        present: np.ndarray = self.counts.numpy() > 0
        return present

    @cached_property
    def _starts(self) -> np.ndarray:
        starts: np.ndarray = self.offsets.numpy()[:-1][self._present]
        return starts


Segments = DeviceSegments | HostSegments


def best_parameters(numbers: Tensor, segments: Segments, largest: int) -> tuple[Tensor, Tensor]:
    """The parameter of each segment, at most `largest`, whose code is the shortest, and that code's length in bits.

    With mean m the best parameter is at least log2(2/3 (m + 1)), rounded down, and at most log2(m), rounded up
    (Kiely, IPN Progress Report 42-159, 2004): three candidates, and lengths have no other minimum.
    """
    counts = segments.counts
    twice_mean = 2 * (segments.sums(numbers) + counts) // counts.clamp(min=1)
    thresholds = 3 << torch.arange(1, largest + 1, device=numbers.device)
    best = (twice_mean[:, None] >= thresholds).sum(1)
    quotients = numbers >> segments.expand(best.to(numbers.dtype))
    shortest = segments.sums(quotients) + counts * (best + 1)
    parameter = best
    for _ in range(2):
        quotients, parameter = quotients >> 1, parameter + 1
        bits = segments.sums(quotients) + counts * (parameter + 1)
        better = (bits < shortest) & (parameter <= largest)
        best, shortest = torch.where(better, parameter, best), torch.where(better, bits, shortest)
    return best, shortest


def signed_codes(numbers: Tensor) -> Tensor:
    """Signed numbers of 31 bits in the order 0, -1, 1, -2, 2, ..."""
    return (numbers << 1) ^ (numbers >> 31)


def best_signed_parameters(codes: Tensor, segments: Segments, largest: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `best_parameters` for signed numbers: parameter, whether the other order is shorter, and bits.

    The orders differ in the three first codes, so with parameters of 2 and more they are equally long.
    """
    best, shortest = best_parameters(codes, segments, largest)
    reordered = torch.zeros_like(best, dtype=torch.bool)
    other = codes - (codes < 3).int() + 3 * (codes == 0).int()
    for parameter in (0, 1):
        bits = segments.sums(other >> parameter) + segments.counts * (parameter + 1)
        better = bits < shortest
        best, shortest = torch.where(better, parameter, best), torch.where(better, bits, shortest)
        reordered |= better
    return best, reordered, shortest


def reorder(codes: np.ndarray, reordered: np.ndarray) -> np.ndarray:
    """Codes of signed numbers in the other order where it is chosen."""
    small = reordered & (codes < 3)
    result: np.ndarray = codes - small + np.int32(3) * (small & (codes == 0))
    return result


def signed_numbers(codes: np.ndarray, reordered: np.ndarray) -> np.ndarray:
    """The signed numbers of codes in either order."""
    small = reordered & (codes < 3)
    zigzag: np.ndarray = codes + small - 3 * (small & (codes == 2))
    numbers: np.ndarray = (zigzag >> 1) ^ -(zigzag & 1)
    return numbers


def gaps_of(places: Tensor, starts: Tensor, segments: Segments) -> Tensor:
    """How many places lie between increasing ones, or between the first of a segment and the segment's start."""
    previous = places.roll(1)
    previous[:1] = -1
    return (places - torch.maximum(previous, segments.expand(starts - 1)) - 1).int()


@dataclass(frozen=True)
class Coded:
    """How many numbers of each segment are in a stream, and with which parameter."""

    counts: np.ndarray
    parameters: np.ndarray

    @property
    def length(self) -> int:
        """How many numbers there are."""
        return int(self.counts.sum())

    @property
    def remainder_bits(self) -> int:
        """The bits of all remainders."""
        return int((self.counts * self.parameters).sum())

    def quotients(self, numbers: np.ndarray) -> np.ndarray:
        """The quotients of all numbers."""
        quotients: np.ndarray = numbers >> np.repeat(self.parameters.astype(numbers.dtype), self.counts)
        return quotients

    def put_remainders(self, numbers: np.ndarray, bits: np.ndarray) -> None:
        """Write the remainders of all numbers into an array of bits, the lowest bit first."""
        for entries, places, parameter in self._runs():
            for bit in range(parameter):
                bits[places.start + bit : places.stop : parameter] = (numbers[entries] >> bit) & 1

    def numbers(self, quotients: np.ndarray, data: np.ndarray, start: int) -> np.ndarray:
        """The numbers (32 bits) of given quotients, and of remainders that begin at a bit of the data."""
        numbers = np.empty(self.length, np.int32)
        for entries, places, parameter in self._runs():
            for first in range(entries.start, entries.stop, PIECE):
                piece = slice(first, min(first + PIECE, entries.stop))
                at = start + places.start + (first - entries.start) * parameter
                bits = bits_of(data, at, at + (piece.stop - first) * parameter)
                wide = quotients[piece].astype(np.int64) << parameter
                for bit in range(parameter):
                    wide |= bits[bit::parameter].astype(np.int64) << bit
                if wide.max(initial=0) >= LARGEST:
                    raise WireError(f"a number of {int(wide.max())} was found, {LARGEST - 1} is the largest")
                numbers[piece] = wide
        return numbers

    def _runs(self) -> Iterator[tuple[slice, slice, int]]:
        """Entries, their bits and their parameter, for consecutive segments that share it."""
        starts = np.flatnonzero(np.diff(self.parameters, prepend=-1))
        entry = bit = 0
        for parameter, count in zip(self.parameters[starts].tolist(), np.add.reduceat(self.counts, starts).tolist()):
            yield slice(entry, entry + count), slice(bit, bit + count * parameter), parameter
            entry, bit = entry + count, bit + count * parameter


def encode_streams(streams: list[tuple[Coded, np.ndarray]]) -> bytes:
    """The remainders of every stream, then the quotients of every stream; bit i is bit i mod 8 of byte i // 8."""
    quotients = np.concatenate([coded.quotients(numbers) for coded, numbers in streams])
    ends = np.cumsum(quotients + 1, dtype=np.int64)
    remainder_bits = sum(coded.remainder_bits for coded, _ in streams)
    bits = np.zeros(remainder_bits + (int(ends[-1]) if ends.size else 0), np.uint8)
    start = 0
    for coded, numbers in streams:
        coded.put_remainders(numbers, bits[start : start + coded.remainder_bits])
        start += coded.remainder_bits
    bits[start:][ends - 1] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def decode_streams(streams: list[Coded], data: memoryview) -> list[np.ndarray]:
    """What `encode_streams` wrote, in 32 bits. Allocates in proportion to the data; few bits are unpacked at once."""
    announced = sum(coded.length for coded in streams)
    remainder_bits = sum(coded.remainder_bits for coded in streams)
    raw, least = np.frombuffer(data, np.uint8), announced + remainder_bits
    if least > 8 * len(data):
        raise WireError(f"{announced} codes take at least {least} bits, {8 * len(data)} were found")
    quotients = _quotients(raw, remainder_bits, announced)
    numbers, entry, bit = [], 0, 0
    for coded in streams:
        numbers.append(coded.numbers(quotients[entry : entry + coded.length], raw, bit))
        entry, bit = entry + coded.length, bit + coded.remainder_bits
    return numbers


def _quotients(raw: np.ndarray, start: int, announced: int) -> np.ndarray:
    """The quotients from a bit on to the end of the data, which must be as many as were announced."""
    quotients, count, last = np.empty(announced, np.int32), 0, start - 1
    for first in range(start, 8 * raw.size, PIECE):
        ends = np.flatnonzero(bits_of(raw, first, min(first + PIECE, 8 * raw.size)).view(bool)) + first
        lengths = np.diff(ends, prepend=last) - 1
        if lengths.max(initial=0) >= LARGEST:
            raise WireError(f"a quotient of {int(lengths.max())} was found, {LARGEST - 1} is the largest")
        kept = lengths[: max(0, announced - count)]
        quotients[count : count + kept.size] = kept
        count, last = count + ends.size, int(ends[-1]) if ends.size else last
    if count != announced:
        raise WireError(f"{announced} codes were announced, {count} were found")
    if -(-(last + 1) // 8) != raw.size:
        raise WireError("bytes follow the last code")
    return quotients


def bits_of(raw: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Bits of the data, a byte each."""
    unpacked = np.unpackbits(raw[start // 8 : -(-stop // 8)], bitorder="little")
    return unpacked[start % 8 : start % 8 + stop - start]


def varint(number: int) -> bytes:
    """LEB128: seven bits a byte, the lowest first; the high bit says that another byte follows."""
    groups = [number >> shift & 0x7F for shift in range(0, max(1, number.bit_length()), 7)]
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])


def varint_bytes(numbers: Tensor) -> Tensor:
    """The lengths of the varints of numbers below 2^35."""
    return 1 + (numbers[..., None] >> torch.arange(7, 35, 7, device=numbers.device) > 0).sum(-1)


def read_varint(data: memoryview, start: int) -> tuple[int, int]:
    """A varint of at most five bytes, and where it ends; `IndexError` if the data end first."""
    number = 0
    for place in range(5):
        number |= (data[start + place] & 0x7F) << 7 * place
        if data[start + place] < 0x80:
            return number, start + place + 1
    raise WireError("a number of more than 5 bytes was found")
