"""All clients of a cohort at once: their weights are rows of one matrix, and one step moves every row.

On a GPU the usual layers have kernels for many clients (`layers`); a module with others is trained by
`torch.func.vmap`. One step of local SGD of the whole stack is captured as a CUDA graph and replayed: a small model is
bound by kernel launches, and a replay costs one. Other rules run by vmap, step by step. Stacks that do not fit into the
memory are trained in slices.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import vmap

from gluefl.accel import kernels
from gluefl.clients.cohort import Cohort, Job, Outcome
from gluefl.clients.precision import Precision, precision_of
from gluefl.clients.rules import Final, LocalRule, LocalSGD, Loss, Rule, TorchOptimizer, advance
from gluefl.clients.trainers.gradients import ByLayers, ByVmap, Gradients, difference
from gluefl.clients.trainers.layers import ManyClients
from gluefl.clients.trainers.stack import Stack, gather
from gluefl.errors import UsageError
from gluefl.populations.inputs import Inputs, at, parts
from gluefl.vectors.layout import Layout


@dataclass
class Stacked:
    """Trains the rows of a matrix of weights: local SGD by one fused step, other flat rules by vmap."""

    fuses: ClassVar = (LocalSGD,)

    module: nn.Module
    layout: Layout
    transform: Callable[[Any], Any]
    loss: Loss
    most: int = field(default=1024, init=False)  # clients at a time; lowered when the memory does not hold them
    capture: bool = field(default=True, init=False)
    layers: ManyClients | None = field(init=False)  # None: the gradients come from vmap
    stacks: dict[object, Stack] = field(default_factory=dict, init=False)
    _by_vmap: ByVmap = field(init=False)
    _checked: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.module.train()
        on_gpu = kernels.serve(next(self.module.parameters()))
        self.layers = ManyClients.of(self.module, self.layout) if on_gpu else None
        self._by_vmap = ByVmap(self.module, self.layout, self.transform, self.loss)

    def train(self, cohort: Cohort, jobs: Sequence[Job], rule: LocalRule) -> Iterator[Outcome]:
        """In slices of as many clients as fit."""
        if isinstance(rule, TorchOptimizer):
            raise UsageError("the stacked trainer runs rules on flat tensors, not torch.optim: use 'loop'.")
        self._lower(precision_of(rule))
        done = 0
        while done < len(jobs):
            if not self.module.training:  # an evaluation came between; `train()` itself takes a millisecond
                self.module.train()
            slice_ = jobs[done : done + self.most]
            try:
                yield from self._train(cohort, slice_, rule)
            except torch.cuda.OutOfMemoryError:
                if len(slice_) == 1:
                    raise
                self.stacks.clear()
                torch.cuda.empty_cache()
                self.most = -(-len(slice_) // 2)
                continue
            done += len(slice_)

    def _lower(self, precision: Precision | None) -> None:
        """Our kernels compute in float32: a lower precision comes from vmap."""
        if precision is not None:
            self.layers = None
        if precision != self._by_vmap.precision:
            self._by_vmap = replace(self._by_vmap, precision=precision)

    def _train(self, cohort: Cohort, jobs: Sequence[Job], rule: Rule) -> list[Outcome]:
        inputs, labels = gather(jobs, max(len(job.batches) for job in jobs), cohort.weights.device)
        statistics = cohort.statistics[: self.layout.tracked_size]
        if self.layers is not None and not self._checked:
            self._check(cohort.weights, statistics, inputs, labels[:, 0])
        if isinstance(rule, LocalSGD) and type(rule) in self.fuses:
            return self._train_fused(cohort, jobs, rule, inputs, labels)
        return self._train_mapped(cohort, jobs, rule, inputs, labels)

    def _check(self, weights: Tensor, statistics: Tensor, inputs: Inputs, labels: Tensor) -> None:
        assert self.layers is not None
        if not isinstance(inputs, Tensor):  # the layers take the samples of all clients as one tensor
            self.layers = None
            return
        by_layers = ByLayers(self.layers, self.transform, self.loss)
        if reason := difference(by_layers, self._by_vmap, weights, statistics, inputs[:, 0], labels):
            warnings.warn(f"{reason}: it is trained by vmap, which is slower.", stacklevel=2)
            self.layers = None
        self._checked = True

    def _train_fused(
        self, cohort: Cohort, jobs: Sequence[Job], sgd: LocalSGD, inputs: Inputs, labels: Tensor
    ) -> list[Outcome]:
        """Local SGD, in place."""
        steps, lr = [len(job.batches) for job in jobs], sgd.rate(cohort.round)
        weights, statistics, frozen = cohort.weights, cohort.statistics, cohort.frozen
        if self.layers is not None:
            weights = weights[self.layers.order]
            frozen = None if frozen is None else frozen[self.layers.order]
        shapes = tuple((tensor.shape[2:], tensor.dtype) for tensor in (*parts(inputs), labels))
        key = (len(jobs), shapes, frozen is None, sgd)
        if key not in self.stacks:
            self.stacks.clear()  # one at a time: a stack holds several models per client
            stack = Stack.like(weights, statistics, inputs, labels, frozen)
            if weights.is_cuda and self.capture:
                self.capture = stack.capture(lambda stack: self._step(stack, sgd))
            self.stacks[key] = stack
        stack = self.stacks[key]
        remaining = torch.tensor(steps, device=weights.device).unsqueeze(1)
        stack.begin(weights, statistics, frozen)
        uneven = len(set(steps)) > 1
        stack.lr.fill_(lr)
        stack.momentum.fill_(sgd.momentum)
        for step in range(max(steps)):
            if uneven:
                stack.lr.copy_(lr * (remaining > step).to(weights.dtype))
                stack.momentum.copy_(sgd.momentum * (remaining > step).to(weights.dtype))
            stack.feed(inputs, labels, step)
            if stack.graph is not None:
                stack.graph.replay()
            else:
                self._step(stack, sgd)
        deltas = stack.weights - weights
        if self.layers is not None:
            deltas = deltas[:, self.layers.back]
        losses = (stack.loss / remaining.squeeze(1)).unbind()
        after = stack.statistics.clone()
        return [Outcome(job.client, deltas[i], after[i], losses[i]) for i, job in enumerate(jobs)]

    def _step(self, stack: Stack, sgd: LocalSGD) -> None:
        by_layers = None if self.layers is None else ByLayers(self.layers, self.transform, self.loss)
        gradients: Gradients = by_layers or self._by_vmap
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
        if self.layers is not None:
            from gluefl.accel.kernels.move import move

            move(stack, gradient, sgd.weight_decay, sgd.proximal)
            return
        if sgd.weight_decay:
            gradient.add_(stack.weights, alpha=sgd.weight_decay)
        if sgd.proximal:
            gradient.add_(stack.weights - stack.start, alpha=sgd.proximal)
        if stack.movable is not None:
            gradient.mul_(stack.movable)
        stack.velocity.mul_(stack.momentum).addcmul_(gradient, stack.lr)
        stack.weights.sub_(stack.velocity)

    def _train_mapped(
        self, cohort: Cohort, jobs: Sequence[Job], rule: Rule, inputs: Inputs, labels: Tensor
    ) -> list[Outcome]:
        """Any rule: `init` and `final` client by client, `step` by vmap."""
        steps = torch.tensor([len(job.batches) for job in jobs], device=cohort.weights.device)
        contexts = [cohort.context(job.client, rule, self.layout) for job in jobs]
        by_layers = None if self.layers is None else ByLayers(self.layers, self.transform, self.loss)
        gradients: Gradients = self._by_vmap if by_layers is None else by_layers.in_layout_order
        memories = None if contexts[0].memory is None else torch.stack([c.memory for c in contexts])  # type: ignore[misc]

        def step(state: Any, weights: Tensor, gradient: Tensor, memory: Tensor | None) -> tuple[Any, Tensor]:
            return advance(rule, state, weights, gradient, replace(contexts[0], memory=memory))

        step_all = vmap(step, in_dims=(0, 0, 0, None if memories is None else 0))
        state = _joined([rule.init(context) for context in contexts])
        weights = cohort.weights.expand(len(jobs), -1)
        statistics = cohort.statistics[: self.layout.tracked_size].expand(len(jobs), -1)
        total = cohort.weights.new_zeros(len(jobs))
        for number in range(labels.shape[1]):
            batch = at(inputs, (slice(None), number))
            gradient, (losses, after) = gradients(weights, statistics, batch, labels[:, number])
            with torch.no_grad():
                # A client that has done its steps keeps everything as it is, whatever the rule.
                active = steps > number
                state, weights, statistics = _where(
                    active, (*step_all(state, weights, gradient, memories), after), (state, weights, statistics)
                )
                total += torch.where(active, losses, 0)
        means = (total / steps).unbind()
        outcomes = []
        for i, job in enumerate(jobs):
            final: Final = rule.final(_row(state, i), weights[i], contexts[i])
            outcomes.append(Outcome.of(job, final, statistics[i].clone(), means[i]))
        return outcomes


def _joined(states: Sequence[Any]) -> Any:
    """States of several clients with the clients as first dimension."""
    if isinstance(states[0], tuple):
        return tuple(_joined(parts) for parts in zip(*states))
    return torch.stack(list(states))


def _where(chosen: Tensor, new: Any, old: Any) -> Any:
    """The new tensors in the chosen rows, the old ones in the others."""
    if isinstance(new, tuple):
        return tuple(_where(chosen, one, other) for one, other in zip(new, old))
    return torch.where(chosen.view(-1, *[1] * (new.dim() - 1)), new, old)


def _row(state: Any, index: int) -> Any:
    return tuple(_row(part, index) for part in state) if isinstance(state, tuple) else state[index]
