"""The window of evaluations whose mean is compared with a target, in words, and whether a result depends on it."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Summary = Mapping[str, Any]


def window(summaries: Sequence[Summary]) -> str:
    """What an accuracy is the mean of: "mean of the last 5 evaluations, 25 rounds"."""
    windows = {(summary["window_evaluations"], summary["window_rounds"]) for summary in summaries}
    if any(rounds is not None for _, rounds in windows):  # some runs have no evaluation yet
        windows = {(evaluations, rounds) for evaluations, rounds in windows if rounds is not None}
    if len(windows) != 1:
        return "mean of the last evaluations; the windows differ"
    evaluations, rounds = windows.pop()
    if rounds is None:
        return "no evaluation yet"
    if evaluations == 1:
        return f"single evaluations, every {rounds} round{'s' if rounds > 1 else ''}"
    if all(summary["rounds"] < rounds for summary in summaries):
        return f"mean of all evaluations, at most {evaluations}"
    return f"mean of the last {evaluations} evaluations, {rounds} rounds"


def remark(runs: Mapping[str, Sequence[Summary]]) -> str:
    """Whether single evaluations would put the strategies into another order by download; empty without an order."""
    summaries = [summary for repetitions in runs.values() for summary in repetitions]
    if len(runs) < 2 or all(summary["window_evaluations"] == 1 for summary in summaries):
        return ""
    order, single = _order(runs, ""), _order(runs, "single_")
    if order == single:
        return "Single evaluations give the same order by download." if len(order) > 1 else ""
    return f"Window-dependent: with single evaluations the order by download is {', '.join(single)}."


def _order(runs: Mapping[str, Sequence[Summary]], prefix: str) -> list[str]:
    """The labels whose runs all reached the target, by their mean download until then."""
    costs = {
        label: statistics.fmean(summary[f"{prefix}down_bytes"] for summary in repetitions)
        for label, repetitions in runs.items()
        if all(summary[f"{prefix}reached_round"] is not None for summary in repetitions)
    }
    return sorted(costs, key=lambda label: costs[label])
