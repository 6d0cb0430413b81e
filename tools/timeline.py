"""When the host and the GPU do what in a round: `python tools/timeline.py --device cuda --model shufflenet_v2_x2_0`.

`gluefl bench profile` says how long each part takes and what the GPU waits for on the whole; a profiler slows the host
down, though, and this is about the host. Here every step of a round notes the host's clock, and an event that the GPU
notes when it gets there. Nothing is waited for until the round is over.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gluefl import round as round_module
from gluefl import wire
from gluefl.bench.cohort import pin
from gluefl.bench.fleet import authors
from gluefl.bench.round import setting
from gluefl.engines.local import LocalEngine
from gluefl.fleet import Instant
from gluefl.training.stacked import Stacked
from gluefl.wire import bodies

WARM_UP = 12
SHOWN_MS = 0.1  # shorter steps are not
STEPS: tuple[tuple[Any, str], ...] = (
    *((round_module, name) for name in ("invite", "encoded_updates", "packages", "first_arrivals", "collect")),
    *((round_module, name) for name in ("aggregate", "asked", "record", "publish")),
    (wire, "measure"),
    (bodies, "lay_out_together"),
    (bodies, "squeeze"),
    (LocalEngine, "prepare"),
    (Stacked, "_train"),
)


@dataclass(frozen=True)
class Noted:
    """A step: when the host entered and left it, and the events of the GPU, in the main thread only."""

    name: str
    here: bool
    began: float
    ended: float
    events: tuple[Any, Any] | None


def main() -> None:
    """Play some rounds and print the last ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="", help="the LEAF CNN if none is given")
    parser.add_argument("--network", default="instant", help="instant, edge, 5g or cloud")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    pin(options.cores)
    on_gpu = options.device != "cpu"
    devices = Instant() if options.network == "instant" else authors(options.network, "diurnal")
    with tempfile.TemporaryDirectory(prefix="gluefl-timeline-") as folder:
        federation, state = setting(options.device, options.model, 1.3, Path(folder), devices)
        for _ in range(WARM_UP if on_gpu else 1):
            state, _ = round_module.play(federation, state)
        notes: list[Noted] = []
        for owner, name in STEPS:
            setattr(owner, name, noting(getattr(owner, name), name, notes, on_gpu))
        for _ in range(options.rounds):
            notes.clear()
            zero = event(on_gpu)
            if on_gpu:
                torch.cuda.synchronize()
            began = time.perf_counter()
            state, _ = round_module.play(federation, state)
            if on_gpu:
                torch.cuda.synchronize()
            print(f"round {state.round}: {1000 * (time.perf_counter() - began):.1f} ms")
            show(list(notes), began, zero)


def noting(step: Callable[..., Any], name: str, notes: list[Noted], on_gpu: bool) -> Callable[..., Any]:
    """The same step, which notes when it was."""

    def noted(*arguments: Any, **options: Any) -> Any:
        here = threading.current_thread() is threading.main_thread()
        began, first = time.perf_counter(), event(on_gpu and here)
        try:
            return step(*arguments, **options)
        finally:
            last = event(on_gpu and here)
            notes.append(Noted(name, here, began, time.perf_counter(), first and (first, last)))

    return noted


def event(wanted: bool) -> Any:
    """A moment of the GPU: when it has done all that was started so far."""
    if not wanted:
        return None
    moment = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    moment.record()
    return moment


def show(notes: list[Noted], began: float, zero: Any) -> None:
    """Milliseconds since the round began; what other threads did, in brackets."""
    for note in sorted(notes, key=lambda note: note.began):
        if 1000 * (note.ended - note.began) < SHOWN_MS:
            continue
        name = note.name if note.here else f"[{note.name}]"
        line = f"  {name:<20} host {1000 * (note.began - began):8.2f} – {1000 * (note.ended - began):8.2f}"
        if note.events is not None:
            line += "   GPU {:8.2f} – {:8.2f}".format(*(zero.elapsed_time(moment) for moment in note.events))
        print(line)


if __name__ == "__main__":
    main()
