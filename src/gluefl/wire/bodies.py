"""What messages carry, and how its encoding is started: on all cores, and from a GPU while that goes on.

A body is the same for all clients that hold one version; `messages` puts a header before it.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from gluefl.cores import available, beside, in_turn, started, stream_beside
from gluefl.selection import Sparse, count_true, positions_of, remember_count
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
        for body in bodies:
            if not body.update.is_whole:
                body.update.mask()  # made here, where it belongs: two streams may ask for it
        device = shared.mask.device
        handed = in_turn(_hand_out_apart, owners, stream_beside(device), started(device))
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


def _hand_out_apart(
    owners: Sequence[Shared | Body], stream: "torch.cuda.Stream", under_way: "torch.cuda.Event"
) -> Handed:
    """In a stream of its own: what was started before is waited for, not what has been since. And waited for first:
    a thread that waits in the middle of a copy keeps all others from starting anything."""
    under_way.synchronize()
    try:
        with torch.cuda.stream(stream):
            return _hand_out_from_gpu(owners)
    except torch.cuda.OutOfMemoryError:
        return {}  # the next clients are training: who asks for the positions later makes them one by one


def _hand_out_from_gpu(owners: Sequence[Shared | Body]) -> Handed:
    """Many at a time leave the GPU, where every call counts."""
    some, handed = max(1, AT_A_TIME // _shared(owners[0]).mask.numel()), Handed()
    for chunk in (owners[at : at + some] for at in range(0, len(owners), some)):
        handed |= _on_all_cores(chunk, [partial(_squeeze, *found) for found in lay_out_together(chunk)])
    return handed


def _on_all_cores(owners: Sequence[Shared | Body], encodings: Sequence[Callable[[], Encoded]]) -> Handed:
    # One task for every core, not for every body: threads that hand over every fifth of a millisecond lose half of it.
    tasks, handed = min(available(), len(owners)), Handed()
    for first in range(tasks):
        task = beside(lambda some: [encode() for encode in some], encodings[first::tasks])
        handed |= {id(owner): (task, place) for place, owner in enumerate(owners[first::tasks])}
    return handed


def _squeeze(relation: int, laid_out: LaidOut) -> Encoded:
    return relation, squeeze(laid_out)


def lay_out_together(owners: Sequence[Shared | Body]) -> list[tuple[int, LaidOut]]:
    """The positions of bodies that share one mask, and of the mask, with their relation to it."""
    shared, size = _shared(owners[0]), _shared(owners[0]).mask.numel()
    found = {i: (ABSOLUTE, LaidOut(size, size)) for i, owner in enumerate(owners) if _is_whole(owner)}
    some = [i for i in range(len(owners)) if i not in found]  # whole ones have no mask
    if some:
        masks = torch.stack([_mask(owners[i]) for i in some])
        counts, inside = count_rows(masks, shared.mask)
        for i, count in zip(some, counts):
            _remember_count(owners[i], count)
        known = count_true(shared.mask)
        covers = [
            isinstance(owners[i], Body) and 0 < known == both and count < size
            for i, count, both in zip(some, counts, inside)
        ]
        for relation, mask in ((BESIDE_MASK, shared.mask), (ABSOLUTE, None)):
            these = [row for row, covered in enumerate(covers) if covered == (mask is not None)]
            if these:
                left = [counts[row] - (0 if mask is None else known) for row in these]
                laid_out = lay_out_rows(rows_of(masks, these), left, mask)
                found |= {some[row]: (relation, one) for row, one in zip(these, laid_out)}
    return [found[i] for i in range(len(owners))]


def _shared(owner: Shared | Body) -> Shared:
    return owner if isinstance(owner, Shared) else owner.shared


def _mask(owner: Shared | Body) -> Tensor:
    return owner.mask if isinstance(owner, Shared) else owner.update.mask()


def _is_whole(owner: Shared | Body) -> bool:
    return isinstance(owner, Body) and owner.update.is_whole


def _remember_count(owner: Shared | Body, count: int) -> None:
    if isinstance(owner, Shared):
        remember_count(owner.mask, count)
    else:
        vars(owner.update)["count"] = count  # in the place of what it would compute
