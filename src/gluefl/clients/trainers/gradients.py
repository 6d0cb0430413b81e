"""The gradients of many clients at once: by `torch.func.vmap`, or by layers with weights for many clients."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from gluefl.clients.precision import Precision, float32_norms, lowered, raised
from gluefl.clients.rules import Loss
from gluefl.clients.trainers.layers import ManyClients
from gluefl.populations.inputs import Inputs, each
from gluefl.vectors.layout import Layout, Part

TOLERANCE = 1e-6  # the largest relative difference between two ways to compute a step in float64

# (weights, statistics, inputs, labels), a row per client → gradient, (losses, statistics after the forward pass)
Gradients = Callable[[Tensor, Tensor, Any, Tensor], tuple[Tensor, tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class ByVmap:
    """The reference: weights in the order of the layout."""

    module: nn.Module
    layout: Layout
    transform: Callable[[Any], Any]
    loss: Loss
    precision: Precision | None = None

    def __call__(
        self, weights: Tensor, statistics: Tensor, inputs: Inputs, labels: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Gradients, losses, statistics."""
        return self._mapped(weights, statistics, inputs, labels)

    @cached_property
    def _mapped(self) -> Gradients:
        def loss(weights: Tensor, statistics: Tensor, inputs: Inputs, labels: Tensor) -> tuple[Tensor, Tensor]:
            # Splitting once makes the backward pass one concatenation instead of a padded copy per tensor.
            tensors = dict(_pieces(self.layout.weights, weights))
            # Normalisation layers write to their buffers: each gets a copy of its own, as autograd tracks them apart.
            buffers = {name: piece.clone() for name, piece in _pieces(self.layout.statistics, statistics)}
            given = each(lambda tensor: _cast(tensor, weights.dtype), self.transform(inputs))
            by_name = dict(given) if isinstance(given, Mapping) else {}
            by_place = () if by_name else given if isinstance(given, tuple) else (given,)
            with lowered(self.precision, weights.device), float32_norms(self.precision, self.module):
                outputs = functional_call(self.module, {**tensors, **buffers}, by_place, by_name)
            after = [buffers[part.name].reshape(-1) for part in self.layout.statistics]
            return self.loss(raised(outputs), labels), torch.cat(after) if after else statistics

        def gradients(w: Tensor, s: Tensor, x: Inputs, y: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            gradient, (value, after) = grad_and_value(loss, has_aux=True)(w, s, x, y)
            return gradient, (value, after)

        mapped: Gradients = vmap(gradients)
        return mapped


@dataclass(frozen=True)
class ByLayers:
    """Weights and gradients in the order of the layers, see `ManyClients.order`."""

    many: ManyClients
    transform: Callable[[Any], Any]
    loss: Loss

    def __call__(
        self, weights: Tensor, statistics: Tensor, inputs: Tensor, labels: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Gradients, losses, statistics."""
        pieces = [piece.detach().requires_grad_() for piece in self.many.pieces(weights)]
        after = statistics.clone()
        batch = _cast(self.transform(inputs.flatten(0, 1)), weights.dtype)
        if batch.dim() == 4:
            batch = batch.contiguous(memory_format=torch.channels_last)
        gradient = torch.empty_like(weights).index_fill_(1, self.many.gaps, 0)
        slots = self.many.pieces(gradient)
        losses = vmap(self.loss)(self.many(pieces, after, batch, slots), labels)
        # No client's loss depends on another's weights: the gradient of their sum is every client's own.
        for own, slot in zip(torch.autograd.grad(losses.sum(), pieces, materialize_grads=True), slots):
            if own.data_ptr() != slot.data_ptr():  # the layers write large gradients into their slots
                slot.copy_(own)
        return gradient, (losses.detach(), after)

    def in_layout_order(
        self, weights: Tensor, statistics: Tensor, inputs: Tensor, labels: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The same for weights and gradients in the order of the layout."""
        gradient, rest = self(weights[:, self.many.order], statistics, inputs, labels)
        return gradient[:, self.many.back], rest


def difference(by_layers: ByLayers, by_vmap: ByVmap, *arguments: Tensor) -> str | None:
    """Why layers do not compute what vmap does for this module, on a first batch of every client; None if they do.

    Do the kernels compile here, and does the forward pass treat every sample separately? A module that does not would
    mix the clients. Compared in float64, where rounding is far below any error, and run once in the type of the
    training, for which other kernels are compiled.
    """
    weights, statistics, inputs, labels = arguments
    draw = torch.Generator(weights.device).manual_seed(0)
    noise = torch.randn(2, len(weights), generator=draw, device=weights.device, dtype=torch.float64)
    two = weights.double() + 0.01 * noise
    half = torch.arange(inputs.shape[1], device=inputs.device) // 2  # a second batch, even if there is one client
    others = statistics.double().expand(2, -1), *(torch.stack([x[0], x[-1][half]]) for x in (inputs, labels))
    expected, (expected_losses, expected_after) = by_vmap(two, *others)
    try:
        gradient, (losses, after) = by_layers.in_layout_order(two, *others)
        by_layers(weights[by_layers.many.order].expand(2, -1), statistics.expand(2, -1), *others[1:])
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        return f"our layers for many clients cannot run here or with this model ({str(error).strip()[:300]})"
    pairs = [(gradient, expected), (losses, expected_losses), (after, expected_after)]
    if all(bool(torch.linalg.norm(a - b) <= TOLERANCE * (1 + torch.linalg.norm(b))) for a, b in pairs):
        return None
    return f"{type(by_vmap.module).__name__} does more with a batch than to compute its samples one by one"


def _pieces(parts: tuple[Part, ...], vector: Tensor) -> Iterator[tuple[str, Tensor]]:
    for part, piece in zip(parts, torch.split(vector, [part.size for part in parts])):
        yield part.name, piece.reshape(part.shape)


def _cast(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    return inputs.to(dtype) if inputs.is_floating_point() else inputs  # words are whole numbers
