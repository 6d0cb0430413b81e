"""What travels and what becomes of it: one paper, one file, the client's half and the server's half together.

`docs/your-own-strategy.md` shows how to write another.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from gluefl.parameters import Count, Has, checked
from gluefl.randomness import stream
from gluefl.vectors.grid import Segments
from gluefl.vectors.layout import Layout, Part
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import Sparse, add_all
from gluefl.wire.bodies import BodyCodec
from gluefl.wire.updates import Updates
from gluefl.wire.values import FLOAT32, ValueCodec

CPU = torch.device("cpu")
PARTS = ("traits", "init", "mask", "frozen", "compress", "combine", "aggregate")  # of a strategy
Combine = TypeVar("Combine", bound=Callable[..., Tensor])


@dataclass(frozen=True)
class Statistic:
    """A tensor of the statistics: its size, and what its values are."""

    size: int
    kind: Literal["mean", "variance", "counter", "exchanged"]


@dataclass(frozen=True)
class Space:
    """The vector space of a model: the sizes of its tensors, in order, and where its vectors lie."""

    tensors: tuple[int, ...]  # of the weights
    device: torch.device = CPU
    statistics: tuple[Statistic, ...] = ()

    @classmethod
    def of(cls, layout: Layout, device: torch.device = CPU) -> "Space":
        """The space of a module."""
        statistics = tuple(Statistic(part.size, _kind(part)) for part in layout.statistics)
        if layout.exchanged:
            statistics += (Statistic(layout.exchanged, "exchanged"),)
        return cls(tuple(part.size for part in layout.weights), device, statistics)

    @property
    def size(self) -> int:
        """d, the number of weights."""
        return sum(self.tensors)

    @property
    def statistics_size(self) -> int:
        """The number of statistics."""
        return sum(statistic.size for statistic in self.statistics)

    @cached_property
    def statistics_segments(self) -> Segments:
        """The tensors of the statistics."""
        return Segments(tuple(statistic.size for statistic in self.statistics), self.device)

    @cached_property
    def segments_of_all(self) -> Segments:
        """All tensors, the weights first."""
        return Segments((*self.tensors, *self.statistics_segments.sizes), self.device)

    @cached_property
    def variances(self) -> Tensor:
        """Which of the statistics are variances."""
        kinds = torch.tensor([statistic.kind == "variance" for statistic in self.statistics], device=self.device)
        return self.statistics_segments.spread(kinds.bool())

    def segments(self, scope: str) -> tuple[int, ...]:
        """Over which parts top-k is taken: the whole vector (the paper) or each tensor separately."""
        return self.tensors if scope == "tensor" else (self.size,)

    def mask(self, value: bool) -> Mask:
        """A mask that is the same everywhere."""
        return Mask.uniform(self.size, value, self.device)


@dataclass(frozen=True)
class Task:
    """What a client receives: the round, the mask both sides know (M^t), its nominal weight (ν_i), its number."""

    round: int
    mask: Mask
    weight: float
    space: Space
    client: int = 0
    seed: int = 0

    def stream(self, purpose: str = "compress") -> np.random.Generator:
        """A new random stream of this round and client, the same on both sides and after a resume; draws for another
        purpose need another name."""
        return stream(self.seed, purpose, self.round, self.client)


@dataclass(frozen=True)
class Upload:
    """What a client sent and was used: `weight` is the weight it enters the sum with."""

    client: int
    weight: float
    update: Sparse
    statistics: Tensor
    seed: int = 0  # of the run, as in the client's task


def _kind(part: Part) -> Literal["mean", "variance", "counter"]:
    if not part.dtype.is_floating_point:
        return "counter"
    return "variance" if part.name.rpartition(".")[2] == "running_var" else "mean"


Codec = Annotated[ValueCodec | BodyCodec, Has(("code", "measure", "longest", "encode", "decode"))]


@checked
@dataclass(frozen=True)
class Traits:
    """What a strategy declares about itself. Codecs are lossless for the values they are given: a strategy rounds in
    `compress` what clients send, and in `aggregate` what the server publishes."""

    upload_codec: Codec = FLOAT32  # of the values that clients send
    package_codec: Codec = FLOAT32  # of the weights that the server sends
    optimizer_acts_on: Literal["sum", "update"] = "update"  # the sum before selection, or the update that is published
    optimizer_may_remember: bool = True  # whether its momentum is kept for coordinates that are not published
    covers: Literal["weights", "everything"] = "weights"  # or the statistics too, as one vector after the weights
    dense: bool = False  # whether clients send, and the server publishes, every coordinate in every round
    most_clients: Count | None = None  # of a population; None: as many as a ledger holds

    def problems(self) -> Iterator[str]:
        """The number of a codec takes one byte in a message."""
        for codec in (self.upload_codec, self.package_codec):
            if codec.code not in range(256):
                yield f"the code of {type(codec).__name__} must be a number from 0 to 255; found {codec.code!r}"

    def vector(self, weights: Tensor, statistics: Tensor) -> Tensor:
        """What the strategy sees of a model or of its change: the weights, or everything."""
        return torch.cat([weights, statistics]) if self.covers == "everything" else weights

    def beside(self, statistics: Tensor) -> Tensor:
        """The statistics that travel beside what the strategy sees: all of them, or none."""
        return statistics[:0] if self.covers == "everything" else statistics


class Strategy(Protocol):
    """Both halves of an algorithm. The state is a tree of frozen dataclasses, tuples, tensors, masks and numbers."""

    def traits(self, space: Space) -> Traits:
        """Both sides: how values are encoded, and what the server's optimiser acts on."""
        ...

    def init(self, space: Space, initial: Tensor) -> tuple[Any, Tensor]:
        """The server's state before round 1, and version 0 of the model: `initial`, or what is published of it."""
        ...

    def mask(self, state: Any, round: int) -> Mask:
        """What both sides know in this round: values at these positions travel without positions."""
        ...

    def frozen(self, mask: Mask) -> Mask | None:
        """Client: the coordinates that local training must not move, None for none."""
        ...

    def compress(self, delta: Tensor, task: Task, residual: Tensor | None) -> tuple[Sparse, Tensor | None]:
        """Client: what to upload of an update, and what to remember for the next time."""
        ...

    def combine(self, state: Any, uploads: Sequence[Upload], round: int) -> Tensor:
        """Server: the weighted sum of the uploads as a dense vector; `weighted_sum` for most strategies."""
        ...

    def aggregate(self, state: Any, total: Tensor, round: int) -> tuple[Any, Sparse]:
        """Server: the next state and the update of the model; its positions count as changed."""
        ...


class Summed(list[Upload]):
    """Uploads that were added up one by one: their updates are empty, their weighted sum is `total`."""

    def __init__(self, uploads: Iterable[Upload], total: Tensor) -> None:
        super().__init__(uploads)
        self.total = total


def plain_sum(combine: Combine) -> Combine:
    """Mark the `combine` of a strategy that is `weighted_sum` and nothing else. Uploads may then be added up as they
    arrive; it is a property of the method, so that a strategy that wraps or replaces it does not inherit it."""
    combine.is_plain_sum = True  # type: ignore[attr-defined]
    return combine


def is_plain_sum(strategy: Strategy) -> bool:
    """Whether the strategy adds up uploads and does nothing else with them."""
    return getattr(getattr(type(strategy), "combine", None), "is_plain_sum", False)


def weighted_sum(uploads: Sequence[Upload], space: Space) -> Tensor:
    """Σ ν_i Δ_i, always in the order of the uploads: the same bits in whatever order clients were trained."""
    if isinstance(uploads, Summed):
        return uploads.total
    total = torch.zeros(space.size, device=space.device)
    return add_all(total, [upload.update for upload in uploads], [upload.weight for upload in uploads])


def mean_statistics(uploads: Sequence[Upload], old: Tensor, exchanged: int, cohort: int) -> Tensor:
    """The mean of the statistics. The last entries may be an exchanged vector, whose change is that of a full cohort.
    If fewer clients arrive, it is scaled by their share of the cohort: SCAFFOLD's c stays the mean of all c_i."""
    mean = torch.stack([upload.statistics for upload in uploads]).mean(0)
    if exchanged and len(uploads) < cohort:
        mean[-exchanged:] = old[-exchanged:].lerp(mean[-exchanged:], len(uploads) / cohort)
    return mean


@runtime_checkable
class KeepsUpdates(Protocol):
    """A strategy that keeps the updates of the last rounds, for packages with the codec `TernaryUpdates`."""

    def updates(self, state: Any, base: int) -> Updates | None:
        """Server: the updates of all versions after this one, None if some of them are not kept."""
        ...

    def without_updates(self, state: Any, version: int) -> Any:
        """Server: the state after a version that no update leads to."""
        ...


@runtime_checkable
class MeasuresUploads(Protocol):
    """A strategy that measures an upload without undoing its encoding; the guard of a server asks it."""

    def measured(self, sent: Tensor, space: Space) -> tuple[float, Tensor] | None:
        """Server: the length of the update in the values of an upload, and the change of the statistics in them; None
        if a strategy inside of this one cannot tell."""
        ...
