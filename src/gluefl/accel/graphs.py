"""The passes of a top-k as a CUDA graph.

Launching seven kernels, nine for a long vector, takes the host several times as long as the GPU takes to run them, and
a round selects from the update of every client. So the passes over a vector of some length are captured once a run and
launched together.
"""

import gc
from dataclasses import dataclass

import torch
from torch import Tensor

from gluefl.accel.resources import Resources, current

CAPTURED = 1 << 18  # values; passes over shorter vectors, which come in many lengths, are launched one by one
MOST_CAPTURED = 8  # graphs: each keeps memory for a vector, its lists and its mask

Asked = tuple[int, int, int]


def largest_by_graph(values: Tensor, asked: Asked, among: Tensor | None) -> Tensor | None:
    """The mask of the largest by a captured graph, None where there is none."""
    held = current()
    if held is None or values.numel() < CAPTURED or asked[0] <= 0:
        return None
    with held.lock:
        graph = _graph_for(held, values, among)
        return None if graph is None else graph.largest(values, asked, among)


@dataclass
class Graph:
    """The captured passes: they read and write the same tensors every time."""

    values: Tensor
    among: Tensor | None
    asked: Tensor
    mask: Tensor
    graph: "torch.cuda.CUDAGraph"
    last_asked: Asked | None = None  # what `asked` holds
    last_among: tuple[Tensor, int] | None = None  # what `among` is a copy of, and the version of that tensor

    def largest(self, values: Tensor, asked: Asked, among: Tensor | None) -> Tensor:
        """Copy the inputs that differ from the last ones and replay; all clients of a round ask for the same."""
        from gluefl.accel.kernels.largest import on_device

        self.values.copy_(values)
        if among is not None and self.among is not None and not self._holds(among):
            self.among.copy_(among)
            self.last_among = among, among._version
        if asked != self.last_asked:
            self.asked.copy_(on_device(asked, self.asked.device))
            self.last_asked = asked
        self.graph.replay()
        return self.mask.clone()

    def _holds(self, among: Tensor) -> bool:
        return self.last_among is not None and self.last_among[0] is among and self.last_among[1] == among._version


def _graph_for(held: Resources, values: Tensor, among: Tensor | None) -> Graph | None:
    """Captured when first needed; one for every stream, because streams must not share tensors."""
    key = (values.device, torch.cuda.current_stream(values.device).cuda_stream, values.numel(), among is None)
    if key not in held.graphs and len(held.graphs) < MOST_CAPTURED:
        held.graphs[key] = _capture(values, among)
    graph: Graph | None = held.graphs.get(key)
    return graph


def _capture(values: Tensor, among: Tensor | None) -> Graph | None:
    from gluefl.accel.kernels.largest import passes

    gc.collect()  # a graph that is collected while another is captured would end the capture
    side = torch.cuda.Stream(values.device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(values.device))
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(side):
            values = values.clone(memory_format=torch.contiguous_format)
            among = None if among is None else among.clone()
            asked = torch.tensor([1, 0, 0], dtype=torch.int32, device=values.device)
            passes(values, asked, among)  # compiles
            # Other threads may be encoding, so only errors of this thread end the capture.
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                mask = passes(values, asked, among)
    except torch.cuda.OutOfMemoryError:
        return None  # the passes need less memory when they are launched one by one
    torch.cuda.current_stream(values.device).wait_stream(side)
    return Graph(values, among, asked, mask, graph)
