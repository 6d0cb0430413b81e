"""Robust aggregation: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018.

A trimmed mean or a median of every coordinate takes the place of the weighted sum, as a hook. It needs a value of every
client for every coordinate, so the uploads of a round must have the same positions: FedAvg, APF, and both with fewer
bits a value. Top-k uploads (STC, GlueFL) and rotated ones (lean) are refused.

Bias. With unbiased weights the expectation of Σ ν_i Δ_i is the update of all clients; that of these rules is not. They
count all uploads of a round alike, so that sampling which favours some clients (a sticky group) favours their updates,
too. And they leave out the ends of every coordinate, so that what only few clients need is lost in every round, however
many rounds follow. Statistics are still averaged plainly; `Guard` bounds them.

Such a hook replaces the sum. Among several hooks it stands first: what another one did to the sum before would be lost.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from gluefl.errors import UsageError
from gluefl.parameters import checked
from gluefl.strategies import Space, Strategy, Task, Upload

PIECE = 2**20  # coordinates that are sorted at once
NEEDED = "a median of every coordinate needs a value of every client for every coordinate"


@checked
@dataclass(frozen=True)
class TrimmedMean:
    """The mean of every coordinate without the share β of the uploads, at least one, at each end; times Σ ν_i.

    >>> GlueFLStrategy(Uniform(10), FedAvg(), hooks=[TrimmedMean(0.2)])
    """

    replaces_sum: ClassVar = True
    share: Annotated[float, Field(gt=0, lt=0.5)] = 0.2  # β

    def check(self, strategy: Strategy, space: Space) -> None:
        """Refuse a strategy whose uploads have other positions for every client."""
        check_positions(strategy, space)

    def on_delta(self, delta: Tensor, task: Task) -> Tensor:
        """Clients send what they always do."""
        return delta

    def on_sum(self, total: Tensor, uploads: Sequence[Upload], round: int) -> Tensor:
        """The trimmed mean instead of the sum."""
        return middle(total, uploads, math.ceil(Fraction(str(self.share)) * len(uploads)))


@checked
@dataclass(frozen=True)
class Median:
    """The median of every coordinate, the mean of the two in the middle for an even number of uploads; times Σ ν_i."""

    replaces_sum: ClassVar = True

    def check(self, strategy: Strategy, space: Space) -> None:
        """Refuse a strategy whose uploads have other positions for every client."""
        check_positions(strategy, space)

    def on_delta(self, delta: Tensor, task: Task) -> Tensor:
        """Clients send what they always do."""
        return delta

    def on_sum(self, total: Tensor, uploads: Sequence[Upload], round: int) -> Tensor:
        """The median instead of the sum."""
        return middle(total, uploads, len(uploads))


def middle(total: Tensor, uploads: Sequence[Upload], dropped: int) -> Tensor:
    """Σ ν_i times the mean of every coordinate without the `dropped` smallest and largest; one or two always stay."""
    updates = [upload.update for upload in uploads]
    first, dropped = updates[0], min(dropped, (len(updates) - 1) // 2)
    for update in updates:
        same = (update.is_whole and first.is_whole) or torch.equal(update.mask.bits, first.mask.bits)
        if update.size != total.numel() or not same:
            raise UsageError(f"the uploads of a round have different positions: {NEEDED}. Use FedAvg or APF.")
    pieces = []
    for start in range(0, first.count, PIECE):
        rows = torch.stack([update.values[start : start + PIECE] for update in updates]).sort(0).values
        pieces.append(rows[dropped : len(updates) - dropped].mean(0))
    values = torch.cat(pieces) if pieces else first.values
    return first.with_values(values * sum(upload.weight for upload in uploads)).dense()


def check_positions(strategy: Strategy, space: Space) -> None:
    """Let two clients compress different updates, and refuse the strategy if their coordinates do not coincide."""
    traits, numbers = strategy.traits(space), torch.arange(space.size, device=space.device)
    refusal = UsageError(
        f"{type(strategy).__name__} cannot be aggregated by a trimmed mean or a median: {NEEDED}, and its uploads have "
        "other positions, or another rotation, for every client. Use FedAvg or APF, or bound uploads by a Guard."
    )
    if traits.covers == "everything":
        raise refusal
    state, _ = strategy.init(space, torch.zeros(space.size, device=space.device))
    mask, uploads = strategy.mask(state, 1), []
    for client in (0, 1):
        delta = torch.cos((client + 1.0) * numbers + client)
        update, _ = strategy.compress(delta, Task(1, mask, 1.0, space, client), None)
        uploads.append(Upload(client, 1.0, update, torch.zeros(0, device=space.device)))
    try:
        for upload in uploads:
            if not torch.equal(strategy.combine(state, [upload], 1), upload.update.dense()):
                raise refusal
        middle(numbers, uploads, 1)
    except (UsageError, RuntimeError) as error:  # a rotated update may have another length
        raise refusal from error
