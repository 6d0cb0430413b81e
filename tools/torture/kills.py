"""SIGKILL at random moments and around writes; runs are resumed until they end, with the result of undisturbed ones.

`python tools/torture kills [--count 200]`
"""

import os
import random
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from processes import STRATEGIES, Case, Setup, cases
from progress import Progress

CALLS = ("fsync", "replace", "truncate", "unlink", "write")
MOST_STARTS = 400  # of one run; each gets further, unless it is killed before its first round


def killed_around(call: int, before: bool) -> Setup:
    """A set-up after which the process kills itself before or after its n-th call that changes a disk."""

    def setup() -> None:
        count = [0]
        for name in CALLS:
            setattr(os, name, _counted(getattr(os, name), count, call, before))

    return setup


def _counted(function: Any, count: list[int], call: int, before: bool) -> Any:
    def counted(*arguments: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] == call and before:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*arguments, **options)
        if count[0] == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return counted


def tormented(case: Case, out: Path, rng: random.Random, counts: Counter[str], said: Progress) -> None:
    """One run, killed again and again until it ends."""
    for _ in range(MOST_STARTS):
        if rng.random() < 0.5:
            process = case.start(out, setup=killed_around(rng.randrange(1, 60), rng.random() < 0.5))
            ended, kind = process.end(), "kills around a write"
        else:
            process = case.start(out)
            ended, kind = process.wait(rng.uniform(0, 0.9 * case.seconds)), "kills at a random moment"
            if ended is None:
                process.kill()
        counts["starts"] += 1
        if ended is None or ended.status == -signal.SIGKILL:
            counts.update((kind, "kills"))
            said.at(counts["kills"])
            counts["kills that left a half-written file"] += any(out.rglob("*.tmp"))
        elif ended.status:
            counts[f"wrong: {case.strategy} ended with {ended.status}: {ended.text[-500:]}"] += 1
            return
        else:
            counts["runs"] += 1
            if not case.is_right(out):
                counts[f"wrong: {case.strategy} gave another result in {out}"] += 1
            return
    counts[f"wrong: {case.strategy} did not end after {MOST_STARTS} starts"] += 1


def run(work: Path, kills: int, seed: int) -> dict[str, Any]:
    """Runs of the strategies in turn, until enough processes were killed."""
    rng, counts, all_cases = random.Random(seed), Counter[str](), cases(work, strategies=STRATEGIES[:kills])  # noqa: S311
    number, said = 0, Progress("kills", kills)
    while counts["kills"] < kills:
        case, out = all_cases[number % len(all_cases)], work / f"run-{number}"
        tormented(case, out, rng, counts, said)
        if case.is_right(out):
            shutil.rmtree(out)
        number += 1
    wrong = [name for name in counts if name.startswith("wrong")]
    return {**{name: count for name, count in counts.items() if name not in wrong}, "wrong": wrong}
