"""How a run stands, in the words of every display: `accuracy 81.2% (80.1 of 85%)  down 12.3 MB`."""

import math
from collections import deque
from typing import Any

from gluefl.watching import Goal


def volume(size_bytes: float) -> str:
    """Bytes with three digits and a unit: 1 GB is 10^9 bytes."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size_bytes >= factor:
            return (
                f"{size_bytes / factor:.3g} {unit}"
                if size_bytes < 999.5 * factor
                else f"{size_bytes / factor:.0f} {unit}"
            )
    return f"{size_bytes:.0f} B"


def percent(share: float) -> str:
    """A share without a trailing zero: 80%, 73.3%."""
    return f"{share:.1%}".replace(".0%", "%")


class Status:
    """What is shown of a run, from the lines of its journal."""

    def __init__(self, goal: Goal) -> None:
        self.goal, self.round, self._down_bytes = goal, 0, 0
        self._values = deque[float](maxlen=goal.window)  # of the last evaluations
        self._reached = 0  # the round that reached the target, after which a run may go on

    def add(self, line: Any) -> bool:
        """Add the line of a round; whether it was evaluated."""
        self.round, self._down_bytes = line["round"], self._down_bytes + line["down_bytes"]
        if counted := self.goal.spacing.counts(line):
            self._values.append(line["accuracy"])
            self._reached = self._reached or (self.round if self._reaches() else 0)
        return counted

    def _reaches(self) -> bool:
        complete, target = len(self._values) == self.goal.window, self.goal.target
        mean = math.fsum(self._values) / len(self._values)
        return complete and target is not None and self.goal.score.reached(mean, target)

    def __str__(self) -> str:
        """The last evaluation; with a target the mean that is compared with it, or how many evaluations it lacks."""
        down, goal, known = f"down {volume(self._down_bytes)}", self.goal, len(self._values)
        if not known:
            return down
        value = f"{goal.score.name} {goal.score.text(self._values[-1])}"
        if goal.target is None:
            return f"{value}  {down}"
        target = goal.score.short(goal.target)
        if self._reached and self.round > self._reached:
            return f"{value} ({target} in round {self._reached})  {down}"
        if goal.window == 1:
            return f"{value} of {target}  {down}"
        mean = goal.score.text(math.fsum(self._values) / known).removesuffix("%")
        return f"{value} ({f'{mean} of {target}' if known == goal.window else f'{known}/{goal.window}'})  {down}"
