"""Bandwidth-efficient federated learning: GlueFL and its baselines, simulated and on a real wire.

>>> from gluefl import GlueFL, Sticky, train
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# Names are imported when they are first used: torch alone takes seconds, and `gluefl --help` should not.
_HOMES = {
    "FedAvg": "gluefl.strategies.fedavg",
    "STC": "gluefl.strategies.stc",
    "APF": "gluefl.strategies.apf",
    "GlueFL": "gluefl.strategies.gluefl",
    "Lean": "gluefl.strategies.lean",
    "Uniform": "gluefl.core.sampling",
    "Sticky": "gluefl.core.sampling",
    "Fleet": "gluefl.fleet",
    "Instant": "gluefl.fleet",
    "Arrivals": "gluefl.fleet",
    "LocalSGD": "gluefl.clients.rules",
    "TorchOptimizer": "gluefl.clients.rules",
    "LocalAdam": "gluefl.clients.optimisers",
    "Scaffold": "gluefl.clients.optimisers",
    "Clipped": "gluefl.clients.optimisers",
    "Falling": "gluefl.clients.schedules",
    "Metric": "gluefl.clients.metrics",
    "Evaluation": "gluefl.simulation.settings",
    "Options": "gluefl.simulation.settings",
    "Setting": "gluefl.simulation.settings",
    "Server": "gluefl.core.optimizer",
    "Adam": "gluefl.core.optimizer",
    "Yogi": "gluefl.core.optimizer",
    "Adagrad": "gluefl.core.optimizer",
    "Averaging": "gluefl.core.averaging",
    "Samples": "gluefl.populations",
    "HeldOut": "gluefl.populations.held_out",
    "Result": "gluefl.simulation.result",
    "EarlyStopping": "gluefl.watching.stopping",
    "TimeLimit": "gluefl.watching.stopping",
    "BestModel": "gluefl.watching.best",
    "TensorBoard": "gluefl.watching.tensorboard",
    "MLflow": "gluefl.watching.mlflow",
    "WandB": "gluefl.watching.wandb",
    "from_dataset": "gluefl.populations.dataset",
    "compare": "gluefl.experiments.comparing",
    "load": "gluefl.simulation.loading",
    "train": "gluefl.simulation.run",
    "plan": "gluefl.experiments.theory.planning",
}

__all__ = [
    "APF",
    "STC",
    "Adagrad",
    "Adam",
    "Arrivals",
    "Averaging",
    "BestModel",
    "Clipped",
    "EarlyStopping",
    "Evaluation",
    "Falling",
    "FedAvg",
    "Fleet",
    "GlueFL",
    "HeldOut",
    "Instant",
    "Lean",
    "LocalAdam",
    "LocalSGD",
    "MLflow",
    "Metric",
    "Options",
    "Result",
    "Samples",
    "Scaffold",
    "Server",
    "Setting",
    "Sticky",
    "TensorBoard",
    "TimeLimit",
    "TorchOptimizer",
    "Uniform",
    "WandB",
    "Yogi",
    "compare",
    "from_dataset",
    "load",
    "plan",
    "train",
]

if TYPE_CHECKING:
    from gluefl.clients.metrics import Metric
    from gluefl.clients.optimisers import Clipped, LocalAdam, Scaffold
    from gluefl.clients.rules import LocalSGD, TorchOptimizer
    from gluefl.clients.schedules import Falling
    from gluefl.core.averaging import Averaging
    from gluefl.core.optimizer import Adagrad, Adam, Server, Yogi
    from gluefl.core.sampling import Sticky, Uniform
    from gluefl.experiments.comparing import compare
    from gluefl.experiments.theory.planning import plan
    from gluefl.fleet import Arrivals, Fleet, Instant
    from gluefl.populations import Samples
    from gluefl.populations.dataset import from_dataset
    from gluefl.populations.held_out import HeldOut
    from gluefl.simulation.loading import load
    from gluefl.simulation.result import Result
    from gluefl.simulation.run import train
    from gluefl.simulation.settings import Evaluation, Options, Setting
    from gluefl.strategies.apf import APF
    from gluefl.strategies.fedavg import FedAvg
    from gluefl.strategies.gluefl import GlueFL
    from gluefl.strategies.lean import Lean
    from gluefl.strategies.stc import STC
    from gluefl.watching.best import BestModel
    from gluefl.watching.mlflow import MLflow
    from gluefl.watching.stopping import EarlyStopping, TimeLimit
    from gluefl.watching.tensorboard import TensorBoard
    from gluefl.watching.wandb import WandB


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gluefl' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
