"""What messages carry, and how its encoding is started: on all cores, and from a GPU while that goes on.

A body is the same for all clients that hold one version; `messages` puts a header before it.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gluefl.cores import available, beside, in_turn, started, stream_beside
from gluefl.selection import Sparse, count_true, positions_of
from gluefl.wire.positions import LaidOut, Packed, count_rows, lay_out, lay_out_rows, pack, rows_of, squeeze

ABSOLUTE, BESIDE_MASK, KNOWN = range(3)  # relation of a set of positions to the shared mask
AT_A_TIME = 1 << 28  # positions of many bodies that are laid out together


@dataclass(frozen=True)
class Shared:
    """The mask both sides know, with what encoding needs of it, computed once."""

    mask: Tensor

    @cached_property
    def packed(self) -> Packed:
        """The mask, encoded."""
        started: Future[Packed] | None = vars(self).get("started")
        return started.result() if started else pack(self.mask)

    @cached_property
    def outside(self) -> Tensor:
        """The positions that the mask does not cover."""
        return positions_of(~self.mask)


@dataclass(frozen=True)
class Body:
    """Values at some positions, the statistics, and the shared mask: sent in a package, known in an upload."""

    update: Sparse
    statistics: Tensor
    shared: Shared
    sends_mask: bool

    @cached_property
    def laid_out(self) -> tuple[int, LaidOut]:
        """The positions, beside the shared mask where that covers part of them, else on their own."""
        return _lay_out(self)

    @cached_property
    def positions(self) -> tuple[int, Packed]:
        """Them, encoded."""
        handed: Future[Handed] | None = vars(self).get("handed")
        found = None if handed is None else handed.result().get(id(self))
        if found is None:
            return _encode_positions(self)
        task, place = found
        return task.result()[place]


Handed = dict[int, tuple["Future[list[tuple[int, Packed]]]", int]]  # id of a body → a task and the body's place in it


def encode_positions(bodies: Sequence[Body], under_way: bool = False) -> None:
    """Start to encode the positions of bodies that share one mask, on all cores: who asks for them waits for them.
    A GPU is waited for until they have left it, unless they are said to be `under_way` there."""
    if not bodies:
        return
    shared = bodies[0].shared
    if not shared.mask.is_cuda and count_true(shared.mask):
        _ = shared.outside  # before several threads ask for it at once
    if not {"packed", "started"} & vars(shared).keys():
        vars(shared)["started"] = beside(squeeze, lay_out(shared.mask, count_true(shared.mask)))
    if shared.mask.is_cuda and under_way:
        for body in bodies:
            if not body.update.is_whole:
                body.update.mask()  # made here, where it belongs: two streams may ask for it
        device = shared.mask.device
        handed = in_turn(_hand_out_apart, bodies, stream_beside(device), started(device))
    else:
        handed = Future[Handed]()
        handed.set_result(_hand_out(bodies))
    for body in bodies:
        vars(body)["handed"] = handed


def _hand_out_apart(bodies: Sequence[Body], stream: "torch.cuda.Stream", under_way: "torch.cuda.Event") -> Handed:
    """In a stream of its own: what was started before is waited for, not what has been since. And waited for first:
    a thread that waits in the middle of a copy keeps all others from starting anything."""
    under_way.synchronize()
    try:
        with torch.cuda.stream(stream):
            return _hand_out(bodies)
    except torch.cuda.OutOfMemoryError:
        return {}  # the next clients are training: who asks for the positions later makes them one by one


def _hand_out(bodies: Sequence[Body]) -> Handed:
    if bodies[0].shared.mask.is_cuda:
        lay_out_together(bodies)
    # One task for every core, not for every body: threads that hand over every fifth of a millisecond lose half of it.
    tasks = min(available(), len(bodies))
    handed: Handed = {}
    for some in (bodies[i::tasks] for i in range(tasks)):
        task = beside(_encode_each, some)
        handed |= {id(body): (task, place) for place, body in enumerate(some)}
    return handed


def _encode_each(bodies: Sequence[Body]) -> list[tuple[int, Packed]]:
    return [_encode_positions(body) for body in bodies]


def _encode_positions(body: Body) -> tuple[int, Packed]:
    relation, laid_out = vars(body).get("laid_out") or _lay_out(body)
    return relation, squeeze(laid_out)


def _lay_out(body: Body) -> tuple[int, LaidOut]:
    update, known = body.update, count_true(body.shared.mask)
    if update.count == update.size:
        return ABSOLUTE, LaidOut(update.size, update.size)
    mask = update.mask()
    inside = count_true(mask & body.shared.mask) if known else 0
    if known and inside == known:
        return BESIDE_MASK, lay_out(mask.index_select(0, body.shared.outside), update.count - inside)
    return ABSOLUTE, lay_out(mask, update.count)


def lay_out_together(bodies: Sequence[Body]) -> None:
    """Lay out the positions of bodies that share one mask, many at a time: for a GPU, where every call counts."""
    bodies = [body for body in bodies if not body.update.is_whole]  # whole ones have no mask
    if not bodies:
        return
    shared, size = bodies[0].shared, bodies[0].update.size
    known, some = count_true(shared.mask), max(1, AT_A_TIME // size)
    for chunk in (bodies[at : at + some] for at in range(0, len(bodies), some)):
        masks = torch.stack([body.update.mask() for body in chunk])
        counts, inside = count_rows(masks, shared.mask)
        beside = [i for i in range(len(chunk)) if known and inside[i] == known and counts[i] < size]
        alone = [i for i in range(len(chunk)) if i not in beside]
        found: dict[int, tuple[int, LaidOut]] = {}
        if beside:
            rows = lay_out_rows(rows_of(masks, beside), [counts[i] - known for i in beside], shared.mask)
            found |= zip(beside, ((BESIDE_MASK, row) for row in rows))
        if alone:
            rows = lay_out_rows(rows_of(masks, alone), [counts[i] for i in alone])
            found |= zip(alone, ((ABSOLUTE, row) for row in rows))
        for i, body in enumerate(chunk):  # in the place of what they would compute one by one
            vars(body)["laid_out"], vars(body.update)["count"] = found[i], counts[i]
