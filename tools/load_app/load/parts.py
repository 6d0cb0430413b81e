"""Where the CPU seconds of a ServerApp go."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gluefl.flower import exchange, guarding, outbox, session
from gluefl.flower import nodes as nodes_of_a_run
from gluefl.storage import checkpoint

PARTS = [
    (outbox.Outbox, "message", "packages"),
    (exchange, "read_reply", "reading replies"),
    (guarding.Protection, "refuse", "guard"),
    (session, "aggregate", "aggregation"),
    (checkpoint, "save", "checkpoint"),
    (nodes_of_a_run.Nodes, "refresh", "list of nodes"),
]


@dataclass
class Clock:
    """CPU seconds of this process by part, those of its threads included."""

    seconds: dict[str, float] = field(default_factory=dict)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its seconds added to a part."""

        def call(*arguments: Any, **named: Any) -> Any:
            began = time.process_time()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds[part] = self.seconds.get(part, 0.0) + time.process_time() - began

        return call


@contextmanager
def watched(clock: Clock, others: Sequence[tuple[Any, str, str]] = ()) -> Iterator[None]:
    """Time the parts of a ServerApp, and others."""
    parts = [*PARTS, *others]
    before = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in parts]
    for owner, attribute, part in parts:
        setattr(owner, attribute, clock.timed(part, getattr(owner, attribute)))
    try:
        yield
    finally:
        for owner, attribute, function in before:
            setattr(owner, attribute, function)


def cpu_s(pid: int) -> float:
    """CPU seconds of another process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
