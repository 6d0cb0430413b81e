"""Mean over several seeds, with its 95% confidence interval (Student's t)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """The mean over runs. A single run has no interval."""

    mean: float
    half_width: float | None
    values: tuple[float, ...]
    missing: int = 0  # runs without a value, for example because they did not reach the target

    def as_json(self) -> dict[str, object]:
        """Mean, bounds, and the values they were computed from."""
        low, high = (
            (None, None) if self.half_width is None else (self.mean - self.half_width, self.mean + self.half_width)
        )
        return {"mean": self.mean, "low": low, "high": high, "values": [*self.values], "missing": self.missing}

    @classmethod
    def of_json(cls, cell: Mapping[str, Any]) -> "Estimate":
        """What was written as JSON, computed again from the values; one number stands for itself."""
        again = estimate(cell["values"])
        if again is None:
            raise ValueError("an estimate without values")
        return replace(again, missing=cell["missing"])


def estimate(values: Sequence[float | None], confidence: float = CONFIDENCE) -> Estimate | None:
    """Mean and interval of the values that are not None: `estimate([0.71, 0.73, 0.72])`."""
    measured = tuple(float(value) for value in values if value is not None)
    n = len(measured)
    if n == 0:
        return None
    mean = math.fsum(measured) / n
    if n == 1:
        return Estimate(mean, None, measured, len(values) - n)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in measured) / (n - 1))
    return Estimate(mean, student_t(n - 1, confidence) * deviation / math.sqrt(n), measured, len(values) - n)


def student_t(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The t with P(|T| < t) = confidence: 4.303 for two degrees of freedom and 95%."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < confidence else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def _inside(angle: float, freedom: int) -> float:
    """P(|T| < t) at t = tan(angle)·√freedom, by its finite series."""
    odd = freedom % 2
    cosine, term, total = math.cos(angle), 1.0, 0.0
    if odd:
        term = cosine
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    total *= math.sin(angle)
    return (angle + total) * 2 / math.pi if odd else total
