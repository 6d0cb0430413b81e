"""The strategies by name: one row each. Its parameters in TOML are the fields of the class."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from gluefl.strategies.apf import APF
from gluefl.strategies.coded import Coded
from gluefl.strategies.fedavg import FedAvg
from gluefl.strategies.gluefl import GlueFL
from gluefl.strategies.lean import Lean
from gluefl.strategies.stc import STC


@dataclass(frozen=True)
class Row:
    """A strategy's dataclass, and what is used with it where a configuration does not say."""

    kind: type[Any]
    sampler: Literal["uniform", "sticky"] = "uniform"
    sticky_size: int = 4  # S/K
    sticky_cohort: Fraction = Fraction(4, 5)  # C/K
    sticky_share: float | None = None  # of the extra invitations; None is C/K
    weights: Literal["unbiased", "proportional"] = "unbiased"
    initial: Literal["download", "known"] = "download"
    average: float = 0.0  # β, of the server's average over versions
    average_span: float = 0.0  # the share of the rounds so far that it reaches back over


ROWS = {
    "fedavg": Row(FedAvg),
    "stc": Row(STC),
    "apf": Row(APF),
    "gluefl": Row(GlueFL, "sticky"),
    "lean": Row(
        Lean,
        "sticky",
        sticky_size=8,
        sticky_share=0.85,
        weights="proportional",
        initial="known",
        average=0.9,
        average_span=0.05,
    ),
}

STRATEGIES: dict[str, Any] = {name: row.kind for name, row in ROWS.items()}


def innermost(strategy: Any) -> Any:
    """The strategy inside of those that are around another one."""
    while hasattr(strategy, "strategy"):
        strategy = strategy.strategy
    return strategy


def row_of(strategy: Any) -> Row:
    """What is used with a strategy; with one of another kind, what is used with FedAvg."""
    kind = type(innermost(strategy))
    return next((row for row in ROWS.values() if row.kind is kind), ROWS["fedavg"])


def name_of(strategy: Any) -> str:
    """A strategy in summaries: "gluefl", "fedavg (int8 down, rotated up)"."""
    if isinstance(strategy, Coded):
        return f"{name_of(strategy.strategy)} ({strategy.package} down, {strategy.upload} up)"
    own = type(strategy).__name__.lower()
    return f"{name_of(strategy.strategy)} ({own})" if hasattr(strategy, "strategy") else own
