"""When the host and the GPU do what in a round: `python tools/timeline.py --device cuda --model shufflenet_v2_x2_0`.

`gluefl bench profile` says how long each part takes and what the GPU waits for on the whole; a profiler slows the host
down, though, and this is about the host. Here every part of a round notes the host's clock, and an event that the GPU
notes when it gets there. Nothing is waited for until all rounds are over: on a GPU they overlap.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gluefl.accel.resources import resources
from gluefl.experiments.bench.cohort import pin
from gluefl.experiments.bench.fleet import authors
from gluefl.experiments.bench.profile import WARM_UP, Stopwatch, watched
from gluefl.experiments.bench.round import Work, setting
from gluefl.fleet import Instant
from gluefl.simulation.run import player

SHOWN_MS = 0.2  # shorter ones are not


class Timeline(Stopwatch):
    """Notes when a part began and ended, for the host and for the GPU. One for all rounds: what a round has begun of
    the next belongs to one federation."""

    def __init__(self, on_gpu: bool) -> None:
        super().__init__(lambda: None)
        self.on_gpu = on_gpu
        self.notes: list[tuple[str, float, float, Any, Any]] = []  # of the round that goes on

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Whatever runs inside belongs to this part."""
        began, first = time.perf_counter(), self.moment()
        yield
        self.notes.append((name, began, time.perf_counter(), first, self.moment()))

    def moment(self) -> Any:
        """Of the GPU: when it has done all that was started so far."""
        if not self.on_gpu:
            return None
        moment = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        moment.record()
        return moment

    def zero(self) -> Any:
        """Now. The GPU may still be busy: it notes the moment in a stream in which nothing is before it."""
        if not self.on_gpu:
            return None
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            return self.moment()


def show(
    round: int, notes: Sequence[tuple[str, float, float, Any, Any]], began: float, ended: float, zero: Any
) -> None:
    """Milliseconds since the round began."""
    print(f"round {round}: {1000 * (ended - began):.1f} ms")
    for name, start, end, *moments in sorted(notes, key=lambda note: note[1]):
        if 1000 * (end - start) >= SHOWN_MS:
            line = f"  {name:<22} host {1000 * (start - began):8.2f} – {1000 * (end - began):8.2f}"
            gpu = [zero.elapsed_time(moment) for moment in moments] if zero else []
            print(line + ("   GPU {:8.2f} – {:8.2f}".format(*gpu) if gpu else ""))


def main() -> None:
    """Play some rounds and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="", help="the LEAF CNN if none is given")
    parser.add_argument("--network", default="instant", help="instant, edge, 5g or cloud")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    pin(options.cores)
    on_gpu = options.device != "cpu"
    synchronise: Callable[[], None] = torch.cuda.synchronize if on_gpu else (lambda: None)
    devices = Instant() if options.network == "instant" else authors(options.network, "diurnal")
    with tempfile.TemporaryDirectory(prefix="gluefl-timeline-") as folder, resources():
        sim, state = setting(Work(options.device, options.model, 1.3), Path(folder), devices)
        play = player(sim.core.space.device)
        for _ in range(WARM_UP if on_gpu else 1):
            state, _ = play(sim, state)
        rounds, timeline = [], Timeline(on_gpu)
        seen = watched(sim, timeline)
        state, _ = play(seen, state)  # nothing was begun for this one
        for _ in range(options.rounds):
            timeline.notes = []
            zero, began = timeline.zero(), time.perf_counter()
            state, _ = play(seen, state)
            rounds.append((state.round, timeline.notes, began, time.perf_counter(), zero))
        synchronise()
        for one in rounds:
            show(*one)


if __name__ == "__main__":
    main()
