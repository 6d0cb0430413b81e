"""Top-k by magnitude, exact and the same on every device, and the sparse vectors it makes.

Ties are broken by a fixed hash of (round, position): both sides of a federation then derive the same mask from
the same update, and when quantised updates tie massively the mask is not pinned to the first layers.
"""

import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gluefl.accel import kernels
from gluefl.errors import Diverged

MASK_32 = 0xFFFFFFFF
SAMPLE = 1 << 14  # of a long vector, at most
LONG = 5000


class Sparse:
    """A part of a flat vector of `size` entries: increasing positions and their values."""

    def __init__(self, positions: Tensor, values: Tensor, size: int) -> None:
        self.size = size
        self.count, self.positions, self.values = positions.numel(), positions, values  # instead of the cached ones

    @classmethod
    def where(cls, mask: Tensor, vector: Tensor) -> "Sparse":
        """The entries of a vector that a mask covers; the vector must not change as long as they are used."""
        if mask.is_cuda:
            # To list positions is to wait for all that was started, and a GPU is faster through the whole vector.
            return cls.view(mask, vector)
        positions = positions_of(mask)
        sparse = cls(positions, vector.index_select(0, positions), mask.numel())
        sparse._mask = mask
        return sparse

    @classmethod
    def both(cls, mask: Tensor, beside: Tensor, vector: Tensor) -> "Sparse":
        """The entries that either of two masks covers, which share no position."""
        either, counts = mask | beside, (known_count(mask), known_count(beside))
        if counts[0] is not None and counts[1] is not None:
            remember_count(either, counts[0] + counts[1])
        sparse = cls.where(either, vector)
        sparse.covered = mask
        if sparse.listed:
            sparse._mask = None  # a round holds many, and who goes over lists needs none
        return sparse

    @classmethod
    def view(cls, mask: Tensor, vector: Tensor) -> "Sparse":
        """As `where`, but nothing is computed before it is asked for, on a CPU too."""
        sparse = cls.__new__(cls)
        sparse.size = mask.numel()
        sparse._mask, sparse._vector = mask, vector
        return sparse

    @classmethod
    def full(cls, vector: Tensor) -> "Sparse":
        """All entries of a vector."""
        sparse = cls.__new__(cls)
        sparse.size = sparse.count = vector.numel()
        sparse.values = vector
        return sparse

    @classmethod
    def empty(cls, size: int, device: torch.device | str = "cpu") -> "Sparse":
        """No entry at all."""
        return cls(torch.zeros(0, dtype=torch.long, device=device), torch.zeros(0, device=device), size)

    covered: Tensor | None = None  # a mask all of whose positions are known to be present
    _mask: Tensor | None = None
    _vector: Tensor

    @cached_property
    def count(self) -> int:
        """How many positions are present."""
        return count_true(self.mask())

    @cached_property
    def positions(self) -> Tensor:
        """Increasing."""
        if self._mask is None:  # all of them
            return torch.arange(self.size, device=self.values.device)
        return positions_of(self._mask)

    @cached_property
    def values(self) -> Tensor:
        """One for every position."""
        return self._vector if self.is_whole else self._vector.index_select(0, self.positions)

    @property
    def density(self) -> float:
        """Share of the positions that are present."""
        return self.count / self.size

    def mask(self) -> Tensor:
        """The positions as booleans; not to be written to."""
        if self._mask is None:
            mask = torch.zeros(self.size, dtype=torch.bool, device=self.positions.device)
            mask[self.positions] = True
            self._mask = mask  # not before it is filled: another thread may be asking
        return self._mask

    def release(self) -> None:
        """Forget the values, if they take room on a GPU: nobody will ask for them."""
        if not self.listed:
            for name in ("_vector", "values"):
                vars(self).pop(name, None)

    def dense(self) -> Tensor:
        """The vector, zero where nothing is present."""
        return self.add_to(torch.zeros(self.size, dtype=self.values.dtype, device=self.values.device))

    def add_to(self, vector: Tensor, weight: float = 1.0) -> Tensor:
        """Add `weight` times this to a vector, in place, and return it."""
        if self.is_whole:
            return vector.add_(self.values * weight)
        if self._listed:
            return vector.index_add_(0, self.positions, self.values * weight)
        if self._served(vector):
            return add_all(vector, [self], [weight])
        # Adding −0 changes nothing, not even the sign of a zero.
        return vector.add_((self._vector * weight).masked_fill_(~self.mask(), -0.0))

    def set_in(self, vector: Tensor, value: float) -> Tensor:
        """Set the entries of a vector at these positions, in place, and return it."""
        if self.is_whole:
            return vector.fill_(value)
        if self._listed:
            return vector.index_fill_(0, self.positions, value)
        return vector.masked_fill_(self.mask(), value)

    def rest_of(self, vector: Tensor, weight: float = 1.0) -> Tensor:
        """`weight` times a vector, and zero at these positions."""
        if self._served(vector):
            from gluefl.accel.kernels.add import rest

            return rest(vector, self.mask(), weight)
        return self.set_in(vector * weight, 0)

    def finite(self) -> Tensor:
        """Whether all values are numbers; on a GPU that may still be under way."""
        if self.is_whole or self._listed:
            return torch.isfinite(self.values).all()
        return torch.isfinite(self._vector).logical_or_(~self.mask()).all()

    @property
    def is_whole(self) -> bool:
        """Whether every position is present, as far as is known: to count on a GPU is to wait for it."""
        return vars(self).get("count") == self.size

    @property
    def listed(self) -> bool:
        """Whether there is a list of the positions already."""
        return "positions" in vars(self)

    def _served(self, vector: Tensor) -> bool:
        """Whether a kernel goes over a vector and this together."""
        if self.is_whole or self._listed or not kernels.serve(vector):
            return False
        return vector.dtype == self._vector.dtype == torch.float32 and vector.is_contiguous()

    @property
    def _listed(self) -> bool:
        """Whether to go over the list of positions: on a GPU only if there is one already."""
        return self.listed or not self.mask().is_cuda


def add_all(vector: Tensor, parts: Sequence[Sparse], weights: Sequence[float]) -> Tensor:
    """Add weighted parts to a vector, in place and one after the other, and return it; on a GPU many in one pass."""
    if parts and all(part._served(vector) for part in parts):
        from gluefl.accel.kernels.add import add

        return add(vector, [part._vector for part in parts], [part.mask() for part in parts], weights)
    for part, weight in zip(parts, weights):
        part.add_to(vector, weight)
    return vector


@cache
def count(fraction: float, size: int) -> int:
    """⌊fraction·size⌋ on the decimal the user wrote: 0.2 of 10 is 2, whatever binary floats say."""
    return int(Fraction(str(fraction)) * size)


def counts(fraction: float, sizes: Sequence[int], at_least: int = 0) -> tuple[int, ...]:
    """`count` for every segment of a vector."""
    return tuple(max(at_least, count(fraction, size)) for size in sizes)


def top(values: Tensor, keep: Sequence[int], sizes: Sequence[int], round: int, among: Tensor | None = None) -> Tensor:
    """A mask of the `keep[j]` largest magnitudes in every segment j of a vector.

    One segment is the paper's top_q over R^d; the sizes of the tensors give the top per tensor. `among` leaves
    only some positions eligible; where fewer than `keep` are eligible, all of them are taken.

    >>> top(torch.tensor([1.0, -3.0, 2.0]), keep=[2], sizes=[3], round=1)
    tensor([False,  True,  True])
    """
    ends = np.cumsum(sizes).tolist()
    some = [*zip(keep, [0, *ends], ends)]
    if kernels.serve(values) and values.dtype == torch.float32:
        from gluefl.accel.kernels.largest import largest

        if len(some) == 1:  # as it is: who asks for many among the same is recognised
            masks = [largest(values, keep[0], 0, _salt(round), among)]
        else:
            masks = [
                largest(values[a:b], k, a, _salt(round), None if among is None else among[a:b]) for k, a, b in some
            ]
    else:
        bits = _magnitude_bits(values)
        if among is not None:
            bits.bitwise_or_(among.view(torch.int8) - 1)  # −1 where not eligible, below every magnitude
        masks = [_top(bits[a:b], k, round, a) for k, a, b in some]
    mask = masks[0] if len(masks) == 1 else torch.cat(masks)
    eligible = list(sizes) if among is None else [known_count(among) if len(masks) == 1 else None]
    if None not in eligible:
        remember_count(mask, sum(min(max(k, 0), most or 0) for k, most in zip(keep, eligible)))
    return mask


def tie_break(positions: Tensor, round: int) -> Tensor:
    """A fixed one-to-one hash of positions below 2^32, different in every round; the lowest goes first."""
    x = positions ^ _salt(round)
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        x = x ^ (x >> 16)
        x = x * factor & MASK_32
    return x ^ (x >> 16)


def _salt(round: int) -> int:
    return round * 0x9E3779B9 & MASK_32


def positions_of(mask: Tensor) -> Tensor:
    """The increasing positions at which a mask holds."""
    if mask.is_cuda:
        return mask.nonzero().squeeze(1)
    return torch.from_numpy(np.flatnonzero(mask.numpy()))  # five times as fast as torch's nonzero on a CPU


def count_true(mask: Tensor) -> int:
    """At how many positions a mask holds. On a GPU it is remembered: to ask is to wait for all that was started."""
    if not mask.is_cuda:
        return int(np.count_nonzero(mask.numpy()))
    found = known_count(mask)
    if found is None:
        found = int(torch.count_nonzero(mask))
        remember_count(mask, found)
    return found


def known_count(mask: Tensor) -> int | None:
    """As `count_true`, if somebody has told: on a GPU, where to count is to wait."""
    version, found = vars(mask).get("counted", (None, 0))
    return int(found) if version == mask._version else None


def outside(mask: Tensor) -> Tensor:
    """The positions at which a mask does not hold, as a mask; not to be written to. On a GPU every client of a round
    asks for the same one, and to start another kernel takes as long as all that it does: it is remembered."""
    version, rest = vars(mask).get("outside", (None, None))
    count = known_count(mask)
    if not isinstance(rest, Tensor) or version != mask._version:
        rest = ~mask
    if count is not None:
        remember_count(rest, mask.numel() - count)
    if mask.is_cuda:
        vars(mask)["outside"] = mask._version, rest
    return rest


def remember_count(mask: Tensor, count: int) -> None:
    """Somebody has counted at how many positions a mask holds."""
    if mask.is_cuda:
        vars(mask)["counted"] = mask._version, count


def uniform_mask(size: int, value: bool, device: torch.device) -> Tensor:
    """A mask that is the same everywhere: how often it holds need not be asked."""
    mask = torch.full((size,), value, device=device)
    remember_count(mask, size if value else 0)
    return mask


def _magnitude_bits(values: Tensor) -> Tensor:
    # The bit pattern of a non-negative IEEE float orders like the float, and integers compare alike everywhere.
    integer = {torch.float32: torch.int32, torch.float64: torch.int64}[values.dtype]
    bits = values.abs().view(integer)
    if bits.numel() and not bits.is_cuda:  # `_top_on_gpu` looks at it together with everything else
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


def _top_on_gpu(bits: Tensor, keep: int, round: int, start: int) -> Tensor:
    """As `_top`, but it asks the device only once: every answer waits for all that was started before."""
    keep = min(keep, bits.numel())
    if keep <= 0:
        return torch.zeros_like(bits, dtype=torch.bool)
    threshold = bits.topk(keep, sorted=False).values.min()
    above, ties = bits > threshold, bits == threshold
    answers = torch.stack([bits.max().long(), threshold.long(), above.sum(), ties.sum()]).tolist()
    largest, at, more, tied = (int(answer) for answer in answers)
    _check_finite(bits, largest)
    if at < 0:  # fewer than `keep` are eligible
        return bits >= 0
    if more + tied > keep:
        among = positions_of(ties)
        ties = torch.zeros_like(ties)
        ties[among[tie_break(among + start, round).argsort()[: keep - more]]] = True
    return above | ties


def _top(bits: Tensor, keep: int, round: int, start: int) -> Tensor:
    if bits.is_cuda:
        return _top_on_gpu(bits, keep, round, start)
    if keep <= 0:
        return torch.zeros_like(bits, dtype=torch.bool)
    threshold = _kth_largest(bits, keep) if keep < bits.numel() else 0
    mask = _compare(bits, operator.ge, max(threshold, 0))  # below 0: fewer than `keep` are eligible
    too_many = count_true(mask) - keep
    if too_many > 0:
        ties = positions_of(_compare(bits, operator.eq, threshold))
        mask[ties[tie_break(ties + start, round).argsort()[ties.numel() - too_many :]]] = False
    return mask


def _compare(bits: Tensor, how: Callable[[Any, int], Any], value: int) -> Tensor:
    return torch.from_numpy(how(bits.numpy(), value))  # five times as fast as torch's own on a CPU


def _kth_largest(bits: Tensor, k: int) -> int:
    everything = bits.numpy()
    if everything.size >= LONG:
        # A sample tells roughly where the k-th lies: what is above need only be counted, and little is partitioned.
        sample = everything[:: everything.size // min(SAMPLE, everything.size // 12)]
        expected = sample.size * k / everything.size
        margin = 4 * expected**0.5 + 1
        lowest, highest = int(expected + margin) + 1, int(expected - margin)
        if lowest <= sample.size and highest >= 1:
            ends = sample.size - lowest, sample.size - highest
            low, high = np.partition(sample, ends)[[*ends]]
            above = int(np.count_nonzero(everything > high))
            between = everything[(everything >= low) & (everything <= high)]
            if above < k <= above + between.size:
                return _kth(between, k - above)
    return _kth(everything, k)


def _kth(values: Any, k: int) -> int:
    return int(np.partition(values, values.size - k)[values.size - k])
