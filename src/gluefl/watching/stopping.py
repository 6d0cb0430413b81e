"""Callbacks that end a run: no progress, or no time left. They decide by the lines of the journal alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from gluefl.errors import UsageError
from gluefl.parameters import Count, NonNegative, Positive, checked
from gluefl.storage.journal import Line
from gluefl.watching import AfterRound, Watched


@checked
@dataclass(frozen=True)
class EarlyStopping:
    """Ends a run when its evaluations get no better: `Options(callbacks=[EarlyStopping(patience=5)])`."""

    patience: Count = 5  # evaluations without a better value
    gain: NonNegative = 0.0  # a value is better only by more than this

    @contextmanager
    def watch(self, run: Watched) -> Iterator[AfterRound]:
        """Compare every evaluation with the best one before it."""
        best: tuple[float, int] | None = None  # value and round
        since = 0  # evaluations

        def add(line: Line) -> None:
            nonlocal best, since
            if run.goal.spacing.counts(line):
                is_better = best is None or run.goal.is_better(line["accuracy"], best[0], self.gain)
                best, since = ((line["accuracy"], line["round"]), 0) if is_better else (best, since + 1)

        def check() -> None:
            if best is not None and since >= self.patience:
                (value, round), score = best, run.goal.score
                text = f"{score.name} than {score.text(value)} in round {round}"
                run.stop(f"{since} evaluations without a better {text}")

        def after_round(line: Line, state: Any) -> None:
            add(line)
            check()

        for line in run.played():
            add(line)
        check()
        yield after_round


@checked
@dataclass(frozen=True)
class TimeLimit:
    """Ends a run after so many seconds of its rounds, those before it was resumed included.

    The clock is the wall clock (the sum of `wall_s` in the journal) or that of the simulated devices (`clock_s`).
    """

    seconds: Positive
    clock: Literal["wall", "simulated"] = "wall"

    @contextmanager
    def watch(self, run: Watched) -> Iterator[AfterRound]:
        """Add up the seconds of the rounds."""
        passed_s = 0.0

        def add(line: Line) -> None:
            nonlocal passed_s
            passed_s = passed_s + line["wall_s"] if self.clock == "wall" else _simulated_s(line)

        def check() -> None:
            if passed_s >= self.seconds:
                run.stop(f"its rounds took {passed_s:.4g} s of the {self.clock} clock, the limit is {self.seconds:g} s")

        def after_round(line: Line, state: Any) -> None:
            add(line)
            check()

        for line in run.played():
            add(line)
        check()
        yield after_round


def _simulated_s(line: Line) -> float:
    clock_s: float | None = line["clock_s"]
    if clock_s is None:
        raise UsageError(
            "TimeLimit(clock='simulated') needs devices that take time, as in Setting(devices=Fleet(…)); these take "
            "none. Give such devices, or choose clock='wall'."
        )
    return clock_s
