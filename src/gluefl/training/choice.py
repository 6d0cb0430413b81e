"""Which trainer a model gets."""

import torch
from torch import nn

from gluefl.errors import UsageError
from gluefl.layout import Layout
from gluefl.populations import Population
from gluefl.training import Loss, Trainer
from gluefl.training.dense import Dense, dense_layers
from gluefl.training.loop import Loop
from gluefl.training.stacked import Stacked
from gluefl.training.workers import Workers

DENSE_LIMIT = 1_000_000  # parameters; above it the products of single clients fill a core by themselves
TRAINERS = ("auto", "loop", "workers", "dense", "stacked")


def choose(
    name: str, module: nn.Module, layout: Layout, population: Population, loss: Loss, device: torch.device
) -> Trainer:
    """A trainer by its name, or the one that measured fastest for this kind of model (docs/performance.md)."""
    if name not in TRAINERS:
        raise UsageError(f"training.trainer = '{name}' is unknown; there are {', '.join(TRAINERS)}.")
    if name == "auto":
        name = _best(module, device)
    if name == "stacked" and not stackable(module):
        raise UsageError(f"{type(module).__name__} cannot be stacked: train it with training.trainer = 'loop'.")
    if name == "workers" and (device.type != "cpu" or is_random(module)):
        raise UsageError("training.trainer = 'workers' is for CPU cores and models without dropout: use 'loop'.")
    if name == "dense" and (device.type != "cpu" or dense_layers(module) is None):
        raise UsageError("training.trainer = 'dense' is for chains of Linear and ReLU on a CPU: use 'workers'.")
    if name == "dense":
        return Dense(module, layout, population.transform, loss)
    if name == "workers":
        return Workers(module, layout, population.transform, loss)
    if name == "stacked":
        return Stacked(module, layout, population.transform, loss)
    return Loop(module, layout, population.transform, loss)


def stackable(module: nn.Module) -> bool:
    """Whether vmap can train it: no randomness in the forward pass, and no word of its own against it."""
    return not is_random(module) and bool(getattr(module, "stackable", True))


def is_random(module: nn.Module) -> bool:
    """Whether its forward pass draws random numbers, from a generator that threads would share."""
    return any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in module.modules())


def _best(module: nn.Module, device: torch.device) -> str:
    if is_random(module):
        return "loop"
    if device.type != "cpu":
        return "stacked" if stackable(module) else "loop"
    small = sum(parameter.numel() for parameter in module.parameters()) <= DENSE_LIMIT
    return "dense" if small and dense_layers(module) is not None else "workers"
