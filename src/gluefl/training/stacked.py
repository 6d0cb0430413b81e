"""All clients of a cohort at once: their weights are rows of one matrix, `torch.func.vmap` trains every row.

On a GPU one SGD step of the whole stack is captured as a CUDA graph and replayed: a small model is bound by kernel
launches, and a replay costs one. Stacks that do not fit into the memory are trained in slices.
"""

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from gluefl.layout import Layout, Part
from gluefl.training import Job, LocalSGD, Loss, Outcome


@dataclass
class Stack:
    """The tensors of one captured step; replays read and write these and no others."""

    weights: Tensor  # (clients, d)
    velocity: Tensor
    statistics: Tensor  # (clients, s)
    inputs: Tensor  # (clients, batch, …), raw
    labels: Tensor
    lr: Tensor  # (clients, 1); 0 for a client that has done its steps
    momentum: Tensor  # (clients, 1)
    start: Tensor  # (d,), the weights of the round
    movable: Tensor | None  # (d,), 0 where a coordinate is frozen
    loss: Tensor  # (clients,), summed over steps
    graph: "torch.cuda.CUDAGraph | None" = None


@dataclass
class Stacked:
    """Trains the rows of a matrix of weights."""

    module: nn.Module
    layout: Layout
    transform: Callable[[Tensor], Tensor]
    loss: Loss
    most: int = 1024  # clients at a time; lowered when the memory does not hold them
    capture: bool = True
    _stacks: dict[object, Stack] = field(default_factory=dict)

    def train(
        self,
        weights: Tensor,
        statistics: Tensor,
        jobs: Sequence[Job],
        sgd: LocalSGD,
        lr: float,
        frozen: Tensor | None,
    ) -> Iterator[Outcome]:
        """In slices of as many clients as fit."""
        self.module.train()
        at = 0
        while at < len(jobs):
            some = jobs[at : at + self.most]
            try:
                yield from self._train(weights, statistics, some, sgd, lr, frozen)
            except torch.cuda.OutOfMemoryError:
                if len(some) == 1:
                    raise
                self._stacks.clear()
                torch.cuda.empty_cache()
                self.most = -(-len(some) // 2)
                continue
            at += len(some)

    def _train(
        self,
        weights: Tensor,
        statistics: Tensor,
        jobs: Sequence[Job],
        sgd: LocalSGD,
        lr: float,
        frozen: Tensor | None,
    ) -> list[Outcome]:
        steps = [len(job.batches) for job in jobs]
        inputs, labels = _gather(jobs, max(steps), weights.device)
        stack = self._stack(weights, statistics, inputs, labels, sgd, frozen)
        remaining = torch.tensor(steps, device=weights.device).unsqueeze(1)
        stack.weights.copy_(weights.expand_as(stack.weights))
        stack.statistics.copy_(statistics.expand_as(stack.statistics))
        stack.velocity.zero_()
        stack.loss.zero_()
        stack.start.copy_(weights)
        if stack.movable is not None and frozen is not None:
            stack.movable.copy_(~frozen)
        uneven = len(set(steps)) > 1
        stack.lr.fill_(lr)
        stack.momentum.fill_(sgd.momentum)
        for step in range(max(steps)):
            if uneven:
                stack.lr.copy_(lr * (remaining > step).to(weights.dtype))
                stack.momentum.copy_(sgd.momentum * (remaining > step).to(weights.dtype))
            stack.inputs.copy_(inputs[:, step])
            stack.labels.copy_(labels[:, step])
            if stack.graph is not None:
                stack.graph.replay()
            else:
                self._step(stack, sgd)
        deltas = stack.weights - weights
        losses = (stack.loss / remaining.squeeze(1)).tolist()
        after = stack.statistics.clone()
        return [Outcome(job.client, deltas[i], after[i], losses[i]) for i, job in enumerate(jobs)]

    def _stack(
        self,
        weights: Tensor,
        statistics: Tensor,
        inputs: Tensor,
        labels: Tensor,
        sgd: LocalSGD,
        frozen: Tensor | None,
    ) -> Stack:
        clients = len(inputs)
        key = (clients, inputs.shape[2:], inputs.dtype, frozen is None, sgd)
        if key not in self._stacks:
            self._stacks.clear()  # one at a time: a stack holds several models per client
            stack = Stack(
                weights=weights.expand(clients, -1).clone(),
                velocity=weights.new_zeros(clients, weights.numel()),
                statistics=statistics.expand(clients, -1).clone(),
                inputs=inputs[:, 0].clone(),
                labels=labels[:, 0].clone(),
                lr=weights.new_zeros(clients, 1),
                momentum=weights.new_zeros(clients, 1),
                start=weights.clone(),
                movable=None if frozen is None else (~frozen).to(weights.dtype),
                loss=weights.new_zeros(clients),
            )
            if weights.is_cuda and self.capture:
                self._capture(stack, sgd)
            self._stacks[key] = stack
        return self._stacks[key]

    def _capture(self, stack: Stack, sgd: LocalSGD) -> None:
        gc.collect()  # a graph that is collected while another is captured spoils it
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):
                for _ in range(3):  # libraries choose their algorithms and allocate before the capture
                    self._step(stack, sgd)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step(stack, sgd)
            stack.graph = graph
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            warnings.warn(
                f"this model cannot be captured as a CUDA graph, it is trained without: {error}", stacklevel=2
            )
            self.capture = False

    def _step(self, stack: Stack, sgd: LocalSGD) -> None:
        gradient, (losses, statistics) = self._gradients(stack.weights, stack.statistics, stack.inputs, stack.labels)
        with torch.no_grad():
            if sgd.weight_decay:
                gradient.add_(stack.weights, alpha=sgd.weight_decay)
            if sgd.proximal:
                gradient.add_(stack.weights - stack.start, alpha=sgd.proximal)
            if stack.movable is not None:
                gradient.mul_(stack.movable)
            # The learning rate is folded into the velocity; it is the same for all steps of a round.
            stack.velocity.mul_(stack.momentum).addcmul_(gradient, stack.lr)
            stack.weights.sub_(stack.velocity)
            done = stack.lr == 0
            if self.layout.statistics:
                stack.statistics.copy_(torch.where(done, stack.statistics, statistics))
            stack.loss.add_(torch.where(done.squeeze(1), 0, losses))

    @cached_property
    def _gradients(self) -> Callable[..., tuple[Tensor, tuple[Tensor, Tensor]]]:
        def loss(weights: Tensor, statistics: Tensor, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            # Splitting once makes the backward pass one concatenation instead of a padded copy per tensor.
            tensors = dict(_pieces(self.layout.weights, weights))
            # Normalisation layers write to their buffers: each gets a copy of its own, autograd watches them apart.
            buffers = {name: piece.clone() for name, piece in _pieces(self.layout.statistics, statistics)}
            outputs = functional_call(self.module, {**tensors, **buffers}, (self.transform(inputs),))
            after = [buffers[part.name].reshape(-1) for part in self.layout.statistics]
            return self.loss(outputs, labels), torch.cat(after) if after else statistics

        def gradients(w: Tensor, s: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            gradient, (value, after) = grad_and_value(loss, has_aux=True)(w, s, x, y)
            return gradient, (value, after)

        return vmap(gradients)


def _pieces(parts: tuple[Part, ...], vector: Tensor) -> Iterator[tuple[str, Tensor]]:
    for part, piece in zip(parts, torch.split(vector, [part.size for part in parts])):
        yield part.name, piece.reshape(part.shape)


def _gather(jobs: Sequence[Job], steps: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The batches of all clients: (clients, steps, batch, …). One that trains for fewer steps repeats its last."""
    inputs, labels = [], []
    for job in jobs:
        order = job.batches.to(device)
        if len(order) < steps:
            order = torch.cat([order, order[-1:].expand(steps - len(order), -1)])
        inputs.append(job.samples.inputs[order])
        labels.append(job.samples.labels[order])
    return torch.stack(inputs), torch.stack(labels)
