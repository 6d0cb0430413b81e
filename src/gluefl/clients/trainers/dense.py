"""Small dense models on CPU cores: several clients as one batched matrix product, momentum folded into it.

Such a model is bound by the dispatch of its operations, not by arithmetic. Linear layers and ReLUs have a backward
pass of one line each, so it is written out here: no autograd graph, and the gradient of a weight matrix is added to
its velocity by the product that computes it. Any loss will do; autograd sees the outputs alone.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gluefl.accel.threads import available, pool_of
from gluefl.clients.rules import Job, LocalSGD, Loss, Outcome
from gluefl.vectors.layout import Layout, split

CHUNK = 10  # clients in one product: more fall out of the cache (docs/performance.md)


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


@dataclass
class Dense:
    """Trains chunks of clients, one chunk per core at a time."""

    module: nn.Module
    layout: Layout
    transform: Callable[[Tensor], Tensor]
    loss: Loss
    count: int = field(default_factory=available)
    _pool: ThreadPoolExecutor | None = None

    def train(
        self, weights: Tensor, statistics: Tensor, jobs: Sequence[Job], sgd: LocalSGD, lr: float, frozen: Tensor | None
    ) -> Iterator[Outcome]:
        """Clients with the same number of steps go together."""
        if self._pool is None:
            self._pool = pool_of(self.count)
        by_steps = defaultdict[int, list[Job]](list)
        for job in jobs:
            by_steps[len(job.batches)].append(job)
        chunks = [some[at : at + CHUNK] for some in by_steps.values() for at in range(0, len(some), CHUNK)]
        for outcomes in self._pool.map(lambda chunk: self._train(weights, chunk, sgd, lr, frozen), chunks):
            for job, delta, loss in outcomes:
                yield Outcome(job.client, delta, statistics.clone(), loss)

    @torch.no_grad()
    def _train(
        self, start: Tensor, jobs: Sequence[Job], sgd: LocalSGD, lr: float, frozen: Tensor | None
    ) -> list[tuple[Job, Tensor, float]]:
        clients, (steps, batch) = len(jobs), jobs[0].batches.shape
        order = [job.batches.reshape(-1) for job in jobs]
        raw = torch.cat([job.samples.inputs[some] for job, some in zip(jobs, order)])
        inputs = self.transform(raw).reshape(clients, steps, batch, -1)
        labels = torch.stack([job.samples.labels[some] for job, some in zip(jobs, order)]).reshape(
            clients, steps, batch
        )
        weights = start.expand(clients, -1).clone()
        velocity = torch.zeros_like(weights)
        total = weights.new_zeros(clients)
        stack = _Stack(dense_layers(self.module) or [], self.layout, weights, velocity)
        plain = not (sgd.weight_decay or sgd.proximal or frozen is not None)
        for step in range(steps):
            activations = stack.forward(inputs[:, step])
            losses, error = self._losses(activations[-1], labels[:, step])
            total += losses
            if plain:
                stack.backward(activations, error.mul_(lr), sgd.momentum)
            else:
                velocity.mul_(sgd.momentum)
                gradient = _Stack(stack.layers, self.layout, weights, torch.zeros_like(weights))
                gradient.backward(activations, error, 0.0)
                change = gradient.flat_velocity
                if sgd.weight_decay:
                    change.add_(weights, alpha=sgd.weight_decay)
                if sgd.proximal:
                    change.add_(weights - start, alpha=sgd.proximal)
                if frozen is not None:
                    change.mul_(~frozen)
                velocity.add_(change, alpha=lr)
            weights.sub_(velocity)
        weights.sub_(start)
        return [(job, weights[i], float(total[i]) / steps) for i, job in enumerate(jobs)]

    def _losses(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of every client and its derivative by the outputs."""
        if self.loss is nn.functional.cross_entropy:
            log_p = outputs.log_softmax(2)
            right = labels.unsqueeze(2)
            error = log_p.exp()
            error.scatter_add_(2, right, error.new_full((1,), -1.0).expand(right.shape))
            return -log_p.gather(2, right).mean((1, 2)), error.div_(labels.shape[1])
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            losses = torch.stack([self.loss(some, own) for some, own in zip(leaf, labels)])
            return losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]


class _Stack:
    """The matrices of several clients as views of two flat ones, and both passes over them."""

    def __init__(self, layers: list[tuple[str, nn.Module]], layout: Layout, weights: Tensor, velocity: Tensor):
        self.layers, self.flat_velocity = layers, velocity
        self.weights, self.velocity = dict(split(layout.weights, weights)), dict(split(layout.weights, velocity))

    def forward(self, inputs: Tensor) -> list[Tensor]:
        """The input of every layer, and the output."""
        activations = [inputs]
        for name, layer in self.layers:
            x = activations[-1]
            if isinstance(layer, nn.Linear):
                matrix, bias = self.weights[f"{name}.weight"].transpose(1, 2), self.weights.get(f"{name}.bias")
                x = torch.bmm(x, matrix) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, matrix)
            elif isinstance(layer, nn.ReLU):
                x = x.relu_() if len(activations) > 1 else x.relu()  # what it overwrites is not needed again
            activations.append(x)
        return activations

    def backward(self, activations: list[Tensor], error: Tensor, momentum: float) -> None:
        """velocity ← momentum · velocity + gradient, from the derivative of the loss by the outputs."""
        first = next(i for i, (_, layer) in enumerate(self.layers) if isinstance(layer, nn.Linear))
        for i in reversed(range(first, len(self.layers))):
            name, layer = self.layers[i]
            if isinstance(layer, nn.ReLU):
                error = error.mul_(activations[i + 1] > 0)
            elif isinstance(layer, nn.Linear):
                self.velocity[f"{name}.weight"].baddbmm_(error.transpose(1, 2), activations[i], beta=momentum)
                if layer.bias is not None:
                    self.velocity[f"{name}.bias"].mul_(momentum).add_(error.sum(1))
                if i > first:
                    error = torch.bmm(error, self.weights[f"{name}.weight"])
