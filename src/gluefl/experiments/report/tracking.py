"""TensorBoard tracking: accuracy, loss, bytes and seconds of every round, written into the run's folder."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from gluefl.errors import MissingExtra
from gluefl.experiments.runner import Callback, Tracker

SCALARS = {
    "accuracy": "accuracy",
    "loss/train": "loss",
    "loss/test": "test_loss",
    "loss/validation": "validation_loss",
    "bytes/down": "down_bytes",
    "bytes/up": "up_bytes",
    "seconds/round": "round_s",
    "seconds/download": "download_s",
    "seconds/compute": "compute_s",
    "seconds/upload": "upload_s",
    "staleness": "staleness_mean",
}


def tracker(name: str | None) -> Tracker:
    """The tracker of this name; None tracks nothing."""
    if name is None:
        return lambda folder: nullcontext([])
    try:
        importlib.import_module("tensorboardX")
    except ImportError as error:
        raise MissingExtra("tracking", "--track tensorboard") from error
    return tensorboard


@contextmanager
def tensorboard(folder: Path) -> Iterator[list[Callback]]:
    """A callback that writes every round into the folder of its run: `tensorboard --logdir` the one above."""
    from tensorboardX import SummaryWriter

    writer: Any = None

    def write(line: Any, state: Any) -> None:
        nonlocal writer
        if writer is None:
            # Opened after the first round, because a run refuses a folder that is not empty. Rounds that are repeated
            # after --resume replace the old ones.
            writer = SummaryWriter(str(folder), purge_step=line["round"], write_to_disk=True)
        for tag, key in SCALARS.items():
            if line.get(key) is not None:
                writer.add_scalar(tag, line[key], line["round"])

    try:
        yield [write]
    finally:
        if writer is not None:
            writer.close()
