"""What a run was started with, beside its configuration: data, module, loss, metric, versions. Resuming compares it."""

import hashlib
import inspect
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gluefl import __version__
from gluefl.clients.metrics import TOP_1, Metric
from gluefl.clients.rules import Loss
from gluefl.errors import UsageError
from gluefl.parameters import checked
from gluefl.populations import Population, Samples, samples_of
from gluefl.populations.held_out import HeldOut
from gluefl.populations.inputs import applied, parts
from gluefl.randomness import stream
from gluefl.storage import toml
from gluefl.storage.described import add_tensors
from gluefl.vectors.layout import Layout, evaluating

# How far outputs and losses may differ, relatively: another CPU rounds differently, a GPU also rounds the factors of
# its products. Another activation or loss is further away.
SAME_ON_CPUS, SAME_ON_A_GPU = 1e-4, 1e-2
PROBED = 8  # test samples
READ, COUNTED = 8, 256  # clients whose samples are read, and whose numbers of samples are
OUTPUTS = 64  # values of the outputs that are kept


@checked
@dataclass(frozen=True)
class Fingerprint:
    """Parameters of the population, hashes of data and module, what model and loss give on a few samples, versions."""

    population: dict[str, Any]
    data: str
    module: str
    loss: str  # its name
    outputs: list[float] | None  # None where the model cannot be evaluated on single samples
    losses: list[float] | None  # of the outputs, and of a pattern that is far from them
    device: str
    versions: dict[str, str]
    metric: list[float] | None = None  # of that pattern: its sums and its value; unknown of earlier versions

    def as_json(self) -> dict[str, Any]:
        """As a checkpoint holds it."""
        return asdict(self)


def fingerprint(
    module: nn.Module, layout: Layout, population: Population, loss: Loss, metric: Metric = TOP_1
) -> Fingerprint:
    """Of a few clients, the test samples, the module, its loss and its metric."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(repr((population.clients, population.classes, tuple(population.shape))).encode())
    test, clients = samples_of(population.test(), "test"), _clients(population.clients)
    digest.update(repr([population.size(client) for client in clients]).encode())
    for samples in (test, *(samples_of(population.train(client), "train") for client in clients[:READ])):
        if not isinstance(samples.inputs, Tensor):
            digest.update(repr(sorted(samples.inputs) if isinstance(samples.inputs, Mapping) else "tuple").encode())
        add_tensors(digest, *parts(samples.inputs), samples.labels)
    structure = hashlib.blake2b(f"{module!r}".encode() + layout.fingerprint, digest_size=8)
    add_tensors(structure, *module.parameters(), *module.buffers())  # frozen ones, too
    outputs, losses, measured = _probe(module, population, test, loss, metric)
    return Fingerprint(
        population=_parameters(population),
        data=digest.hexdigest(),
        module=structure.hexdigest(),
        loss=getattr(loss, "__qualname__", None) or toml.text(loss),
        outputs=outputs,
        losses=losses,
        metric=measured,
        device=next(module.parameters()).device.type,
        versions={"gluefl": __version__, "torch": torch.__version__.split("+")[0], "numpy": np.__version__},
    )


def _clients(count: int) -> list[int]:
    """The first, the middle and the last client, and others at random, the same ones every time."""
    ends = dict.fromkeys((0, count // 2, count - 1))
    others = stream(0, "fingerprint").integers(count, size=COUNTED).tolist()
    return list(ends | dict.fromkeys(others))[:COUNTED]


def _parameters(population: Population) -> dict[str, Any]:
    """What a population was made with, without paths: data may move to another folder."""
    try:
        names = inspect.signature(type(population)).parameters
    except (TypeError, ValueError):
        return {}
    values = {name: getattr(population, name, None) for name in names}
    inner = _parameters(population.population) if isinstance(population, HeldOut) else {}
    return inner | {
        name: value
        for name, value in values.items()
        if isinstance(value, bool | int | float) or (isinstance(value, str) and os.sep not in value)
    }


def check_same(before: Fingerprint, current: Fingerprint) -> None:
    """Refuse to resume with other data, another module or another loss; warn of other versions."""
    same_outputs = _close(before, current, "outputs")
    differing = [
        name
        for name, same in (
            ("the parameters of the population", before.population == current.population),
            ("the data of the population", before.data == current.data),
            ("the module or its initial weights", before.module == current.module),
            ("an activation or another function of the model", same_outputs),
            # Where the outputs differ, so do their losses.
            ("the loss", before.loss == current.loss and (_close(before, current, "losses") or not same_outputs)),
            ("the metric", None in (before.metric, current.metric) or _close(before, current, "metric")),
        )
        if not same
    ]
    if differing:
        raise UsageError(
            f"this run was started with something else: {' and '.join(differing)} changed. "
            "Resume with what it was started with, or start another run in another folder."
        )
    if before.versions != current.versions:
        warnings.warn(
            f"this run was started with {before.versions} and goes on with {current.versions}: "
            "its rounds may be rounded differently from here on",
            stacklevel=2,
        )


def _close(before: Fingerprint, current: Fingerprint, name: str) -> bool:
    a: Sequence[float] | None = getattr(before, name)
    b: Sequence[float] | None = getattr(current, name)
    if a is None or b is None or len(a) != len(b):
        return a == b
    tolerance = SAME_ON_CPUS if before.device == current.device == "cpu" else SAME_ON_A_GPU
    largest = max(map(abs, (*a, *b)), default=0.0)
    return all(abs(x - y) <= tolerance * largest for x, y in zip(a, b, strict=True))


@torch.no_grad()
def _probe(
    module: nn.Module, population: Population, test: Samples, loss: Loss, metric: Metric
) -> tuple[list[float] | None, list[float] | None, list[float] | None]:
    """Outputs of the module for a few samples, losses, and what the metric makes of a pattern."""
    device = next(module.parameters()).device
    first = test[:PROBED].to(device).copied()
    try:
        with evaluating(module):
            outputs = applied(module, population.transform(first.inputs))
        values = outputs.flatten()[:OUTPUTS].tolist()
        # The first outputs of a model are small, where many losses are alike.
        pattern = 3 * torch.cos(1.7 * torch.arange(outputs.numel(), device=device)).view_as(outputs).to(outputs.dtype)
        losses = [float(loss(outputs, first.labels)), float(loss(pattern, first.labels))]
    except Exception:
        return None, None, None  # what is wrong with the model or its data is reported when it is trained
    measured = _measured(metric, pattern, first.labels)
    return (values, losses, measured) if all(map(math.isfinite, (*values, *losses))) else (None, None, measured)


def _measured(metric: Metric, outputs: Tensor, labels: Tensor) -> list[float] | None:
    """Not of the model's outputs: which of two is larger may depend on the device."""
    try:
        total, divisor = map(float, metric.sums(outputs, labels))
        values = [total, divisor, metric.final(total / divisor)]
    except Exception:  # it has no value for so few samples, or is computed from the loss
        return None
    return values if all(map(math.isfinite, values)) else None
