"""Sets of positions as bytes: nothing, everything, a bitmap, or the gaps between positions; the shortest is sent.

At a density of 20% a bitmap through zstd costs 2% more than the entropy; gaps through zstd take over below about an
eighth.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import zstandard

from gluefl.accel.resources import current
from gluefl.accel.threads import submit
from gluefl.errors import WireError
from gluefl.vectors.mask import Mask
from gluefl.wire.layouts import LaidOut, lay_out, lists_present

NOTHING, EVERYTHING, BITMAP, BITMAP_ZSTD, GAPS_ZSTD, ABSENT_GAPS_ZSTD = range(6)
CODECS = ("nothing", "everything", "bitmap", "bitmap+zstd", "gaps+zstd", "gaps of the absent+zstd")

ZSTD_LEVEL = 1
LONG_TO_COMPRESS = 1 << 20  # positions: bitmap and gaps are each worth a core of their own
LONGEST_VARINT = 5  # bytes, for gaps below 2^32
PIECE = 1 << 17  # bytes of varints that are read at once


@dataclass(frozen=True)
class Packed:
    """A set of positions, encoded."""

    codec: int
    count: int
    data: bytes


def pack(mask: Mask) -> Packed:
    """Encode the positions that a mask covers."""
    return squeeze(lay_out(mask))


def squeeze(laid_out: LaidOut) -> Packed:
    """The shortest encoding of the positions. zstd releases the interpreter lock."""
    size, count, bitmap, gaps = laid_out.size, laid_out.count, laid_out.bitmap, laid_out.gaps
    if count in (0, size):
        return Packed(NOTHING if count == 0 else EVERYTHING, count, b"")
    tried: list[tuple[int, bytes | memoryview]] = []
    both = bitmap is not None and gaps is not None and size >= LONG_TO_COMPRESS
    other = submit(_compress, gaps) if both else None
    if bitmap is not None:
        tried += [(BITMAP_ZSTD, _compress(bitmap)), (BITMAP, bitmap)]
    if gaps is not None:
        # A task that has not started is done here: pool threads that wait for each other could deadlock.
        squeezed = _compress(gaps) if other is None or other.cancel() else other.result()
        tried.append((GAPS_ZSTD if lists_present(count, size) else ABSENT_GAPS_ZSTD, squeezed))
    codec, data = min(tried, key=lambda option: len(option[1]))
    return Packed(codec, count, bytes(data))


def unpack(packed: Packed, size: int) -> Mask:
    """Decode into a mask of `size` entries, or refuse. Never allocates more than a mask of `size` entries needs."""
    codec, count, data = packed.codec, packed.count, packed.data
    if count > size:
        raise WireError(f"{count} positions are announced in a vector of {size}")
    if codec == NOTHING:
        mask = np.zeros(size, dtype=bool)
    elif codec == EVERYTHING:
        mask = np.ones(size, dtype=bool)
    elif codec == BITMAP:
        mask = _from_bitmap(data, size)
    elif codec == BITMAP_ZSTD:
        mask = _from_bitmap(_decompress(data, -(-size // 8), exact=True), size)
    elif codec in (GAPS_ZSTD, ABSENT_GAPS_ZSTD):
        listed = count if codec == GAPS_ZSTD else size - count
        mask = _from_gaps(_decompress(data, longest_gaps(listed, size)), listed, size)
        if codec == ABSENT_GAPS_ZSTD:
            np.logical_not(mask, out=mask)
    else:
        raise WireError(f"codec {codec} for positions is unknown; this build knows 0 to {len(CODECS) - 1}")
    if codec in (NOTHING, EVERYTHING) and data:
        raise WireError(f"codec {codec} ({CODECS[codec]}) carries no data, {len(data)} bytes were found")
    if int(np.count_nonzero(mask)) != count:
        raise WireError(f"{count} positions were announced, {int(np.count_nonzero(mask))} were found")
    return Mask(torch.from_numpy(mask), count)


def entropy_bytes(count: int, size: int) -> int:
    """The entropy of a random set of positions."""
    shares = [share for share in (count / size, 1 - count / size) if share > 0] if size else []
    return round(size * sum(-share * math.log2(share) for share in shares) / 8)


def longest_gaps(count: int, size: int) -> int:
    """No gaps of `count` positions take more bytes: the sum of all gaps is below `size`, and a varint has a byte, and
    at most one more for every 128 of its value."""
    return min(LONGEST_VARINT * count, count + size // 128)


def _from_bitmap(data: bytes, size: int) -> np.ndarray:
    if len(data) != -(-size // 8):
        raise WireError(f"a bitmap of {size} positions has {-(-size // 8)} bytes, {len(data)} were found")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").view(bool)
    if bits[size:].any():
        raise WireError("the padding of a bitmap is not zero")
    return bits[:size]


def _from_gaps(data: bytes, count: int, size: int) -> np.ndarray:
    """The mask of positions by their gaps. Varints are read in pieces: all of them as numbers take much memory."""
    raw = np.frombuffer(data, np.uint8)
    whole = int(np.count_nonzero(raw < 0x80))
    if whole != count or (raw.size and raw[-1] >= 0x80):
        raise WireError(f"{count} gaps were announced, {whole} whole ones were found")
    mask = np.zeros(size, dtype=bool)
    start, before = 0, -1  # the next varint, and the last position
    while start < raw.size:
        ends = np.flatnonzero(raw[start : start + PIECE] < 0x80) + start
        if not ends.size:
            raise WireError(f"a gap of more than {LONGEST_VARINT} bytes was found")
        positions = np.cumsum(_varints(raw, start, ends) + 1) + before
        start, before = int(ends[-1]) + 1, int(positions[-1])
        if before >= size:  # gaps are below 2^35 and a piece has few: the sum cannot overflow
            raise WireError(f"a position lies outside a vector of {size}")
        mask[positions] = True
    return mask


def _varints(raw: np.ndarray, start: int, ends: np.ndarray) -> np.ndarray:
    """The numbers whose last bytes are at `ends`; the first one begins at `start`."""
    starts = np.concatenate([[start], ends[:-1] + 1])
    lengths = ends - starts
    if int(lengths.max()) >= LONGEST_VARINT:
        raise WireError(f"a gap of more than {LONGEST_VARINT} bytes was found")
    numbers: np.ndarray = raw[starts].astype(np.int64) & 0x7F
    for place in range(1, int(lengths.max()) + 1):
        longer = np.flatnonzero(lengths >= place)
        numbers[longer] |= (raw[starts[longer] + place].astype(np.int64) & 0x7F) << 7 * place
    return numbers


def _compress(data: bytes | memoryview) -> bytes:
    # Every thread of a run keeps a compressor: a new one allocates its tables every time.
    held = current()
    if held is None:
        return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(data)
    if not hasattr(held.of_thread, "compressor"):
        held.of_thread.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    return bytes(held.of_thread.compressor.compress(data))


def _decompress(data: bytes, limit: int, exact: bool = False) -> bytes:
    # The size a frame declares is checked before anything is allocated, and the output is bounded by it.
    try:
        declared = zstandard.frame_content_size(data)
        if declared < 0 or declared > limit or (exact and declared != limit):
            raise WireError(f"a compressed part declares {declared} bytes, {limit} are allowed")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=limit, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(f"a compressed part is damaged: {error}") from error
