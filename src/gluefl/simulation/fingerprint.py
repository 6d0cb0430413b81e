"""What a run was started with, beside its configuration: data, module, loss and versions. Resuming compares it."""

import hashlib
import math
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gluefl import __version__
from gluefl.clients.rules import Loss
from gluefl.errors import UsageError
from gluefl.parameters import checked
from gluefl.populations import Population, Samples
from gluefl.vectors.layout import Layout

SAME_LOSS = 1e-3  # relative: another CPU or GPU rounds differently, another loss or activation is further away
PROBED = 8  # test samples


@checked
@dataclass(frozen=True)
class Fingerprint:
    """Hashes of the data and the module, the loss of the initial model on a few samples, and versions."""

    data: str
    module: str
    initial_loss: float | None  # None where the model cannot be evaluated on single samples
    versions: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """As a checkpoint holds it."""
        return asdict(self)


def fingerprint(module: nn.Module, layout: Layout, population: Population, loss: Loss) -> Fingerprint:
    """Of the first, the middle and the last client, the test samples, the module and its loss."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(repr((population.clients, population.classes, tuple(population.shape))).encode())
    test = population.test()
    clients = sorted({0, population.clients // 2, population.clients - 1})
    for samples in (test, *(population.train(client) for client in clients)):
        _add(digest, samples.inputs, samples.labels)
    structure = hashlib.blake2b(f"{module!r}".encode() + layout.fingerprint, digest_size=8)
    _add(structure, *module.parameters(), *module.buffers())  # frozen ones, too
    versions = {"gluefl": __version__, "torch": torch.__version__.split("+")[0], "numpy": np.__version__}
    return Fingerprint(digest.hexdigest(), structure.hexdigest(), _loss(module, population, test, loss), versions)


def _add(digest: "hashlib.blake2b", *tensors: Tensor) -> None:
    for tensor in tensors:
        digest.update(repr((tuple(tensor.shape), str(tensor.dtype))).encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def check_same(before: Fingerprint, current: Fingerprint) -> None:
    """Refuse to resume with other data, another module or another loss; warn of other versions."""
    differing = [
        name
        for name, same in (
            ("the data of the population", before.data == current.data),
            ("the module or its initial weights", before.module == current.module),
            ("the loss or an activation", _close(before.initial_loss, current.initial_loss)),
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


def _close(a: float | None, b: float | None) -> bool:
    return a == b or (a is not None and b is not None and math.isclose(a, b, rel_tol=SAME_LOSS))


@torch.no_grad()
def _loss(module: nn.Module, population: Population, test: Samples, loss: Loss) -> float | None:
    device, modes = next(module.parameters()).device, {part: part.training for part in module.modules()}
    inputs: Tensor = test.inputs[:PROBED].to(device)
    try:
        module.eval()
        value = float(loss(module(population.transform(inputs)), test.labels[:PROBED].to(device)))
    except Exception:
        return None  # what is wrong with the model or its data is reported when it is trained
    finally:
        for part, training in modes.items():
            part.training = training
    return value if math.isfinite(value) else None
