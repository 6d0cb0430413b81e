"""Several seeds: a mean, and the interval in which the true one lies with 95% confidence (Student's t)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """The mean of some runs. One run alone has no interval."""

    mean: float
    half_width: float | None
    values: tuple[float, ...]
    missing: int = 0  # runs in which there was nothing to measure: the target was not reached, say

    def as_json(self) -> dict[str, object]:
        """Mean, bounds and what they come from."""
        low, high = (
            (None, None) if self.half_width is None else (self.mean - self.half_width, self.mean + self.half_width)
        )
        return {"mean": self.mean, "low": low, "high": high, "values": [*self.values], "missing": self.missing}


def estimate(values: Sequence[float | None], confidence: float = CONFIDENCE) -> Estimate | None:
    """Mean and interval of the values that are known: `estimate([0.71, 0.73, 0.72])`."""
    known = tuple(float(value) for value in values if value is not None)
    n = len(known)
    if n == 0:
        return None
    mean = math.fsum(known) / n
    if n == 1:
        return Estimate(mean, None, known, len(values) - n)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in known) / (n - 1))
    return Estimate(mean, student_t(n - 1, confidence) * deviation / math.sqrt(n), known, len(values) - n)


@cache
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
