"""Which trainer a model gets."""

import copy

import torch
from torch import Tensor, nn

from gluefl.clients.rules import Loss, Trainer
from gluefl.clients.trainers.dense import Dense, dense_layers
from gluefl.clients.trainers.loop import Loop
from gluefl.clients.trainers.stacked import Stacked
from gluefl.clients.trainers.workers import Workers
from gluefl.errors import UsageError
from gluefl.populations import Population
from gluefl.vectors.layout import Layout

DENSE_LIMIT = 1_000_000  # parameters; above it the products of single clients fill a core by themselves
TRAINERS = ("auto", "loop", "workers", "dense", "stacked")


def choose(
    name: str, module: nn.Module, layout: Layout, population: Population, loss: Loss, device: torch.device
) -> Trainer:
    """A trainer by its name, or the one that measured fastest for this kind of model (docs/performance.md)."""
    if name not in TRAINERS:
        raise UsageError(f"training.trainer = '{name}' is unknown; there are {', '.join(TRAINERS)}.")
    random, chain = is_random(module, population), is_chain(module, population)
    stackable = not random and bool(getattr(module, "stackable", True))
    if name == "auto":
        name = _best(module, device, random, chain, stackable)
    if name == "stacked" and not stackable:
        raise UsageError(f"{type(module).__name__} cannot be stacked: train it with training.trainer = 'loop'.")
    if name == "workers" and (device.type != "cpu" or random):
        raise UsageError("training.trainer = 'workers' is for CPU cores and models without dropout: use 'loop'.")
    if name == "dense" and (device.type != "cpu" or not chain):
        raise UsageError("training.trainer = 'dense' is for chains of Linear and ReLU on a CPU: use 'workers'.")
    if name == "dense":
        return Dense(module, layout, population.transform, loss)
    if name == "workers":
        return Workers(module, layout, population.transform, loss)
    if name == "stacked":
        return Stacked(module, layout, population.transform, loss)
    return Loop(module, layout, population.transform, loss)


def is_chain(module: nn.Module, population: Population) -> bool:
    """Whether `dense` computes what the module does: it gives every sample as one row."""
    layers = dense_layers(module)
    return layers is not None and (isinstance(layers[0][1], nn.Flatten) or len(population.shape) == 1)


def is_random(module: nn.Module, population: Population) -> bool:
    """Whether its forward pass draws random numbers, from a generator that threads would share. One is made, on a
    copy and two samples: dropout may be a module, an option of a layer, or a function in the middle of a pass."""
    if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in module.modules()):
        return True
    device = next(module.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        try:
            inputs = population.train(0).inputs
            two = population.transform(inputs[torch.arange(2) % len(inputs)].to(device))
            before = _generators(device)  # what the transform draws is not the model's
            copy.deepcopy(module).train()(two)
        except Exception:
            return False  # what is wrong with the model or its data is said when it is trained
        return not all(torch.equal(a, b) for a, b in zip(before, _generators(device)))


def _generators(device: torch.device) -> list[Tensor]:
    states = [torch.random.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _best(module: nn.Module, device: torch.device, random: bool, chain: bool, stackable: bool) -> str:
    if random:
        return "loop"
    if device.type != "cpu":
        return "stacked" if stackable else "loop"
    small = sum(parameter.numel() for parameter in module.parameters()) <= DENSE_LIMIT
    return "dense" if small and chain else "workers"
