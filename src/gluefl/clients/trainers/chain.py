"""Chains of Linear and ReLU for several clients: which modules are chains, and both passes over one."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gluefl.vectors.layout import Layout


def dense_layers(module: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """The layers of a chain of Linear and ReLU, perhaps flattened first, by name; None for any other module."""
    layers = _chain(module) if isinstance(module, nn.Sequential) else None
    if layers is None:
        return None
    matrices = [layer for _, layer in layers if isinstance(layer, nn.Linear)]
    tensors = [tensor for layer in matrices for tensor in layer.parameters()]
    shared = len({id(tensor) for tensor in tensors}) < len(tensors)
    frozen = any(not parameter.requires_grad for parameter in module.parameters())
    flattens_late = any(isinstance(layer, nn.Flatten) for _, layer in layers[1:])
    return layers if matrices and not (shared or frozen or flattens_late) else None


def _chain(module: nn.Module) -> list[tuple[str, nn.Module]] | None:
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return None
    if type(module) in (nn.Linear, nn.ReLU, nn.Identity):
        return [("", module)]
    if isinstance(module, nn.Flatten):
        return [("", module)] if (type(module), module.start_dim, module.end_dim) == (nn.Flatten, 1, -1) else None
    if type(module) is not nn.Sequential:
        return None
    layers: list[tuple[str, nn.Module]] = []
    for name, child in module._modules.items():  # `named_children` leaves out a module that comes twice
        inner = None if child is None else _chain(child)
        if inner is None:
            return None
        layers += [(f"{name}.{below}" if below else name, layer) for below, layer in inner]
    return layers


@dataclass(frozen=True)
class Chain:
    """The weights and velocities of several clients, one tensor (clients, …) per tensor of the module.

    Every tensor is contiguous: a batched product is then one call of the library instead of one per client.
    """

    layers: list[tuple[str, nn.Module]]
    weights: dict[str, Tensor]
    velocity: dict[str, Tensor]

    @classmethod
    def of(cls, module: nn.Module, layout: Layout, clients: int) -> "Chain":
        """Memory for a module that is a chain."""
        weights = {part.name: torch.empty(clients, *part.shape, dtype=layout.dtype) for part in layout.weights}
        return cls(dense_layers(module) or [], weights, {name: torch.empty_like(w) for name, w in weights.items()})

    def first(self, clients: int) -> "Chain":
        """The same memory for fewer clients."""
        weights, velocity = ({k: v[:clients] for k, v in d.items()} for d in (self.weights, self.velocity))
        return Chain(self.layers, weights, velocity)

    def begin(self, start: dict[str, Tensor]) -> None:
        """All clients start from the same weights, with zero velocity."""
        for name, weight in self.weights.items():
            weight.copy_(start[name])
            self.velocity[name].zero_()

    def forward(self, inputs: Tensor) -> list[Tensor]:
        """The input of every layer, and the output."""
        activations = [inputs]
        for name, layer in self.layers:
            x = activations[-1]
            if isinstance(layer, nn.Linear):
                matrix, bias = self.weights[f"{name}.weight"].transpose(1, 2), self.weights.get(f"{name}.bias")
                x = torch.bmm(x, matrix) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, matrix)
            elif isinstance(layer, nn.ReLU):
                x = x.relu_() if len(activations) > 1 else x.relu()  # the backward pass needs the output alone
            activations.append(x)
        return activations

    def backward(self, activations: list[Tensor], error: Tensor, velocity: dict[str, Tensor], momentum: float) -> None:
        """velocity ← momentum · velocity + gradient, from the derivative of the loss by the outputs."""
        first = next(i for i, (_, layer) in enumerate(self.layers) if isinstance(layer, nn.Linear))
        for i in reversed(range(first, len(self.layers))):
            name, layer = self.layers[i]
            if isinstance(layer, nn.ReLU):
                error = error.mul_(activations[i + 1] > 0)
            elif isinstance(layer, nn.Linear):
                velocity[f"{name}.weight"].baddbmm_(error.transpose(1, 2), activations[i], beta=momentum)
                if layer.bias is not None:
                    velocity[f"{name}.bias"].mul_(momentum).add_(error.sum(1))
                if i > first:
                    error = torch.bmm(error, self.weights[f"{name}.weight"])
