"""Sets of positions as bytes: nothing, everything, a bitmap, or the gaps between them; the smallest that was tried.

Measured in the notes of the project: at a density of 20% a bitmap through zstd costs 2% more than the entropy,
and gaps through zstd take over below about an eighth.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import zstandard
from torch import Tensor

from gluefl.accel import kernels
from gluefl.accel.cores import beside, fetched, to_host, wait_for
from gluefl.errors import WireError
from gluefl.vectors.selection import count_true, positions_of

NOTHING, EVERYTHING, BITMAP, BITMAP_ZSTD, GAPS_ZSTD, ABSENT_GAPS_ZSTD = range(6)
CODECS = ("nothing", "everything", "bitmap", "bitmap+zstd", "gaps+zstd", "gaps of the absent+zstd")

ZSTD_LEVEL = 1
SPARSE = 1 / 8  # below this density (or above its complement) gaps are tried beside the bitmap
VERY_SPARSE = 1 / 16  # and below this one the bitmap is not tried: only if positions crowd together is it shorter
LONG = 4096  # positions; a shorter bitmap may be shorter than the frame around the gaps
LONG_TO_COMPRESS = 1 << 20  # positions: bitmap and gaps are each worth a core of their own
LONGEST_VARINT = 5  # bytes, for gaps below 2^32
GATHER_BITS = 0x0102040810204080  # times eight bytes of 0 or 1: their bits, in order, in the highest byte


@dataclass(frozen=True)
class Packed:
    """A set of positions, encoded."""

    codec: int
    count: int
    data: bytes


@dataclass(frozen=True)
class LaidOut:
    """A set of positions as bytes, before they are compressed: all of it that has to leave a GPU."""

    size: int
    count: int
    bitmap: bytes | memoryview | None = None
    gaps: bytes | memoryview | None = None  # between those that are present or those that are absent, whichever are few


def pack(mask: Tensor) -> Packed:
    """Encode the positions at which a mask holds."""
    return squeeze(lay_out(mask, count_true(mask)))


def lay_out(mask: Tensor, count: int) -> LaidOut:
    """The bytes of a mask that holds at `count` positions."""
    size = mask.numel()
    if count in (0, size):
        return LaidOut(size, count)
    gaps = None
    if _few(count, size) <= SPARSE * size:
        gaps = _gaps(mask if _lists_present(count, size) else ~mask, _few(count, size))
    return LaidOut(size, count, _to_bitmap(mask) if _tries_bitmap(count, size) else None, gaps)


def lay_out_list(positions: np.ndarray, size: int) -> LaidOut:
    """As `lay_out` for increasing positions of a vector of `size`."""
    count = positions.size
    if 0 < count < size and _lists_present(count, size) and not _tries_bitmap(count, size):
        return LaidOut(size, count, None, _varints(positions))
    mask = np.zeros(size, bool)
    mask[positions] = True
    return lay_out(torch.from_numpy(mask), count)


def lay_out_rows(masks: Tensor, counts: Sequence[int], known: Tensor | None = None) -> Callable[[], list[LaidOut]]:
    """As `lay_out` for every row of a matrix, in a handful of calls to a GPU: one call costs as much as its work.
    Nobody waits for it: what is returned is to be called when it has been done.
    What is `known` is left out: positions are counted beside it, and a row holds `counts` of them there."""
    size = masks.shape[1] - (0 if known is None else count_true(known))
    some = [i for i, count in enumerate(counts) if 0 < count < size]
    dense = [i for i in some if _tries_bitmap(counts[i], size)]
    bitmaps = _bitmaps(rows_of(masks, dense), known) if dense else None
    gaps = []
    for present in (True, False):
        few = [i for i in some if _few(counts[i], size) <= SPARSE * size and _lists_present(counts[i], size) == present]
        if few:
            listed = [_few(counts[i], size) for i in few]
            gaps.append((few, _gaps_of_rows(rows_of(masks, few), known, present, listed)))

    def done() -> list[LaidOut]:
        bits = {} if bitmaps is None else {i: row.data for i, row in zip(dense, bitmaps.numpy())}
        varints = {i: row for few, rows in gaps for i, row in zip(few, rows())}
        return [LaidOut(size, count, bits.get(i), varints.get(i)) for i, count in enumerate(counts)]

    return done


def rows_of(masks: Tensor, some: Sequence[int]) -> Tensor:
    """Some rows, in increasing order: not copied where that is all of them."""
    return masks if len(some) == len(masks) else masks[some]


def _few(count: int, size: int) -> int:
    return min(count, size - count)


def _lists_present(count: int, size: int) -> bool:
    return count <= size - count


def _tries_bitmap(count: int, size: int) -> bool:
    return size < LONG or _few(count, size) > VERY_SPARSE * size


def squeeze(laid_out: LaidOut) -> Packed:
    """The shortest encoding of the positions; zstd lets other threads run meanwhile."""
    size, count, bitmap, gaps = laid_out.size, laid_out.count, laid_out.bitmap, laid_out.gaps
    if count in (0, size):
        return Packed(NOTHING if count == 0 else EVERYTHING, count, b"")
    tried: list[tuple[int, bytes | memoryview]] = []
    both = bitmap is not None and gaps is not None and size >= LONG_TO_COMPRESS
    other = beside(_compress, gaps) if both else None
    if bitmap is not None:
        tried += [(BITMAP_ZSTD, _compress(bitmap)), (BITMAP, bitmap)]
    if gaps is not None:
        # Where no core was free for it yet it is done here: tasks that waited for each other could wait for ever.
        squeezed = _compress(gaps) if other is None or other.cancel() else other.result()
        tried.append((GAPS_ZSTD if _lists_present(count, size) else ABSENT_GAPS_ZSTD, squeezed))
    codec, data = min(tried, key=lambda option: len(option[1]))
    return Packed(codec, count, bytes(data))


def unpack(packed: Packed, size: int) -> Tensor:
    """Decode into a mask of `size` entries, or refuse. Never allocates more than `size` asks for."""
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
        mask = np.full(size, codec == ABSENT_GAPS_ZSTD)
        mask[_from_gaps(_decompress(data, LONGEST_VARINT * listed), listed, size)] ^= True
    else:
        raise WireError(f"codec {codec} for positions is unknown; this build knows 0 to {len(CODECS) - 1}")
    if codec in (NOTHING, EVERYTHING) and data:
        raise WireError(f"codec {codec} ({CODECS[codec]}) carries no data, {len(data)} bytes were found")
    if int(np.count_nonzero(mask)) != count:
        raise WireError(f"{count} positions were announced, {int(np.count_nonzero(mask))} were found")
    return torch.from_numpy(mask)


def _to_bitmap(mask: Tensor) -> bytes:
    # Least significant bit first. On a GPU the bits are packed there: an eighth of the bytes crosses the bus.
    if mask.is_cuda:
        bitmaps = _bitmaps(mask.unsqueeze(0), None)
        wait_for(mask.device)
        return bitmaps.numpy().tobytes()
    return np.packbits(mask.numpy(), bitorder="little").tobytes()


def _bitmaps(masks: Tensor, known: Tensor | None) -> Tensor:
    if kernels.serve(masks):
        from gluefl.accel.kernels.positions import absent, bitmaps

        return to_host(bitmaps(masks, None if known is None else absent(known, known.numel() - count_true(known))))
    masks = masks if known is None else masks.index_select(1, positions_of(~known))
    eights = torch.nn.functional.pad(masks, (0, -masks.shape[1] % 8)).view(torch.int64)
    return to_host((eights * GATHER_BITS >> 56).to(torch.uint8))


def _from_bitmap(data: bytes, size: int) -> np.ndarray:
    if len(data) != -(-size // 8):
        raise WireError(f"a bitmap of {size} positions has {-(-size // 8)} bytes, {len(data)} were found")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    if bits[size:].any():
        raise WireError("the padding of a bitmap is not zero")
    return bits[:size].astype(bool)


def _gaps(mask: Tensor, count: int) -> bytes | memoryview:
    """LEB128 varints of position − previous position − 1, the one before the first being −1."""
    if mask.is_cuda:
        rows = _gaps_of_rows(mask.unsqueeze(0), None, True, [count])
        wait_for(mask.device)
        return rows()[0]
    return _varints(positions_of(mask).numpy())


def _varints(positions: np.ndarray) -> bytes:
    gaps = np.diff(positions, prepend=-1)
    gaps -= 1
    first, long = gaps.astype(np.uint8), np.flatnonzero(gaps > 0x7F)  # few need a second byte, fewer a third
    if not long.size:
        return first.tobytes()
    first[long] |= 0x80
    rest, places, further = gaps[long] >> 7, [], []
    while long.size:
        goes_on = rest > 0x7F
        places.append(long + 1)
        further.append((rest & 0x7F | goes_on << 7).astype(np.uint8))
        long, rest = long[goes_on], rest[goes_on] >> 7
    at = np.concatenate(places)
    order = np.argsort(at, kind="stable")
    return np.insert(first, at[order], np.concatenate(further)[order]).tobytes()


def count_rows(masks: Tensor, known: Tensor) -> tuple[list[int], list[int]]:
    """At how many positions each row holds, and at how many of those that are known."""
    if kernels.serve(masks):
        from gluefl.accel.kernels.positions import counts

        found = counts(masks, known)
    else:
        found = torch.stack([masks.sum(1), (masks & known).sum(1)])
    held, both = fetched(found)().tolist()
    return held, both


def _gaps_of_rows(
    masks: Tensor, known: Tensor | None, present: bool, listed: Sequence[int]
) -> Callable[[], list[memoryview]]:
    if kernels.serve(masks):
        from gluefl.accel.kernels.positions import gaps

        data, lengths = (to_host(found) for found in gaps(masks, known, present, listed))
        return lambda: [row[:length].data for row, length in zip(data.numpy(), lengths.tolist())]
    masks = masks if present else ~masks
    found = _gaps_by_torch(masks if known is None else masks.index_select(1, positions_of(~known)))
    varints, ends = (to_host(some) for some in found)
    return lambda: [varints.numpy()[a:b].data for a, b in zip([0, *ends.tolist()], ends.tolist())]


def _gaps_by_torch(masks: Tensor) -> tuple[Tensor, Tensor]:
    row, column = masks.nonzero().to(torch.int32).unbind(1)
    gaps = torch.diff(column, prepend=column.new_zeros(1)).sub_(1)
    starts = torch.diff(row, prepend=row.new_full((1,), -1)) != 0
    gaps = torch.where(starts, column, gaps).unsqueeze(1)
    longest = max(1, -(-int(gaps.max()).bit_length() // 7))
    shifts = torch.arange(0, 7 * longest, 7, dtype=torch.int32, device=masks.device)
    there = gaps >> shifts > 0
    there[:, 0] = True
    follow = gaps >> (shifts + 7).clamp_(max=31) > 0
    varints = (gaps >> shifts & 0x7F | follow.int() << 7).to(torch.uint8)
    lengths = torch.zeros(len(masks), dtype=torch.long, device=masks.device).index_add_(0, row, there.sum(1))
    return varints[there], lengths.cumsum(0)


def _from_gaps(data: bytes, count: int, size: int) -> np.ndarray:
    raw = np.frombuffer(data, np.uint8).astype(np.int64)
    ends = np.flatnonzero(raw < 0x80)
    if ends.size != count or (raw.size and (not ends.size or ends[-1] != raw.size - 1)):
        raise WireError(f"{count} gaps were announced, {ends.size} whole ones were found")
    if not count:
        return np.zeros(0, np.int64)
    starts = np.concatenate([[0], ends[:-1] + 1])
    place = np.arange(raw.size) - np.repeat(starts, ends - starts + 1)
    if int(place.max()) >= LONGEST_VARINT:
        raise WireError(f"a gap of more than {LONGEST_VARINT} bytes was found")
    positions = np.cumsum(np.add.reduceat((raw & 0x7F) << (7 * place), starts) + 1) - 1
    if int(positions[-1]) >= size or (np.diff(positions) <= 0).any():
        raise WireError(f"a position lies outside a vector of {size}")
    return positions


_of_this_thread = threading.local()


def _compress(data: bytes | memoryview) -> bytes:
    # Every thread keeps a compressor: a new one asks for memory every time.
    if not hasattr(_of_this_thread, "compressor"):
        _of_this_thread.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    return bytes(_of_this_thread.compressor.compress(data))


def _decompress(data: bytes, limit: int, exact: bool = False) -> bytes:
    # The size a frame declares is checked before anything is allocated, and the output is bounded by it.
    try:
        declared = zstandard.frame_content_size(data)
        if declared < 0 or declared > limit or (exact and declared != limit):
            raise WireError(f"a compressed part declares {declared} bytes, {limit} are allowed")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=limit, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(f"a compressed part is damaged: {error}") from error
