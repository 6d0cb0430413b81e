"""A step of SGD."""

from typing import Protocol

import triton
import triton.language as tl
from torch import Tensor


class Rows(Protocol):
    """The tensors that a step reads and writes, a row per client."""

    weights: Tensor  # (clients, d)
    velocity: Tensor
    lr: Tensor  # (clients, 1)
    momentum: Tensor
    start: Tensor  # (d,)
    movable: Tensor | None  # (d,), 0 where a coordinate is frozen


@triton.jit(do_not_specialize=["size"])
def _move_kernel(
    weights, velocity, gradient, lr, momentum, movable, start, size, WEIGHT_DECAY: tl.constexpr,
    PROXIMAL: tl.constexpr, FROZEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = place < size
    at = client * size + place
    w, v, g = tl.load(weights + at, mask=ok), tl.load(velocity + at, mask=ok), tl.load(gradient + at, mask=ok)
    if WEIGHT_DECAY != 0.0:
        g += WEIGHT_DECAY * w
    if PROXIMAL != 0.0:
        g += PROXIMAL * (w - tl.load(start + place, mask=ok))
    if FROZEN:
        g *= tl.load(movable + place, mask=ok)
    v = tl.load(momentum + client) * v + tl.load(lr + client) * g
    tl.store(velocity + at, v, mask=ok)
    tl.store(weights + at, w - v, mask=ok)


def move(rows: Rows, gradient: Tensor, weight_decay: float, proximal: float) -> None:
    """A step of SGD with momentum for (clients, d), in one pass over the memory."""
    clients, size = rows.weights.shape
    _move_kernel[(triton.cdiv(size, 4096), clients)](
        rows.weights, rows.velocity, gradient, rows.lr, rows.momentum,
        rows.start if rows.movable is None else rows.movable, rows.start, size,
        WEIGHT_DECAY=weight_decay, PROXIMAL=proximal, FROZEN=rows.movable is not None, BLOCK=4096,
    )  # fmt: skip
