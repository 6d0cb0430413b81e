"""The memory of a stack of clients: the batches of a cohort, and the tensors of a step that a CUDA graph replays."""

import gc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gluefl.clients.cohort import Job
from gluefl.populations import together
from gluefl.populations.inputs import Inputs, at, each, joined

MOST_CONCATENATED = 2  # times the samples that are trained on


@dataclass
class Stack:
    """The tensors of one captured step of SGD; replays read and write these and no others. Weights are in the order
    of the layers that compute them."""

    weights: Tensor  # (clients, d)
    velocity: Tensor
    statistics: Tensor  # (clients, s)
    inputs: Any  # (clients, batch, …), raw; one tensor, or several
    labels: Tensor
    lr: Tensor  # (clients, 1); 0 for a client that has done its steps
    momentum: Tensor  # (clients, 1)
    start: Tensor  # (d,), the weights of the round
    movable: Tensor | None  # (d,), 0 where a coordinate is frozen
    loss: Tensor  # (clients,), summed over steps
    graph: "torch.cuda.CUDAGraph | None" = None

    @classmethod
    def like(
        cls, weights: Tensor, statistics: Tensor, inputs: Inputs, labels: Tensor, frozen: Tensor | None
    ) -> "Stack":
        """Memory for batches (clients, steps, batch, …) of inputs and labels."""
        clients = len(labels)
        return cls(
            weights=weights.expand(clients, -1).clone(),
            velocity=weights.new_zeros(clients, weights.numel()),
            statistics=statistics.expand(clients, -1).clone(),
            inputs=each(lambda tensor: tensor[:, 0].clone(), inputs),
            labels=labels[:, 0].clone(),
            lr=weights.new_zeros(clients, 1),
            momentum=weights.new_zeros(clients, 1),
            start=weights.clone(),
            movable=None if frozen is None else (~frozen).to(weights.dtype),
            loss=weights.new_zeros(clients),
        )

    def begin(self, weights: Tensor, statistics: Tensor, frozen: Tensor | None) -> None:
        """All clients start from the same weights, with zero velocity."""
        self.weights.copy_(weights.expand_as(self.weights))
        self.statistics.copy_(statistics.expand_as(self.statistics))
        self.velocity.zero_()
        self.loss.zero_()
        self.start.copy_(weights)
        if self.movable is not None and frozen is not None:
            self.movable.copy_(~frozen)

    def feed(self, inputs: Inputs, labels: Tensor, step: int) -> None:
        """Copy the batches of a step to where a replay reads them."""
        each(lambda own, new: own.copy_(new[:, step]), self.inputs, inputs)
        self.labels.copy_(labels[:, step])

    def capture(self, step: Callable[["Stack"], None]) -> bool:
        """Record a step as a CUDA graph; False, with a warning, for a module that cannot be recorded."""
        gc.collect()  # a graph that is collected while another is captured invalidates the capture
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):
                for _ in range(3):  # libraries choose their algorithms and allocate before the capture
                    step(self)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with (
                torch.cuda.stream(side),  # a capture that fails would leave this thread in its own stream
                # Other threads encode messages meanwhile: their calls must not invalidate the capture.
                torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"),
            ):
                step(self)
            torch.cuda.current_stream().wait_stream(side)
            self.graph = graph
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            warnings.warn(
                f"this model cannot be captured as a CUDA graph, it is trained without: {error}", stacklevel=2
            )
            return False
        return True


def gather(jobs: Sequence[Job], steps: int, device: torch.device) -> tuple[Any, Tensor]:
    """The batches of all clients: (clients, steps, batch, …). A client with fewer steps repeats its last batch."""
    orders = torch.stack([_lengthened(job.batches, steps) for job in jobs])
    sizes = [len(job.samples) for job in jobs]
    if sum(sizes) <= MOST_CONCATENATED * orders.numel():  # all samples in one tensor: few calls instead of many
        places = (orders + torch.tensor([0, *sizes[:-1]]).cumsum(0)[:, None, None]).to(device)
        samples = together([job.samples for job in jobs])
        return at(samples.inputs, places), samples.labels[places]
    orders = orders.to(device)  # one copy for all clients
    inputs = joined([at(job.samples.inputs, order) for job, order in zip(jobs, orders)], torch.stack)
    return inputs, torch.stack([job.samples.labels[order] for job, order in zip(jobs, orders)])


def _lengthened(batches: Tensor, steps: int) -> Tensor:
    missing = steps - len(batches)
    return torch.cat([batches, batches[-1:].expand(missing, -1)]) if missing else batches
