"""What apps report of a round or an evaluation, averaged over the nodes."""

from collections.abc import Iterable
from logging import WARNING

from flwr.app import Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

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
