"""The reader of run folders: configuration, journal, summary and failure of a run in any state.

A damaged file is read up to the damage, and the run is marked.
"""

import json
import math
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gluefl.errors import UsageError
from gluefl.scores import Score
from gluefl.storage.evaluations import Spacing
from gluefl.storage.journal import Line, summarise
from gluefl.storage.journal import read as read_journal
from gluefl.storage.names import CHECKPOINT, CONFIG, FAILURE, JOURNAL, MODEL, SUMMARY
from gluefl.storage.toml import flattened

AVERAGE, EVERY, CLIENTS = "evaluation.average", "evaluation.every", "population.clients"
NUMBERS = ("rounds", "seed", "target", AVERAGE, EVERY, CLIENTS)  # keys of a configuration that are computed with
REQUIRED = ("round", "invited", "used", "down_bytes", "up_bytes", "accuracy")
NAMED = ("metric", "higher_is_better", "metric_format", "evaluated_on", "test_accuracy")
OPTIONAL = (
    "wasted_down_bytes",
    "wasted_up_bytes_estimate",
    "authors_down_bytes",
    "authors_up_bytes",
    "download_s",
    "compute_s",
    "upload_s",
    "wasted_s",
    "clock_s",
)


@dataclass(frozen=True)
class Run:
    """One run folder: `read_run(Path("runs/demo/gluefl-1")).summary["down_bytes"]`."""

    path: Path
    label: str
    seed: int | None
    config: Mapping[str, Any]  # by dotted key
    lines: Sequence[Line]  # of the journal
    summary: Mapping[str, Any]  # as in `summary.json`, computed from the lines while the run is in progress
    finished: bool  # or failed: no more lines will be written
    failure: str | None = None  # the error message of a run that diverged
    marks: tuple[str, ...] = ()  # warnings about damaged or missing files

    @property
    def score(self) -> Score:
        """How the metric, which lines hold under `accuracy`, is named, written and compared."""
        return Score.of_summary(self.summary) if "metric" in self.summary else Score.of_config(self.config)

    @property
    def target(self) -> float | None:
        """The target of its configuration."""
        target: float | None = self.config.get("target", self.summary["target"])
        return target

    @property
    def average(self) -> int:
        """The number of evaluations whose mean is compared with a target."""
        return int(self.config.get(AVERAGE, 5))

    @property
    def spacing(self) -> Spacing:
        """After which rounds it is evaluated."""
        return _spacing(self.config, self.lines)

    @property
    def model_bytes(self) -> int:
        """The size of the whole model in one message."""
        return int(self.summary["model_bytes"])

    @property
    def timed(self) -> bool:
        """Whether its rounds have simulated durations."""
        return bool(self.lines) and all(line.get("clock_s") is not None for line in self.lines)

    @property
    def stops(self) -> bool:
        """Whether late clients were told to stop, and were charged a part of their packages; if unknown, they were."""
        tables = ("fleet", "arrivals")  # of a configuration, of a run made in Python
        return any(self.config.get(f"{table}.stop_late_downloads", not self.config) for table in tables)

    @property
    def progress(self) -> str:
        """The rounds done so far, empty if the run is finished."""
        total = f" of {self.config['rounds']}" if "rounds" in self.config else ""
        return "" if self.finished else f"{len(self.lines)}{total} rounds"

    @cached_property
    def smoothed(self) -> list[tuple[int, float]]:
        """Round and mean metric of the last `average` evaluations, from the first complete mean on."""
        seen = [(line["round"], line["accuracy"]) for line in self.lines if self.spacing.counts(line)]
        means = []
        for end in range(self.average, len(seen) + 1):
            window = [accuracy for _, accuracy in seen[end - self.average : end]]
            means.append((seen[end - 1][0], math.fsum(window) / self.average))
        return means

    @property
    def best(self) -> float | None:
        """The best smoothed metric."""
        return self.score.best(accuracy for _, accuracy in self.smoothed)

    def until(self, target: float | None) -> Sequence[Line] | None:
        """The lines up to the round that reached the target: None if no round did, all lines without a target."""
        if target is None:
            return self.lines
        reached = next((round for round, value in self.smoothed if self.score.reached(value, target)), None)
        return None if reached is None else self.lines[:reached]

    @property
    def counted(self) -> Sequence[Line]:
        """The lines that its volumes and times are summed over: up to the target where it was reached."""
        return self.lines[: self.summary["reached_round"] or len(self.lines)]

    def at(self, target: float | None) -> Mapping[str, Any]:
        """Its summary for another target."""
        if target == self.target:
            return self.summary
        named = {key: self.summary[key] for key in NAMED if key in self.summary}
        return self.summarised(target) | named

    def summarised(self, target: float | None) -> dict[str, Any]:
        """The summary of its lines."""
        return summarise(self.lines, target, self.average, self.model_bytes, self.score, self.spacing)

    def size(self, key: str) -> int | None:
        """A size of its sampler (`cohort`, `sticky_size`, `sticky_cohort`)."""
        value = self.config.get(f"sampling.{key}")
        return value if isinstance(value, int) else None


def find(folders: Iterable[Path]) -> list[Path]:
    """The run folders in the given folders, which may be run folders themselves."""
    paths: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder} is no folder: give a run folder or a folder of run folders.")
        below = {path.parent for path in folder.rglob(JOURNAL)}
        # A run that has not begun, or was damaged; a project of the user may have a config.toml, too.
        begun = {path.parent for path in folder.rglob(CONFIG)}
        below |= {
            path for path in begun if any((path / name).exists() for name in (CHECKPOINT, SUMMARY, FAILURE, MODEL))
        }
        # Hidden folders are incomplete copies of runs.
        paths |= {path.resolve(): path for path in sorted(below) if not path.name.startswith(".")}
    return list(paths.values())


def read_run(path: Path) -> Run:
    """Read one run folder."""
    config, marks = _config(path / CONFIG)
    lines, damaged = read_journal(path / JOURNAL) if (path / JOURNAL).exists() else ([], False)
    whole = next((i for i, line in enumerate(lines) if any(key not in line for key in REQUIRED)), len(lines))
    if damaged or whole < len(lines):
        marks.append(f"the journal is damaged or half written after round {whole}: read up to there")
    elif not lines:
        marks.append("the journal is empty")
    lines = [{**dict.fromkeys(OPTIONAL), **line} for line in lines[:whole]]
    summary = _summary(path / SUMMARY)
    complete = summary.get("rounds") == len(lines) > 0
    if not complete or "window_rounds" not in summary:  # not finished, or of an earlier version
        target, average = config.get("target", summary.get("target")), int(config.get(AVERAGE, 5))
        size = summary.get("model_bytes") or _model_bytes(lines)
        totals = summarise(lines, target, average, size, Score.of_config(config), _spacing(config, lines))
        summary = {"strategy": summary.get("strategy")} | totals
    failure = _failure(path / FAILURE)
    if failure is not None:
        marks.append(f"failed: {failure}")
    seed = config.get("seed", summary.get("seed"))
    label = path.resolve().name.removesuffix(f"-{seed}")
    if label == path.resolve().name:
        label = config.get("strategy.name") or summary.get("strategy") or label
    finished = complete or failure is not None
    return Run(path, str(label), seed, config, lines, summary, finished, failure, tuple(marks))


class JournalTail:
    """The lines that were appended to a journal since the last call, while another process writes it."""

    def __init__(self, folder: Path) -> None:
        self._path, self._file, self._offset = folder / JOURNAL, 0, 0

    def read(self) -> tuple[bool, list[Line]]:
        """Whether the journal was replaced, as at the start of a resumed run; and its new complete lines."""
        try:
            with self._path.open("rb") as file:
                number = os.fstat(file.fileno()).st_ino
                replaced = number != self._file
                self._file, self._offset = number, 0 if replaced else self._offset
                file.seek(self._offset)
                text = file.read()
        except OSError:
            return False, []
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        try:
            lines = [json.loads(line) for line in complete.splitlines()]
        except (ValueError, RecursionError):  # damage by a crash, which the resumed run removes
            return replaced, []
        return replaced, [line for line in lines if all(key in line for key in REQUIRED)]


def _config(path: Path) -> tuple[dict[str, Any], list[str]]:
    try:
        config = flattened(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}, ["there is no config.toml"]
    except (OSError, ValueError, RecursionError):
        return {}, ["config.toml cannot be read"]
    odd = [key for key in NUMBERS if not isinstance(config.get(key, 0), int | float)]
    marks = [f"config.toml: {', '.join(odd)} cannot be read"] if odd else []
    return {key: value for key, value in config.items() if key not in odd}, marks


def _spacing(config: Mapping[str, Any], lines: Sequence[Line]) -> Spacing:
    """What is not in the configuration: the spacing of runs of earlier versions, the last round of those in Python."""
    return Spacing(max(1, int(config.get(EVERY, 1))), int(config.get("rounds", len(lines))))


def _summary(path: Path) -> dict[str, Any]:
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    needed = {"model_bytes", "reached_round", "target"}
    return summary if isinstance(summary, dict) and needed <= summary.keys() else {}


def _failure(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.exists() else None


def _model_bytes(lines: Sequence[Line]) -> int:
    """In the first round every client downloads the whole model, or, where version 0 is known and no client is cold,
    nothing: then the authors' estimate, which is a bitmap of a bit per weight of 32, tells its size."""
    first = lines[0] if lines else {}
    if first.get("cold") == 0 and first.get("authors_down_bytes"):
        return 32 * int(first["authors_down_bytes"]) // max(1, int(first.get("invited", 1)))
    sizes = first.get("clients", {}).get("down_bytes") or [
        first.get("down_bytes", 0) // max(1, first.get("invited", 1))
    ]
    return max(1, *map(int, sizes))
