"""The folder of a run: who may write into it, and whether it holds the run that is to go on."""

import json
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from gluefl import files
from gluefl.clients.metrics import METRICS
from gluefl.core.sampling import Sampler
from gluefl.core.server import State
from gluefl.errors import Damaged, UsageError
from gluefl.populations import Population
from gluefl.populations.held_out import HeldOut
from gluefl.simulation.fingerprint import Fingerprint, check_same
from gluefl.simulation.settings import Evaluation, Options, Setting
from gluefl.storage import checkpoint, columns, toml
from gluefl.storage.client_log import ClientLog
from gluefl.storage.described import EARLIER, described
from gluefl.storage.journal import ACCURACY, Journal
from gluefl.storage.names import CHECKPOINT, CHECKSUMS, CONFIG, FAILURE, JOURNAL, MODEL, SUMMARY
from gluefl.storage.results import write_result
from gluefl.strategies import Strategy

EVERY = "evaluation.every"  # which earlier versions did not note of runs made in Python
# What may differ when a run goes on, by dotted key.
MOVABLE = {
    "rounds",
    "target",
    "evaluation.stop_at_target",
    "residuals.memory_gb",
    "residuals.device_gb",
    "checkpoint.keep",
}
# Keys that runs of earlier versions do not have, with the values that they had.
ADDED = [("server.average_span", 0.0), ("averaging.span", 0.0)]


@dataclass(frozen=True)
class RunFolder:
    """A folder, the configuration of the run that belongs into it, and what that run was started with."""

    path: Path
    description: str
    identity: Fingerprint
    rounds: int
    stores: Mapping[str, checkpoint.Store] = field(default_factory=dict)
    keep: int = checkpoint.KEPT  # checkpoints
    types: dict[str, Any] = field(default_factory=dict)  # in the state before round 1, once the folder is locked
    log: ClientLog = field(default_factory=ClientLog)

    @contextmanager
    def locked(self, resume: bool, fresh: State) -> Iterator[None]:
        """Make the folder, unless it holds something else; no other process can write into it meanwhile."""
        self.types.update(checkpoint.check(fresh))
        self._check_usable(resume)
        files.make_folder(self.path)
        with files.locked(self.path):
            self._check_usable(resume)  # another process may have used it in between
            del fresh  # which would stay in memory as long as the lock is held
            yield

    def open(self, fresh: State, journal: Journal) -> State:
        """The state to go on from: that of a new run, or of the run in the folder."""
        saved, config = self.path / CHECKPOINT, self.path / CONFIG
        found = checkpoint.find(saved, self.stores, journal.count())
        if found is not None:
            self._check_configuration(found.note("config"))
            check_same(Fingerprint(**found.note("fingerprint")), self.identity)
            self._check_rounds(found.round)
            self._report(found)
            state = checkpoint.load(found, fresh, self.stores)
        else:
            self._check_new()
            state = fresh
        for name in (CHECKSUMS, SUMMARY, FAILURE):  # they are of the rounds that were done before
            (self.path / name).unlink(missing_ok=True)
        files.write(config, self.description)
        journal.cut(state.round)
        if found is None:  # from here on a run without a checkpoint is a damaged one
            self.save(state)
        return state

    def save(self, state: State) -> None:
        """Write a checkpoint."""
        notes = {"config": self.description, "fingerprint": self.identity.as_json()}
        checkpoint.save(self.path / CHECKPOINT, state, self.stores, notes, self.keep, self.log, self.types)

    def finish(self, model: dict[str, Tensor], summary: Mapping[str, Any], notes: Mapping[str, str]) -> None:
        """Write what a run leaves at its end. The summary comes last: it says that the run is done."""
        write_result(self.path, self.description, to_bytes(model, metadata=dict(notes) or None), summary)

    def _check_usable(self, resume: bool) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path} is a file; --out needs a folder.")
        # All that a run leaves that was killed while it wrote its first file.
        begun = self.path / (CONFIG + files.TEMPORARY)
        if not self.path.exists() or all(path == begun for path in self.path.iterdir()):
            return
        is_run = any((self.path / name).exists() for name in (CONFIG, JOURNAL))
        if not is_run and not checkpoint.exists(self.path / CHECKPOINT):
            raise UsageError(f"{self.path} is not empty and holds no run of gluefl: choose another --out.")
        if not resume:
            raise UsageError(f"{self.path} holds a run already: choose another --out, or go on with it by --resume.")

    def _check_new(self) -> None:
        """A folder without a checkpoint holds at most the beginning of a run that never came to its first round."""
        config = self.path / CONFIG
        if config.exists():
            self._check_configuration(config.read_text("utf-8", "replace"))
        journal = (self.path / JOURNAL, columns.path_of(self.path / JOURNAL))
        traces = [path.name for path in journal if path.exists() and path.stat().st_size]
        traces += [name for name in (SUMMARY, MODEL, CHECKSUMS) if (self.path / name).exists()]
        stored = sorted((self.path / CHECKPOINT).glob("*.bin"))  # empty before the first round
        traces += [f"{CHECKPOINT}/{path.name}" for path in stored if path.stat().st_size]
        if traces:
            raise Damaged(
                f"{self.path} holds {', '.join(traces)} of a run, but no checkpoint: it was lost or removed, as a "
                "study does at the end of a run. The run cannot go on; nothing was changed. Copy "
                f"{CHECKPOINT}/ back from a backup, or start the run again in another folder."
            )

    def _report(self, found: checkpoint.Found) -> None:
        """Tell the user what is damaged and mended."""
        if found.warning is not None:
            warnings.warn(f"{self.path}: {found.warning}", stacklevel=5)
        config = self.path / CONFIG
        if not config.exists() or not same_configuration(config.read_text("utf-8", "replace"), found.note("config")):
            warnings.warn(
                f"{config} is not as the run wrote it; it is written again from the checkpoint's copy", stacklevel=5
            )

    def _check_rounds(self, played: int) -> None:
        """Rounds can be added, but not taken back."""
        if played > self.rounds:
            raise UsageError(
                f"{self.path} holds a run of {played} rounds, it cannot be resumed with rounds = {self.rounds}: "
                f"give at least {played}, or start another run in another folder."
            )

    def _check_configuration(self, old: str) -> None:
        """A run goes on with the configuration it was started with; only its end and its memory may change."""
        before, now = _fixed(old), _fixed(self.description)
        if before != now:
            lines = "\n".join(f"  {line}" for line in _differences(before, now))
            hint = "" if any(line.startswith(f"{EVERY} = ") for line in before) else EARLIER
            raise UsageError(
                f"{self.path} holds a run of another configuration, it cannot be resumed with this one.{hint} "
                f"They differ in:\n{lines}"
            )


def _differences(before: list[str], now: list[str]) -> list[str]:
    """The lines of only one of two configurations, key by key."""
    keys = dict.fromkeys(line.partition(" = ")[0] for line in sorted(set(before) ^ set(now)))

    def value(lines: list[str], key: str) -> str:
        return next((line.partition(" = ")[2] for line in lines if line.partition(" = ")[0] == key), "absent")

    return [f"{key}: {value(before, key)} in the folder, {value(now, key)} now" for key in keys]


def same_configuration(a: str, b: str) -> bool:
    """Whether two configurations are of the same run."""
    return _fixed(a) == _fixed(b)


def _fixed(text: str) -> list[str]:
    """What must stay the same in a configuration, a line per key; a damaged text as it is."""
    try:
        tree = toml.flattened(tomllib.loads(text))
    except (ValueError, RecursionError):
        return text.splitlines()
    kept = {key: value for key, value in tree.items() if key not in MOVABLE and (key, value) not in ADDED}
    return [f"{key} = {json.dumps(value, default=str)}" for key, value in kept.items()]


def describe(
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
        "population": type(getattr(population, "population", population)).__name__,
        "importance": setting.importance,
        "initial": setting.initial,
        "forget_residuals_after": setting.forget_residuals_after,
    }
    parts = {  # under the names of their tables in a configuration, as far as they have one
        "strategy": strategy,
        "sampling": sampler,
        "training": setting.training,
        "server": setting.server,
        "averaging": setting.averaging,
        "devices": setting.devices,
        "arrivals": setting.arrivals,
    }
    tables = {key: described(part) for key, part in parts.items() if part is not None}
    tables["evaluation"] = _evaluation(population, setting.evaluation)
    return toml.dumps({**scalars, **tables, "hooks": [described(hook) for hook in setting.hooks]})


def _evaluation(population: Population, evaluation: Evaluation) -> dict[str, Any]:
    """When the model is measured, what is measured and on which samples; the accuracy on the test samples is not
    named."""
    metric, table = evaluation.metric, dict[str, Any](every=evaluation.every, average=evaluation.average)
    if metric.score != ACCURACY:
        table |= metric.score.keys()
    if metric not in METRICS.values():  # a function of one's own may depend on the batch
        own = described(metric)
        table |= {"function": own["function"], "final": own["final"], "batch": evaluation.batch}
    if isinstance(population, HeldOut):
        table |= {"held_out": population.by, "held_out_share": population.share, "held_out_seed": population.seed}
    elif hasattr(population, "validation"):
        table["held_out"] = "own"
    return table
