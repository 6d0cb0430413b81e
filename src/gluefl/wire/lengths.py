"""How long bodies are: an encoding under way, and bodies that are measured without being encoded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from gluefl.accel.streams import fetched, recorded, side_stream
from gluefl.accel.threads import Pending, on_all_cores, submit_in_order
from gluefl.vectors.sparse import Sparse, Support
from gluefl.wire.bodies import Body, BodyCodec
from gluefl.wire.positions import Packed

Encoded = tuple[int, Packed]  # relation to the shared mask, and the positions
Counts = tuple[int, int]  # of positions, and of those that the shared mask covers too


@dataclass(frozen=True)
class Encoding:
    """What becomes of a body's positions, and with them the length of its message. Holds no values."""

    positions: Pending[Encoded] | None  # None if the codec of the values encodes them, too
    mask: Pending[Encoded] | None  # of a package, which sends the shared mask
    support: Support
    rest_bytes: Callable[[], int]  # values and statistics

    @property
    def body_bytes(self) -> int:
        """The bytes of the body; without section headers, where it has sections."""
        sections = (part for part in (self.mask, self.positions) if part is not None)
        return sum(len(section.result()[1].data) for section in sections) + self.rest_bytes()


def measured(codec: BodyCodec, bodies: Sequence[Body]) -> list[Encoding]:
    """Start to measure bodies whose codec encodes positions and values together."""
    fixed = codec.fixed_bytes
    if fixed is not None:
        lengths = [Pending(lambda: fixed) for _ in bodies]
    elif not bodies[0].shared.mask.bits.is_cuda:
        lengths = on_all_cores([partial(_length, body) for body in bodies])
    else:
        device = bodies[0].shared.mask.bits.device
        task = submit_in_order(_lengths_after, codec, bodies, side_stream(device, "encoding"), recorded(device))
        lengths = [Pending(partial(lambda place: task.result()[place], place)) for place in range(len(bodies))]
    return [
        Encoding(None, None, body.update.support, length.result) for body, length in zip(bodies, lengths, strict=True)
    ]


def _length(body: Body) -> int:
    assert isinstance(body.codec, BodyCodec)
    return body.codec.measure([body])[0]


def _lengths_after(
    codec: BodyCodec, bodies: Sequence[Body], stream: "torch.cuda.Stream", complete: "torch.cuda.Event"
) -> list[int]:
    complete.synchronize()  # not inside a copy call, which would block launches of all other threads
    with torch.cuda.stream(stream):
        return codec.measure(bodies)


def count_all(updates: Sequence[Sparse]) -> list[Counts]:
    """Count the positions of updates, synchronising with a GPU once; masks remember the counts."""
    counts = fetched(torch.stack([torch.count_nonzero(update.mask.bits) for update in updates]))().tolist()
    for update, count in zip(updates, counts, strict=True):
        update.mask.remember(count)
    return [(count, 0) for count in counts]
