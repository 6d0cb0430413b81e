"""A run as TensorBoard sees it: accuracy, loss, bytes and seconds of every round, in the run's folder."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from gluefl.errors import MissingExtra

Callbacks = list[Callable[[Any, Any], None]]
Tracker = Callable[[Path], AbstractContextManager[Callbacks]]

SCALARS = {
    "accuracy": "accuracy",
    "loss/train": "loss",
    "loss/test": "test_loss",
    "bytes/down": "down_bytes",
    "bytes/up": "up_bytes",
    "seconds/round": "round_s",
    "seconds/download": "download_s",
    "seconds/compute": "compute_s",
    "seconds/upload": "upload_s",
    "staleness": "staleness_mean",
}


def tracker(name: str | None) -> Tracker:
    """What follows a run by the name the command line gives it; nothing for None."""
    if name is None:
        return lambda folder: nullcontext([])
    try:
        importlib.import_module("tensorboardX")
    except ImportError as error:
        raise MissingExtra("tracking", "--track tensorboard") from error
    return tensorboard


@contextmanager
def tensorboard(folder: Path) -> Iterator[Callbacks]:
    """A callback that writes every round into the folder of its run: `tensorboard --logdir` the one above."""
    from tensorboardX import SummaryWriter

    writer: Any = None

    def write(line: Any, state: Any) -> None:
        nonlocal writer
        if writer is None:
            # Only now: the run refuses a folder that is not empty. Rounds played again after --resume are replaced.
            writer = SummaryWriter(str(folder), purge_step=line["round"], write_to_disk=True)
        for tag, key in SCALARS.items():
            if line.get(key) is not None:
                writer.add_scalar(tag, line[key], line["round"])

    try:
        yield [write]
    finally:
        if writer is not None:
            writer.close()
