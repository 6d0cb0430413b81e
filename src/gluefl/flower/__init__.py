"""GlueFL, lean, STC, APF and FedAvg in a real federation: a strategy for Flower's server and a mod for its clients.

>>> from gluefl.flower import GlueFLStrategy, gluefl_mod
"""

try:
    import flwr  # noqa: F401
except ImportError as error:
    from gluefl.errors import MissingExtra

    raise MissingExtra("flower", "gluefl.flower") from error

from gluefl.core.guard import Guard
from gluefl.core.robust import Median, TrimmedMean
from gluefl.core.sampling import Sticky, Uniform
from gluefl.flower.mod import GlueFLMod, gluefl_mod
from gluefl.flower.server import GlueFLStrategy

__all__ = ["GlueFLMod", "GlueFLStrategy", "Guard", "Median", "Sticky", "TrimmedMean", "Uniform", "gluefl_mod"]
