"""Mutated messages: each is decoded to a sound message or refused with `WireError`, in little memory and time.

`python tools/torture fuzz [--count 10000000]`
"""

import ctypes
import logging
import random
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from mutation import LARGE, Seed, Subject, large_seeds, seeds
from progress import Progress

from gluefl.errors import WireError

LONGEST_S = 5.0  # of the processor; a message that takes twice that is a hang, whatever it does
BUDGET_BYTES = 200 * 10**6
PIECE, LARGE_PIECE = 20_000, 50  # messages
LARGE_SHARE = 1 / 5000  # messages for a large model
RECORDS_SHARE = 1 / 100  # Flower records: reading one takes as long as reading several messages


class Hang(BaseException):
    """A message took too long. No decoder that expects exceptions catches it."""


@dataclass
class Watch:
    """Raises `Hang` when the processor has worked on one message for too long: twice the same at a tick of a timer."""

    number: int = -1  # of the message that is read
    at_last_tick: int = -2

    def __enter__(self) -> "Watch":
        signal.signal(signal.SIGPROF, self.tick)
        signal.setitimer(signal.ITIMER_PROF, LONGEST_S, LONGEST_S)
        return self

    def __exit__(self, *error: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)

    def tick(self, signal_number: int, frame: Any) -> None:
        """Look which message is read."""
        if self.number == self.at_last_tick:
            raise Hang
        self.at_last_tick = self.number


def forget_peak() -> None:
    """Give back what was freed, and let the peak of memory be counted from now on, where the system can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The most memory that this process had."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def read(name: str, subject: Subject, mutant: Any) -> str:
    """What becomes of one mutant."""
    try:
        is_sound = subject.is_sound(mutant)
    except WireError:
        return "refused"
    except Hang:
        return f"wrong: {name} takes more than {LONGEST_S} s: {shown(mutant)}"
    except Exception as error:
        return f"wrong: {name} {error!r} {shown(mutant)} {traceback.format_exc(limit=-2)}"
    return "decoded" if is_sound else f"wrong: {name} is not sound: {shown(mutant)}"


def is_wrong(outcome: str) -> bool:
    """Whether it is neither decoded nor refused."""
    return outcome.startswith("wrong")


def shown(mutant: Any) -> str:
    """A mutant for people."""
    return mutant.hex()[:400] if isinstance(mutant, bytes) else repr(mutant)[:400]


def fuzz(subjects: Mapping[str, Subject], messages: int, seed: int) -> Counter[str]:
    """Read mutants of the subjects in turn; counts of what became of them, wrong ones in words."""
    rng, counts = random.Random(seed), Counter[str]()  # noqa: S311 - mutations
    others = [subject for subject in subjects.values() if isinstance(subject, Seed)]
    chosen, slowest_s = list(subjects.items()), 0.0
    with Watch() as watch:
        for number in range(messages):
            name, subject = chosen[number % len(chosen)]
            mutant = subject.mutant(others, rng)
            watch.number, began_s = number, time.process_time()
            counts[read(name, subject, mutant)] += 1
            slowest_s = max(slowest_s, time.process_time() - began_s)
    for number, (_, subject) in enumerate(chosen):
        counts[f"format {subject.format}"] += len(range(number, messages, len(chosen)))
    counts["messages"] += messages
    counts["slowest_ms"] = round(1000 * slowest_s)
    return counts


@cache
def prepared(kind: str) -> tuple[dict[str, Subject], int]:
    """The subjects of a process, each read once, and its peak of memory then: imports and caches are not counted."""
    torch.set_num_threads(1)
    subjects: dict[str, Subject] = {}
    if kind == "records":
        from records import record_seeds

        logging.getLogger("flwr").setLevel(logging.ERROR)
        subjects |= record_seeds()
    else:
        subjects |= large_seeds() if kind == "large" else seeds()
    for name, subject in subjects.items():
        if read(name, subject, subject.whole) != "decoded":
            raise RuntimeError(f"{name} is not read as it is")
    forget_peak()
    return subjects, peak_bytes()


def work(job: tuple[str, int, int]) -> Counter[str]:
    """One piece, in a process that reads pieces of the same kind alone."""
    kind, messages, seed = job
    subjects, before = prepared(kind)
    counts = fuzz(subjects, messages, seed)
    counts["peak_bytes"] = peak_bytes() - before
    return counts


def pieces(kind: str, messages: int, seed: int) -> list[tuple[str, int, int]]:
    """Messages in pieces, each with a seed of its own."""
    piece = LARGE_PIECE if kind == "large" else PIECE
    starts = range(0, messages, piece)
    return [(kind, min(piece, messages - start), 10**6 * seed + start // piece) for start in starts]


def run(messages: int, seed: int, processes: int = 2) -> dict[str, Any]:
    """Small models, Flower records and a large model, in separate processes: each kind has a peak of its own."""
    records = round(messages * RECORDS_SHARE) if find_spec("flwr") else 0
    large = max(30, round(messages * LARGE_SHARE)) if messages > 10**4 else 0
    totals, extremes = Counter[str](), {"slowest_ms": 0, "peak_bytes": 0}
    said = Progress("fuzz", messages)
    for kind, count in (("small", messages - records - large), ("records", records), ("large", large)):
        with get_context("spawn").Pool(1 if kind == "large" else processes) as pool:
            said.at(totals["messages"], f"{kind} messages follow")
            for counts in pool.imap_unordered(work, pieces(kind, count, seed)):
                for name in extremes:
                    extremes[name] = max(extremes[name], counts.pop(name))
                totals.update(counts)
                said.at(totals["messages"], f"{sum(map(is_wrong, totals))} wrong, {extremes}")
    wrong = [outcome for outcome in totals if is_wrong(outcome)]
    if extremes["peak_bytes"] > BUDGET_BYTES:
        wrong.append(f"{extremes['peak_bytes']} bytes above the model's own, {BUDGET_BYTES} are allowed")
    formats = {name.removeprefix("format "): count for name, count in totals.items() if name.startswith("format ")}
    counted = {name: totals[name] for name in ("messages", "decoded", "refused")}
    return {**counted, "formats": formats, f"of them for {LARGE} weights": large, **extremes, "wrong": wrong}
