"""Which rounds of a run are evaluated, and whether they are enough for a target."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spacing:
    """A run is evaluated after every so many rounds, and after its last one."""

    every: int = 1
    last: int | None = None

    def evaluates(self, round: int) -> bool:
        """Whether the model of a round is evaluated."""
        return round % self.every == 0 or round == self.last

    def counts(self, line: Mapping[str, Any]) -> bool:
        """Whether a journal line has an evaluation that counts.

        A run that was given more rounds was also evaluated after its earlier last round. If that counted, its targets
        would be other ones than those of a run that had all its rounds from the start.
        """
        return line["accuracy"] is not None and self.evaluates(line["round"])


def unreachable(target: float | None, rounds: int, every: int, average: int) -> str | None:
    """Why no run of so many rounds can reach a target, and what to change; None if one can."""
    evaluations = -(-rounds // every)  # the last round is always evaluated
    if target is None or rounds == 0 or evaluations >= average:
        return None
    changes = [f"rounds to at least {every * average}", f"evaluation.average to at most {evaluations}"]
    changes += [f"evaluation.every to at most {rounds // average}"] if rounds >= average else []
    return (
        f"no run can reach the target {target:g}: it is compared with the mean of {average} evaluations, and "
        f"{rounds} rounds, evaluated every {every}, have {evaluations}. "
        f"Set {', '.join(changes[:-1])} or {changes[-1]}."
    )
