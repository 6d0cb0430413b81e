"""Small dense models on CPU cores: several clients as one batched matrix product, momentum folded into it.

Such a model is bound by the dispatch of its operations and by its memory, not by arithmetic. Linear layers and ReLUs
have a backward pass of one line each, so it is written out here: no autograd graph, and the gradient of a weight matrix
is added to its velocity by the product that computes it. Any loss will do; autograd sees the outputs alone.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from gluefl.accel.threads import available, pool_of
from gluefl.clients.cohort import Cohort, Job, Outcome
from gluefl.clients.rules import LocalRule, LocalSGD, Loss
from gluefl.clients.trainers.chain import Chain
from gluefl.errors import UsageError
from gluefl.vectors.layout import Layout, split

CHUNK = 10  # clients in one product: more fall out of the cache (docs/performance.md)


@dataclass
class Dense:
    """Trains chunks of clients, one chunk per core at a time."""

    fuses: ClassVar = (LocalSGD,)

    module: nn.Module
    layout: Layout
    transform: Callable[[Any], Any]
    loss: Loss
    count: int = field(default_factory=available)
    _pool: ThreadPoolExecutor | None = None
    _spaces: SimpleQueue["Workspace"] = field(default_factory=SimpleQueue)

    def train(self, cohort: Cohort, jobs: Sequence[Job], rule: LocalRule) -> Iterator[Outcome]:
        """Clients with the same number of steps train together."""
        if not isinstance(rule, LocalSGD) or type(rule) not in self.fuses:
            raise UsageError(f"the dense trainer runs LocalSGD, not {type(rule).__name__}: use 'loop' or 'workers'.")
        if rule.precision is not None:
            raise UsageError(f"the dense trainer computes in float32, not {rule.precision}: use 'loop' or 'workers'.")
        sgd = rule
        if self._pool is None:
            self._pool = pool_of(self.count)
            for _ in range(self.count):
                self._spaces.put(Workspace(Chain.of(self.module, self.layout, CHUNK)))
        by_steps = defaultdict[int, list[Job]](list)
        for job in jobs:
            by_steps[len(job.batches)].append(job)
        chunks = [alike[at : at + CHUNK] for alike in by_steps.values() for at in range(0, len(alike), CHUNK)]

        def work(chunk: list[Job]) -> tuple[Tensor, list[float]]:
            space = self._spaces.get()
            try:
                return self._train(space, cohort, chunk, sgd)
            finally:
                self._spaces.put(space)

        for chunk, (deltas, losses) in zip(chunks, self._pool.map(work, chunks)):
            for job, delta, loss in zip(chunk, deltas, losses):
                yield Outcome(job.client, delta, cohort.statistics.clone(), loss)

    @torch.no_grad()
    def _train(
        self, space: "Workspace", cohort: Cohort, jobs: Sequence[Job], sgd: LocalSGD
    ) -> tuple[Tensor, list[float]]:
        """The deltas of a chunk of clients, (clients, d), and their mean losses."""
        lr, steps = sgd.rate(cohort.round), len(jobs[0].batches)
        inputs, labels = self._gather(space, jobs)
        start = dict(split(self.layout.weights, cohort.weights))
        movable = None if cohort.frozen is None else dict(split(self.layout.weights, ~cohort.frozen))
        chain = space.chain.first(len(jobs))
        chain.begin(start)
        total = cohort.weights.new_zeros(len(jobs))
        plain = not (sgd.weight_decay or sgd.proximal or movable is not None)
        for step in range(steps):
            activations = chain.forward(inputs[:, step])
            losses, error = self._losses(activations[-1], labels[:, step])
            total += losses
            if plain:
                chain.backward(activations, error.mul_(lr), chain.velocity, sgd.momentum)
            else:
                change = {name: torch.zeros_like(weight) for name, weight in chain.weights.items()}
                chain.backward(activations, error, change, 0.0)
                for name, slope in change.items():
                    if sgd.weight_decay:
                        slope.add_(chain.weights[name], alpha=sgd.weight_decay)
                    if sgd.proximal:
                        slope.add_(chain.weights[name] - start[name], alpha=sgd.proximal)
                    if movable is not None:
                        slope.mul_(movable[name])
                    chain.velocity[name].mul_(sgd.momentum).add_(slope, alpha=lr)
            torch._foreach_sub_([*chain.weights.values()], [*chain.velocity.values()])
        deltas = cohort.weights.new_empty(len(jobs), self.layout.size)
        for name, delta in split(self.layout.weights, deltas):
            torch.sub(chain.weights[name], start[name], out=delta)
        return deltas, [value / steps for value in total.tolist()]

    def _gather(self, space: "Workspace", jobs: Sequence[Job]) -> tuple[Tensor, Tensor]:
        """Inputs (clients, steps, batch, features) and labels (clients, steps, batch, …)."""
        shape = (len(jobs), *jobs[0].batches.shape)
        orders = [job.batches.reshape(-1) for job in jobs]
        inputs = [job.samples.inputs for job in jobs]
        raw = space.room_for(cast(Tensor, inputs[0]), sum(map(len, orders)))  # `choose` saw one tensor
        for own, order, rows in zip(inputs, orders, torch.split(raw, [len(order) for order in orders])):
            torch.index_select(cast(Tensor, own), 0, order, out=rows)
        labels = torch.cat([job.samples.labels[order] for job, order in zip(jobs, orders)])
        return self.transform(raw).reshape(*shape, -1), labels.reshape(*shape, *labels.shape[1:])

    def _losses(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of every client and its derivative by the outputs."""
        if self.loss is nn.functional.cross_entropy and _are_classes(labels):
            log_p = outputs.log_softmax(2)
            right = labels.unsqueeze(2)
            error = log_p.exp()
            error.scatter_add_(2, right, error.new_full((1,), -1.0).expand(right.shape))
            return -log_p.gather(2, right).mean((1, 2)), error.div_(labels.shape[1])
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            losses = torch.stack([self.loss(own, right) for own, right in zip(leaf, labels)])
            return losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]


@dataclass
class Workspace:
    """The memory of one thread, used for all of its chunks: fresh memory costs a page fault per 4 KiB."""

    chain: Chain
    samples: Tensor = field(default_factory=lambda: torch.empty(0))

    def room_for(self, like: Tensor, count: int) -> Tensor:
        """Memory for `count` samples, valid until the next call."""
        if self.samples.dtype != like.dtype or self.samples.shape[1:] != like.shape[1:] or len(self.samples) < count:
            self.samples = like.new_empty(count, *like.shape[1:])
        return self.samples[:count]


def _are_classes(labels: Tensor) -> bool:
    """Whether labels (clients, batch) are classes, all of them known: not probabilities, and none is −100."""
    return labels.dim() == 2 and not labels.is_floating_point() and bool((labels >= 0).all())
