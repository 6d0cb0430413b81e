"""Weights & Biases: a run in a project, online or offline."""

import importlib
import uuid
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from gluefl.errors import GlueFLError, MissingExtra
from gluefl.parameters import File, checked
from gluefl.watching import AfterRound, Watched
from gluefl.watching.tracking import followed, remembered

FILE = "wandb-run.txt"  # in the run folder: the identity of the run


@checked
@dataclass(frozen=True)
class WandB:
    """Logs to a project; offline with `mode="offline"` or the variable WANDB_MODE. A resumed run goes on."""

    project: str = "gluefl"
    name: str | None = None  # of the run; by default that of its folder
    mode: Literal["online", "offline", "disabled"] | None = None
    folder: File | None = None  # where it keeps its files; by default wandb/ in the working directory

    def watch(self, run: Watched) -> AbstractContextManager[AfterRound]:
        """Log every round."""
        return followed(self.open, run)

    def open(self, run: Watched) -> "Logged":
        """Start a run in the project, or go on with the one that the folder names."""
        wandb = library()
        identity = remembered(run.folder, FILE, lambda: uuid.uuid4().hex[:8])
        try:
            started = wandb.init(
                project=self.project,
                name=self.name or run.name,
                id=identity,
                resume="allow",
                mode=self.mode,
                dir=self.folder,
                settings=wandb.Settings(silent=True),
                reinit="create_new",
            )
        except wandb.errors.Error as error:
            raise GlueFLError(f"Weights & Biases cannot be used: {error}") from error
        return Logged(started)


@dataclass(frozen=True)
class Logged:
    """A run of Weights & Biases as a log."""

    run: Any

    def settings(self, values: Mapping[str, Any]) -> None:
        """As its configuration."""
        self.run.config.update(dict(values), allow_val_change=True)

    def scalars(self, values: Mapping[str, float], round: int) -> None:
        """With the round as step; of a round that comes again the library keeps the first values."""
        if round >= self.run.step:
            self.run.log(dict(values), step=round)

    def close(self, error: BaseException | None) -> None:
        """Finished, or failed with an exit code."""
        try:
            self.run.finish(exit_code=0 if error is None else 1)
        except library().errors.Error as away:  # the result of the run is still to be written
            warnings.warn(f"Weights & Biases did not take the end of the run: {away}", stacklevel=2)


def library() -> Any:
    """The module wandb; an error that names the extra if it is missing."""
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise MissingExtra("wandb", "WandB") from error


TRACKER = WandB  # for `--track wandb`
