"""Two processes resume one folder at once: one goes on to the right result, the other says that it cannot.

`python tools/torture pairs [--count 20]`
"""

import random
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

from damage import EVERY, ROUNDS, stopped
from processes import STRATEGIES, cases
from progress import Progress

LOCKED = "another process is writing"


def run(work: Path, pairs: int, seed: int) -> dict[str, Any]:
    """Pairs over the strategies in turn."""
    rng, counts = random.Random(seed), Counter[str]()  # noqa: S311 - moments
    chosen = cases(work, ROUNDS, EVERY, STRATEGIES[:pairs])
    wholes = [(case, stopped(case, work / f"{case.strategy}-killed")) for case in chosen]
    wrong, said = [], Progress("pairs", pairs)
    for number in range(pairs):
        case, whole = wholes[number % len(wholes)]
        folder = Path(shutil.copytree(whole, work / f"pair-{number}"))
        first = case.start(folder)
        time.sleep(rng.uniform(0, 0.02))
        second = case.start(folder, log=work / "second.log")
        ends = [first.end(), second.end()]
        statuses = sorted(ended.status for ended in ends)
        locked = any(LOCKED in ended.text for ended in ends)
        if statuses == [0, 1] and locked:
            counts["one went on, one was refused"] += 1
        elif statuses == [0, 0]:
            counts["one after the other"] += 1
        else:
            wrong.append(f"{case.strategy}: statuses {statuses}: {ends[0].text[-400:]} {ends[1].text[-400:]}")
        if not case.is_right(folder):
            wrong.append(f"{case.strategy}: another result in {folder}")
        else:
            shutil.rmtree(folder)
        said.at(number + 1)
    return {"pairs": pairs, **counts, "wrong": wrong}
