"""What apps report of a round or an evaluation, averaged over the nodes."""

import math
from collections.abc import Iterable
from logging import WARNING
from typing import Any

from flwr.app import Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from gluefl.flower.exchange import Exchange
from gluefl.storage.journal import Line

ACCURACIES = ("accuracy", "eval_acc", "acc")  # the names under which apps report it


def mean_metrics(replies: Iterable[Message], weighted_by_key: str) -> MetricRecord | None:
    """The mean of what nodes report, weighted by a number that they report, too; None if they report nothing."""
    contents = [reply.content for reply in replies]
    records = [RecordDict(dict(content.metric_records)) for content in contents if content.metric_records]
    try:
        return aggregate_metricrecords(records, weighted_by_key) if records else None
    except Exception as error:  # metrics are informative: whatever a node put into them, the round counts
        log(WARNING, "The metrics of the nodes cannot be averaged: %s: %s", type(error).__name__, error)
        return None


def accuracy(metrics: MetricRecord) -> float | None:
    """The accuracy in an app's metrics, if there is one."""
    value = next((metrics[name] for name in ACCURACIES if name in metrics), None)
    return float(value) if isinstance(value, int | float) else None


def evaluation_line(exchange: Exchange, metrics: MetricRecord | None) -> Line:
    """The line of an evaluation on nodes in `evaluations.jsonl`."""
    numbers = {name: value for name, value in (metrics or {}).items() if isinstance(value, int | float)}
    line = {
        "round": exchange.round,
        "nodes": len(exchange.replies),
        "down_bytes": sum(parcel.size_bytes for parcel in exchange.parcels.values()),
        "metrics": numbers,
        "incidents": exchange.incidents,
    }
    return journaled(line)


def journaled(line: Line) -> Line:
    """A line as JSON can hold it: null for a number that is not finite, and a note for each.

    Such numbers come from apps: what a node or `evaluate_fn` reports must not end the run.
    """
    notes: list[str] = []
    cleaned: Line = _cleaned(line, "", notes)
    return cleaned | {"notes": [*line.get("notes", []), *notes]} if notes else cleaned


def _cleaned(value: Any, path: str, notes: list[str]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        notes.append(f"{path} is {value}, which is not a finite number: null is written")
        return None
    if isinstance(value, dict):
        return {name: _cleaned(part, f"{path}.{name}" if path else name, notes) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(part, f"{path}[{place}]", notes) for place, part in enumerate(value)]
    return value
