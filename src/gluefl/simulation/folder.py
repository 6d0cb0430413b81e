"""The folder of a run: who may write into it, and whether it holds the run that is to go on."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from torch import nn

from gluefl.core.sampling import Sampler
from gluefl.core.server import State
from gluefl.errors import GlueFLError, UsageError
from gluefl.populations import Population
from gluefl.simulation.fingerprint import Fingerprint, check_same
from gluefl.simulation.settings import Options, Setting
from gluefl.storage import checkpoint, toml
from gluefl.storage.journal import Journal
from gluefl.strategies import Strategy

MOVABLE = ("rounds =", "target =", "stop_at_target =", "memory_gb =", "device_gb =")  # may differ when a run goes on
IDENTITY = "fingerprint.json"  # beside the checkpoint


@dataclass(frozen=True)
class RunFolder:
    """A folder, the configuration of the run that belongs into it, and what that run was started with."""

    path: Path
    description: str
    identity: Fingerprint

    def open(self, resume: bool, fresh: State, journal: Journal, stores: Mapping[str, checkpoint.Store]) -> State:
        """Make the folder, or go on in it."""
        checkpoint.check(fresh)
        config, saved = self.path / "config.toml", self.path / "checkpoint"
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path} is a file; --out needs a folder.")
        if config.exists() and not resume:
            raise UsageError(f"{self.path} holds a run already: choose another --out, or go on with it by --resume.")
        if not config.exists() and self.path.exists() and any(self.path.iterdir()):
            raise UsageError(f"{self.path} is not empty and holds no run of gluefl: choose another --out.")
        self.path.mkdir(parents=True, exist_ok=True)
        checkpoint.check_format(saved)
        if config.exists():
            self._check_configuration(config.read_text(encoding="utf-8"))
        state = fresh
        if checkpoint.exists(saved):
            self._check_identity(saved / IDENTITY)
            state = checkpoint.load(saved, fresh, stores)
        saved.mkdir(exist_ok=True)
        (saved / IDENTITY).write_text(json.dumps(self.identity.as_json()) + "\n", encoding="utf-8")
        (self.path / "summary.json").unlink(missing_ok=True)  # it is of the rounds that were done before
        config.write_text(self.description, encoding="utf-8")
        journal.cut(state.round)
        return state

    def _check_configuration(self, old: str) -> None:
        """A run goes on with the configuration it was started with; only its end and its memory may change."""
        before, now = (
            [line for line in text.splitlines() if not line.startswith(MOVABLE)] for text in (old, self.description)
        )
        if before != now:
            lines = "\n".join(f"  {line}" for line in sorted(set(before) ^ set(now)))
            raise UsageError(
                f"{self.path} holds a run of another configuration, it cannot be resumed with this one. "
                f"They differ in:\n{lines}"
            )

    def _check_identity(self, path: Path) -> None:
        try:
            before = Fingerprint(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise GlueFLError(
                f"{path} is damaged or missing ({type(error).__name__}: {error}), so that nothing shows whether data, "
                "model and loss are those that the run was started with. Start the run again in another folder."
            ) from error
        check_same(before, self.identity)


def description(
    module: nn.Module,
    population: Population,
    strategy: Strategy,
    sampler: Sampler,
    setting: Setting,
    options: Options,
) -> str:
    """The configuration a run was made from; for one made in Python, its parts by their types and parameters."""
    if options.description is not None:
        return options.description
    scalars = {
        "seed": setting.seed,
        "model": type(module).__name__,
        "population": type(population).__name__,
        "importance": setting.importance,
        "initial": setting.initial,
    }
    parts = {  # under the names of their tables in a configuration, as far as they have one
        "strategy": strategy,
        "sampling": sampler,
        "training": setting.training,
        "server": setting.server,
        "devices": setting.devices,
        "arrivals": setting.arrivals,
    }
    tables = {key: _table(part) for key, part in parts.items()}
    return toml.dumps({**scalars, **tables, "hooks": [_table(hook) for hook in setting.hooks]})


def _table(part: object) -> dict[str, Any]:
    """A part by its type and, if it is a dataclass, its parameters."""
    parameters = asdict(part) if is_dataclass(part) and not isinstance(part, type) else {}
    return {"type": type(part).__name__, **parameters}
