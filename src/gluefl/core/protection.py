"""What a guard needs of a run: how large an upload is, and an earlier version as the next one."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gluefl import wire
from gluefl.core.guard import EXAMPLES, UPDATE, Claim, claim_of_examples
from gluefl.core.server import Aggregate, Core, State
from gluefl.strategies import KeepsUpdates, MeasuresUploads, Statistic, Upload
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import part_of, whole

NOT_NEGATIVE = ("variance", "counter")
MOST_GROWTH = 1e6  # of a length over the model's own, where the lengths of other clients say nothing
# A change of statistics that travels in eight bits is rounded: a value that went to 0 may arrive as one below it.
ROUNDING = 0.1  # of the value before
LEAST_ROUNDING = 1e-4  # of the largest change


def claim(core: Core, state: State, upload: Upload, round: int, examples: float) -> Claim:
    """Measure an upload against the model that it was trained on."""
    before = state.statistics
    length, after, exact = _measured(core, state, upload, round)
    counted = claim_of_examples(EXAMPLES, examples)
    quantities = {**counted.quantities, UPDATE: length}
    limits = {**counted.limits, UPDATE: _limit(state.weights)}
    problem = None
    for kind, places in _places(core.space.statistics).items():
        old, new = before[places], after[places]
        quantities[kind], limits[kind] = _length(new - old), _limit(old)
        if kind in NOT_NEGATIVE and bool((new < _lowest(old, new, exact)).any()):
            problem = f"a {kind} of {float(new.min()):.3g} among the statistics"
    return Claim(quantities, limits, problem)


def returned(core: Core, state: State, good: State) -> Aggregate:
    """An earlier version as the next one: what changed since then changes back, and the server's state with it."""
    old, new = (core.traits.vector(one.weights, one.statistics) for one in (state, good))
    # A dense strategy publishes every coordinate in every round, and its codec may need them all (`BlockIntegers`).
    update = whole(new - old) if core.traits.dense else part_of(new - old, Mask(old != new))
    strategy, recurrence = good.strategy, state.ledger.recurrence
    if isinstance(core.strategy, KeepsUpdates):  # those of the versions in between would not lead here
        strategy = core.strategy.without_updates(strategy, state.ledger.version + 1)
    return Aggregate(
        strategy,
        good.optimizer,
        update,
        weights=good.weights,
        statistics=good.statistics,
        average=good.average,
        changed_at=state.ledger.changed_by(update),
        recurrence=recurrence.step(old, new) if recurrence is not None else None,
        finite=torch.tensor(True),
    )


def _measured(core: Core, state: State, upload: Upload, round: int) -> tuple[float, Tensor, bool]:
    """The length of the update, the statistics after it, and whether these are exact."""
    strategy, size = core.strategy, core.space.size
    if not isinstance(core.traits.upload_codec, wire.BodyCodec):
        return _length(upload.update.values), upload.statistics, True
    own = strategy.measured(upload.update.values, core.space) if isinstance(strategy, MeasuresUploads) else None
    if own is not None:
        length, change = own
        return length, state.statistics + change, False
    total = strategy.combine(state.strategy, [replace(upload, weight=1.0)], round)
    everything = core.traits.covers == "everything"
    after = state.statistics + total[size:] if everything else upload.statistics
    return _length(total[:size]), after, not everything


def _places(statistics: Sequence[Statistic]) -> dict[str, Tensor]:
    """Where the statistics of each kind lie."""
    start, places = 0, dict[str, list[Tensor]]()
    for one in statistics:
        places.setdefault(one.kind, []).append(torch.arange(start, start + one.size))
        start += one.size
    return {kind: torch.cat(parts) for kind, parts in places.items()}


def _lowest(old: Tensor, new: Tensor, exact: bool) -> Tensor:
    """The smallest values that an honest client can report, of statistics that are not below 0 unless the model has
    them there."""
    least = old.clamp(max=0.0)  # an integer array of an app may be a constant below 0
    if exact or not new.numel():
        return least
    return least - (ROUNDING * old.abs() + LEAST_ROUNDING * (new - old).abs().max())


def _length(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))


def _limit(before: Tensor) -> float:
    return MOST_GROWTH * max(1.0, _length(before))
