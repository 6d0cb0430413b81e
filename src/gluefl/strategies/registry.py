"""The strategies by their names, and the sampler each of them comes with in its paper."""

from typing import Any

from gluefl.strategies.apf import APF
from gluefl.strategies.fedavg import FedAvg
from gluefl.strategies.gluefl import GlueFL
from gluefl.strategies.stc import STC

STRATEGIES: dict[str, Any] = {"fedavg": FedAvg, "stc": STC, "apf": APF, "gluefl": GlueFL}
SAMPLING = {"fedavg": "uniform", "stc": "uniform", "apf": "uniform", "gluefl": "sticky"}
