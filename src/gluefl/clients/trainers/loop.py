"""The reference trainer: one client after the other, one step after the other. Slow and easy to check."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from gluefl.clients.cohort import Cohort, Job, Outcome
from gluefl.clients.precision import Precision, lowered, precision_of, raised
from gluefl.clients.rules import Context, Final, LocalRule, Loss, Rule, TorchOptimizer, advance
from gluefl.populations.inputs import applied
from gluefl.vectors.layout import Layout, split

GENERATOR = Lock()  # on PyTorch's generator, which other runs of this process draw from, too


@dataclass(frozen=True)
class Loop:
    """Trains a module that is overwritten for every client. Runs every rule."""

    module: nn.Module
    layout: Layout
    transform: Callable[[Any], Any]
    loss: Loss

    def train(self, cohort: Cohort, jobs: Sequence[Job], rule: LocalRule) -> Iterator[Outcome]:
        """Client after client."""
        for job in jobs:
            # Dropout depends on the job alone; the global generator is restored.
            devices = [cohort.weights.device] if cohort.weights.is_cuda else []
            with GENERATOR, torch.random.fork_rng(devices=devices):
                torch.manual_seed(job.seed)
                outcome = self.train_client(cohort, job, rule)
            yield outcome

    def train_client(self, cohort: Cohort, job: Job, rule: LocalRule) -> Outcome:
        """One client."""
        self.layout.fill(self.module, cohort.weights, cohort.statistics)
        self.module.train()
        context = cohort.context(job.client, rule, self.layout)
        named = dict(self.module.named_parameters())
        parameters = [named[part.name] for part in self.layout.weights]
        losses: list[Tensor] = []
        gradients = self._gradients(job, parameters, losses, precision_of(rule))
        if isinstance(rule, TorchOptimizer):
            final = self._by_optimizer(rule, context, parameters, gradients)
        else:
            final = self._by_rule(rule, context, parameters, gradients)
        statistics = self.layout.flatten(self.module)[1][: self.layout.tracked_size]
        return Outcome.of(job, final, statistics, float(torch.stack(losses).mean()))

    def _gradients(
        self, job: Job, parameters: list[nn.Parameter], losses: list[Tensor], precision: Precision | None
    ) -> Iterator[list[Tensor]]:
        """The gradients of batch after batch, at the parameters that the module has then."""
        for batch in job.batches.to(parameters[0].device):
            samples = job.samples[batch]
            inputs = self.transform(samples.inputs)
            with lowered(precision, batch.device):
                outputs = applied(self.module, inputs)
            loss = self.loss(raised(outputs), samples.labels)
            losses.append(loss.detach())
            yield list(torch.autograd.grad(loss, parameters, materialize_grads=True))

    def _by_rule(
        self, rule: Rule, context: Context, parameters: list[nn.Parameter], gradients: Iterator[list[Tensor]]
    ) -> Final:
        state, weights = rule.init(context), context.start
        for gradient in gradients:
            with torch.no_grad():
                flat = torch.cat([piece.reshape(-1).to(weights.dtype) for piece in gradient])
                state, weights = advance(rule, state, weights, flat, context)
                self._write(parameters, weights)
        return rule.final(state, weights, context)

    def _by_optimizer(
        self, rule: TorchOptimizer, context: Context, parameters: list[nn.Parameter], gradients: Iterator[list[Tensor]]
    ) -> Final:
        optimizer = rule.build(parameters, context.lr)
        frozen = None if context.frozen is None else [piece for _, piece in split(self.layout.weights, context.frozen)]
        for gradient in gradients:
            for i, parameter in enumerate(parameters):
                parameter.grad = gradient[i] if frozen is None else gradient[i].masked_fill(frozen[i], 0)
            rule.move(optimizer)
            if context.frozen is not None:
                weights = self.layout.flatten(self.module)[0]
                self._write(parameters, torch.where(context.frozen, context.start, weights))
        optimizer.zero_grad()
        return Final(self.layout.flatten(self.module)[0] - context.start)

    @torch.no_grad()
    def _write(self, parameters: list[nn.Parameter], weights: Tensor) -> None:
        for parameter, (_, piece) in zip(parameters, split(self.layout.weights, weights)):
            parameter.copy_(piece)
