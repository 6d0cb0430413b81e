"""Which trainer a model and a rule get."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gluefl.clients.cohort import Trainer
from gluefl.clients.precision import check_precision, precision_of
from gluefl.clients.rules import LocalRule, Loss, TorchOptimizer
from gluefl.clients.trainers.chain import dense_layers
from gluefl.clients.trainers.dense import Dense
from gluefl.clients.trainers.loop import Loop
from gluefl.clients.trainers.stacked import Stacked
from gluefl.clients.trainers.workers import Workers
from gluefl.errors import UsageError
from gluefl.populations import Population, first_samples
from gluefl.populations.inputs import Inputs, applied, at, parts
from gluefl.vectors.frozen import copied
from gluefl.vectors.layout import Layout

DENSE_LIMIT = 1_000_000  # parameters; above it the products of single clients fill a core alone
AUGMENTATION = "Store augmented samples, or make augmentation a part of the model, which is random in training only."
TRAINERS = ("auto", "loop", "workers", "dense", "stacked")


def choose(
    name: str,
    module: nn.Module,
    layout: Layout,
    population: Population,
    loss: Loss,
    device: torch.device,
    rule: LocalRule,
) -> Trainer:
    """A trainer by its name, or the one that measured fastest for this kind of model (docs/performance.md)."""
    if name not in TRAINERS:
        raise UsageError(f"training.trainer = '{name}' is unknown; there are {', '.join(TRAINERS)}.")
    pass_ = probe(module, layout, population)
    if pass_.untracked:
        raise UsageError(
            f"{type(module).__name__} changes the buffer '{pass_.untracked[0]}' in training, and it would not reach "
            "the server: name it in `tracked_buffers` of the module it belongs to (gluefl.vectors.layout)."
        )
    if pass_.augmented:
        raise UsageError(f"the population's transform draws random numbers; it must be deterministic. {AUGMENTATION}")
    if pass_.mixed:
        raise UsageError(
            "the population's transform gives two samples together another result than each of them alone; it must be "
            f"deterministic and treat every sample by itself: measure means and maxima beforehand. {AUGMENTATION}"
        )
    flat = not isinstance(rule, TorchOptimizer)
    rounded = [part for part in layout.weights if part.dtype != layout.dtype]
    if rounded and name not in ("auto", "loop"):
        raise UsageError(
            f"training.trainer = '{name}' keeps weights as the module does, and '{rounded[0].name}' is "
            f"{rounded[0].dtype}, which loses small steps: use 'loop', or a module in float32."
        )
    stackable = flat and not pass_.random and bool(getattr(module, "stackable", True))
    check_precision(precision_of(rule), device)
    plain = type(rule) in Dense.fuses and precision_of(rule) is None
    dense = plain and is_chain(module, population) and pass_.single
    if name == "auto":
        name = "loop" if rounded else _best(module, device, pass_.random, dense, stackable)
    if name == "stacked" and not flat:
        raise UsageError("training.trainer = 'stacked' runs rules on flat tensors, not torch.optim: use 'loop'.")
    if name == "stacked" and not stackable:
        raise UsageError(f"{type(module).__name__} cannot be stacked: train it with training.trainer = 'loop'.")
    if name == "workers" and (device.type != "cpu" or pass_.random):
        raise UsageError("training.trainer = 'workers' is for CPU cores and models without dropout: use 'loop'.")
    if name == "dense" and (device.type != "cpu" or not dense):
        raise UsageError(
            "training.trainer = 'dense' is for chains of Linear and ReLU on a CPU, trained by LocalSGD in float32: "
            "use 'workers'."
        )
    kind = {"dense": Dense, "workers": Workers, "stacked": Stacked, "loop": Loop}[name]
    trainer: Trainer = kind(module, layout, population.transform, loss)
    return trainer


def is_chain(module: nn.Module, population: Population) -> bool:
    """Whether `dense` computes what the module does: it gives every sample as one row."""
    layers = dense_layers(module)
    return layers is not None and (isinstance(layers[0][1], nn.Flatten) or len(population.shape) == 1)


@dataclass(frozen=True)
class Pass:
    """What a forward pass in training mode does besides computing outputs."""

    random: bool = False  # it draws random numbers, from a generator that threads would share
    untracked: tuple[str, ...] = ()  # buffers that it changes and that are no statistics of the layout
    single: bool = True  # raw and transformed inputs are one tensor each
    augmented: bool = False  # the population's transform draws random numbers
    mixed: bool = False  # what it makes of a sample depends on the others of the batch


def probe(module: nn.Module, layout: Layout, population: Population) -> Pass:
    """One forward pass on a copy and two samples. Dropout may be a module, an option of a layer, or a function in the
    middle of the forward pass, so that only a pass can tell."""
    draws = any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in module.modules())
    draws |= any(isinstance(m, nn.RReLU) for m in module.modules())  # which draws for negative inputs only
    device = next(module.parameters()).device
    probed = copied(module).train()
    tracked = {part.name for part in layout.statistics}
    constants = {name: buffer.clone() for name, buffer in probed.named_buffers() if name not in tracked}
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        try:
            own = first_samples(population)
            raw = own[torch.arange(2) % len(own)].to(device).inputs
            alone = [at(raw, [row]) for row in range(2)]  # copies: a transform may write into its inputs
            untouched = _generators(device)
            two = population.transform(raw)
            augmented = not _equal(untouched, _generators(device))
            mixed = not all(_alike(at(two, [row]), population.transform(one)) for row, one in enumerate(alone))
            single = isinstance(raw, Tensor) and isinstance(two, Tensor)
            before = _generators(device)
            applied(probed, two)
        except Exception:
            return Pass(draws)  # the training itself says what is wrong with the model or its data
        random = not _equal(before, _generators(device))
    after = dict(probed.named_buffers())
    changed = [name for name, old in constants.items() if not _same(old, after[name])]
    return Pass(random or draws, tuple(changed), single, augmented, mixed)


def _same(old: Tensor, new: Tensor) -> bool:
    return old.shape == new.shape and bool(torch.eq(old, new).logical_or(old.isnan() & new.isnan()).all())


def _equal(before: list[Tensor], after: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def _alike(found: Inputs, expected: Inputs) -> bool:
    """Whether inputs are equal up to rounding, which depends on the shape of a batch; that of TF32 is coarse."""
    for a, b in zip(parts(found), parts(expected), strict=True):
        a, b, share = a.double(), b.double(), 1e-2 if a.is_cuda else 1e-4
        limit = share * float(a.nan_to_num().abs().max()) if a.numel() else 0.0
        if a.shape != b.shape or not torch.allclose(a, b, rtol=0, atol=limit, equal_nan=True):
            return False
    return True


def _generators(device: torch.device) -> list[Tensor]:
    states = [torch.random.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _best(module: nn.Module, device: torch.device, random: bool, dense: bool, stackable: bool) -> str:
    if random:
        return "loop"
    if device.type != "cpu":
        return "stacked" if stackable else "loop"
    small = sum(parameter.numel() for parameter in module.parameters()) <= DENSE_LIMIT
    return "dense" if small and dense else "workers"
