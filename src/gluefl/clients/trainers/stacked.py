"""All clients of a cohort at once: their weights are rows of one matrix, and one step moves every row.

On a GPU the usual layers have kernels that know of many clients (`layers`); a module with others is trained by
`torch.func.vmap`. One SGD step of the whole stack is captured as a CUDA graph and replayed: a small model is bound by
kernel launches, and a replay costs one. Stacks that do not fit into the memory are trained in slices.
"""

import gc
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from gluefl.clients.rules import Job, LocalSGD, Loss, Outcome
from gluefl.clients.trainers.layers import ManyClients
from gluefl.vectors.layout import Layout, Part

MOST_SIDE_BY_SIDE = 2  # times the samples that are trained on
ALIKE = 1e-6  # how far two ways to compute a step may be apart in float64


@dataclass
class Stack:
    """The tensors of one captured step; replays read and write these and no others. Weights are in the order of the
    layers that compute them."""

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
    _checked: bool = False

    def __post_init__(self) -> None:
        self.module.train()

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
        at = 0
        while at < len(jobs):
            if not self.module.training:  # somebody evaluated; to say it to every part of a module takes a millisecond
                self.module.train()
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
        if self._many is not None and not self._checked:
            self._check(weights, statistics, inputs[:, 0], labels[:, 0])
            self._checked = True
        if self._many is not None:
            weights = weights[self._many.order]
            frozen = None if frozen is None else frozen[self._many.order]
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
        if self._many is not None:
            deltas = deltas[:, self._many.back]
        losses = (stack.loss / remaining.squeeze(1)).unbind()
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
            with (
                torch.cuda.stream(side),  # so that a capture that fails does not leave us in its stream
                torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"),  # others may be encoding
            ):
                self._step(stack, sgd)
            torch.cuda.current_stream().wait_stream(side)
            stack.graph = graph
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            warnings.warn(
                f"this model cannot be captured as a CUDA graph, it is trained without: {error}", stacklevel=2
            )
            self.capture = False

    def _step(self, stack: Stack, sgd: LocalSGD) -> None:
        gradients = self._by_vmap if self._many is None else self._by_layers
        gradient, (losses, statistics) = gradients(stack.weights, stack.statistics, stack.inputs, stack.labels)
        self._move(stack, gradient, sgd)
        with torch.no_grad():
            done = stack.lr == 0
            if self.layout.statistics:
                stack.statistics.copy_(torch.where(done, stack.statistics, statistics))
            stack.loss.add_(torch.where(done.squeeze(1), 0, losses))

    @torch.no_grad()
    def _move(self, stack: Stack, gradient: Tensor, sgd: LocalSGD) -> None:
        # The learning rate is folded into the velocity; it is the same for all steps of a round.
        if self._many is not None:
            from gluefl.accel.kernels.move import move

            move(stack.weights, stack.velocity, gradient, stack.lr, stack.momentum, stack.movable, stack.start,
                 sgd.weight_decay, sgd.proximal)  # fmt: skip
            return
        if sgd.weight_decay:
            gradient.add_(stack.weights, alpha=sgd.weight_decay)
        if sgd.proximal:
            gradient.add_(stack.weights - stack.start, alpha=sgd.proximal)
        if stack.movable is not None:
            gradient.mul_(stack.movable)
        stack.velocity.mul_(stack.momentum).addcmul_(gradient, stack.lr)
        stack.weights.sub_(stack.velocity)

    def _check(self, weights: Tensor, statistics: Tensor, inputs: Tensor, labels: Tensor) -> None:
        """Before anything is trained: do the kernels compile here, and does the forward pass treat every sample by
        itself? One that does not would mix the clients. In float64, where right and wrong are far apart, and once as
        it will be trained: those are other kernels."""
        assert self._many is not None
        draw = torch.Generator(weights.device).manual_seed(0)
        noise = torch.randn(2, len(weights), generator=draw, device=weights.device, dtype=torch.float64)
        two = weights.double() + 0.01 * noise
        half = torch.arange(inputs.shape[1], device=inputs.device) // 2  # another batch, also where there is one client
        others = statistics.double().expand(2, -1), *(torch.stack([x[0], x[-1][half]]) for x in (inputs, labels))
        expected = self._by_vmap(two, *others)
        try:
            gradient, (losses, after) = self._by_layers(two[:, self._many.order], *others)
            self._by_layers(weights[self._many.order].expand(2, -1), statistics.expand(2, -1), *others[1:])
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            reason = f"our layers for many clients cannot run here or with this model ({str(error).strip()[:300]})"
        else:
            found = gradient[:, self._many.back], (losses, after)
            pairs = zip((found[0], *found[1]), (expected[0], *expected[1]))
            if all(bool(torch.linalg.norm(a - b) <= ALIKE * (1 + torch.linalg.norm(b))) for a, b in pairs):
                return
            reason = f"{type(self.module).__name__} does more with a batch than to compute its samples one by one"
        warnings.warn(f"{reason}: it is trained by vmap, which is slower.", stacklevel=2)
        self._many = None

    @cached_property
    def _many(self) -> ManyClients | None:
        on_gpu = next(self.module.parameters()).is_cuda and importlib.util.find_spec("triton") is not None
        return ManyClients.of(self.module, self.layout) if on_gpu else None

    def _by_layers(
        self, weights: Tensor, statistics: Tensor, inputs: Tensor, labels: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        assert self._many is not None
        pieces = [piece.detach().requires_grad_() for piece in self._many.pieces(weights)]
        after = statistics.clone()
        batch = _in(weights.dtype, self.transform(inputs.flatten(0, 1)))
        if batch.dim() == 4:
            batch = batch.contiguous(memory_format=torch.channels_last)
        gradient = torch.empty_like(weights).index_fill_(1, self._many.gaps, 0)
        slots = self._many.pieces(gradient)
        losses = vmap(self.loss)(self._many(pieces, after, batch, slots), labels)
        # No client's loss depends on another's weights: the gradient of their sum is every client's own.
        for found, slot in zip(torch.autograd.grad(losses.sum(), pieces, materialize_grads=True), slots):
            if found.data_ptr() != slot.data_ptr():  # the large ones are there already
                slot.copy_(found)
        return gradient, (losses.detach(), after)

    @cached_property
    def _by_vmap(self) -> Callable[..., tuple[Tensor, tuple[Tensor, Tensor]]]:
        def loss(weights: Tensor, statistics: Tensor, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            # Splitting once makes the backward pass one concatenation instead of a padded copy per tensor.
            tensors = dict(_pieces(self.layout.weights, weights))
            # Normalisation layers write to their buffers: each gets a copy of its own, autograd watches them apart.
            buffers = {name: piece.clone() for name, piece in _pieces(self.layout.statistics, statistics)}
            outputs = functional_call(
                self.module, {**tensors, **buffers}, (_in(weights.dtype, self.transform(inputs)),)
            )
            after = [buffers[part.name].reshape(-1) for part in self.layout.statistics]
            return self.loss(outputs, labels), torch.cat(after) if after else statistics

        def gradients(w: Tensor, s: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            gradient, (value, after) = grad_and_value(loss, has_aux=True)(w, s, x, y)
            return gradient, (value, after)

        return vmap(gradients)


def _pieces(parts: tuple[Part, ...], vector: Tensor) -> Iterator[tuple[str, Tensor]]:
    for part, piece in zip(parts, torch.split(vector, [part.size for part in parts])):
        yield part.name, piece.reshape(part.shape)


def _in(dtype: torch.dtype, inputs: Tensor) -> Tensor:
    return inputs.to(dtype) if inputs.is_floating_point() else inputs  # words are whole numbers


def _gather(jobs: Sequence[Job], steps: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The batches of all clients: (clients, steps, batch, …). One that trains for fewer steps repeats its last."""
    orders = torch.stack([_lengthened(job.batches, steps) for job in jobs])
    sizes = [len(job.samples) for job in jobs]
    if sum(sizes) <= MOST_SIDE_BY_SIDE * orders.numel():  # their data side by side: a handful of calls instead of many
        places = (orders + torch.tensor([0, *sizes[:-1]]).cumsum(0)[:, None, None]).to(device)
        inputs, labels = (torch.cat([getattr(job.samples, name) for job in jobs]) for name in ("inputs", "labels"))
        return inputs[places], labels[places]
    orders = orders.to(device)  # one copy for all of them
    inputs = torch.stack([job.samples.inputs[order] for job, order in zip(jobs, orders)])
    return inputs, torch.stack([job.samples.labels[order] for job, order in zip(jobs, orders)])


def _lengthened(batches: Tensor, steps: int) -> Tensor:
    missing = steps - len(batches)
    return torch.cat([batches, batches[-1:].expand(missing, -1)]) if missing else batches
