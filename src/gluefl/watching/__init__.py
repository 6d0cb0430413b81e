"""Watching a run: what is called after its rounds, and what may end it.

A callback is a function of a journal line and the server's state, called after every round; `True` ends the run:

>>> Options(callbacks=[lambda line, state: line["loss"] < 0.1])

A callback that needs more is an object with a method `watch`. It is entered before the first round and left after
the last one, also by an error, and gives such a function. The object itself stays unchanged, so that several runs
can use it; what it remembers lives in the function:

>>> @dataclass(frozen=True)
... class LossLimit:
...     most: float
...
...     @contextmanager
...     def watch(self, run: Watched) -> Iterator[AfterRound]:
...         def after_round(line, state):
...             if line["loss"] > self.most:
...                 run.stop(f"the loss is above {self.most}")
...
...         yield after_round

A resumed run plays the rounds again that were not checkpointed. A callback whose decisions follow from the lines of
the journal, with those of `run.played()` first, gives the same result as in a run that was not interrupted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gluefl.scores import Score
from gluefl.storage.evaluations import Spacing

if TYPE_CHECKING:  # tables and numbers of the command line need no torch
    from torch import Tensor

    from gluefl.core.server import State
    from gluefl.storage.journal import Line

    AfterRound = Callable[[Line, State], bool | None]
else:
    AfterRound = Callable[[dict[str, Any], Any], bool | None]


BY_CALLBACK = "raised by a callback of the run"  # a note of such an error


@dataclass(frozen=True)
class Goal:
    """What the evaluations of a run measure, and what they aim at."""

    score: Score = Score()  # noqa: RUF009 - frozen
    target: float | None = None
    window: int = 1  # the mean of this many evaluations is compared with the target
    spacing: Spacing = Spacing()  # noqa: RUF009 - frozen

    def is_better(self, value: float, than: float, by: float = 0.0) -> bool:
        """Whether a value is better than another one, by more than `by`."""
        return value - than > by if self.score.higher_is_better else than - value > by


@dataclass(frozen=True)
class Watched:
    """The run that a callback watches."""

    name: str  # of its folder, or of its strategy
    rounds: int
    goal: Goal
    folder: Path | None  # where it is written, if it is
    configuration: Mapping[str, Any]  # as in config.toml
    played: "Callable[[], Iterator[Line]]"  # the lines of the rounds so far; of a run that goes on, those before it
    tensors: "Callable[[State], dict[str, Tensor]]"  # the model of a state, under the names of the module
    notes: Callable[[], Mapping[str, str]] = dict  # what a file of these tensors says of those that it leaves out
    reasons: list[str] = field(default_factory=list)  # why it ends before its last round

    def stop(self, reason: str) -> None:
        """End the run: after this round, or, before the first one, at once."""
        self.reasons.append(reason)


class Watcher(Protocol):
    """A callback with a beginning and an end."""

    def watch(self, run: Watched) -> AbstractContextManager[AfterRound]:
        """Give the function that is called after every round, for the duration of a run."""
        ...


Callback = AfterRound | Watcher


@contextmanager
def watching(callbacks: Sequence[Callback], run: Watched) -> Iterator[AfterRound]:
    """All callbacks as one function. Every callback sees every round, also where another one ends the run."""
    with ExitStack() as entered:
        functions = [
            entered.enter_context(callback.watch(run)) if hasattr(callback, "watch") else callback
            for callback in callbacks
        ]

        def after_round(line: "Line", state: "State") -> None:
            for function in functions:
                try:
                    over = function(line, state)
                except Exception as error:
                    error.add_note(BY_CALLBACK)
                    raise
                if over:
                    run.stop("a callback returned True")

        yield after_round
