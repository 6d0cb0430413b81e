"""Values in fewer bits for the strategies that send float32: a strategy around another one.

`Coded(FedAvg(), package="int8", upload="rotated")` is FedAvg with quantised downloads and the uploads of DRIVE
(Vargaftik et al., NeurIPS 2021). The strategy inside decides what travels; here it is only rounded, so that the codecs
on the wire are exact.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from gluefl.parameters import Has, checked
from gluefl.strategies import PARTS, KeepsUpdates, Space, Strategy, Task, Traits, Upload
from gluefl.vectors.mask import Mask
from gluefl.vectors.rotation import MOST_CLIENTS, SHORTEST, Rotated
from gluefl.vectors.sparse import Masked, Sparse, whole
from gluefl.wire.blocks import BlockIntegers, rounded, rounded_whole
from gluefl.wire.ternary import Signs
from gluefl.wire.updates import Updates
from gluefl.wire.values import FLOAT16, FLOAT32, ValueCodec, halved

Package = Literal["float32", "float16", "int8", "int4"]
UploadAs = Literal["float32", "float16", "int8", "int4", "rotated"]
BITS = {"int8": 8, "int4": 4}
ROTATED = Rotated()


@dataclass(frozen=True)
class CodedState:
    """The state of the strategy inside; the model in full precision, and as it is published."""

    inner: Any
    latent: Tensor
    published: Tensor


@checked
@dataclass(frozen=True)
class Coded:
    """A strategy whose packages and uploads hold fewer bits a value.

    Packages: the server keeps the model in full precision, and publishes it rounded at the positions of every update:
    what rounding leaves out is published later. The server's optimiser then acts on the sum of the updates, before the
    rounding. Integers share a scale in blocks of 256 coordinates, which must be published together.

    Uploads: float16 rounds to the nearest; integers, in blocks of 256 values, at random, so that their mean is the
    value. What rounding changed is added to the client's residual, if the strategy has error compensation. "rotated"
    takes one bit per coordinate, and a scale for every 4096.
    """

    strategy: Annotated[Strategy, Has(PARTS)]
    package: Package = "float32"
    upload: UploadAs = "float32"

    def problems(self) -> Iterator[str]:
        """Which strategies a codec is for."""
        name, own = type(self.strategy).__name__, self.strategy.traits(Space((1,)))
        if hasattr(self.strategy, "strategy"):
            yield f"{name} is around another strategy: a codec belongs inside it, {name}(Coded(…), …)"
            return
        if own.covers == "everything":
            yield f"{name} has codecs of its own for packages and uploads: package and upload must not be given"
            return
        for key, given, codec in (
            ("package", self.package, own.package_codec),
            ("upload", self.upload, own.upload_codec),
        ):
            if given != "float32" and codec is not FLOAT32:
                yield f"{key} = '{given}': {name} has a codec of its own for it, {type(codec).__name__}; remove {key}"
        if self.package in BITS and not own.dense:
            yield (
                f"package = '{self.package}' needs a strategy that publishes every coordinate in every round, FedAvg: "
                f"values that {name} publishes in different rounds lie on different grids; choose float16"
            )
        if self.upload == "rotated" and not own.dense:
            yield (
                f"upload = 'rotated' needs a strategy that sends every coordinate, FedAvg: a rotation mixes what "
                f"{name} sends with what it leaves out; choose float16, int8 or int4"
            )

    def traits(self, space: Space) -> Traits:
        """The codecs; an optimiser acts before values are rounded to be published."""
        own = self.strategy.traits(space)
        if self.package != "float32":
            own = replace(
                own,
                package_codec=_codec(self.package),
                optimizer_acts_on="sum",
                optimizer_may_remember=own.dense,  # the others select after it
            )
        if self.upload == "float32":
            return own
        most = MOST_CLIENTS if self.upload == "rotated" else own.most_clients
        return replace(own, upload_codec=_codec(self.upload), most_clients=most)

    def init(self, space: Space, initial: Tensor) -> tuple[Any, Tensor]:
        """Version 0, rounded."""
        inner, version_0 = self.strategy.init(space, initial)
        if self.package == "float32":
            return inner, version_0
        published = self._rounded(version_0, None)
        return CodedState(inner, version_0, published), published

    def mask(self, state: Any, round: int) -> Mask:
        """That of the strategy inside."""
        return self.strategy.mask(self._inner(state), round)

    def frozen(self, mask: Mask) -> Mask | None:
        """What the strategy inside freezes."""
        return self.strategy.frozen(mask)

    def compress(self, delta: Tensor, task: Task, residual: Tensor | None) -> tuple[Sparse, Tensor | None]:
        """What the strategy inside sends, rounded."""
        exact, rest = self.strategy.compress(delta, task, residual)
        if self.upload == "float32":
            return exact, rest
        if self.upload == "rotated":
            return whole(_rotated(exact.values, task)), rest
        if self.upload == "float16":
            sent = _mapped(exact, halved)
        else:
            sent = rounded(exact, BITS[self.upload], task.stream("coded"))
        mode = getattr(self.strategy, "compensation", "none")
        if rest is not None and mode != "none":
            factor = task.weight if mode == "rescaled" else 1.0
            rest = _difference(exact, sent).add_to(rest.clone(), factor)
        return sent, rest

    def combine(self, state: Any, uploads: Sequence[Upload], round: int) -> Tensor:
        """The sum of the strategy inside; of rotated updates, that of their estimates."""
        if self.upload == "rotated":
            return _summed(uploads, round)
        return self.strategy.combine(self._inner(state), uploads, round)

    def aggregate(self, state: Any, total: Tensor, round: int) -> tuple[Any, Sparse]:
        """Move the model as the strategy inside does, and publish it rounded at the positions that it changes."""
        if self.package == "float32":
            return self.strategy.aggregate(state, total, round)
        inner, change = self.strategy.aggregate(state.inner, total, round)
        latent = change.add_to(state.latent.clone())
        # What the server adds to the model: the published vector here must have the same bits.
        update = _at(change, self._rounded(latent, state.published) - state.published)
        return CodedState(inner, latent, update.add_to(state.published.clone())), update

    def updates(self, state: Any, base: int) -> Updates | None:
        """Those that the strategy inside keeps; it then has a codec of its own for packages."""
        return self.strategy.updates(self._inner(state), base) if isinstance(self.strategy, KeepsUpdates) else None

    def without_updates(self, state: Any, version: int) -> Any:
        """What the strategy inside makes of it."""
        if not isinstance(self.strategy, KeepsUpdates):
            return state
        inner = self.strategy.without_updates(self._inner(state), version)
        return replace(state, inner=inner) if self.package != "float32" else inner

    def _inner(self, state: Any) -> Any:
        return state.inner if self.package != "float32" else state

    def _rounded(self, vector: Tensor, before: Tensor | None) -> Tensor:
        return halved(vector) if self.package == "float16" else rounded_whole(vector, BITS[self.package], before)


def _codec(name: str) -> ValueCodec:
    if name == "rotated":
        return Signs(ROTATED.block)
    return FLOAT16 if name == "float16" else BlockIntegers(BITS[name])


def _mapped(update: Sparse, function: Callable[[Tensor], Tensor]) -> Sparse:
    """A function of every value. Listing positions would synchronise with a GPU."""
    if isinstance(update, Masked):
        return Masked(update.mask, function(update.vector), update.covers)
    return update.with_values(function(update.values))


def _at(update: Sparse, vector: Tensor) -> Sparse:
    """The entries of a vector at the positions of an update."""
    if isinstance(update, Masked):
        return Masked(update.mask, vector, update.covers)
    return update.with_values(vector.index_select(0, update.positions))


def _difference(one: Sparse, other: Sparse) -> Sparse:
    """Of two updates of the same positions."""
    if isinstance(one, Masked) and isinstance(other, Masked):
        return Masked(one.mask, one.vector - other.vector)
    return one.with_values(one.values - other.values)


def _pieces(size: int) -> list[tuple[Rotated, slice]]:
    """Whole blocks, and the rest as a shorter block of which as many entries are sent as there are coordinates: a bit
    for every coordinate, and no padding."""
    end = size // ROTATED.block * ROTATED.block
    rest = size - end
    pieces = [(ROTATED, slice(0, end))] if end else []
    if rest:
        entries = max(SHORTEST, 1 << (rest - 1).bit_length())
        pieces.append((replace(ROTATED, share=rest / entries), slice(end, size)))
    return pieces


def _rotated(delta: Tensor, task: Task) -> Tensor:
    """The rotated update, rounded: a sign for every coordinate times the scale of its block."""
    parts = []
    for rotated, where in _pieces(delta.numel()):
        coded = rotated.compress(delta[where], task.seed, task.round, task.client)
        count = where.stop - where.start
        signs, scales = 2 * coded[:count] - 1, coded[count:]
        parts.append((signs.view(scales.numel(), -1) * scales.unsqueeze(1)).flatten())
    return torch.cat(parts)


def _summed(uploads: Sequence[Upload], round: int) -> Tensor:
    """Σ ν_i times the update that was rotated, rounded and rotated back."""
    weights, clients = [upload.weight for upload in uploads], [upload.client for upload in uploads]
    vectors, totals = [upload.update.values for upload in uploads], []
    for rotated, where in _pieces(vectors[0].numel()):
        size = where.stop - where.start
        blocks = rotated.blocks(size)
        sent = []
        for vector in vectors:
            rows = vector[where].view(blocks.count, blocks.sent)
            sent.append(torch.cat([(~torch.signbit(rows)).float().flatten(), rows[:, 0].abs()]))
        totals.append(rotated.combine(sent, weights, size, uploads[0].seed, round, clients))
    return torch.cat(totals)
