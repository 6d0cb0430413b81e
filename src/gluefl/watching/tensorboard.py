"""TensorBoard: event files, written by tensorboardX."""

import importlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gluefl.errors import MissingExtra, UsageError
from gluefl.parameters import File, checked
from gluefl.watching import AfterRound, Watched
from gluefl.watching.tracking import followed


@checked
@dataclass(frozen=True)
class TensorBoard:
    """Writes event files into the folder of the run, or into this one: `tensorboard --logdir runs`."""

    folder: File | None = None

    def watch(self, run: Watched) -> AbstractContextManager[AfterRound]:
        """Write every round."""
        return followed(self.open, run)

    def open(self, run: Watched) -> "Events":
        """An event file. Rounds that are played again after a resume replace the old ones."""
        folder = run.folder if self.folder is None else Path(self.folder)
        if folder is None:
            raise UsageError("TensorBoard needs a folder to write to: Options(out=…) or TensorBoard(folder=…).")
        first = 1 + sum(1 for _ in run.played())
        # The library names files by the second: without a suffix a run resumed at once would overwrite the first file.
        suffix = f".round-{first}"
        return Events(
            library().SummaryWriter(str(folder), purge_step=first, filename_suffix=suffix, write_to_disk=True)
        )


@dataclass(frozen=True)
class Events:
    """An event file as a log."""

    writer: Any

    def settings(self, values: Mapping[str, Any]) -> None:
        """As a table of text."""
        rows = "\n".join(f"| {key} | {value} |" for key, value in values.items())
        self.writer.add_text("configuration", f"| key | value |\n|---|---|\n{rows}", 0)

    def scalars(self, values: Mapping[str, float], round: int) -> None:
        """One scalar per tag."""
        for tag, value in values.items():
            self.writer.add_scalar(tag, value, round)

    def close(self, error: BaseException | None) -> None:
        """Write what is left."""
        self.writer.close()


def library() -> Any:
    """The module tensorboardX; an error that names the extra if it is missing."""
    try:
        return importlib.import_module("tensorboardX")
    except ImportError as error:
        raise MissingExtra("tracking", "TensorBoard") from error


TRACKER = TensorBoard  # for `--track tensorboard`
