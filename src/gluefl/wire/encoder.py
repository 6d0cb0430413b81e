"""The positions of bodies are encoded in the background: on all cores, and from a GPU by a side stream."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gluefl.accel import kernels
from gluefl.accel.streams import recorded, side_stream, synchronise
from gluefl.accel.threads import Pending, on_all_cores, submit_in_order
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import Listed, Sparse
from gluefl.wire.bodies import Body, BodyCodec, Shared
from gluefl.wire.layouts import LaidOut, count_rows, lay_out, lay_out_list, lay_out_rows, rows_of
from gluefl.wire.lengths import Counts, Encoded, Encoding, count_all, measured
from gluefl.wire.positions import squeeze

ABSOLUTE, BESIDE_MASK, KNOWN = range(3)  # relation of a set of positions to the shared mask
AT_A_TIME = 1 << 28  # positions that are laid out in one batch on a GPU


@dataclass(frozen=True)
class PositionSet:
    """Positions to encode: listed on a CPU, a mask otherwise; given beside the shared mask where they may be."""

    size: int
    shared: Shared
    mask: Mask | None = None
    listed: Tensor | None = None
    covers: Mask | None = None
    is_whole: bool = False
    relative: bool = True

    @classmethod
    def of(cls, update: Sparse, shared: Shared) -> "PositionSet":
        """The positions of an update."""
        if update.is_whole:
            return cls(update.size, shared, is_whole=True)
        if isinstance(update, Listed) and not update.positions.is_cuda:
            return cls(update.size, shared, listed=update.positions)
        return cls(update.size, shared, mask=update.mask, covers=update.covers)

    def encode(self) -> Encoded:
        """Beside the shared mask if the positions include all of it, else on their own."""
        shared, covered = self.shared.mask, self.shared.mask.count if self.relative else 0
        if self.is_whole:
            return ABSOLUTE, squeeze(LaidOut(self.size, self.size))
        if self.listed is not None:  # a pass over the list is faster than one over a mask
            positions = self.listed.numpy()
            unique = positions[np.flatnonzero(~shared.bits.numpy()[positions])] if covered else positions
            if covered and positions.size - unique.size == covered:
                return BESIDE_MASK, squeeze(lay_out_list(self.shared.numbers[unique], self.size - covered))
            return ABSOLUTE, squeeze(lay_out_list(positions, self.size))
        mask = self.mask_given
        if covered and mask.count < self.size and Mask(mask.bits & shared.bits).count == covered:
            rest = Mask(mask.bits.index_select(0, self.shared.outside), mask.count - covered)
            return BESIDE_MASK, squeeze(lay_out(rest))
        return ABSOLUTE, squeeze(lay_out(mask))

    @property
    def mask_given(self) -> Mask:
        """The mask of a set that is neither listed nor whole."""
        assert self.mask is not None
        return self.mask

    def known_counts(self) -> Counts | None:
        """The counts, if they follow without counting."""
        if self.is_whole:
            return self.size, 0
        count, shared = self.mask_given.known_count, self.shared.mask
        if count is None or shared.known_count is None:
            return None
        contained = not shared.known_count or shared is self.mask or shared is self.covers
        return (count, shared.known_count) if contained else None


def encode_positions(
    bodies: Sequence[Body],
    mask: Pending[Encoded] | None = None,
    counts: Sequence[Counts] | None = None,
    under_way: bool = False,
) -> list[Encoding]:
    """Start to encode the positions of bodies that share one mask, and the mask if it is sent and not given.

    A GPU is synchronised with until it has made the bytes, unless the positions are still being computed there
    (`under_way`): then a side stream waits for them instead of the host. `counts` are those of `count_positions`.
    """
    if not bodies:
        return []
    if isinstance(bodies[0].codec, BodyCodec):
        return measured(bodies[0].codec, bodies)
    shared, sends_mask = bodies[0].shared, bodies[0].sends_mask
    sets = [PositionSet.of(body.update, shared) for body in bodies]
    if sends_mask and mask is None:
        sets = [PositionSet(shared.mask.size, shared, shared.mask, covers=shared.mask, relative=False), *sets]
        counts = None if counts is None else [(shared.mask.count, shared.mask.count), *counts]
    if not shared.mask.bits.is_cuda:
        positions = _on_host(sets, shared)
    elif under_way:
        positions = _by_side_stream(sets)
    else:
        positions = _from_gpu(sets, counts)
    if len(sets) > len(bodies):
        mask, *positions = positions
    return [
        Encoding(encoded, mask if sends_mask else None, body.update.support, _rest_bytes(body))
        for body, encoded in zip(bodies, positions)
    ]


def count_positions(bodies: Sequence[Body]) -> list[Counts]:
    """Count the positions of bodies that share one mask, synchronising with a GPU once; masks remember the counts."""
    if not bodies or not bodies[0].shared.mask.bits.is_cuda:
        return []
    if isinstance(bodies[0].codec, BodyCodec):
        return count_all([body.update for body in bodies])
    sets, shared = [PositionSet.of(body.update, body.shared) for body in bodies], bodies[0].shared
    sets = [PositionSet(shared.mask.size, shared, shared.mask, covers=shared.mask, relative=False), *sets]
    counts: list[Counts] = []
    for batch in _batches(sets):
        masks = [one.mask_given.bits for one in batch if not one.is_whole]
        counts += _counts(batch, torch.stack(masks) if masks else None)
        synchronise(shared.mask.bits.device)
    return counts[1:]


def _rest_bytes(body: Body) -> Callable[[], int]:
    assert not isinstance(body.codec, BodyCodec)
    values_bytes, statistics_bytes = body.codec.measure(body.update), 4 * body.statistics.numel()
    return lambda: values_bytes() + statistics_bytes


def _on_host(sets: Sequence[PositionSet], shared: Shared) -> list[Pending[Encoded]]:
    if shared.mask.count:
        _ = shared.outside, shared.numbers  # before several threads compute them at once
    return on_all_cores([one.encode for one in sets])


def _by_side_stream(sets: Sequence[PositionSet]) -> list[Pending[Encoded]]:
    """After everything launched so far, and before what is launched from here on has finished."""
    device = sets[0].shared.mask.bits.device
    stream, complete = side_stream(device, "encoding"), recorded(device)
    if not kernels.HAS_TRITON or any(one.known_counts() is None for one in sets):
        return _spread(submit_in_order(_from_gpu_after, sets, stream, complete), len(sets))
    try:
        with torch.cuda.stream(stream):
            stream.wait_event(complete)
            layouts = [lay_out_together(batch) for batch in _batches(sets)]
            return _spread(submit_in_order(_squeezed_after, layouts, recorded(device)), len(sets))
    except torch.cuda.OutOfMemoryError:
        return [Pending(one.encode) for one in sets]  # one by one, when the positions are read


def _from_gpu_after(
    sets: Sequence[PositionSet], stream: "torch.cuda.Stream", complete: "torch.cuda.Event"
) -> list[Pending[Encoded]]:
    complete.synchronize()  # not inside a copy call, which would block launches of all other threads
    with torch.cuda.stream(stream):
        return _from_gpu(sets, None)


def _from_gpu(sets: Sequence[PositionSet], counts: Sequence[Counts] | None) -> list[Pending[Encoded]]:
    pending: list[Pending[Encoded]] = []
    for batch in _batches(sets):
        try:
            given = None if counts is None else counts[len(pending) : len(pending) + len(batch)]
            layout = lay_out_together(batch, given)
        except torch.cuda.OutOfMemoryError:
            return pending + [Pending(one.encode) for one in sets[len(pending) :]]
        synchronise(batch[0].shared.mask.bits.device)
        pending += on_all_cores([partial(_squeeze, *one) for one in layout()])
    return pending


def _squeezed_after(
    layouts: Sequence[Callable[[], list[tuple[int, LaidOut]]]], complete: "torch.cuda.Event"
) -> list[Pending[Encoded]]:
    complete.synchronize()
    return [one for layout in layouts for one in on_all_cores([partial(_squeeze, *part) for part in layout()])]


def _batches(sets: Sequence[PositionSet]) -> list[Sequence[PositionSet]]:
    length = max(1, AT_A_TIME // sets[0].size)
    return [sets[at : at + length] for at in range(0, len(sets), length)]


def _spread(task: "Future[list[Pending[Encoded]]]", count: int) -> list[Pending[Encoded]]:
    return [Pending(partial(lambda place: task.result()[place].result(), place)) for place in range(count)]


def _squeeze(relation: int, laid_out: LaidOut) -> Encoded:
    return relation, squeeze(laid_out)


def lay_out_together(
    sets: Sequence[PositionSet], counts: Sequence[Counts] | None = None
) -> Callable[[], list[tuple[int, LaidOut]]]:
    """The positions of sets that share one mask, each with its relation to it; to be called when a GPU is done."""
    shared, size = sets[0].shared.mask, sets[0].size
    places = [place for place, one in enumerate(sets) if not one.is_whole]  # whole ones have no bytes
    parts: list[tuple[int, list[int], Callable[[], list[LaidOut]]]] = []
    if places:
        masks = torch.stack([sets[place].mask_given.bits for place in places])
        counted = _counts(sets, masks) if counts is None else counts
        beside = [
            place for place in places if sets[place].relative and 0 < counted[place][1] == shared.count
            and counted[place][0] < size
        ]  # fmt: skip
        for relation, beside_mask in ((BESIDE_MASK, shared), (ABSOLUTE, None)):
            rows = [row for row, place in enumerate(places) if (place in beside) == (relation == BESIDE_MASK)]
            if rows:
                left = [counted[places[row]][0] - (shared.count if beside_mask is not None else 0) for row in rows]
                read = lay_out_rows(rows_of(masks, rows), left, beside_mask)
                parts.append((relation, [places[row] for row in rows], read))

    def done() -> list[tuple[int, LaidOut]]:
        laid_out = {place: (relation, one) for relation, at, read in parts for place, one in zip(at, read())}
        return [laid_out.get(place, (ABSOLUTE, LaidOut(size, size))) for place in range(len(sets))]

    return done


def _counts(sets: Sequence[PositionSet], masks: Tensor | None) -> list[Counts]:
    """The counts of sets, whose masks that are not whole are the rows of a matrix; synchronises if one is unknown."""
    counts_given = [one.known_counts() for one in sets]
    if masks is None or None not in counts_given:
        return [counts or (0, 0) for counts in counts_given]
    rows = iter(zip(*count_rows(masks, sets[0].shared.mask)))
    counted = []
    for one in sets:
        counts = (one.size, 0) if one.is_whole else next(rows)
        if not one.is_whole:
            one.mask_given.remember(counts[0])
        counted.append(counts)
    return counted
