"""The frozen part of a module: parameters that require no gradient, such as the base model under adapters.

It is a constant that both sides have from the start. Copies of a module share it, so that a process holds it once, and
a run does not save it: its file holds a digest instead, which `load` compares.
"""

import copy
import hashlib

import torch
from torch import Tensor, nn


def frozen_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The frozen parameters under all of their names."""
    named = module.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if not parameter.requires_grad}


def copied(module: nn.Module) -> nn.Module:
    """A copy with trainable parameters and buffers of its own; frozen parameters share the memory of the original.

    They are other `Parameter` objects, so that converting the copy (`.to`) leaves the original as it is.
    """
    shared = {id(parameter): _alias(parameter) for parameter in frozen_parameters(module).values()}
    return copy.deepcopy(module, memo=dict(shared))


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    if type(parameter) is not nn.Parameter:  # a type of another library, for instance of quantised weights
        return parameter
    return nn.Parameter(parameter.detach(), requires_grad=False)


def frozen_digest(module: nn.Module) -> str | None:
    """A digest of the frozen parameters, with names, shapes and types; None of a module that has none."""
    parameters = frozen_parameters(module)
    if not parameters:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in sorted(parameters.items()):
        _add(digest, name, parameter)
    return digest.hexdigest()


def _add(digest: "hashlib.blake2b", name: str, tensor: Tensor) -> None:
    """Add a tensor to a digest, in place and without a copy where it lies on the CPU."""
    digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
    digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
