"""What `train` refuses, in words: arguments of the wrong kind, and data, model, loss or metric that do not fit."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from gluefl.clients.metrics import IGNORED
from gluefl.errors import GlueFLError, UsageError
from gluefl.parameters import Has, NonNegativeCount, check
from gluefl.populations import PROBED, Population, Samples, first_samples, samples_of
from gluefl.populations.inputs import KINDS, applied, form
from gluefl.populations.inputs import problem as problem_of
from gluefl.randomness import stream
from gluefl.simulation.settings import Options, Setting
from gluefl.vectors.frozen import copied, frozen_digest, frozen_parameters
from gluefl.vectors.layout import check_initialised, evaluating
from gluefl.watching import BY_CALLBACK

DIFFERENCES = tuple(getattr(nn.functional, f"{name}_loss") for name in ("mse", "l1", "smooth_l1", "huber"))
FROZEN = "frozen"  # in the metadata of a model's file: the digest of the part that it leaves out
AnyPopulation = Annotated[Any, Has(("clients", "classes", "shape", "size", "train", "test", "transform"))]


def check_arguments(*arguments: Any) -> None:
    """Refuse arguments of `train` that cannot be used, all of them in one message."""
    kinds: dict[str, Any] = {
        "model": nn.Module,
        "population": AnyPopulation,
        "sampler": Annotated[Any, Has(("cohort", "check", "init", "invite", "next_state"))] | None,
        "rounds": NonNegativeCount,
        "setting": Setting | None,
        "options": Options | None,
    }
    check("train", **{name: (kind, value) for (name, kind), value in zip(kinds.items(), arguments, strict=True)})
    model, population, _, _, setting, _ = arguments
    check_initialised(model)
    if setting is not None and hasattr(setting.devices, "check"):  # traces may know fewer clients
        setting.devices.check(population.clients)


def copy_of(model: nn.Module) -> nn.Module:
    """A copy of a module with parameters of its own; frozen ones are shared."""
    try:
        return copied(model)
    except Exception as error:
        raise UsageError(
            f"{type(model).__name__} cannot be copied, and every worker needs a copy: {error}. Remove what "
            "copy.deepcopy refuses from the module: a lock, an open file, a tensor with a gradient. Instead of "
            "nn.utils.weight_norm use nn.utils.parametrizations.weight_norm."
        ) from error


def load_weights(module: nn.Module, path: Path | str) -> None:
    """Load a safetensors file into a module. A file without the frozen part fits a module that has the same one."""
    try:
        with safe_open(path, framework="pt") as file:
            digest = (file.metadata() or {}).get(FROZEN)
        tensors, frozen = load_file(path), frozen_parameters(module)
    except Exception as error:
        raise UsageError(f"{path} does not fit this model: {error}") from error
    if digest is not None and digest != frozen_digest(module):
        raise UsageError(
            f"{path} holds the trained part of a model, {len(tensors)} tensors, without its frozen part: give the "
            "model that the run was started with, with the same base weights frozen. "
            + ("The frozen part of this one differs." if frozen else "This one has no frozen parameters.")
        )
    for name in frozen.keys() & tensors.keys():
        frozen[name].data = frozen[name].data.clone()  # the original shares this memory
    left_out = frozen.keys() - tensors.keys() if digest is not None else set()
    try:
        missing, unexpected = module.load_state_dict(tensors, strict=False)
        if wrong := [*sorted(set(missing) - left_out), *unexpected]:
            raise ValueError(f"{', '.join(wrong[:5])} {'is' if len(wrong) == 1 else 'are'} missing or too many")
    except Exception as error:
        raise UsageError(f"{path} does not fit this model: {error}") from error


@contextmanager
def explained(model: nn.Module, population: Population, setting: Setting) -> Iterator[None]:
    """Replace an error of torch or Python by the reason, where data, model, loss or metric do not fit together.

    Nothing is examined unless a run fails, so that a run that works pays nothing.
    """
    try:
        yield
    except (GlueFLError, OSError, MemoryError):
        raise
    except Exception as error:
        if BY_CALLBACK in getattr(error, "__notes__", ()):
            raise
        reason = misfit(model, population, setting)
        if reason is None:
            raise
        raise UsageError(reason) from error


def misfit(model: nn.Module, population: Population, setting: Setting) -> str | None:
    """Why samples of this population cannot be used with this model, loss and metric; None if they can."""
    try:
        test = samples_of(population.test(), "test")
        reason = _of_samples(test, population.classes, "the test samples", setting)
        for client in range(min(population.clients, PROBED)):
            if reason is None and population.size(client):
                own = samples_of(population.train(client), "train")
                reason = _of_samples(own, population.classes, f"client {client}", setting)
        return reason or unfit(model, population, setting, test) or _untrainable(model, population, setting)
    except GlueFLError as error:
        return str(error)
    except Exception:  # the population's own fault, and its error says more
        return None


def _of_samples(samples: Samples, classes: int, owner: str, setting: Setting) -> str | None:
    labels = samples.labels
    if setting.loss is not nn.functional.cross_entropy or not len(samples):
        return None
    column = labels.dim() > 1 and labels[0].numel() == 1
    if labels.is_floating_point() or column:
        if labels.is_floating_point() and labels.dim() == 2:
            return None  # probabilities of classes
        found = f"{labels.dtype} {tuple(labels.shape)}"
        return f"{owner}: cross_entropy needs labels as one whole number per sample; found {found}."
    known = labels[labels != IGNORED]
    lowest, highest = (int(known.min()), int(known.max())) if len(known) else (0, 0)
    if lowest >= 0 and highest < classes:
        return None
    return f"{owner}: labels must lie between 0 and classes − 1 = {classes - 1}; found {lowest} to {highest}."


@torch.no_grad()
def unfit(model: nn.Module, population: Population, setting: Setting, samples: Samples) -> str | None:
    """Why model, loss and metric cannot be applied to the first two of these samples; None if they can."""
    two = samples[:2].to(next(model.parameters()).device).copied()
    labels, step = two.labels, f"the population cannot transform inputs of {form(two.inputs)}"
    try:
        inputs = population.transform(two.inputs)
        if problem := problem_of(inputs):
            return f"the population's transform must return {KINDS}; found {problem}."
        kind = next(model.parameters()).dtype
        step = f"the model, whose weights are {kind}, cannot be applied to inputs of {form(inputs)}"
        with evaluating(model):
            outputs = applied(model, inputs)
        step = f"the loss cannot be applied to the model's {form(outputs)} and labels of {form(labels)}"
        loss = setting.loss(outputs, labels)
        if not isinstance(loss, Tensor) or loss.dim():
            return f"the loss must return one number as a tensor without dimensions; found {form(loss)}."
        step = f"the metric cannot be applied to the model's {form(outputs)} and labels of {form(labels)}"
        function = setting.evaluation.metric.function
        if function is not None and not _is_metric(values := function(outputs, labels), labels):
            return (
                "the metric must return one number per sample or per label as a tensor, or a sum and its divisor as a "
                f"pair of tensors; found {form(values)}."
            )
    except Exception as error:
        return f"{step}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return None


def _untrainable(model: nn.Module, population: Population, setting: Setting) -> str | None:
    samples = first_samples(population)
    try:
        batches = setting.training.batches(stream(setting.seed, "probe"), len(samples))
        own = samples[batches[0]].to(next(model.parameters()).device)
        loss = setting.loss(applied(copied(model).train(), population.transform(own.inputs)), own.labels)
    except Exception as error:
        return f"the model cannot be trained on a batch of {setting.training.batch} samples: {error}"
    return None if loss.requires_grad else "the loss does not depend on the model's weights: it has no gradient."


def _is_metric(values: object, labels: Tensor) -> bool:
    if isinstance(values, tuple):
        return len(values) == 2 and all(isinstance(value, Tensor) for value in values)
    return isinstance(values, Tensor) and (values.dim() == 1 or values.shape == labels.shape)


@torch.no_grad()
def check_shapes(model: nn.Module, population: Population, setting: Setting) -> None:
    """Refuse outputs (N, 1) for labels (N,) and the like, from which a loss of differences makes (N, N) errors."""
    if setting.loss not in DIFFERENCES:
        return
    two = first_samples(population)[:2].to(next(model.parameters()).device).copied()
    with evaluating(model):
        outputs = applied(model, population.transform(two.inputs))
    if outputs.shape != two.labels.shape:
        raise UsageError(
            f"the model gives {tuple(outputs.shape)} for labels {tuple(two.labels.shape)}: {setting.loss.__name__} "
            "needs the same shape. Give the labels that shape, or let the model end with nn.Flatten(0)."
        )
