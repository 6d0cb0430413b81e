"""Scores: how the value of a metric is named, written and compared. `clients/metrics.py` computes the values."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Format = Literal["percent", "number"]


@dataclass(frozen=True)
class Score:
    """The name of a metric, its direction, and whether it is written in percent."""

    name: str = "accuracy"
    higher_is_better: bool = True
    format: Format = "percent"

    @property
    def title(self) -> str:
        """The name at the beginning of a sentence."""
        return self.name[:1].upper() + self.name[1:]

    @property
    def is_share(self) -> bool:
        """Whether values lie between 0 and 1 and are written in percent."""
        return self.format == "percent"

    @property
    def pattern(self) -> str:
        """How numbers are written."""
        return "{:.1%}" if self.is_share else "{:.4g}"

    def text(self, value: float) -> str:
        """A value: 84.2% or 0.3421."""
        return self.pattern.format(value)

    def short(self, value: float) -> str:
        """A value without a trailing zero: 80%."""
        return self.text(value).replace(".0%", "%")

    def reached(self, value: float, target: float) -> bool:
        """Whether a value is at least as good as a target."""
        return value >= target if self.higher_is_better else value <= target

    def best(self, values: Iterable[float]) -> float | None:
        """The best of these values, None if there are none."""
        choose = max if self.higher_is_better else min
        return choose(values, default=None)

    def worst(self, values: Iterable[float]) -> float | None:
        """The worst of these values, None if there are none."""
        choose = min if self.higher_is_better else max
        return choose(values, default=None)

    def aim(self, target: float) -> str:
        """A target in words: 80% accuracy, MAE ≤ 0.5."""
        text = self.short(target)
        if self.is_share and self.higher_is_better:
            return f"{text} {self.name}"
        return f"{self.name} {'≥' if self.higher_is_better else '≤'} {text}"

    def relaxed(self, value: float) -> float:
        """The nearest number of few digits that is not better: 0.1% steps, or three digits."""
        if not value or not math.isfinite(value):
            return value
        factor = 1000 if self.is_share else 10.0 ** (2 - math.floor(math.log10(abs(value))))
        return (math.floor if self.higher_is_better else math.ceil)(value * factor) / factor

    def problem(self, target: float | None) -> str | None:
        """Why no value can be compared with this target; None if it can be."""
        if target is None or not self.is_share or 0 < target <= 1:
            return None
        without = "; a run without a target needs no such key" if not target else ""
        return f"{self.name} lies between 0 and 1, where 80% is 0.8; found {target:g}{without}"

    def on(self, samples: str) -> "Score":
        """The same on other samples than the test set: validation accuracy."""
        return self if samples == "test" else replace(self, name=f"{samples} {self.name}")

    def keys(self) -> dict[str, Any]:
        """Its part of a summary."""
        return {"metric": self.name, "higher_is_better": self.higher_is_better, "metric_format": self.format}

    @classmethod
    def of_summary(cls, summary: Mapping[str, Any]) -> "Score":
        """As a summary names it, with the samples it was measured on; that of older runs is the accuracy."""
        score = cls(
            str(summary.get("metric", cls.name)),
            bool(summary.get("higher_is_better", True)),
            "number" if summary.get("metric_format") == "number" else "percent",
        )
        return score.on(str(summary.get("evaluated_on", "test")))

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> "Score":
        """As `config.toml` names it, by dotted key, while a run has no summary yet."""
        name = config.get("evaluation.metric", "top1")
        samples = "validation" if config.get("evaluation.held_out") is not None else "test"
        if name in SCORES and "evaluation.higher_is_better" not in config:  # which is written for one of the user's own
            return SCORES[name].on(samples)
        return cls(
            str(name),
            bool(config.get("evaluation.higher_is_better", True)),
            "percent" if config.get("evaluation.metric_format") == "percent" else "number",
        ).on(samples)


def perplexity(loss: float) -> float:
    """e^loss, for text; no loss makes it overflow."""
    return math.exp(min(loss, 700.0))


# The metrics that a configuration can name.
SCORES = {
    "top1": Score(),
    "top5": Score("top-5 accuracy"),
    "multilabel": Score("label accuracy"),
    "f1": Score("F1", format="number"),
    "mae": Score("MAE", higher_is_better=False, format="number"),
    "rmse": Score("RMSE", higher_is_better=False, format="number"),
    "perplexity": Score("perplexity", higher_is_better=False, format="number"),
    "loss": Score("loss", higher_is_better=False, format="number"),
}
