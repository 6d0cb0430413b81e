"""Numbers that are read together: one unit for a column, and ratios in words."""

import math
from collections.abc import Iterable

Units = tuple[tuple[int, str], ...]
VOLUMES: Units = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "B"))
TIMES: Units = ((3600, "h"), (60, "min"), (1, "s"))


def unit(units: Units, numbers: Iterable[float]) -> tuple[float, str]:
    """Factor and name of one unit for all numbers: the largest in which the smallest is not below 1."""
    if not units:
        return 1, ""
    smallest = min((number for number in numbers if number > 0), default=1)
    return next(((factor, name) for factor, name in units if smallest >= factor), units[-1])


def places(number: float) -> int:
    """Decimals that give a number three digits."""
    return max(0, 2 - math.floor(math.log10(number))) if number > 0 else 0


def times(ratio: float, at_least: bool = False) -> str:
    """A ratio in words, `33.8 times less`; with `at_least` it is a lower bound."""
    if ratio <= 0:
        return "nothing"
    if ratio < 0.98:
        return f"{'≤ ' if at_least else ''}{1 / ratio:.3g} times less"
    if ratio > 1.02:
        return f"{'≥ ' if at_least else ''}{ratio:.3g} times more"
    return "≥ the same" if at_least else "about the same"
