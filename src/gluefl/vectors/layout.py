"""A torch module as two flat vectors: weights (trainable) and statistics (what normalisation layers track).

Weights are what strategies mask and compress. Statistics (the running mean, variance and batch count of PyTorch's
normalisation layers) are few, travel whole and are averaged plainly (App. D of the paper). Everything else of a module
(frozen parameters, other buffers) is a constant of the architecture: both sides have it from the start, and it never
travels. A module that updates other buffers in training names them in an attribute, and they are statistics, too:

>>> class Whitening(nn.Module):
...     tracked_buffers = ("covariance",)
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from gluefl.errors import UsageError

# The largest count that float32 holds exactly; BatchNorm's batch counter travels as a float.
LARGEST_EXACT_INTEGER = 2**24


@dataclass(frozen=True)
class Part:
    """One tensor of the module and its place in the flat vector."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def size(self) -> int:
        """Number of entries."""
        return int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class Layout:
    """Where every tensor of a module lies in the two flat vectors.

    >>> layout = Layout.of(module)
    >>> weights, statistics = layout.flatten(module)
    >>> layout.fill(module, weights, statistics)
    """

    weights: tuple[Part, ...]
    statistics: tuple[Part, ...]
    dtype: torch.dtype = torch.float32
    exchanged: int = 0  # entries after the statistics that belong to no tensor: a local rule's second vector

    @classmethod
    def of(cls, module: nn.Module, dtype: torch.dtype = torch.float32) -> "Layout":
        """The layout of a module; refuses a module that the vectors could not hold exactly."""
        check_initialised(module)
        parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not any(parameter.numel() for _, parameter in parameters):
            raise UsageError(
                f"{type(module).__name__} has no trainable parameter: there is nothing to learn. "
                "Pass a module with parameters that require a gradient."
            )
        for name, tensor in [*parameters, *_tracked(module)]:
            _check(name, tensor, dtype)
        return cls(_parts(parameters), _parts(_tracked(module)), dtype)

    @property
    def size(self) -> int:
        """d, the number of trainable parameters."""
        return _total(self.weights)

    @property
    def statistics_size(self) -> int:
        """How many numbers travel beside the weights: the module's statistics, then what a local rule exchanges."""
        return self.tracked_size + self.exchanged

    @property
    def tracked_size(self) -> int:
        """How many of them are the module's."""
        return _total(self.statistics)

    @cached_property
    def fingerprint(self) -> bytes:
        """Eight bytes that two sides compare before they exchange vectors: names, shapes and types."""
        table = [[(p.name, p.shape, str(p.dtype)) for p in parts] for parts in (self.weights, self.statistics)]
        extra = [self.exchanged] if self.exchanged else []
        return hashlib.sha256(json.dumps([table, str(self.dtype), *extra]).encode()).digest()[:8]

    def flatten(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """Copy a module's parameters and statistics into two new flat vectors; exchanged entries are zero."""
        tensors = _by_name(module)
        weights, statistics = self._join(self.weights, tensors), self._join(self.statistics, tensors)
        return weights, torch.cat([statistics, weights.new_zeros(self.exchanged)]) if self.exchanged else statistics

    @torch.no_grad()
    def fill(self, module: nn.Module, weights: Tensor, statistics: Tensor) -> None:
        """Copy two flat vectors into a module, in place."""
        tensors = _by_name(module)
        for parts, vector in ((self.weights, weights), (self.statistics, statistics)):
            for name, view in split(parts, vector):
                write(tensors[name], view)

    def state_dict(
        self, module: nn.Module, weights: Tensor, statistics: Tensor, leave_out: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """The vectors under the names of the module's own state dict, ready to be saved or loaded."""
        self.fill(module, weights, statistics)
        named = module.state_dict().items()
        kept = ((name, value) for name, value in named if isinstance(value, Tensor))  # a module may add other values
        return {name: writable(tensor) for name, tensor in kept if name not in leave_out}

    def _join(self, parts: tuple[Part, ...], tensors: dict[str, Tensor]) -> Tensor:
        pieces = [tensors[part.name].detach().reshape(-1).to(self.dtype) for part in parts]
        device = next(iter(tensors.values())).device  # of a module without statistics, too
        return torch.cat(pieces) if pieces else torch.zeros(0, dtype=self.dtype, device=device)


def writable(tensor: Tensor) -> Tensor:
    """A copy as safetensors writes it: it refuses memory that tied weights share, and other orders of dimensions."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def split(parts: tuple[Part, ...], vector: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a flat vector by name, as views; leading dimensions (clients) are kept."""
    for part in parts:
        piece = vector[..., part.start : part.start + part.size]
        yield part.name, piece.reshape((*vector.shape[:-1], *part.shape))


def check_initialised(module: nn.Module) -> None:
    """Refuse a module with tensors that have no shape or no values yet."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise UsageError(
                f"'{name}' belongs to a lazy layer that has no shape yet: apply {type(module).__name__} to a batch of "
                "inputs first, or give the layer its sizes."
            )
        if tensor.is_meta:
            raise UsageError(
                f"'{name}' is on the device meta, where tensors have no values: make {type(module).__name__} on the "
                "CPU, or call .to_empty(device='cpu') and load its weights."
            )


def write(target: Tensor, values: Tensor) -> None:
    """Copy values into a tensor of a module. An averaged batch count need not be whole; the module's counter is."""
    target.copy_(values if target.is_floating_point() else values.round())


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """The module in evaluation mode; then every part of it is in its own mode again."""
    modes = {part: part.training for part in module.modules()}
    try:
        module.eval()
        yield
    finally:
        for part, training in modes.items():
            part.training = training


def _tracked(module: nn.Module) -> list[tuple[str, Tensor]]:
    names = {f"{name}.{own}" if name else own for name, child in module.named_modules() for own in _tracked_by(child)}
    buffers = [(name, buffer) for name, buffer in module.named_buffers() if name in names]
    if lost := [name for name, _ in buffers if name not in module.state_dict()]:
        raise UsageError(
            f"the buffer {lost[0]!r} changes in training, and the state of {type(module).__name__} leaves it out, so "
            "that no file and no message would hold it: register it with persistent=True."
        )
    if missing := names - {name for name, _ in module.named_buffers(remove_duplicate=False)}:
        raise UsageError(
            f"tracked_buffers names {', '.join(map(repr, sorted(missing)))}, and {type(module).__name__} has no such "
            "buffer: register it, or correct the name."
        )
    return buffers


def _tracked_by(module: nn.Module) -> set[str]:
    """The names of the buffers that a module updates in training; those of its children are not among them."""
    own = {name for name, _ in module.named_buffers(recurse=False)} if isinstance(module, _NormBase) else set()
    names = getattr(module, "tracked_buffers", ())
    if isinstance(names, str):
        raise UsageError(
            f"tracked_buffers = {names!r} of {type(module).__name__} is a text; give a tuple of names: ({names!r},)."
        )
    return own | set(names)


def _check(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.is_complex():
        raise UsageError(f"'{name}' is complex; gluefl trains real parameters only.")
    if tensor.dtype == torch.bool:
        raise UsageError(
            f"the buffer '{name}' is boolean, and the server averages the buffers that `tracked_buffers` names: "
            "register it as a tensor of numbers, for example torch.zeros(1)."
        )
    if tensor.is_floating_point() and torch.promote_types(tensor.dtype, dtype) != dtype:
        raise UsageError(
            f"'{name}' is {tensor.dtype}, which a flat vector of {dtype} cannot hold exactly: "
            "convert the module with .float() first."
        )
    if not tensor.is_floating_point() and tensor.numel() and int(tensor.abs().max()) > LARGEST_EXACT_INTEGER:
        raise UsageError(f"the counter '{name}' is above {LARGEST_EXACT_INTEGER}: reset it before training.")


def _by_name(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _parts(tensors: Iterable[tuple[str, Tensor]]) -> tuple[Part, ...]:
    parts, start = [], 0
    for name, tensor in tensors:
        parts.append(Part(name, tuple(tensor.shape), tensor.dtype, start))
        start += tensor.numel()
    return tuple(parts)


def _total(parts: tuple[Part, ...]) -> int:
    return parts[-1].start + parts[-1].size if parts else 0
