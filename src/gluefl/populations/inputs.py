"""Inputs of a model: one tensor, a dict of tensors by the names of arguments, or a tuple of tensors in their order."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Tensor | Mapping[str, Tensor] | tuple[Tensor, ...]
KINDS = "one tensor, a dict of tensors or a tuple of tensors"


def parts(inputs: Any) -> list[Any]:
    """The tensors, or arrays, in their order."""
    if isinstance(inputs, Mapping | tuple):
        return list(inputs.values() if isinstance(inputs, Mapping) else inputs)
    return [inputs]


def each(function: Callable[..., Any], *inputs: Any) -> Any:
    """A function of every tensor, in the same structure; of several inputs, tensors of the same name together."""
    first = inputs[0]
    if isinstance(first, Mapping):
        return {name: function(*(one[name] for one in inputs)) for name in first}
    if isinstance(first, tuple):
        return tuple(function(*tensors) for tensors in zip(*inputs, strict=True))
    return function(*inputs)


def at(inputs: Inputs, rows: Any) -> Any:
    """These rows of every tensor."""
    return inputs[rows] if isinstance(inputs, Tensor) else each(lambda tensor: tensor[rows], inputs)


def joined(many: Sequence[Inputs], join: Callable[[list[Tensor]], Tensor] = torch.cat) -> Any:
    """The rows of many inputs of one structure, one after the other."""
    return each(lambda *tensors: join([*tensors]), *many)


def applied(module: nn.Module, inputs: Inputs) -> Any:
    """The outputs of a module: a dict gives keyword arguments, a tuple positional ones."""
    if isinstance(inputs, Tensor):
        return module(inputs)
    return module(**inputs) if isinstance(inputs, Mapping) else module(*inputs)


def form(inputs: object) -> str:
    """Types and shapes, for messages: torch.int64 (2, 80)."""
    if isinstance(inputs, Tensor):
        return f"{inputs.dtype} {tuple(inputs.shape)}"
    if isinstance(inputs, Mapping):
        return "{" + ", ".join(f"{name}: {form(value)}" for name, value in inputs.items()) + "}"
    if isinstance(inputs, tuple | list):
        return "(" + ", ".join(map(form, inputs)) + ")"
    return type(inputs).__name__


def problem(inputs: Any) -> str | None:
    """Why these cannot be the inputs of samples; None if they can."""
    if isinstance(inputs, Mapping):
        if not inputs or not all(isinstance(name, str) for name in inputs):
            return f"a dict with the keys {list(inputs)}; its keys must be names of arguments, at least one"
        values = list(inputs.values())
    elif isinstance(inputs, tuple):
        values = list(inputs)
        if not values:
            return "an empty tuple"
    else:
        values = [inputs]
    for value in values:
        if not isinstance(value, Tensor):
            within = "" if value is inputs else f" in a {type(inputs).__name__}"
            return f"a {type(value).__name__}{within}"
        if not value.dim():
            return "a tensor without dimensions"
    if len({len(value) for value in values}) > 1:
        return f"tensors of different lengths, {[len(value) for value in values]}"
    return None
