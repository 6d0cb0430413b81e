"""Client after client on CPU cores: one thread per core, each with a module of its own that it trains in place.

Convolutions run channels-last, where pooling is ten times as fast, and as products on maps of a few pixels; a client's
samples are indexed and transformed once; weights are written into the module, never loaded through a state dict, and
never pickled.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gluefl.accel.small_maps import use_products
from gluefl.accel.threads import available, one_thread, pool_of
from gluefl.clients.cohort import Cohort, Job, Outcome
from gluefl.clients.precision import lowered, raised
from gluefl.clients.rules import LocalRule, LocalSGD, Loss
from gluefl.clients.trainers.loop import Loop
from gluefl.populations.inputs import Inputs, applied, at, each
from gluefl.vectors.frozen import copied
from gluefl.vectors.layout import Layout, split, write


@dataclass
class Workers:
    """Trains on `count` cores: local SGD in place, other rules as the reference does."""

    fuses: ClassVar = (LocalSGD,)

    module: nn.Module
    layout: Layout
    transform: Callable[[Any], Any]
    loss: Loss
    count: int = field(default_factory=available)
    channels_last: bool = field(default=True, init=False)
    _pool: ThreadPoolExecutor | None = None
    _benches: SimpleQueue["Bench"] = field(default_factory=SimpleQueue)

    def train(self, cohort: Cohort, jobs: Sequence[Job], rule: LocalRule) -> Iterator[Outcome]:
        """Outcomes are returned as soon as they are ready: the caller compresses them while other clients train."""
        if not jobs:  # every client of the round was lost or late
            return
        if self._pool is None:
            # In a thread of the pool torch uses one core; the cores are shared between clients instead.
            self._pool = pool_of(self.count)
            self.channels_last = self.channels_last and self._accepts_channels_last(jobs[0])
            module = self._converted() if self.channels_last else self.module
            for _ in range(self.count):  # the frozen part, converted once, is shared by all of them
                loop = Loop(copied(module), self.layout, self.transform, self.loss)
                self._benches.put(Bench.of(loop, self.channels_last))

        def work(job: Job) -> Outcome:
            bench = self._benches.get()
            try:
                if isinstance(rule, LocalSGD) and type(rule) in self.fuses:
                    return bench.train(cohort, job, rule)
                return bench.loop.train_client(cohort, job, rule)
            finally:
                self._benches.put(bench)

        # The largest first, which balances the cores; few at a time, which bounds the memory of finished outcomes.
        waiting = deque(sorted(jobs, key=lambda job: -len(job.batches)))
        running: deque[Future[Outcome]] = deque()
        with one_thread():  # of the caller, who compresses what is yielded: the pool occupies all cores
            try:
                while waiting or running:
                    while waiting and len(running) < 2 * self.count:
                        running.append(self._pool.submit(work, waiting.popleft()))
                    yield running.popleft().result()
            finally:
                for future in running:
                    future.cancel()

    def _converted(self) -> nn.Module:
        module: nn.Module = copied(self.module).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return use_products(module)

    @torch.no_grad()
    def _accepts_channels_last(self, job: Job) -> bool:
        # `x.view(len(x), -1)` after a convolution needs the channels first.
        module = self._converted().train()
        inputs = self.transform(at(job.samples.inputs, job.batches[0]))
        try:
            applied(module, _channels_last(inputs))
        except RuntimeError:
            return False
        return True


@dataclass(frozen=True)
class Bench:
    """One worker's module and the tensors that it trains in place."""

    loop: Loop
    parameters: list[Tensor]
    buffers: list[Tensor]
    velocity: list[Tensor]
    channels_last: bool

    @classmethod
    def of(cls, loop: Loop, channels_last: bool) -> "Bench":
        """Prepare a module that belongs to one worker."""
        loop.module.train()
        named, buffers = dict(loop.module.named_parameters()), dict(loop.module.named_buffers())
        parameters: list[Tensor] = [named[part.name] for part in loop.layout.weights]
        return cls(
            loop,
            parameters,
            [buffers[part.name] for part in loop.layout.statistics],
            [torch.zeros_like(parameter) for parameter in parameters],
            channels_last,
        )

    def train(self, cohort: Cohort, job: Job, sgd: LocalSGD) -> Outcome:
        """One client by local SGD."""
        loop, layout = self.loop, self.loop.layout
        lr = sgd.rate(cohort.round)
        start = [piece for _, piece in split(layout.weights, cohort.weights)]
        movable = None if cohort.frozen is None else [~piece for _, piece in split(layout.weights, cohort.frozen)]
        self._fill(start, cohort.statistics)
        order = job.batches.reshape(-1)
        samples = job.samples[order]
        inputs, labels = loop.transform(samples.inputs), samples.labels
        if self.channels_last:
            inputs = _channels_last(inputs)
        total, batch = torch.zeros(()), job.batches.shape[1]
        for step in range(len(job.batches)):
            rows = slice(step * batch, (step + 1) * batch)
            with lowered(sgd.precision, total.device):
                outputs = applied(loop.module, at(inputs, rows))
            loss = loop.loss(raised(outputs), labels[rows])
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
        trained, after = layout.flatten(loop.module)
        return Outcome(job.client, trained.sub_(cohort.weights), after, float(total) / len(job.batches))

    @torch.no_grad()
    def _fill(self, start: list[Tensor], statistics: Tensor) -> None:
        torch._foreach_copy_(self.parameters, start)
        for buffer, (_, piece) in zip(self.buffers, split(self.loop.layout.statistics, statistics)):
            write(buffer, piece)


def _channels_last(inputs: Inputs) -> Any:
    """Images with the channels last in memory; other tensors as they are."""
    return each(lambda x: x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x, inputs)
