"""When the host and the GPU do what in a round.

`profile` says how long each part takes and what the GPU waits for, but a profiler slows the host down. Here every part
of a round notes the host's clock, and an event that the GPU records when it gets there. Nothing is synchronised until
all rounds are over: on a GPU they overlap.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gluefl.accel.resources import resources
from gluefl.experiments.bench.cohort import pin
from gluefl.experiments.bench.fleet import authors
from gluefl.experiments.bench.profile import WARM_UP, Stopwatch, watched
from gluefl.experiments.bench.progress import counted
from gluefl.experiments.bench.round import Work, setting
from gluefl.fleet import Devices, Instant
from gluefl.simulation.run import player


@dataclass(frozen=True)
class Note:
    """A part of a round: seconds of the host's clock and, on a GPU, events recorded at its beginning and end."""

    part: str
    began_s: float
    ended_s: float
    events: tuple[Any, ...]


class Timeline(Stopwatch):
    """Notes when a part began and ended. One for all rounds: what a round has begun of the next belongs to one
    simulation."""

    def __init__(self, on_gpu: bool) -> None:
        super().__init__(lambda: None)
        self.on_gpu = on_gpu
        self.notes: list[Note] = []  # of the round in progress

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Whatever runs inside belongs to this part."""
        began_s, first = time.perf_counter(), self.event()
        yield
        self.notes.append(Note(name, began_s, time.perf_counter(), (*first, *self.event())))

    def event(self) -> tuple[Any, ...]:
        """Recorded by the GPU when it has done everything that was started so far; empty without a GPU."""
        if not self.on_gpu:
            return ()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return (event,)

    def start(self) -> tuple[Any, ...]:
        """Recorded now, though the GPU may be busy: in a stream that has no work."""
        if not self.on_gpu:
            return ()
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            return self.event()


def measure(work: Work, rounds: int = 2, cores: int = 2, network: str = "instant") -> list[dict[str, Any]]:
    """Rounds with their parts; all times are milliseconds since the round began, `gpu_ms` only on a GPU."""
    pin(cores)
    on_gpu = work.device != "cpu"
    devices: Devices = Instant() if network == "instant" else authors(network, "diurnal")
    with tempfile.TemporaryDirectory(prefix="gluefl-bench-") as folder, resources():
        sim, state = setting(work, Path(folder), devices)
        play = player(sim.core.space.device)
        for _ in counted(range(WARM_UP if on_gpu else 1), "rounds"):
            state, _ = play(sim, state)
        played, timeline = [], Timeline(on_gpu)
        seen = watched(sim, timeline)
        state, _ = play(seen, state)  # nothing was begun for this one
        for _ in range(rounds):
            timeline.notes = []
            start, began_s = timeline.start(), time.perf_counter()
            state, _ = play(seen, state)
            played.append((state.round, timeline.notes, began_s, time.perf_counter(), start))
        if on_gpu:
            torch.cuda.synchronize()
        return [_round(*one) for one in played]


def _round(number: int, notes: list[Note], began_s: float, ended_s: float, start: tuple[Any, ...]) -> dict[str, Any]:
    parts = []
    for note in sorted(notes, key=lambda note: note.began_s):
        host_ms = [1000 * (note.began_s - began_s), 1000 * (note.ended_s - began_s)]
        gpu_ms = {"gpu_ms": [start[0].elapsed_time(event) for event in note.events]} if start else {}
        parts.append({"part": note.part, "host_ms": host_ms, **gpu_ms})
    return {"round": number, "round_ms": 1000 * (ended_s - began_s), "parts": parts}


def lines(rounds: list[dict[str, Any]], shortest_ms: float = 0.2) -> Iterator[str]:
    """For a terminal; parts that took the host less time are left out."""
    for one in rounds:
        yield f"round {one['round']}: {one['round_ms']:.1f} ms"
        for part in one["parts"]:
            began_ms, ended_ms = part["host_ms"]
            if ended_ms - began_ms >= shortest_ms:
                gpu = "   GPU {:8.2f} – {:8.2f}".format(*part["gpu_ms"]) if "gpu_ms" in part else ""
                yield f"  {part['part']:<28} host {began_ms:8.2f} – {ended_ms:8.2f}{gpu}"
