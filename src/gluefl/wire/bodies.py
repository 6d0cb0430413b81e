"""What messages carry, and how its encoding is started: on all cores, and from a GPU while that goes on.

A body is the same for all clients that hold one version; `messages` puts a header before it.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from gluefl.cores import available, beside, in_turn, started, stream_beside, wait_for
from gluefl.selection import Sparse, count_true, known_count, positions_of, remember_count
from gluefl.wire.positions import (
    LaidOut,
    Packed,
    count_rows,
    lay_out,
    lay_out_rows,
    pack,
    rows_of,
    squeeze,
)

ABSOLUTE, BESIDE_MASK, KNOWN = range(3)  # relation of a set of positions to the shared mask
AT_A_TIME = 1 << 28  # positions of many bodies that are laid out together
Encoded = tuple[int, Packed]  # a set of positions and its relation to the shared mask
LaidOutTogether = Callable[[], list[tuple[int, LaidOut]]]
Handed = dict[int, tuple["Future[list[Encoded]]", int]]  # id of what has positions → a task and its place in it


@dataclass(frozen=True)
class Shared:
    """The mask both sides know, with what encoding needs of it, computed once."""

    mask: Tensor

    @cached_property
    def packed(self) -> Packed:
        """The mask, encoded."""
        return (_handed(self) or self.encoded_here())[1]

    @cached_property
    def outside(self) -> Tensor:
        """The positions that the mask does not cover."""
        return positions_of(~self.mask)

    def encoded_here(self) -> Encoded:
        """The mask, in relation to nothing."""
        return ABSOLUTE, pack(self.mask)


@dataclass(frozen=True)
class Body:
    """Values at some positions, the statistics, and the shared mask: sent in a package, known in an upload."""

    update: Sparse
    statistics: Tensor
    shared: Shared
    sends_mask: bool

    @cached_property
    def positions(self) -> Encoded:
        """The positions, encoded."""
        return _handed(self) or self.encoded_here()

    def encoded_here(self) -> Encoded:
        """The positions, beside the shared mask where that covers part of them, else on their own."""
        update, known = self.update, count_true(self.shared.mask)
        if update.count == update.size:
            return ABSOLUTE, squeeze(LaidOut(update.size, update.size))
        mask = update.mask()
        inside = count_true(mask & self.shared.mask) if known else 0
        if known and inside == known:
            return BESIDE_MASK, squeeze(lay_out(mask.index_select(0, self.shared.outside), update.count - inside))
        return ABSOLUTE, squeeze(lay_out(mask, update.count))


def encode_positions(bodies: Sequence[Body], under_way: bool = False) -> None:
    """Start to encode the positions of bodies that share one mask, and the mask: who asks for them waits for them.
    A GPU is waited for until they have left it, unless they are said to be `under_way` there."""
    if not bodies:
        return
    shared = bodies[0].shared
    owners: list[Shared | Body] = [*bodies] if {"packed", "handed"} & vars(shared).keys() else [shared, *bodies]
    if shared.mask.is_cuda and under_way:
        handed = _hand_out_later(owners)
    else:
        handed = Future[Handed]()
        handed.set_result(_hand_out_from_gpu(owners) if shared.mask.is_cuda else _hand_out(owners))
    for owner in owners:
        vars(owner)["handed"] = handed


def _handed(owner: Shared | Body) -> Encoded | None:
    """What was started elsewhere, if it was."""
    handed: Future[Handed] | None = vars(owner).get("handed")
    task, place = (None, 0) if handed is None else handed.result().get(id(owner), (None, 0))
    return None if task is None else task.result()[place]


def _hand_out(owners: Sequence[Shared | Body]) -> Handed:
    if count_true(_shared(owners[0]).mask):
        _ = _shared(owners[0]).outside  # before several threads ask for it at once
    return _on_all_cores(owners, [owner.encoded_here for owner in owners])


def _hand_out_later(owners: Sequence[Shared | Body]) -> "Future[Handed]":
    """In a stream of its own, behind what the GPU was given so far and not behind what it is given from here on."""
    device = _shared(owners[0]).mask.device
    for owner in owners:
        if not _is_whole(owner):
            _mask(owner)  # made here, where it belongs: two streams may ask for it
    stream, under_way = stream_beside(device), started(device)
    if any(_known_counts(owner) is None for owner in owners):
        return in_turn(_hand_out_apart, owners, stream, under_way)
    try:
        with torch.cuda.stream(stream):
            stream.wait_event(under_way)
            chunks = [(chunk, lay_out_together(chunk)) for chunk in _chunks(owners)]
            return in_turn(_hand_out_done, chunks, started(device))
    except torch.cuda.OutOfMemoryError:
        return in_turn(dict)  # others are training: who asks for the positions later makes them one by one


def _hand_out_apart(
    owners: Sequence[Shared | Body], stream: "torch.cuda.Stream", under_way: "torch.cuda.Event"
) -> Handed:
    """Where something has to be asked of the GPU. It is waited for first: a thread that waits in the middle of a copy
    keeps all others from starting anything."""
    under_way.synchronize()
    try:
        with torch.cuda.stream(stream):
            return _hand_out_from_gpu(owners)
    except torch.cuda.OutOfMemoryError:
        return {}


def _hand_out_from_gpu(owners: Sequence[Shared | Body]) -> Handed:
    """Here and now. Many at a time leave the GPU, where every call counts."""
    handed: Handed = {}
    for chunk in _chunks(owners):
        laid_out = lay_out_together(chunk)
        wait_for(_shared(chunk[0]).mask)
        handed |= _on_all_cores(chunk, [partial(_squeeze, *one) for one in laid_out()])
    return handed


def _hand_out_done(
    chunks: Sequence[tuple[Sequence[Shared | Body], LaidOutTogether]], under_way: "torch.cuda.Event"
) -> Handed:
    under_way.synchronize()
    handed: Handed = {}
    for owners, laid_out in chunks:
        handed |= _on_all_cores(owners, [partial(_squeeze, *one) for one in laid_out()])
    return handed


def _chunks(owners: Sequence[Shared | Body]) -> list[Sequence[Shared | Body]]:
    some = max(1, AT_A_TIME // _shared(owners[0]).mask.numel())
    return [owners[at : at + some] for at in range(0, len(owners), some)]


def _on_all_cores(owners: Sequence[Shared | Body], encodings: Sequence[Callable[[], Encoded]]) -> Handed:
    # One task for every core, not for every body: threads that hand over every fifth of a millisecond lose half of it.
    tasks, handed = min(available(), len(owners)), Handed()
    for first in range(tasks):
        task = beside(lambda some: [encode() for encode in some], encodings[first::tasks])
        handed |= {id(owner): (task, place) for place, owner in enumerate(owners[first::tasks])}
    return handed


def _squeeze(relation: int, laid_out: LaidOut) -> Encoded:
    return relation, squeeze(laid_out)


def lay_out_together(owners: Sequence[Shared | Body]) -> LaidOutTogether:
    """The positions of bodies that share one mask, and of the mask, with their relation to it: to be called when a GPU
    has done it."""
    shared, size = _shared(owners[0]), _shared(owners[0]).mask.numel()
    some = [owner for owner in owners if not _is_whole(owner)]  # whole ones have no mask
    found: list[tuple[int, list[int], Callable[[], list[LaidOut]]]] = []
    if some:
        masks = torch.stack([_mask(owner) for owner in some])
        counts, inside = _counts(some, masks)
        known = count_true(shared.mask)
        covers = [
            isinstance(owner, Body) and 0 < known == both and count < size
            for owner, count, both in zip(some, counts, inside)
        ]
        for relation, mask in ((BESIDE_MASK, shared.mask), (ABSOLUTE, None)):
            rows = [row for row, covered in enumerate(covers) if covered == (mask is not None)]
            if rows:
                left = [counts[row] - (0 if mask is None else known) for row in rows]
                found.append(
                    (relation, [id(some[row]) for row in rows], lay_out_rows(rows_of(masks, rows), left, mask))
                )

    def done() -> list[tuple[int, LaidOut]]:
        rows = {key: (relation, row) for relation, keys, rows in found for key, row in zip(keys, rows())}
        return [rows.get(id(owner), (ABSOLUTE, LaidOut(size, size))) for owner in owners]

    return done


def _counts(owners: Sequence[Shared | Body], masks: Tensor) -> tuple[Sequence[int], Sequence[int]]:
    """How many positions there are, and how many of them the shared mask covers."""
    known = [_known_counts(owner) for owner in owners]
    if None not in known:
        return [both[0] for both in known if both], [both[1] for both in known if both]
    counts, inside = count_rows(masks, _shared(owners[0]).mask)
    for owner, count in zip(owners, counts):
        remember_count(_mask(owner), count)
        if isinstance(owner, Body):
            vars(owner.update)["count"] = count  # in the place of what it would compute
    return counts, inside


def _known_counts(owner: Shared | Body) -> tuple[int, int] | None:
    """As `_counts`, if it can be said without asking a GPU."""
    if _is_whole(owner):
        return 0, 0
    mask, shared = _mask(owner), _shared(owner).mask
    count, known = known_count(mask), known_count(shared)
    if count is None or known is None:
        return None
    covered = mask if isinstance(owner, Shared) else owner.update.covered
    return (count, known) if not known or shared is mask or shared is covered else None


def _shared(owner: Shared | Body) -> Shared:
    return owner if isinstance(owner, Shared) else owner.shared


def _mask(owner: Shared | Body) -> Tensor:
    return owner.mask if isinstance(owner, Shared) else owner.update.mask()


def _is_whole(owner: Shared | Body) -> bool:
    return isinstance(owner, Body) and owner.update.is_whole
