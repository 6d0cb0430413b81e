"""Error compensation on the client (§3.3, equation 7): what was not sent is added to the next update.

Re-scaled (REC), a client remembers ν·h and divides by the weight of the round in which it is used: that is
equation 7 without a ratio to look up, and it holds when a client moves between the sticky group and the others.
"""

from typing import Literal

import torch
from torch import Tensor

from gluefl.vectors.sparse import Sparse

Compensation = Literal["none", "plain", "rescaled"]


def compensate(delta: Tensor, residual: Tensor | None, weight: float, mode: Compensation) -> Tensor:
    """Δ + (ν^φ / ν) h."""
    if residual is None or mode == "none":
        return delta
    if delta.is_cuda:
        return torch.add(delta, residual, alpha=1 / weight if mode == "rescaled" else 1)  # one pass instead of two
    return (residual / weight).add_(delta) if mode == "rescaled" else delta + residual


def remember(delta: Tensor, sent: Sparse, weight: float, mode: Compensation) -> Tensor | None:
    """h = Δ − what was sent, as the server decodes it: also what rounding the values left out."""
    if mode == "none":
        return None
    return sent.rest_of(delta, weight if mode == "rescaled" else 1)
