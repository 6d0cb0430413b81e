"""Losses that a configuration can name; in Python, any function of outputs and labels will do."""

from torch import Tensor
from torch.nn import functional

from gluefl.clients.metrics import fitting
from gluefl.clients.rules import Loss


def mse(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean squared error."""
    return functional.mse_loss(fitting(outputs, labels), labels.to(outputs.dtype))


def l1(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean absolute error."""
    return functional.l1_loss(fitting(outputs, labels), labels.to(outputs.dtype))


def bce(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean binary cross-entropy of logits, for several labels per sample."""
    return functional.binary_cross_entropy_with_logits(fitting(outputs, labels), labels.to(outputs.dtype))


LOSSES: dict[str, Loss] = {"cross_entropy": functional.cross_entropy, "mse": mse, "l1": l1, "bce": bce}
