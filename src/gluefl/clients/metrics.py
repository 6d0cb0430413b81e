"""Metrics: by which number models are compared. `Metric` is one of your own, `METRICS` has the others by name."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from gluefl.errors import UsageError, nearest
from gluefl.parameters import checked
from gluefl.scores import SCORES, Format, Score, perplexity

IGNORED = -100  # a label that neither loss nor metric counts, as in torch's cross_entropy

# (outputs, labels) → one number per sample or per label, or the pair of a sum and what it is divided by
Function = Callable[[Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]
Name = Annotated[str, Field(pattern=r"^[\w][\w .,@%+/()-]{0,39}$")]


@checked
@dataclass(frozen=True)
class Metric:
    """A metric by its name in tables and pages, with its direction.

    `function(outputs, labels)` returns one number per sample, or one per label where a sample has many (tokens);
    the metric is the mean of all numbers. Numbers whose label is −100 are left out, where there is one per label. For
    a ratio of two sums it returns both as a pair of tensors. `final` is applied to the mean.

    >>> Metric("MAE", lambda outputs, labels: (outputs - labels).abs(), higher_is_better=False)
    """

    name: Name
    function: Function | None  # None: the loss of the run
    higher_is_better: bool = True
    format: Format = "number"
    final: Callable[[float], float] = float

    @property
    def score(self) -> Score:
        """How it is named, written and compared."""
        return Score(self.name, self.higher_is_better, self.format)

    def sums(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """What is added up over batches, and by what the total is divided."""
        if self.function is None:
            raise UsageError(f"the metric {self.name} is computed from the loss of a run: give one with a function.")
        values = self.function(outputs, labels)
        if isinstance(values, tuple):
            return values[0].sum(), values[1].sum()
        if values.shape == labels.shape and not labels.is_floating_point():
            known = labels != IGNORED
            return torch.where(known, values, 0).sum(), known.sum()
        return values.sum(), torch.full((), values.numel(), device=values.device)


def weight(labels: Tensor) -> Tensor:
    """How much a batch counts in the mean loss: its labels that are not −100; its samples where labels are floats."""
    if labels.is_floating_point():
        return torch.full((), len(labels), device=labels.device)
    return (labels != IGNORED).sum()


def top_1(outputs: Tensor, labels: Tensor) -> Tensor:
    """Whether the best guess is right; classes are dimension 1, as for cross_entropy."""
    return (outputs.argmax(1) == labels).float()


def top_5(outputs: Tensor, labels: Tensor) -> Tensor:
    """Whether one of the five best guesses is right."""
    best = outputs.topk(min(5, outputs.shape[1]), dim=1).indices
    return (best == labels.unsqueeze(1)).any(1).float()


def right_labels(outputs: Tensor, labels: Tensor) -> Tensor:
    """For several labels per sample: whether each output is positive exactly where its label is."""
    return ((fitting(outputs, labels) > 0) == (labels > 0.5)).float()


def f1_sums(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Twice the true positives, and the positives that were expected and guessed: their ratio is F1 over all labels."""
    expected, guessed = labels > 0.5, (fitting(outputs, labels) > 0) & (labels != IGNORED)
    return 2 * (expected & guessed).sum(), expected.sum() + guessed.sum()


def absolute_errors(outputs: Tensor, labels: Tensor) -> Tensor:
    """|output − label|."""
    return (fitting(outputs, labels) - labels).abs()


def squared_errors(outputs: Tensor, labels: Tensor) -> Tensor:
    """(output − label)²."""
    return (fitting(outputs, labels) - labels).square()


def fitting(outputs: Tensor, labels: Tensor) -> Tensor:
    """Outputs (N, 1) as labels (N,) and the other way round. Subtracting them as they are would give (N, N)."""
    if outputs.shape == labels.shape:
        return outputs
    if outputs.numel() == labels.numel() and len(outputs) == len(labels):
        return outputs.reshape(labels.shape)
    raise UsageError(f"outputs {tuple(outputs.shape)} and labels {tuple(labels.shape)} must have the same shape.")


def _named(key: str, function: Function | None, final: Callable[[float], float] = float) -> Metric:
    score = SCORES[key]
    return Metric(score.name, function, score.higher_is_better, score.format, final)


METRICS: dict[str, Metric] = {
    "top1": _named("top1", top_1),
    "top5": _named("top5", top_5),
    "multilabel": _named("multilabel", right_labels),
    "f1": _named("f1", f1_sums),
    "mae": _named("mae", absolute_errors),
    "rmse": _named("rmse", squared_errors, math.sqrt),
    "perplexity": _named("perplexity", None, perplexity),
    "loss": _named("loss", None),
}
TOP_1 = METRICS["top1"]


def key_of(metric: Metric) -> str | None:
    """The name of a metric in `METRICS`; None of one that is not among them."""
    return next((key for key, known in METRICS.items() if known == metric), None)


def metric_of(given: Any) -> Any:
    """A metric by its name, from a function of one's own, or as it is."""
    if isinstance(given, Metric):
        return given
    if isinstance(given, str):
        if given not in METRICS:
            raise ValueError(f"there is no metric of this name{nearest(given, METRICS)}; known: {', '.join(METRICS)}")
        return METRICS[given]
    if not callable(given):
        raise ValueError(f"input should be a Metric, a function, or one of {', '.join(METRICS)}")
    if own := next((metric for metric in METRICS.values() if metric.function is given), None):
        return own
    name = getattr(given, "__name__", "")
    return Metric(name if name.isidentifier() else "metric", given)


AnyMetric = Annotated[Metric, BeforeValidator(metric_of)]
