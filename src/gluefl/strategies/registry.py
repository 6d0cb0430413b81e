"""The strategies by name: one row each. Its parameters in TOML are the fields of the class."""

from dataclasses import dataclass
from typing import Any, Literal

from gluefl.strategies.apf import APF
from gluefl.strategies.fedavg import FedAvg
from gluefl.strategies.gluefl import GlueFL
from gluefl.strategies.stc import STC


@dataclass(frozen=True)
class Row:
    """A strategy's dataclass, and the sampler that its paper comes with."""

    kind: type[Any]
    sampler: Literal["uniform", "sticky"] = "uniform"


ROWS = {
    "fedavg": Row(FedAvg),
    "stc": Row(STC),
    "apf": Row(APF),
    "gluefl": Row(GlueFL, "sticky"),
}

STRATEGIES: dict[str, Any] = {name: row.kind for name, row in ROWS.items()}
