"""The reference trainer: one client after the other, a plain SGD loop over a module. Slow and easy to check."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gluefl.clients.rules import Job, LocalSGD, Loss, Outcome
from gluefl.vectors.layout import Layout, split


@dataclass(frozen=True)
class Loop:
    """Trains with a module that is overwritten for every client."""

    module: nn.Module
    layout: Layout
    transform: Callable[[Tensor], Tensor]
    loss: Loss

    def train(
        self,
        weights: Tensor,
        statistics: Tensor,
        jobs: Sequence[Job],
        sgd: LocalSGD,
        lr: float,
        frozen: Tensor | None,
    ) -> Iterator[Outcome]:
        """Client after client."""
        for job in jobs:
            # What dropout draws depends on the job alone; the global generator is left as it was.
            with torch.random.fork_rng(devices=[weights.device] if weights.is_cuda else []):
                torch.manual_seed(job.seed)
                outcome = self._train(weights, statistics, job, sgd, lr, frozen)
            yield outcome

    def _train(
        self, weights: Tensor, statistics: Tensor, job: Job, sgd: LocalSGD, lr: float, frozen: Tensor | None
    ) -> Outcome:
        self.layout.fill(self.module, weights, statistics)
        self.module.train()
        named = dict(self.module.named_parameters())
        parameters = [named[part.name] for part in self.layout.weights]
        start = [view for _, view in split(self.layout.weights, weights)]
        movable = None if frozen is None else [view for _, view in split(self.layout.weights, ~frozen)]
        velocity: list[Tensor] | None = None
        losses = []
        for batch in job.batches.to(weights.device):
            outputs = self.module(self.transform(job.samples.inputs[batch]))
            loss = self.loss(outputs, job.samples.labels[batch])
            gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
            with torch.no_grad():
                step = [
                    g + sgd.weight_decay * p + sgd.proximal * (p - w) for g, p, w in zip(gradients, parameters, start)
                ]
                if movable is not None:
                    step = [s * m for s, m in zip(step, movable)]
                velocity = step if velocity is None else [sgd.momentum * v + s for v, s in zip(velocity, step)]
                for parameter, v in zip(parameters, velocity):
                    parameter.sub_(lr * v)
            losses.append(loss.detach())
        trained, after = self.layout.flatten(self.module)
        return Outcome(job.client, trained - weights, after, float(torch.stack(losses).mean()))
