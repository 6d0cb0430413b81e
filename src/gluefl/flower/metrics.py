"""What apps report of a round or an evaluation, averaged over the nodes."""

import math
import reprlib
from collections import ChainMap, Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from flwr.app import Message, MetricRecord
from numpy.typing import NDArray

from gluefl.flower.exchange import Exchange
from gluefl.storage.journal import Line

ACCURACIES = ("accuracy", "eval_acc", "acc")  # the names under which apps report it
MOST_NAMED, LONGEST_NAME = 5, 100  # of the metrics in an incident
Metrics = Mapping[str, Any]


def mean_metrics(exchange: Exchange, weighted_by_key: str) -> MetricRecord | None:
    """The mean of every metric over the nodes that report finite numbers, weighted by a number that they report, too.

    A node that is left out of a mean is an incident. Lists are averaged number by number. A metric of which no node
    reports a finite number is NaN; without any metrics, or any weight, there are no means.
    """
    reported = {client: _reported(exchange.replies[client]) for client in sorted(exchange.replies)}
    names = [name for name in dict.fromkeys(chain.from_iterable(reported.values())) if name != weighted_by_key]
    weights = {client: weight for client in reported if (weight := _weight(reported[client].get(weighted_by_key)))}
    if not any(reported.values()):
        return None
    if not weights:
        exchange.note(None, "metrics", f"no node reports a number above 0 as {weighted_by_key}: there are no means")
        return None
    means, counted = MetricRecord(), dict[str, Collection[int]]()
    for name in names:
        values = _alike({client: reported[client].get(name) for client in weights})
        counted[name], means[name] = values.keys(), _mean(values, weights)
    for client, metrics in reported.items():
        left_out = [name for name in names if client not in counted[name]]
        if left_out:
            found = _found(metrics, left_out if client in weights else [weighted_by_key])
            exchange.note(client, "metrics", f"left out of {len(left_out)} of {len(names)} means: {found}")
    return means


def _reported(reply: Message) -> Metrics:
    """All metrics of a reply; of two with one name the first."""
    return ChainMap(*reply.content.metric_records.values())


def _weight(value: object) -> float | None:
    """A finite number above 0, or None."""
    return float(value) if isinstance(value, int | float) and 0 < value < math.inf else None


def _alike(reported: Mapping[int, Any]) -> dict[int, NDArray[np.float64]]:
    """The finite numbers, or lists of them, by client; of several lengths the one that most clients have."""
    arrays = {client: np.array(value, np.float64) for client, value in reported.items() if value is not None}
    finite = {client: array for client, array in arrays.items() if np.isfinite(array).all()}
    shapes = Counter(array.shape for array in finite.values()).most_common(1)
    return {client: array for client, array in finite.items() if array.shape == shapes[0][0]}


def _mean(values: Mapping[int, NDArray[np.float64]], weights: Mapping[int, float]) -> float | list[float]:
    if not values:
        return math.nan
    shares = np.array([weights[client] for client in values])
    shares /= shares.max()  # the sum of large weights may be infinite
    shares /= shares.sum()
    mean: float | list[float] = np.sum([s * array for s, array in zip(shares, values.values())], axis=0).tolist()
    return mean


def _found(metrics: Metrics, names: Sequence[str]) -> str:
    """What a node reports under these names, in words."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    texts = [reprlib.repr(metrics[name]) if name in metrics else "missing" for name in names[:MOST_NAMED]]
    return ", ".join(f"{name[:LONGEST_NAME]} is {text}" for name, text in zip(names, texts)) + more


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
