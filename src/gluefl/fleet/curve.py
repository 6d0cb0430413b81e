"""The share of clients online over the day, as calibrated on the GlueFL authors' runs."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np

from gluefl.fleet.noise import Floats
from gluefl.fleet.shipped import rows

DAY_S = 86_400.0
CLOCKS = 1 << 10  # moments whose threshold is kept: all clients of a round ask for the same one


@dataclass(frozen=True, eq=False)
class OnlineCurve:
    """Knots of the share online, as normal quantiles: between two knots the threshold is a straight line.

    The table holds the first day, which starts low, and then the day that repeats. `OnlineCurve.shipped().share(0.0)`
    is 30%; from the second day on the share varies between 40% and 66%.
    """

    knots_s: Floats
    quantiles: Floats

    @classmethod
    def shipped(cls) -> "OnlineCurve":
        """Read the table of the package."""
        table = rows("online_fraction.csv")
        quantiles = [NormalDist().inv_cdf(float(row["fraction"])) for row in table]
        return cls(np.array([float(row["clock_s"]) for row in table]), np.array(quantiles))

    def thresholds(self, clock_s: Floats) -> Floats:
        """The normal quantile of the share online at several moments."""
        return np.interp(np.where(clock_s < DAY_S, clock_s, DAY_S + clock_s % DAY_S), self.knots_s, self.quantiles)

    @cached_property
    def threshold(self) -> Callable[[float], float]:
        """The same for one moment; the last results are kept."""
        return functools.lru_cache(CLOCKS)(self._threshold)

    def _threshold(self, clock_s: float) -> float:
        within_s = clock_s if clock_s < DAY_S else DAY_S + clock_s % DAY_S
        return float(np.interp(within_s, self.knots_s, self.quantiles))

    def share(self, clock_s: float) -> float:
        """The share of clients online."""
        return NormalDist().cdf(self.threshold(clock_s))

    def knots_between(self, start_s: float, end_s: float) -> Floats:
        """The moments between start and end at which the slope changes."""
        first_day, daily = self.knots_s[self.knots_s < DAY_S], self.knots_s[self.knots_s >= DAY_S] - DAY_S
        days = np.arange(max(1, start_s // DAY_S), end_s // DAY_S + 1)
        every = np.concatenate([first_day, (days[:, None] * DAY_S + daily).ravel()])
        return every[(every > start_s) & (every < end_s)]

    @cached_property
    def next_knot_s(self) -> Callable[[float], float]:
        """The next moment at which the slope changes; the last results are kept."""
        return functools.lru_cache(CLOCKS)(self._next_knot_s)

    def _next_knot_s(self, clock_s: float) -> float:
        # The table's second day, moved to the day of this moment.
        day_s = 0.0 if clock_s < DAY_S else clock_s // DAY_S * DAY_S - DAY_S
        later = np.searchsorted(self.knots_s, clock_s - day_s, side="right")
        return float(self.knots_s[later]) + day_s if later < len(self.knots_s) else day_s + 2 * DAY_S
