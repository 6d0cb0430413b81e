"""Losses that a configuration can name; in Python, any function of outputs and labels will do."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from gluefl.clients.metrics import IGNORED, fitting
from gluefl.clients.rules import Loss


def mse(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean squared error."""
    return _mean(functional.mse_loss, outputs, labels)


def l1(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean absolute error."""
    return _mean(functional.l1_loss, outputs, labels)


def bce(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean binary cross-entropy of logits, for several labels per sample."""
    return _mean(functional.binary_cross_entropy_with_logits, outputs, labels)


def _mean(loss: Callable[..., Tensor], outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean over all labels, of whole numbers over those that are not −100."""
    outputs, targets = fitting(outputs, labels), labels.to(outputs.dtype)
    if labels.is_floating_point():
        return loss(outputs, targets)
    known = labels != IGNORED
    losses = loss(outputs, torch.where(known, targets, 0), reduction="none")
    return torch.where(known, losses, 0).sum() / known.sum()


LOSSES: dict[str, Loss] = {"cross_entropy": functional.cross_entropy, "mse": mse, "l1": l1, "bce": bce}
