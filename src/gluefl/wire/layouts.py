"""Sets of positions as bytes before they are compressed: a bitmap, the gaps between positions, or both.

On a GPU the bytes are made there by kernels, for many sets in a few launches, and only they are copied to the host.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gluefl.accel import kernels
from gluefl.accel.streams import fetched, synchronise, to_host
from gluefl.vectors.mask import Mask

SPARSE = 1 / 8  # below this density (or above its complement) gaps are tried beside the bitmap
VERY_SPARSE = 1 / 16  # below this one the bitmap is not tried: it is shorter only for clustered positions
LONG = 4096  # positions; a shorter bitmap may be shorter than the frame around the gaps
GATHER_BITS = 0x0102040810204080  # times eight bytes of 0 or 1: their bits, in order, in the highest byte


@dataclass(frozen=True)
class LaidOut:
    """A set of positions as bytes."""

    size: int
    count: int
    bitmap: bytes | memoryview | None = None
    gaps: bytes | memoryview | None = None  # between the present or the absent positions, whichever are fewer


def lay_out(mask: Mask) -> LaidOut:
    """The bytes of a mask."""
    size, count = mask.size, mask.count
    if count in (0, size):
        return LaidOut(size, count)
    gaps = None
    if few(count, size) <= SPARSE * size:
        gaps = _gaps(mask if lists_present(count, size) else mask.complement, few(count, size))
    return LaidOut(size, count, _to_bitmap(mask.bits) if _tries_bitmap(count, size) else None, gaps)


def lay_out_list(positions: np.ndarray, size: int) -> LaidOut:
    """As `lay_out` for increasing positions of a vector of `size`."""
    count = positions.size
    if 0 < count < size and lists_present(count, size) and not _tries_bitmap(count, size):
        return LaidOut(size, count, None, _varints(positions))
    bits = np.zeros(size, bool)
    bits[positions] = True
    return lay_out(Mask(torch.from_numpy(bits), count))


def lay_out_rows(masks: Tensor, counts: Sequence[int], beside: Mask | None = None) -> Callable[[], list[LaidOut]]:
    """As `lay_out` for every row of a matrix, in a few launches; the returned function reads the bytes on the host
    once the device has made them. Positions of `beside` are left out: the others are numbered without them, and
    `counts` counts the others alone."""
    size = masks.shape[1] - (0 if beside is None else beside.count)
    coded = [i for i, count in enumerate(counts) if 0 < count < size]
    dense = [i for i in coded if _tries_bitmap(counts[i], size)]
    bitmaps = _bitmaps(rows_of(masks, dense), beside) if dense else None
    gaps = []
    for present in (True, False):
        rows = [i for i in coded if few(counts[i], size) <= SPARSE * size and lists_present(counts[i], size) == present]
        if rows:
            listed = [few(counts[i], size) for i in rows]
            gaps.append((rows, _gaps_of_rows(rows_of(masks, rows), beside, present, listed)))

    def done() -> list[LaidOut]:
        bits = {} if bitmaps is None else {i: row.data for i, row in zip(dense, bitmaps.numpy())}
        varints = {i: row for rows, read in gaps for i, row in zip(rows, read())}
        return [LaidOut(size, count, bits.get(i), varints.get(i)) for i, count in enumerate(counts)]

    return done


def count_rows(masks: Tensor, shared: Mask) -> tuple[list[int], list[int]]:
    """How many positions each row covers, and how many of those the shared mask covers. Synchronises."""
    if kernels.serve(masks):
        from gluefl.accel.kernels.positions import counts

        both = counts(masks, shared.bits)
    else:
        both = torch.stack([masks.sum(1), (masks & shared.bits).sum(1)])
    covered, inside = fetched(both)().tolist()
    return covered, inside


def rows_of(masks: Tensor, rows: Sequence[int]) -> Tensor:
    """Rows in increasing order, without a copy if that is all of them."""
    return masks if len(rows) == len(masks) else masks[rows]


def few(count: int, size: int) -> int:
    """The smaller of present and absent."""
    return min(count, size - count)


def lists_present(count: int, size: int) -> bool:
    """Whether gaps are those of the present positions."""
    return count <= size - count


def _tries_bitmap(count: int, size: int) -> bool:
    return size < LONG or few(count, size) > VERY_SPARSE * size


def _to_bitmap(bits: Tensor) -> bytes:
    # Least significant bit first. On a GPU the bits are packed there: an eighth of the bytes crosses the bus.
    if bits.is_cuda:
        bitmaps = _bitmaps(bits.unsqueeze(0), None)
        synchronise(bits.device)
        return bitmaps.numpy().tobytes()
    return np.packbits(bits.numpy(), bitorder="little").tobytes()


def _bitmaps(masks: Tensor, beside: Mask | None) -> Tensor:
    if kernels.serve(masks):
        from gluefl.accel.kernels.positions import absent, bitmaps

        return to_host(bitmaps(masks, None if beside is None else absent(beside.bits, beside.size - beside.count)))
    masks = masks if beside is None else masks.index_select(1, beside.complement.positions)
    eights = torch.nn.functional.pad(masks, (0, -masks.shape[1] % 8)).view(torch.int64)
    return to_host((eights * GATHER_BITS >> 56).to(torch.uint8))


def _gaps(mask: Mask, count: int) -> bytes | memoryview:
    """LEB128 varints of position − previous position − 1, the one before the first being −1."""
    if mask.bits.is_cuda:
        rows = _gaps_of_rows(mask.bits.unsqueeze(0), None, True, [count])
        synchronise(mask.bits.device)
        return rows()[0]
    return _varints(mask.positions.numpy())


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


def _gaps_of_rows(
    masks: Tensor, beside: Mask | None, present: bool, listed: Sequence[int]
) -> Callable[[], list[memoryview]]:
    if kernels.serve(masks):
        from gluefl.accel.kernels.positions import gaps

        data, lengths = (
            to_host(rows) for rows in gaps(masks, None if beside is None else beside.bits, present, listed)
        )
        return lambda: [row[:length].data for row, length in zip(data.numpy(), lengths.tolist())]
    masks = masks if present else ~masks
    varints, ends = (
        to_host(rows)
        for rows in _gaps_by_torch(masks if beside is None else masks.index_select(1, beside.complement.positions))
    )
    return lambda: [varints.numpy()[a:b].data for a, b in zip([0, *ends.tolist()], ends.tolist())]


def _gaps_by_torch(masks: Tensor) -> tuple[Tensor, Tensor]:
    row, column = masks.nonzero().to(torch.int32).unbind(1)
    gaps = torch.diff(column, prepend=column.new_zeros(1)).sub_(1)
    starts = torch.diff(row, prepend=row.new_full((1,), -1)) != 0
    gaps = torch.where(starts, column, gaps).unsqueeze(1)
    longest = max(1, -(-int(gaps.max()).bit_length() // 7))
    shifts = torch.arange(0, 7 * longest, 7, dtype=torch.int32, device=masks.device)
    used = gaps >> shifts > 0
    used[:, 0] = True
    follow = gaps >> (shifts + 7).clamp_(max=31) > 0
    varints = (gaps >> shifts & 0x7F | follow.int() << 7).to(torch.uint8)
    lengths = torch.zeros(len(masks), dtype=torch.long, device=masks.device).index_add_(0, row, used.sum(1))
    return varints[used], lengths.cumsum(0)
