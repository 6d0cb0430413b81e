"""Trackers: every round of a run in a system that shows experiments. All of them are callbacks.

A tracker opens a `Log` for a run; `followed` turns it into a callback. A tracker of your own needs no more than this:

>>> @dataclass(frozen=True)
... class Mine:
...     def open(self, run: Watched) -> Log: ...
...
...     def watch(self, run: Watched) -> AbstractContextManager[AfterRound]:
...         return followed(self.open, run)
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from gluefl import files
from gluefl.storage.toml import flattened
from gluefl.watching import AfterRound, Watched

SCALARS = {
    "loss/train": "loss",
    "loss/test": "test_loss",
    "loss/validation": "validation_loss",
    "bytes/down": "down_bytes",
    "bytes/up": "up_bytes",
    "seconds/round": "round_s",
    "seconds/download": "download_s",
    "seconds/compute": "compute_s",
    "seconds/upload": "upload_s",
    "staleness": "staleness_mean",
}
SUMS = {"bytes/down_total": "down_bytes", "bytes/up_total": "up_bytes"}


class Log(Protocol):
    """Where the rounds of a run are written to."""

    def settings(self, values: Mapping[str, Any]) -> None:
        """The configuration, once: numbers, texts and lists by dotted key."""
        ...

    def scalars(self, values: Mapping[str, float], round: int) -> None:
        """The numbers of a round. After a resume some rounds come again, with the same numbers."""
        ...

    def close(self, error: BaseException | None) -> None:
        """The run has ended, or was ended by this error."""
        ...


@contextmanager
def followed(open_log: Callable[[Watched], Log], run: Watched) -> Iterator[AfterRound]:
    """Write the configuration and every round of a run into a log."""
    log, totals = open_log(run), dict.fromkeys(SUMS, 0)

    def add(line: Mapping[str, Any]) -> None:
        for tag, key in SUMS.items():
            totals[tag] += line[key]

    def after_round(line: Mapping[str, Any], state: Any) -> None:
        add(line)
        keys = {run.goal.score.name: "accuracy", **SCALARS}
        values = {tag: line[key] for tag, key in keys.items() if line.get(key) is not None}
        log.scalars({**values, **totals}, line["round"])

    try:
        for line in run.played():
            add(line)
        log.settings(flattened(run.configuration))
        yield after_round
    except BaseException as error:
        log.close(error)
        raise
    log.close(None)


def remembered(folder: Path | None, name: str, make: Callable[[], str]) -> str:
    """The identity of a run in another system; kept in a file of its folder, so that a resumed run finds it."""
    path = None if folder is None else folder / name
    if path is not None and path.exists():
        return path.read_text(encoding="utf-8").strip()
    identity = make()
    if path is not None:
        files.write(path, identity + "\n")
    return identity
