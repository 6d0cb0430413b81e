"""Top-k by magnitude, exact and the same on every device.

Ties are broken by a fixed hash of (round, position): both sides of a federation then derive the same mask from the
same update, and when quantised updates tie massively the mask is not pinned to the first layers.
"""

import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gluefl.accel.masked import largest
from gluefl.errors import Diverged
from gluefl.vectors.mask import Mask

MASK_32 = 0xFFFFFFFF
SAMPLE = 1 << 14  # entries of a long vector that are sampled, at most
LONG = 5000


def count(fraction: float, size: int) -> int:
    """⌊fraction·size⌋ on the decimal the user wrote: 0.2 of 10 is 2, whatever binary floats say."""
    return int(Fraction(str(fraction)) * size)


def counts(fraction: float, sizes: Sequence[int], at_least: int = 0) -> tuple[int, ...]:
    """`count` for every segment of a vector."""
    return tuple(max(at_least, count(fraction, size)) for size in sizes)


def top(values: Tensor, keep: Sequence[int], sizes: Sequence[int], round: int, among: Mask | None = None) -> Mask:
    """A mask of the `keep[j]` largest magnitudes in every segment j of a vector.

    One segment is the paper's top_q over R^d; the sizes of the tensors give the top per tensor. `among` leaves
    only some positions eligible; where fewer than `keep` are eligible, all of them are taken.

    >>> top(torch.tensor([1.0, -3.0, 2.0]), keep=[2], sizes=[3], round=1).bits
    tensor([False,  True,  True])
    """
    if len(sizes) == 1:
        bits = _top(values, keep[0], 0, round, None if among is None else among.bits)
        eligible: list[int | None] = [sizes[0] if among is None else among.known_count]
    else:
        ends = np.cumsum(sizes).tolist()
        bits = torch.cat(
            [
                _top(values[a:b], k, a, round, None if among is None else among.bits[a:b])
                for k, a, b in zip(keep, [0, *ends], ends)
            ]
        )
        eligible = list(sizes) if among is None else [None]
    taken = [min(max(k, 0), most) for k, most in zip(keep, eligible) if most is not None]
    return Mask(bits, sum(taken) if None not in eligible else None)


def tie_break(positions: Tensor, round: int) -> Tensor:
    """A fixed one-to-one hash of positions below 2^32, different in every round; the lowest is taken first."""
    x = positions ^ _salt(round)
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        x = x ^ (x >> 16)
        x = x * factor & MASK_32
    return x ^ (x >> 16)


def _salt(round: int) -> int:
    return round * 0x9E3779B9 & MASK_32


def _top(values: Tensor, keep: int, start: int, round: int, among: Tensor | None) -> Tensor:
    """The top of one segment that starts at a position of the whole vector."""
    by_kernel = largest(values, keep, start, _salt(round), among)
    if by_kernel is not None:
        return by_kernel
    bits = _magnitude_bits(values)
    if among is not None:
        bits.bitwise_or_(among.view(torch.int8) - 1)  # −1 where not eligible, below every magnitude
    return _top_by_torch(bits, keep, round, start) if bits.is_cuda else _top_by_numpy(bits, keep, round, start)


def _magnitude_bits(values: Tensor) -> Tensor:
    # The bit pattern of a non-negative IEEE float orders like the float, and integers compare alike everywhere.
    integer = {torch.float32: torch.int32, torch.float64: torch.int64}[values.dtype]
    bits = values.abs().view(integer)
    if bits.numel() and not bits.is_cuda:  # `_top_by_torch` checks it with its only synchronisation
        _check_finite(bits, int(bits.max()))
    return bits


def _check_finite(bits: Tensor, largest: int) -> None:
    infinity = 0x7F800000 if bits.dtype == torch.int32 else 0x7FF0000000000000
    if largest >= infinity:
        bad = int(torch.count_nonzero(bits >= infinity))
        raise Diverged(
            f"{bad} of {bits.numel()} values of an update are NaN or infinite: the training diverged. "
            "Lower the learning rate."
        )


def _top_by_torch(bits: Tensor, keep: int, round: int, start: int) -> Tensor:
    """On a GPU without Triton; synchronises once."""
    keep = min(keep, bits.numel())
    if keep <= 0:
        return torch.zeros_like(bits, dtype=torch.bool)
    threshold = bits.topk(keep, sorted=False).values.min()
    above, ties = bits > threshold, bits == threshold
    answers = torch.stack([bits.max().long(), threshold.long(), above.sum(), ties.sum()]).tolist()
    highest, at, more, tied = (int(answer) for answer in answers)
    _check_finite(bits, highest)
    if at < 0:  # fewer than `keep` are eligible
        return bits >= 0
    if more + tied > keep:
        among = ties.nonzero().squeeze(1)
        ties = torch.zeros_like(ties)
        ties[among[tie_break(among + start, round).argsort()[: keep - more]]] = True
    return above | ties


def _top_by_numpy(bits: Tensor, keep: int, round: int, start: int) -> Tensor:
    if keep <= 0:
        return torch.zeros_like(bits, dtype=torch.bool)
    threshold = _kth_largest(bits, keep) if keep < bits.numel() else 0
    mask = _compare(bits, operator.ge, max(threshold, 0))  # below 0: fewer than `keep` are eligible
    too_many = int(np.count_nonzero(mask.numpy())) - keep
    if too_many > 0:
        ties = Mask(_compare(bits, operator.eq, threshold)).positions
        mask[ties[tie_break(ties + start, round).argsort()[ties.numel() - too_many :]]] = False
    return mask


def _compare(bits: Tensor, how: Callable[[Any, int], Any], value: int) -> Tensor:
    return torch.from_numpy(how(bits.numpy(), value))  # five times as fast as torch's own on a CPU


def _kth_largest(bits: Tensor, k: int) -> int:
    magnitudes = bits.numpy()
    if magnitudes.size >= LONG:
        # A sample brackets the k-th: what is above needs only counting, and little has to be partitioned.
        sample = magnitudes[:: magnitudes.size // min(SAMPLE, magnitudes.size // 12)]
        expected = sample.size * k / magnitudes.size
        margin = 4 * expected**0.5 + 1
        lowest, highest = int(expected + margin) + 1, int(expected - margin)
        if lowest <= sample.size and highest >= 1:
            ends = sample.size - lowest, sample.size - highest
            low, high = np.partition(sample, ends)[[*ends]]
            above = int(np.count_nonzero(magnitudes > high))
            between = magnitudes[(magnitudes >= low) & (magnitudes <= high)]
            if above < k <= above + between.size:
                return _kth(between, k - above)
    return _kth(magnitudes, k)


def _kth(values: Any, k: int) -> int:
    return int(np.partition(values, values.size - k)[values.size - k])
