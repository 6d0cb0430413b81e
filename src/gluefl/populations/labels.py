"""Labels: classes, several labels per sample, or floats."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gluefl.errors import DataError

UNKNOWN = -100  # among several labels of a sample; neither losses nor metrics count it


def count_classes(labels: NDArray[Any], tokens: bool) -> int:
    """How many labels there are; of floats, or several labels per sample that are no tokens, how many a sample has."""
    if labels.dtype.kind == "f" or (labels.ndim == 2 and not tokens):
        return labels.shape[1] if labels.ndim == 2 else 1
    return int(labels.max()) + 1 if labels.dtype.kind in "iub" and labels.size else 1


def check_labels(labels: NDArray[Any], classes: int, where: object) -> None:
    """Labels are whole numbers from 0 to classes − 1; several per sample may be −100, unknown, or 0 and 1; floats are
    finite."""
    if labels.dtype.kind == "f" and labels.ndim in (1, 2):
        wrong = np.flatnonzero(~np.isfinite(labels.reshape(len(labels), -1)).all(axis=1))
        if len(wrong):
            raise DataError(f"{where}: the label of sample {wrong[0]} is not finite ({len(wrong)} such)")
        return
    if labels.ndim not in (1, 2) or labels.dtype.kind not in "iub":
        raise DataError(f"{where}: labels must be numbers, one or a row a sample; found {labels.dtype} {labels.shape}")
    several = labels.ndim == 2
    outside = (labels < 0) | (labels >= (max(2, classes) if several else classes))
    bad = np.flatnonzero((outside & (labels != UNKNOWN)).any(axis=1) if several else outside)
    if len(bad):
        raise DataError(
            f"{where}: sample {bad[0]} has the label {labels[bad[0]]}, outside 0…{classes - 1} ({len(bad)} such)"
        )
