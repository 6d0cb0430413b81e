"""How the encoding of positions is started: on all cores, and from a GPU while that goes on."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from gluefl.accel import kernels
from gluefl.accel.cores import available, beside, in_turn, started, stream_beside, wait_for
from gluefl.vectors.selection import count_true, known_count, remember_count
from gluefl.wire.bodies import ABSOLUTE, BESIDE_MASK, Body, Encoded, Handed, HasPositions
from gluefl.wire.positions import LaidOut, count_rows, lay_out_rows, rows_of, squeeze

AT_A_TIME = 1 << 28  # positions of many bodies that are laid out together
LaidOutTogether = Callable[[], list[tuple[int, LaidOut]]]


def encode_positions(bodies: Sequence[Body], under_way: bool = False) -> None:
    """Start to encode the positions of bodies that share one mask, and the mask: who asks for them waits for them.
    A GPU is waited for until they have left it, unless they are said to be `under_way` there."""
    if not bodies:
        return
    shared = bodies[0].shared
    owners: list[HasPositions] = [*bodies] if {"packed", "handed"} & vars(shared).keys() else [shared, *bodies]
    if shared.mask.is_cuda and under_way:
        handed = _hand_out_later(owners)
    else:
        handed = Future[Handed]()
        handed.set_result(_hand_out_from_gpu(owners) if shared.mask.is_cuda else _hand_out(owners))
    for owner in owners:
        vars(owner)["handed"] = handed


def count_positions(bodies: Sequence[Body]) -> None:
    """Ask a GPU, once for bodies that share one mask, how many positions they have; after that nothing that encoding
    needs is under way. (It is waited for outside of a copy: who waits in the middle of one keeps all other threads from
    starting anything.)"""
    for chunk in _chunks([bodies[0].shared, *bodies]) if bodies and bodies[0].shared.mask.is_cuda else ():
        some = [owner for owner in chunk if not owner.is_whole]
        if some:
            _counts(some, torch.stack([owner.present for owner in some]))
        wait_for(bodies[0].shared.mask.device)


def _hand_out(owners: Sequence[HasPositions]) -> Handed:
    shared = next((owner.shared for owner in owners if isinstance(owner, Body)), None)
    if shared is not None and count_true(shared.mask):
        _ = shared.outside, shared.numbers  # before several threads ask for them at once
    return _on_all_cores(owners, [owner.encoded_here for owner in owners])


def _hand_out_later(owners: Sequence[HasPositions]) -> "Future[Handed]":
    """In a stream of its own, behind what the GPU was given so far and not behind what it is given from here on."""
    device = owners[0].shared_mask.device
    for owner in owners:
        if not owner.is_whole:
            _ = owner.present  # made here, where it belongs: two streams may ask for it
    stream, under_way = stream_beside(device, "encoding"), started(device)
    if not kernels.serve(owners[0].shared_mask) or any(_known_counts(owner) is None for owner in owners):
        return in_turn(_hand_out_apart, owners, stream, under_way)
    try:
        with torch.cuda.stream(stream):
            stream.wait_event(under_way)
            chunks = [(chunk, lay_out_together(chunk)) for chunk in _chunks(owners)]
            return in_turn(_hand_out_done, chunks, started(device))
    except torch.cuda.OutOfMemoryError:
        return in_turn(dict)  # others are training: who asks for the positions later makes them one by one


def _hand_out_apart(
    owners: Sequence[HasPositions], stream: "torch.cuda.Stream", under_way: "torch.cuda.Event"
) -> Handed:
    """Where something has to be asked of the GPU. It is waited for first: a thread that waits in the middle of a copy
    keeps all others from starting anything."""
    under_way.synchronize()
    with torch.cuda.stream(stream):
        return _hand_out_from_gpu(owners)


def _hand_out_from_gpu(owners: Sequence[HasPositions]) -> Handed:
    """Here and now. Many at a time leave the GPU, where every call counts."""
    handed: Handed = {}
    for chunk in _chunks(owners):
        try:
            laid_out = lay_out_together(chunk)
        except torch.cuda.OutOfMemoryError:
            break  # who asks for the positions makes them one by one
        wait_for(chunk[0].shared_mask.device)
        handed |= _on_all_cores(chunk, [partial(_squeeze, *one) for one in laid_out()])
    return handed


def _hand_out_done(
    chunks: Sequence[tuple[Sequence[HasPositions], LaidOutTogether]], under_way: "torch.cuda.Event"
) -> Handed:
    under_way.synchronize()
    handed: Handed = {}
    for owners, laid_out in chunks:
        handed |= _on_all_cores(owners, [partial(_squeeze, *one) for one in laid_out()])
    return handed


def _chunks(owners: Sequence[HasPositions]) -> list[Sequence[HasPositions]]:
    some = max(1, AT_A_TIME // owners[0].shared_mask.numel())
    return [owners[at : at + some] for at in range(0, len(owners), some)]


def _on_all_cores(owners: Sequence[HasPositions], encodings: Sequence[Callable[[], Encoded]]) -> Handed:
    # One task for every core, not for every body: threads that hand over every fifth of a millisecond lose half of it.
    tasks, handed = min(available(), len(owners)), Handed()
    for first in range(tasks):
        task = beside(lambda some: [encode() for encode in some], encodings[first::tasks])
        handed |= {id(owner): (task, place) for place, owner in enumerate(owners[first::tasks])}
    return handed


def _squeeze(relation: int, laid_out: LaidOut) -> Encoded:
    return relation, squeeze(laid_out)


def lay_out_together(owners: Sequence[HasPositions]) -> LaidOutTogether:
    """The positions of bodies that share one mask, and of the mask, with their relation to it: to be called when a GPU
    has done it."""
    shared = owners[0].shared_mask
    size = shared.numel()
    some = [owner for owner in owners if not owner.is_whole]  # whole ones have no mask
    found: list[tuple[int, list[int], Callable[[], list[LaidOut]]]] = []
    if some:
        masks = torch.stack([owner.present for owner in some])
        counts, inside = _counts(some, masks)
        known = count_true(shared)
        covers = [
            owner.relative and 0 < known == both and count < size for owner, count, both in zip(some, counts, inside)
        ]
        for relation, mask in ((BESIDE_MASK, shared), (ABSOLUTE, None)):
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


def _counts(owners: Sequence[HasPositions], masks: Tensor) -> tuple[Sequence[int], Sequence[int]]:
    """How many positions there are, and how many of them the shared mask covers."""
    known = [_known_counts(owner) for owner in owners]
    if None not in known:
        return [both[0] for both in known if both], [both[1] for both in known if both]
    counts, inside = count_rows(masks, owners[0].shared_mask)
    for owner, count, both in zip(owners, counts, inside):
        remember_count(owner.present, count)
        vars(owner)["counted"] = count, both
        if isinstance(owner, Body):
            vars(owner.update)["count"] = count  # in the place of what it would compute
    return counts, inside


def _known_counts(owner: HasPositions) -> tuple[int, int] | None:
    """As `_counts`, if it can be said without asking a GPU."""
    if owner.is_whole:
        return 0, 0
    if counted := vars(owner).get("counted"):
        return counted[0], counted[1]
    mask, shared = owner.present, owner.shared_mask
    count, known = known_count(mask), known_count(shared)
    if count is None or known is None:
        return None
    return (count, known) if not known or shared is mask or shared is owner.covered else None
