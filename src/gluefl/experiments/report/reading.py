"""Run folders → data. What is damaged is read as far as it goes and marked; what cannot be compared is kept apart."""

import itertools
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gluefl.errors import UsageError
from gluefl.storage.journal import Line, summarise
from gluefl.storage.journal import read as read_journal

NEEDED = ("round", "invited", "used", "down_bytes", "up_bytes", "accuracy")
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
# Runs that differ in these alone are the same experiment: a seed, or how far and with how many checkpoints it went.
INCIDENTAL = ("seed", "rounds", "target", "evaluation.stop_at_target", "checkpoint.every", "training.trainer")
FAMILIES = ("fedavg", "stc", "apf", "gluefl")


@dataclass(frozen=True)
class Run:
    """One run folder. `config` has dotted keys; `summary` is as in `summary.json`, from the whole lines."""

    path: Path
    label: str
    seed: int | None
    config: dict[str, Any]
    lines: list[Line]
    summary: dict[str, Any]
    finished: bool  # or failed: nothing more will come
    marks: tuple[str, ...]  # what a reader must know before believing the numbers

    @property
    def target(self) -> float | None:
        """The accuracy it was run to."""
        found: float | None = self.config.get("target", self.summary["target"])
        return found

    @property
    def average(self) -> int:
        """Over how many evaluations an accuracy is averaged before it is compared with a target."""
        return int(self.config.get("evaluation.average", 5))

    @property
    def timed(self) -> bool:
        """Whether its rounds took (simulated) time."""
        return bool(self.lines) and all(line.get("clock_s") is not None for line in self.lines)

    @property
    def progress(self) -> str:
        """How far it is, while it is not finished."""
        planned = f" of {self.config['rounds']}" if "rounds" in self.config else ""
        return "" if self.finished else f"{len(self.lines)}{planned} rounds"

    @property
    def counted(self) -> list[Line]:
        """The lines that its volumes and times are summed over: up to the target where it was reached."""
        return self.lines[: self.summary["reached_round"] or len(self.lines)]

    def at(self, target: float | None) -> dict[str, Any]:
        """Its summary for another target."""
        if target == self.target:
            return self.summary
        return summarise(self.lines, target, self.average, self.summary["model_bytes"])

    def size(self, key: str) -> int | None:
        """A size of its sampling (`cohort`, `sticky_size`, `sticky_cohort`), wherever its configuration says it."""
        for table in ("sampling", "Sticky", "Uniform"):  # a run made in Python describes its parts by their types
            if isinstance(value := self.config.get(f"{table}.{key}"), int):
                return value
        return None


@dataclass(frozen=True)
class Comparison:
    """Runs that can be compared: one population, one target. `reason` says why they stand apart from the first."""

    variants: dict[str, list[Run]]  # by label, in the order to show them; each has a line at least
    unread: list[Run]  # nothing in their journals could be read
    reason: str = ""

    @property
    def runs(self) -> list[Run]:
        """All runs with lines."""
        return [run for runs in self.variants.values() for run in runs]

    @property
    def target(self) -> float | None:
        """The accuracy they were all run to."""
        return self.runs[0].target if self.variants else None


def palette(labels: Iterable[str]) -> dict[str, int]:
    """A colour for every label, by its number: a strategy under its own name always has the same."""
    names = list(dict.fromkeys(labels))
    fixed = {family: i for i, family in enumerate(FAMILIES) if family in names}
    free = (i for i in itertools.count() if i not in fixed.values())
    return {name: fixed[name] if name in fixed else next(free) for name in names}


def find(folders: Iterable[Path]) -> list[Path]:
    """The run folders in some folders, which may be run folders themselves."""
    found: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder} is no folder: give a run folder or a folder of run folders.")
        here = {path.parent for name in ("journal.jsonl", "config.toml") for path in folder.rglob(name)}
        # A hidden one is a copy that was interrupted.
        found |= {path.resolve(): path for path in sorted(here) if not path.name.startswith(".")}
    return list(found.values())


def read(folders: Iterable[Path]) -> list[Comparison]:
    """Everything in some folders, the comparison with the most runs first."""
    return compare([read_run(path) for path in find(folders)])


def read_run(path: Path) -> Run:
    """One run folder, whatever state it is in."""
    config, marks = _config(path / "config.toml")
    lines, damaged = read_journal(path / "journal.jsonl") if (path / "journal.jsonl").exists() else ([], False)
    whole = next((i for i, line in enumerate(lines) if any(key not in line for key in NEEDED)), len(lines))
    if damaged or whole < len(lines):
        marks.append(f"the journal is damaged or half written after round {whole}: read up to there")
    elif not lines:
        marks.append("the journal is empty")
    lines = [{**dict.fromkeys(OPTIONAL), **line} for line in lines[:whole]]
    summary = _summary(path / "summary.json")
    summed = summary.get("rounds") == len(lines) > 0
    if not summed:
        target, average = config.get("target", summary.get("target")), int(config.get("evaluation.average", 5))
        summary = {"strategy": summary.get("strategy")} | summarise(lines, target, average, _model_bytes(lines))
    failed = _failure(path / "failed.txt")
    if failed:
        marks.append(f"failed: {failed}")
    seed = config.get("seed", summary.get("seed"))
    label = path.resolve().name.removesuffix(f"-{seed}")
    if label == path.resolve().name:
        label = config.get("strategy.name") or summary.get("strategy") or label
    return Run(path, str(label), seed, config, lines, summary, summed or bool(failed), tuple(marks))


def compare(runs: Sequence[Run]) -> list[Comparison]:
    """Sort runs into comparisons, the largest first, with the reason why the others stand apart."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(_ground(run), sort_keys=True, default=str), []).append(run)
    ordered = sorted(groups.values(), key=lambda group: -sum(bool(run.lines) for run in group))
    result: list[Comparison] = []
    for group in ordered:
        variants: dict[str, list[Run]] = {}
        for run in sorted(_named([run for run in group if run.lines]), key=_place):
            variants.setdefault(run.label, []).append(run)
        reason = _reason(group[0], ordered[0][0]) if result else ""
        result.append(Comparison(variants, [run for run in group if not run.lines], reason))
    return result


def _config(path: Path) -> tuple[dict[str, Any], list[str]]:
    try:
        return _flat(tomllib.loads(path.read_text(encoding="utf-8"))), []
    except FileNotFoundError:
        return {}, ["there is no config.toml"]
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        return {}, ["config.toml cannot be read"]


def _flat(tree: dict[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return flat


def _summary(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and {"model_bytes", "reached_round", "target"} <= found.keys() else {}


def _failure(path: Path) -> str:
    """The last words of a run of a study that could not go on."""
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.exists() else ""


def _model_bytes(lines: Sequence[Line]) -> int:
    """In the first round nobody holds anything: everyone downloads the whole model."""
    first = lines[0] if lines else {}
    sizes = first.get("clients", {}).get("down_bytes") or [
        first.get("down_bytes", 0) // max(1, first.get("invited", 1))
    ]
    return max(1, *map(int, sizes))


def _ground(run: Run) -> dict[str, Any]:
    """What two runs must share to be compared."""
    population = {key: value for key, value in run.config.items() if key.split(".")[0] == "population"}
    return population | {"target": run.target, "metric": run.config.get("evaluation.metric")}


def _reason(run: Run, first: Run) -> str:
    here, there = _ground(run), _ground(first)
    if not run.config:
        return "it is not known what they were run on"
    differing = [key for key in sorted({**here, **there}) if here.get(key) != there.get(key)]
    return "; ".join(f"another {key}: {_say(here.get(key))} instead of {_say(there.get(key))}" for key in differing)


def _say(value: Any) -> str:
    return "none" if value is None else f"{value:.1%}" if isinstance(value, float) and value <= 1 else str(value)


def _named(runs: Sequence[Run]) -> list[Run]:
    """Labels tell different experiments apart: where one would stand for two, it gets the name of its folder."""
    result = list(runs)
    for length in range(3):
        settings: dict[str, set[str]] = {}
        for run in result:
            settings.setdefault(run.label, set()).add(json.dumps(_settings(run), sort_keys=True, default=str))
        twice = Counter((run.label, run.seed) for run in result)
        clash = {label for label, kinds in settings.items() if len(kinds) > 1}
        clash |= {label for (label, _), count in twice.items() if count > 1}
        result = [replace(run, label=_longer(run, length)) if run.label in clash else run for run in result]
    return result


def _longer(run: Run, length: int) -> str:
    path = run.path.resolve()
    name = path.name.removesuffix(f"-{run.seed}")
    return (name, f"{path.parent.name}/{name}", str(run.path))[length]


def _settings(run: Run) -> dict[str, Any]:
    return {key: value for key, value in run.config.items() if key not in INCIDENTAL}


def _place(run: Run) -> tuple[Any, ...]:
    """FedAvg first, GlueFL last; labels with numbers in the order of the numbers."""
    family = str(run.config.get("strategy.name", run.summary.get("strategy")))
    parts = [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", run.label)]
    return FAMILIES.index(family) if family in FAMILIES else len(FAMILIES), parts, run.seed or 0
