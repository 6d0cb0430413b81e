"""Mutated messages: each is decoded to a sound message or refused with `WireError`, in little memory and time.

`python tools/torture fuzz [--count 10000000]`
"""

import random
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from multiprocessing import get_context
from typing import Any

import torch
from mutation import LARGE, Seed, large_seeds, mutant, seeds

from gluefl import wire
from gluefl.errors import WireError

LONGEST_S = 5.0  # a message that takes longer is a hang
BUDGET_BYTES = 200 * 10**6
LARGE_SHARE = 1 / 2000  # messages for a large model


class Hang(Exception):
    """A message took too long."""


def _hangs(number: int, frame: Any) -> None:
    raise Hang


def sound(body: wire.Body, expected: wire.Expected) -> bool:
    """Whether positions lie in the model, ascend, and have a value each."""
    positions, values = body.update.positions, body.update.values
    if positions.numel() != values.numel() or values.dtype != torch.float32:
        return False
    if not positions.numel() or isinstance(expected.codec, wire.BodyCodec):
        return True
    return int(positions[0]) >= 0 and int(positions[-1]) < expected.size and bool((positions.diff() > 0).all())


def peak_bytes() -> int:
    """The most memory that this process ever had."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def warm(one: Seed) -> None:
    """Decode a message as it is: what is imported and cached then is not counted."""
    wire.decode(one.data, one.expected)


def fuzz(found: Mapping[str, Seed], messages: int, seed: int) -> Counter[str]:
    """Decode mutants of some seeds; counts of what became of them, and the errors in words."""
    rng, counts, all_seeds = random.Random(seed), Counter[str](), list(found.values())  # noqa: S311 - mutations
    chosen = [one for one in found.items() if one[1].data]
    signal.signal(signal.SIGALRM, _hangs)
    for _, one in chosen:
        warm(one)
    slowest_s, before = 0.0, peak_bytes()
    for number in range(messages):
        name, one = chosen[number % len(chosen)]
        data = mutant(one, all_seeds, rng)
        began = time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
        try:
            _, body = wire.decode(data, one.expected)
            signal.setitimer(signal.ITIMER_REAL, 0)
            outcome = "decoded" if sound(body, one.expected) else f"wrong: {name} {data.hex()[:400]}"
        except WireError:
            outcome = "refused"
        except Exception as error:
            outcome = f"wrong: {name} {error!r} {data.hex()[:400]} {traceback.format_exc(limit=-2)}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        slowest_s = max(slowest_s, time.perf_counter() - began)
        counts[outcome] += 1
    counts["messages"] += messages
    counts["slowest_ms"] = round(1000 * slowest_s)
    counts["peak_bytes"] = peak_bytes() - before
    return counts


def _work(job: tuple[bool, int, int]) -> Counter[str]:
    is_large, messages, seed = job
    torch.set_num_threads(1)
    found = large_seeds() if is_large else seeds()
    return fuzz(found, messages, seed)


def run(messages: int, seed: int, processes: int = 2) -> dict[str, Any]:
    """Small and large models, in separate processes: each has a peak of its own."""
    large = max(30, round(messages * LARGE_SHARE))
    jobs = [(True, large, seed)] if messages > 10**4 else []
    pieces = max(1, messages // 250_000)
    jobs += [(False, messages // pieces, seed + 1 + piece) for piece in range(pieces)]
    totals, extremes = Counter[str](), {"slowest_ms": 0, "peak_bytes": 0}
    with get_context("spawn").Pool(processes, maxtasksperchild=1) as pool:
        for done, counts in enumerate(pool.imap_unordered(_work, jobs), 1):
            for name in extremes:
                extremes[name] = max(extremes[name], counts.pop(name))
            totals.update(counts)
            print(f"fuzz: {done} of {len(jobs)} pieces, {totals['messages']} messages, {extremes}", flush=True)
    wrong = [outcome for outcome in totals if outcome.startswith("wrong")]
    if extremes["peak_bytes"] > BUDGET_BYTES:
        wrong.append(f"{extremes['peak_bytes']} bytes above the model's own, {BUDGET_BYTES} are allowed")
    counted = {name: totals[name] for name in ("messages", "decoded", "refused")}
    large_messages = large if len(jobs) > pieces else 0
    return {**counted, f"of them for {LARGE} weights": large_messages, **extremes, "wrong": wrong}
