"""Client after client on CPU cores: one thread per core, each with a module of its own that it trains in place.

Convolutions run channels-last, where pooling is ten times as fast; a client's samples are indexed and transformed
once; weights are written into the module, never loaded through a state dict, and never pickled.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch
from torch import Tensor, nn

from gluefl.accel.threads import available, pool_of
from gluefl.clients.rules import Job, LocalSGD, Loss, Outcome
from gluefl.vectors.layout import Layout, split


@dataclass
class Workers:
    """Trains on `count` cores."""

    module: nn.Module
    layout: Layout
    transform: Callable[[Tensor], Tensor]
    loss: Loss
    count: int = field(default_factory=available)
    channels_last: bool = True
    _pool: ThreadPoolExecutor | None = None
    _benches: SimpleQueue["Bench"] = field(default_factory=SimpleQueue)

    def train(
        self,
        weights: Tensor,
        statistics: Tensor,
        jobs: Sequence[Job],
        sgd: LocalSGD,
        lr: float,
        frozen: Tensor | None,
    ) -> Iterator[Outcome]:
        """Outcomes in the order of the jobs, as they are ready; the caller compresses while others train."""
        if self._pool is None:
            # In a thread of the pool torch uses one core; the cores are shared between clients instead.
            self._pool = pool_of(self.count)
            self.channels_last = self.channels_last and self._takes_channels_last(jobs[0])
            for _ in range(self.count):
                self._benches.put(Bench.of(copy.deepcopy(self.module), self.layout, self.channels_last))

        def work(job: Job) -> Outcome:
            bench = self._benches.get()
            try:
                return bench.train(weights, statistics, job, self.transform, self.loss, sgd, lr, frozen)
            finally:
                self._benches.put(bench)

        # Largest first, so that no core waits long for the last; few at a time, so that few results wait.
        waiting = deque(sorted(jobs, key=lambda job: -len(job.batches)))
        running: deque[Future[Outcome]] = deque()
        try:
            while waiting or running:
                while waiting and len(running) < 2 * self.count:
                    running.append(self._pool.submit(work, waiting.popleft()))
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()

    @torch.no_grad()
    def _takes_channels_last(self, job: Job) -> bool:
        # `x.view(len(x), -1)` after a convolution needs the channels first.
        module = copy.deepcopy(self.module).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs = self.transform(job.samples.inputs[job.batches[0]])
        try:
            module(inputs.contiguous(memory_format=torch.channels_last) if inputs.dim() == 4 else inputs)
        except RuntimeError:
            return False
        return True


@dataclass(frozen=True)
class Bench:
    """One worker's module and the tensors it trains in place."""

    module: nn.Module
    layout: Layout
    parameters: list[Tensor]
    buffers: list[Tensor]
    velocity: list[Tensor]
    channels_last: bool

    @classmethod
    def of(cls, module: nn.Module, layout: Layout, channels_last: bool) -> "Bench":
        """Prepare a module that belongs to one worker."""
        if channels_last:
            module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        module.train()
        named, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        parameters: list[Tensor] = [named[part.name] for part in layout.weights]
        return cls(
            module,
            layout,
            parameters,
            [buffers[part.name] for part in layout.statistics],
            [torch.zeros_like(parameter) for parameter in parameters],
            channels_last,
        )

    def train(
        self,
        weights: Tensor,
        statistics: Tensor,
        job: Job,
        transform: Callable[[Tensor], Tensor],
        loss_of: Loss,
        sgd: LocalSGD,
        lr: float,
        frozen: Tensor | None,
    ) -> Outcome:
        """One client."""
        start = [view for _, view in split(self.layout.weights, weights)]
        movable = None if frozen is None else [~view for _, view in split(self.layout.weights, frozen)]
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, start)
            for buffer, (_, view) in zip(self.buffers, split(self.layout.statistics, statistics)):
                buffer.copy_(view if buffer.is_floating_point() else view.round())
        order = job.batches.reshape(-1)
        inputs, labels = transform(job.samples.inputs[order]), job.samples.labels[order]
        if self.channels_last and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        total, batch = torch.zeros(()), job.batches.shape[1]
        for step in range(len(job.batches)):
            now = slice(step * batch, (step + 1) * batch)
            loss = loss_of(self.module(inputs[now]), labels[now])
            gradient = torch.autograd.grad(loss, self.parameters, materialize_grads=True)
            with torch.no_grad():
                if sgd.weight_decay:
                    torch._foreach_add_(gradient, self.parameters, alpha=sgd.weight_decay)
                if sgd.proximal:
                    moved = torch._foreach_sub(self.parameters, start)
                    torch._foreach_add_(gradient, moved, alpha=sgd.proximal)
                if movable is not None:
                    torch._foreach_mul_(gradient, movable)
                if step == 0:
                    torch._foreach_copy_(self.velocity, gradient)
                else:
                    torch._foreach_mul_(self.velocity, sgd.momentum)
                    torch._foreach_add_(self.velocity, gradient)
                torch._foreach_add_(self.parameters, self.velocity, alpha=-lr)
            total += loss.detach()
        trained, after = self.layout.flatten(self.module)
        return Outcome(job.client, trained.sub_(weights), after, float(total) / len(job.batches))
