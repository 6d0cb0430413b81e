"""The measures of a study: numbers computed from one run."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gluefl.config import validated
from gluefl.experiments.runs import Run
from gluefl.scores import Score
from gluefl.storage.journal import Line, clients_of, mean_accuracy
from gluefl.storage.toml import nested

Form = Literal["count", "number", "percent", "volume", "duration", "seconds", "speed"]
FAR_BELOW = 0.6  # a run that stays below this share of the best accuracy does not set the common target


@dataclass(frozen=True)
class Measure:
    """A number of a run: its heading, its format, and its value given the run and the target accuracy."""

    heading: str
    form: Form
    of: Callable[[Run, float | None], float | None]


def common_target(runs: Sequence[Run]) -> float | None:
    """The highest accuracy, in whole percent, that all runs reach, as the paper chooses its targets; of another
    metric the best value that all runs reach.

    Runs that diverged or, for an accuracy, stay far below the best do not count.
    """
    score = runs[0].score if runs else Score()
    if not (score.is_share and score.higher_is_better):
        values = [run.best for run in runs if run.failure is None]
        worst = score.worst(value for value in values if value is not None)
        return None if worst is None or None in values else score.relaxed(worst)
    best = [run.best or 0.0 for run in runs if run.failure is None]
    reached = [accuracy for accuracy in best if accuracy >= FAR_BELOW * max(best, default=0.0)]
    target = math.floor(100 * min(reached, default=0.0) + 1e-9) / 100
    return target or None


def speed_percentiles(run: Run) -> NDArray[np.float64]:
    """For every client, the share of the population that is slower when the whole model travels both ways."""
    from gluefl.fleet import Fleet
    from gluefl.simulation.build import build_devices

    config = validated(nested(run.config))
    clients = config.population.clients or 1 + max(max(clients_of(line)["id"]) for line in run.lines)
    devices = build_devices(config, clients)
    assert isinstance(devices, Fleet)
    samples = config.training.batch * (config.training.steps or 10)
    parts = devices.durations(np.arange(clients), run.model_bytes, run.model_bytes, samples)
    slowest_first = np.argsort(-(parts[0] + parts[1] + parts[2]), kind="stable")
    percentiles = np.empty(clients)
    percentiles[slowest_first] = (np.arange(clients) + 0.5) / clients
    return percentiles


def client_speeds(run: Run, fate: str | None) -> NDArray[np.float64]:
    """Speed percentiles of the clients with this fate, or of all invited clients, one entry per invitation."""
    tables = [clients_of(line) for line in run.lines]
    invitations = [pair for table in tables for pair in zip(table["id"], table["fate"])]
    chosen = [client for client, outcome in invitations if fate is None or outcome == fate]
    return speed_percentiles(run)[np.array(chosen, np.int64)]


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
    return lambda run, target: float(of(client_speeds(run, fate))) if run.lines and run.lines[0]["round_s"] else None


def _rounds(run: Run, target: float | None) -> float | None:
    lines = run.until(target)
    return None if lines is None else len(lines)


def _final(run: Run, target: float | None) -> float | None:
    return None if run.failure else mean_accuracy([line for line in run.lines if run.spacing.counts(line)], run.average)


MEASURES = {
    # Up to the target.
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
    "used_speed_mean": Measure("speed percentile of used clients, mean", "percent", _speed("used", np.mean)),
    "used_speed_median": Measure("median", "percent", _speed("used", np.median)),
    "invited_speed_mean": Measure("of invited clients, mean", "percent", _speed(None, np.mean)),
    "slowest_fifth": Measure(
        "used clients from the slowest fifth", "percent", _speed("used", lambda ranks: (ranks < 0.2).mean())
    ),
}
