"""The journal: one JSON line a round, each with a checksum; and what it adds up to."""

import itertools
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from gluefl import files
from gluefl.errors import Damaged, UsageError
from gluefl.scores import Score, perplexity
from gluefl.storage import columns
from gluefl.storage.evaluations import Spacing
from gluefl.storage.sealed import seal, unseal

Line = dict[str, Any]
ClientsForm = Literal["lines", "columns", "none"]  # lists in every line, a file beside the journal, or left out
SUMMED = (
    "down_bytes",
    "up_bytes",
    "wasted_down_bytes",
    "wasted_up_bytes_estimate",
    "authors_down_bytes",
    "authors_up_bytes",
    "download_s",
    "compute_s",
    "upload_s",
    "wasted_s",
)
LOSSES = ("test_loss", "validation_loss")
ACCURACY, EVERY_ROUND = Score(), Spacing()


class Journal:
    """Lines in a file, or in memory if there is none. What was written is there after a crash.

    `clients` says how the clients of lines to come are written; those of a file are read whatever form they have.
    """

    def __init__(self, path: Path | None = None, clients: ClientsForm = "lines") -> None:
        self.path, self.clients, self._in_memory = path, clients, list[Line]()
        self._end: int | None = None  # of the columns, once it is known

    @property
    def lines(self) -> list[Line]:
        """All lines. Those of a file are read when they are asked for: a long run does not keep them in memory."""
        return self._in_memory if self.path is None else list(self.stored())

    def stored(self) -> Iterator[Line]:
        """The lines up to the first that is damaged or has no checksum, one after the other."""
        if self.path is None:
            yield from self._in_memory
        elif self.path.exists():
            yield from (line for line, _, is_sealed in _whole_lines(self.path) if is_sealed)

    def append(self, line: Line) -> None:
        """Add a line and flush it."""
        if self.clients == "none":
            line = {key: value for key, value in line.items() if key != "clients"}
        if self.path is None:
            self._in_memory.append(line)
            return
        if self.clients == "columns" and "clients" in line:
            if self._end is None:
                self._end = _end_of_columns(self.path, self.count())
            line = line | {"clients": columns.append(self.path, self._end, line["clients"])}
        with open(self.path, "ab") as file:
            file.write(seal(line))
        self._end = columns.end_of(line) or self._end

    def sync(self) -> None:
        """Let what was written outlast a power failure too."""
        if self.path is not None and self.path.exists():
            if (side := columns.path_of(self.path)).exists():  # first, because the lines rely on it
                files.sync(side)
            with open(self.path, "ab") as file:
                os.fsync(file.fileno())
            files.sync_folder(self.path.parent)

    def count(self) -> int:
        """How many rounds have whole lines, from the first on."""
        return sum(1 for _ in self.stored())

    def cut(self, rounds: int) -> None:
        """Go back to a checkpoint: keep the lines of the first rounds."""
        if self.path is None:
            del self._in_memory[rounds:]
            return
        if (whole := self.count()) < rounds:
            raise Damaged(
                f"{self.path} holds {whole} whole lines, the checkpoint is of round {rounds}: the journal was damaged. "
                "Start the run again in another folder."
            )
        with files.replacing(self.path) as target:
            if rounds:
                with open(self.path, "rb") as source:
                    target.writelines(itertools.islice(source, rounds))
        self._end = _end_of_columns(self.path, rounds)
        columns.cut(self.path, self._end)


def keep_rounds(path: Path, rounds: int) -> None:
    """Of lines that may skip rounds, keep the whole ones of the first rounds: what a crash left half written goes."""
    if not path.exists():
        return
    with open(path, "rb") as source, files.replacing(path) as target:
        for text in source:
            with suppress(ValueError):
                if unseal(text)[0].get("round", 0) <= rounds:
                    target.write(text)


def clients_of(line: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The clients of a line: a list per column."""
    if "clients" not in line:
        raise UsageError(
            f"the journal of this run has no clients in round {line.get('round')}: it was written with "
            '[journal] clients = "none". Run it again with "columns" or "lines".'
        )
    clients: dict[str, list[Any]] = line["clients"]
    return clients


def _end_of_columns(path: Path, rounds: int) -> int:
    """Where the columns of the first rounds end."""
    return max((columns.end_of(line) for line, _, _ in itertools.islice(written_lines(path), rounds)), default=0)


def _whole_lines(path: Path) -> Iterator[tuple[Line, int, bool]]:
    """Lines, their lengths in bytes and whether they have a checksum, up to the first that is damaged."""
    with columns.reading(path) as file:
        for line, length_bytes, is_sealed in written_lines(path):
            try:
                line = columns.resolved(line, file)
            except ValueError:
                return
            yield line, length_bytes, is_sealed


def written_lines(path: Path) -> Iterator[tuple[Line, int, bool]]:
    """The same, but lines whose clients are columns hold the place of these.

    All lines of a journal have a checksum, or none."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        kinds = set[bool]()
        for number, text in enumerate(file, 1):
            try:
                line, is_sealed = unseal(text)
            except ValueError:
                return
            kinds.add(is_sealed)
            if line.get("round") != number or len(kinds) > 1:
                return
            yield line, len(text), is_sealed


def read(path: Path) -> tuple[list[Line], bool]:
    """The whole lines of a journal, and whether it ends in a damaged one. Old journals have no checksums."""
    lines, size_bytes = list[Line](), 0
    for line, length_bytes, _ in _whole_lines(path):
        lines.append(line)
        size_bytes += length_bytes
    return lines, size_bytes < path.stat().st_size


class Totals:
    """What a run amounts to so far, added up line by line: volumes (DV, TV) and times (DT, TT) at the target where it
    was reached, otherwise at the end. It takes the same memory whatever the number of rounds.

    The target is reached by a mean over a window of evaluations; what single evaluations would give stands beside it.
    The key `accuracy` of a line holds the value of the metric, whatever that measures.
    """

    def __init__(
        self, target: float | None, average: int, score: Score = ACCURACY, spacing: Spacing = EVERY_ROUND
    ) -> None:
        self.target, self.average, self.score, self.spacing, self.rounds = target, average, score, spacing, 0
        self.reached_round: int | None = None
        self.single_reached_round: int | None = None
        self._sums: dict[str, Any] = {}
        self._single_down_bytes = 0
        self._accuracies = deque[float](maxlen=average)  # of the last evaluations
        self._first_evaluation: int | None = None
        self._invitations = 0
        self._forgotten: int | None = None  # residuals, if the run forgets any
        self._losses: dict[str, float] = {}  # the last ones, of the test or the validation samples
        self._clock_s: float | None = None

    @classmethod
    def of(
        cls,
        lines: Iterable[Line],
        target: float | None,
        average: int,
        score: Score = ACCURACY,
        spacing: Spacing = EVERY_ROUND,
    ) -> "Totals":
        """Of the first lines of a journal."""
        totals = cls(target, average, score, spacing)
        for line in lines:
            totals.add(line)
        return totals

    def add(self, line: Line) -> None:
        """Add the line of a round; after the target was reached only rounds are counted."""
        self.rounds += 1
        if self.reached_round is not None:
            return
        for key in SUMMED:
            before, value = self._sums.get(key, 0), line[key]
            self._sums[key] = None if before is None or value is None else before + value
        if self.single_reached_round is None:
            self._single_down_bytes += line["down_bytes"]
        self._invitations += line["invited"]
        self._clock_s = line["clock_s"]
        if "forgotten_residuals" in line:
            self._forgotten = (self._forgotten or 0) + line["forgotten_residuals"]
        if line["accuracy"] is not None and not self.spacing.counts(line):
            return
        self._losses |= {key: line[key] for key in LOSSES if line.get(key) is not None}
        if line["accuracy"] is not None:
            self._evaluated(int(line["round"]), line["accuracy"])

    def _evaluated(self, round: int, accuracy: float) -> None:
        self._accuracies.append(accuracy)
        if self._first_evaluation is None:
            self._first_evaluation = round
        if self.target is None:
            return
        if self.single_reached_round is None and self.score.reached(accuracy, self.target):
            self.single_reached_round = round
        mean = math.fsum(self._accuracies) / len(self._accuracies)
        if len(self._accuracies) == self.average and self.score.reached(mean, self.target):
            self.reached_round = round

    def losses(self) -> dict[str, float | None]:
        """The last losses of evaluations, and the perplexity of the test samples."""
        test = self._losses.get("test_loss")
        return {**dict.fromkeys(LOSSES), **self._losses, "perplexity": None if test is None else perplexity(test)}

    def summary(self, model_bytes: int) -> dict[str, Any]:
        """As in `summary.json`."""
        sums, recent = dict.fromkeys(SUMMED) | self._sums, self._accuracies
        first = self._first_evaluation  # after `every` rounds
        down_bytes, up_bytes = sums["down_bytes"] or 0, sums["up_bytes"] or 0  # without a round there is no sum
        share = down_bytes / (self._invitations * model_bytes) if self._invitations else None
        return {
            "rounds": self.rounds,
            "mean_accuracy": math.fsum(recent) / len(recent) if recent else None,  # over the window
            "last_accuracy": recent[-1] if recent else None,
            "window_evaluations": self.average,
            "window_rounds": None if first is None else self.average * first,
            **self.losses(),
            "target": self.target,
            "reached_round": self.reached_round,
            "single_reached_round": self.single_reached_round,
            "single_down_bytes": self._single_down_bytes,
            "down_bytes": down_bytes,
            "up_bytes": up_bytes,
            "total_bytes": down_bytes + up_bytes,
            **{key: sums[key] for key in SUMMED[2:9]},
            "total_s": self._clock_s,
            "wasted_s": sums["wasted_s"],
            "mean_download_share": share,
            "model_bytes": model_bytes,
            **({} if self._forgotten is None else {"forgotten_residuals": self._forgotten}),
        }


def mean_accuracy(lines: Sequence[Line], average: int) -> float | None:
    """The mean of the last `average` evaluations."""
    recent = [line["accuracy"] for line in lines if line["accuracy"] is not None][-average:]
    return math.fsum(recent) / len(recent) if recent else None


def summarise(
    lines: Iterable[Line],
    target: float | None,
    average: int,
    model_bytes: int,
    score: Score = ACCURACY,
    spacing: Spacing = EVERY_ROUND,
) -> dict[str, Any]:
    """The summary of a journal's lines."""
    return Totals.of(lines, target, average, score, spacing).summary(model_bytes)
