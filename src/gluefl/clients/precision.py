"""Mixed precision: the products of a forward pass in bfloat16, weights, gradients and losses in float32.

bfloat16 has the range of float32, so that losses need no scaling. Evaluation stays in float32.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from gluefl.errors import UsageError

Precision = Literal["bfloat16"]


def precision_of(rule: Any) -> Precision | None:
    """The precision of a local rule; one of your own need not have any."""
    precision: Precision | None = getattr(rule, "precision", None)
    return precision


def lowered(precision: Precision | None, device: torch.device) -> AbstractContextManager[Any]:
    """Within this context products are computed in the given precision."""
    if precision is None:
        return nullcontext()
    # A captured graph must not read casts that were cached outside of it.
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


@contextmanager
def float32_norms(precision: Precision | None, module: nn.Module) -> Iterator[None]:
    """Within this context batch and instance normalisation read float32: under `vmap` they refuse inputs of another
    type than their statistics."""
    with ExitStack() as hooks:
        for layer in module.modules() if precision is not None else ():
            if isinstance(layer, _NormBase):
                handle = layer.register_forward_pre_hook(lambda _, inputs: tuple(map(raised, inputs)))
                hooks.callback(handle.remove)
        yield


def raised(outputs: Any) -> Any:
    """What was computed in bfloat16, in float32: a loss needs it."""
    return outputs.float() if isinstance(outputs, Tensor) and outputs.dtype == torch.bfloat16 else outputs


def check_precision(precision: Precision | None, device: torch.device) -> None:
    """Refuse a precision that a GPU cannot compute."""
    if precision is not None and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise UsageError(f"{name} cannot compute in bfloat16, which begins with Ampere: remove training.precision.")
