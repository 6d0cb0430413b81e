"""From the folder of a run to the figures of a study."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from gluefl.config import Config
from gluefl.experiments.grid import Planned
from gluefl.experiments.studies.runner import FAILED
from gluefl.storage import journal
from gluefl.storage.journal import Line

Form = Literal["count", "number", "percent", "volume", "duration", "seconds", "speed"]
FAR_BELOW = 0.6  # a run that stays below this share of the best accuracy does not set the common target


@dataclass(frozen=True)
class Run:
    """A run that is over."""

    label: str
    seed: int
    config: Config
    lines: tuple[Line, ...]
    model_bytes: int
    error: str | None = None  # what it said when it diverged

    @classmethod
    def read(cls, planned: Planned) -> "Run":
        """From its folder. A run that diverged has a journal, but no summary."""
        lines, _ = journal.read(planned.folder / "journal.jsonl")
        failed, summary = planned.folder / FAILED, planned.folder / "summary.json"
        error = failed.read_text(encoding="utf-8").strip() if failed.exists() else None
        if summary.exists():
            model_bytes = int(json.loads(summary.read_text(encoding="utf-8"))["model_bytes"])
        else:  # everyone downloads the whole model in round 1
            model_bytes = max(lines[0]["clients"]["down_bytes"]) if lines else 0
        return cls(planned.label, planned.seed, planned.config, tuple(lines), model_bytes, error)

    @cached_property
    def smooth(self) -> list[tuple[int, float]]:
        """Round and mean of the last evaluations, for every evaluation from the first whole mean on."""
        average = self.config.evaluation.average
        seen = [(line["round"], line["accuracy"]) for line in self.lines if line["accuracy"] is not None]
        return [
            (seen[i][0], math.fsum(accuracy for _, accuracy in seen[i + 1 - average : i + 1]) / average)
            for i in range(average - 1, len(seen))
        ]

    def until(self, target: float | None) -> Sequence[Line] | None:
        """The rounds until the target; None if it was not reached, all of them if there is none."""
        if target is None:
            return self.lines
        reached = next((round for round, accuracy in self.smooth if accuracy >= target), None)
        return None if reached is None else self.lines[:reached]

    @cached_property
    def best(self) -> float | None:
        """The highest smoothed accuracy."""
        return max((accuracy for _, accuracy in self.smooth), default=None)

    @cached_property
    def speed_percentile(self) -> Any:
        """Of every client: the share of the population that is slower with the whole model both ways."""
        from gluefl.fleet import Fleet
        from gluefl.simulation.build import build_devices

        clients = self.config.population.clients or 1 + max(max(line["clients"]["id"]) for line in self.lines)
        devices = build_devices(self.config, clients)
        assert isinstance(devices, Fleet)
        samples = self.config.training.batch * (self.config.training.steps or 10)
        parts = devices.durations(np.arange(clients), self.model_bytes, self.model_bytes, samples)
        slowest_first = np.argsort(-(parts[0] + parts[1] + parts[2]), kind="stable")
        ranks = np.empty(clients)
        ranks[slowest_first] = (np.arange(clients) + 0.5) / clients
        return ranks

    def speeds(self, fate: str | None) -> Any:
        """Speed percentiles of the clients with this fate, once for every round."""
        pairs = (zip(line["clients"]["id"], line["clients"]["fate"]) for line in self.lines)
        chosen = [client for some in pairs for client, f in some if fate is None or f == fate]
        return self.speed_percentile[np.array(chosen, np.int64)]


@dataclass(frozen=True)
class Measure:
    """A figure of a run: its heading, how it is written, and what it is given the target accuracy."""

    heading: str
    form: Form
    of: Callable[[Run, float | None], float | None]


def common_target(runs: Sequence[Run]) -> float | None:
    """The highest accuracy, in whole percent, that all runs reach, as the paper chooses its targets.

    Runs that stay far below the best are set aside: they show that they fail, and nothing else.
    """
    best = [run.best or 0.0 for run in runs if run.error is None]
    reached = [accuracy for accuracy in best if accuracy >= FAR_BELOW * max(best, default=0.0)]
    target = math.floor(100 * min(reached, default=0.0) + 1e-9) / 100
    return target or None


def _sum(lines: Sequence[Line] | None, *keys: str) -> float | None:
    if not lines or any(line[key] is None for line in lines for key in keys):
        return None
    return float(sum(line[key] for line in lines for key in keys))


def _until(*keys: str) -> Callable[[Run, float | None], float | None]:
    return lambda run, target: _sum(run.until(target), *keys)


def _per_round(*keys: str) -> Callable[[Run, float | None], float | None]:
    def mean(run: Run, target: float | None) -> float | None:
        total = _sum(run.lines, *keys)
        return None if total is None else total / len(run.lines)

    return mean


def _of_time(key: str) -> Callable[[Run, float | None], float | None]:
    def share(run: Run, target: float | None) -> float | None:
        part, whole = _sum(run.lines, key), _sum(run.lines, "download_s", "compute_s", "upload_s")
        return None if part is None or not whole else part / whole

    return share


def _of_model(bytes_key: str, clients_key: str) -> Callable[[Run, float | None], float | None]:
    def share(run: Run, target: float | None) -> float | None:
        size, clients = _sum(run.lines, bytes_key), _sum(run.lines, clients_key)
        return None if size is None or not clients else size / (clients * run.model_bytes)

    return share


def _speed(fate: str | None, of: Callable[[Any], Any]) -> Callable[[Run, float | None], float | None]:
    return lambda run, target: float(of(run.speeds(fate))) if run.lines and run.lines[0]["round_s"] else None


def _rounds(run: Run, target: float | None) -> float | None:
    lines = run.until(target)
    return None if lines is None else len(lines)


def _final(run: Run, target: float | None) -> float | None:
    return None if run.error else journal.mean_accuracy(run.lines, run.config.evaluation.average)


MEASURES = {
    # At the target.
    "rounds": Measure("rounds", "count", _rounds),
    "download": Measure("download", "volume", _until("down_bytes")),
    "total": Measure("total volume", "volume", _until("down_bytes", "up_bytes")),
    "download_time": Measure("download time", "duration", _until("download_s")),
    "total_time": Measure("total time", "duration", _until("waited_s", "round_s")),
    # Over the whole run.
    "accuracy": Measure("final accuracy", "percent", _final),
    "best": Measure("best accuracy", "percent", lambda run, target: run.best),
    "share": Measure("model downloaded per client and round", "percent", _of_model("down_bytes", "invited")),
    "upload_share": Measure("model uploaded per client and round", "percent", _of_model("up_bytes", "used")),
    "down_per_round": Measure("download per round", "volume", _per_round("down_bytes")),
    "up_per_round": Measure("upload per round", "volume", _per_round("up_bytes")),
    "round_time": Measure("time per round", "seconds", _per_round("round_s")),
    "download_s": Measure("download per round", "seconds", _per_round("download_s")),
    "upload_s": Measure("upload per round", "seconds", _per_round("upload_s")),
    "compute_s": Measure("compute per round", "seconds", _per_round("compute_s")),
    "download_share_of_time": Measure("time downloading", "percent", _of_time("download_s")),
    "upload_share_of_time": Measure("time uploading", "percent", _of_time("upload_s")),
    "compute_share_of_time": Measure("time computing", "percent", _of_time("compute_s")),
    "used_speed_mean": Measure("speed percentile of the used, mean", "percent", _speed("used", np.mean)),
    "used_speed_median": Measure("median", "percent", _speed("used", np.median)),
    "invited_speed_mean": Measure("of the invited, mean", "percent", _speed(None, np.mean)),
    "slowest_fifth": Measure(
        "used that are of the slowest fifth", "percent", _speed("used", lambda ranks: (ranks < 0.2).mean())
    ),
}
