"""The two workloads on which simulators are compared: W1 the LEAF CNN, W2 a small MLP.

2800 clients with 40 images of 28 × 28 in 62 classes, 30 clients per round, 10 SGD steps of batch 20 with lr 0.01 and
momentum 0.9, FedAvg. The bare loops are tuned code without a simulator: functional and channels-last for W1,
hand-written batched products for W2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gluefl import models
from gluefl.clients.rules import LocalSGD
from gluefl.populations import Samples

CLIENTS, SAMPLES, CLASSES, COHORT = 2800, 40, 62, 30
STEPS = 10
SGD = LocalSGD(steps=STEPS, batch=20, lr=0.01, momentum=0.9)
MODELS = {"w1": "leaf_cnn", "w2": "mlp"}


@dataclass(frozen=True)
class Noisy:
    """A random image per class, plus noise per sample; the labels are skewed by client."""

    clients: int = CLIENTS
    classes: int = CLASSES
    shape: tuple[int, ...] = (1, 28, 28)

    @cached_property
    def everything(self) -> tuple[Tensor, Tensor]:
        """Inputs (clients, samples, 1, 28, 28) and labels (clients, samples)."""
        rng = np.random.default_rng(0)
        pictures = rng.standard_normal((self.classes, *self.shape), dtype=np.float32)
        labels = np.stack(
            [rng.choice(self.classes, SAMPLES, p=rng.dirichlet(np.full(62, 0.3))) for _ in range(self.clients)]
        )
        inputs = pictures[labels]
        for images in inputs:  # per client, which avoids a second copy of all inputs
            images += rng.standard_normal(images.shape, dtype=np.float32)
        return torch.from_numpy(inputs), torch.from_numpy(labels)

    def size(self, client: int) -> int:
        """The same for all clients."""
        return SAMPLES

    def train(self, client: int) -> Samples:
        """One client's samples."""
        inputs, labels = self.everything
        return Samples(inputs[client], labels[client])

    def test(self) -> Samples:
        """The samples of the first 25 clients."""
        inputs, labels = self.everything
        return Samples(inputs[:25].flatten(0, 1), labels[:25].flatten())

    def transform(self, inputs: Tensor) -> Tensor:
        """The inputs are floats already."""
        return inputs


def model(workload: str) -> nn.Module:
    """The model of a workload, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return models.build(MODELS[workload], classes=CLASSES, channels=1)


@dataclass(frozen=True)
class WorkerCopy:
    """Data and model of a workload, created at their first use in a process."""

    workload: str

    @cached_property
    def samples(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels of all clients."""
        return Noisy().everything

    @cached_property
    def module(self) -> nn.Module:
        """The model, to be trained in place."""
        return model(self.workload)


# Used in Flower's worker processes only, which end with the benchmark. In a module, because objects that Flower sends
# to its workers by value would be created anew for every client.
WORKER_COPIES = {workload: WorkerCopy(workload) for workload in MODELS}


def bare_round(workload: str, population: Noisy) -> Callable[[np.random.Generator], None]:
    """A function that trains one cohort and averages it, without gluefl."""
    start = [parameter.detach().clone() for parameter in model(workload).parameters()]
    return _bare_cnn(start, population) if workload == "w1" else _bare_mlp(start, population)


def _draw(rng: np.random.Generator) -> tuple[list[int], list[Tensor]]:
    clients = rng.choice(CLIENTS, COHORT, replace=False).tolist()
    return clients, [SGD.batches(rng, SAMPLES) for _ in clients]


def _bare_cnn(start: list[Tensor], population: Noisy) -> Callable[[np.random.Generator], None]:
    start = [w.to(memory_format=torch.channels_last) if w.dim() == 4 else w for w in start]
    weights = [w.clone().requires_grad_() for w in start]
    velocity = [torch.zeros_like(w) for w in start]
    inputs, labels = population.everything

    def forward(x: Tensor) -> Tensor:
        w = weights
        x = F.max_pool2d(F.relu(F.conv2d(x, w[0], w[1], padding=2)), 2)
        x = F.max_pool2d(F.relu(F.conv2d(x, w[2], w[3], padding=2)), 2)
        return F.linear(F.relu(F.linear(x.flatten(1), w[4], w[5])), w[6], w[7])

    def play(rng: np.random.Generator) -> None:
        nonlocal start
        total = [torch.zeros_like(w) for w in start]
        for client, batches in zip(*_draw(rng)):
            with torch.no_grad():
                torch._foreach_copy_(weights, start)
            for step, batch in enumerate(batches):
                x = inputs[client][batch].contiguous(memory_format=torch.channels_last)
                gradient = torch.autograd.grad(F.cross_entropy(forward(x), labels[client][batch]), weights)
                with torch.no_grad():
                    if step == 0:
                        torch._foreach_copy_(velocity, gradient)
                    else:
                        torch._foreach_mul_(velocity, SGD.momentum)
                        torch._foreach_add_(velocity, gradient)
                    torch._foreach_add_(weights, velocity, alpha=-SGD.lr)
            with torch.no_grad():
                torch._foreach_add_(total, weights, alpha=1 / COHORT)
        start = total

    return play


def _bare_mlp(start: list[Tensor], population: Noisy, chunk: int = 10) -> Callable[[np.random.Generator], None]:
    inputs, labels = population.everything
    w = [torch.empty(chunk, *tensor.shape) for tensor in start]
    v = [torch.zeros(chunk, *tensor.shape) for tensor in start]

    @torch.no_grad()
    def play(rng: np.random.Generator) -> None:
        nonlocal start
        clients, batches = _draw(rng)
        total = [torch.zeros_like(tensor) for tensor in start]
        for at in range(0, COHORT, chunk):
            for stacked, tensor, momentum in zip(w, start, v):
                stacked.copy_(tensor.expand_as(stacked))
                momentum.zero_()
            order = torch.stack(batches[at : at + chunk]).view(chunk, -1)
            rows, members = torch.arange(chunk)[:, None], torch.tensor(clients[at : at + chunk])
            x_all = inputs[members][rows, order].view(chunk, STEPS, SGD.batch, -1)
            y_all = F.one_hot(labels[members][rows, order], CLASSES).float().view(chunk, STEPS, SGD.batch, -1)
            for step in range(STEPS):
                x, y = x_all[:, step], y_all[:, step]
                hidden = torch.baddbmm(w[1].unsqueeze(1), x, w[0].transpose(1, 2)).relu_()
                out = torch.baddbmm(w[3].unsqueeze(1), hidden, w[2].transpose(1, 2))
                error = out.softmax(2).sub_(y).mul_(1 / SGD.batch)
                back = torch.bmm(error, w[2]).mul_(hidden > 0)
                v[0].baddbmm_(back.transpose(1, 2), x, beta=SGD.momentum)
                v[1].mul_(SGD.momentum).add_(back.sum(1))
                v[2].baddbmm_(error.transpose(1, 2), hidden, beta=SGD.momentum)
                v[3].mul_(SGD.momentum).add_(error.sum(1))
                torch._foreach_add_(w, v, alpha=-SGD.lr)
            torch._foreach_add_(total, [stacked.sum(0) for stacked in w], alpha=1 / COHORT)
        start = total

    return play
