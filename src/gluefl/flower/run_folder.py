"""What a checkpoint of the server holds beside its state: the run's name, its settings, the nodes, accepted uploads."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gluefl import files, wire
from gluefl.core.server import Core
from gluefl.errors import Damaged, UsageError
from gluefl.flower.messages import described_part, described_strategy
from gluefl.storage import checkpoint
from gluefl.storage.described import EARLIER, FORMAT
from gluefl.storage.journal import Journal
from gluefl.storage.names import CHECKPOINT, JOURNAL


@contextmanager
def locked(folder: Path | None) -> Iterator[None]:
    """Be the only server that writes into a folder, if there is one."""
    if folder is None:
        yield
        return
    files.make_folder(folder)
    with files.locked(folder):
        yield


@dataclass(frozen=True)
class Saved:
    """A run as its folder knows it."""

    run: bytes
    settings: dict[str, Any]  # what must be the same for the run to go on
    places: dict[str, int]  # of the nodes, by their keys
    accepted: dict[int, tuple[int, str]]  # client → round and digest of its last upload that was used
    version_0: bytes  # its hash; those of later versions are in the journal
    guard: dict[str, Any] | None = None  # what the guard remembers
    found: checkpoint.Found | None = None  # where it was read

    def notes(self) -> dict[str, Any]:
        """As a checkpoint holds it."""
        return {
            "run": self.run.hex(),
            "settings": self.settings,
            "places": self.places,
            "accepted": {str(client): list(last) for client, last in self.accepted.items()},
            "version_0": self.version_0.hex(),
            "guard": self.guard,
            "described": FORMAT,  # of the settings
        }

    @classmethod
    def read(cls, folder: Path | None) -> "Saved | None":
        """The run that a folder holds, None if it holds none."""
        if folder is None:
            return None
        journal = folder / JOURNAL
        found = checkpoint.find(folder / CHECKPOINT, most_rounds=Journal(journal).count())
        if found is None:
            if journal.exists() and journal.stat().st_size:
                raise Damaged(
                    f"{folder} holds the journal of a run, but no checkpoint: it was lost or removed. The run cannot "
                    f"go on; nothing was changed. Copy {CHECKPOINT}/ back from a backup, or choose another folder."
                )
            return None
        return cls(
            run=bytes.fromhex(found.note("run")),
            settings=found.note("settings"),
            places=dict(found.note("places")),
            accepted={int(client): (last, digest) for client, (last, digest) in found.note("accepted").items()},
            version_0=bytes.fromhex(found.note("version_0")),
            guard=found.note("guard"),
            found=found,
        )

    def check(self, now: dict[str, Any], folder: Path) -> None:
        """Refuse to go on with other settings than those of `settings_of`."""
        if now != self.settings:
            unlike = now.get("version_0") != self.settings.get("version_0")
            hint = " The initial model is another one: build it from a fixed seed." if unlike else ""
            if self.found is not None and self.found.manifest["notes"].get("described") != FORMAT:
                hint += EARLIER
            raise UsageError(
                f"{folder} holds a run with other settings; it cannot go on with these. Choose another folder.{hint}\n"
                f"  there: {json.dumps(self.settings)}\n  now:   {json.dumps(now)}"
            )


def settings_of(core: Core) -> dict[str, Any]:
    """What must be the same for a run to go on."""
    settings: dict[str, Any] = {
        "seed": core.seed,
        "layout": core.layout.fingerprint.hex(),
        "strategy": described_strategy(core.strategy),
        "sampler": described_part(core.sampler),
        "server": described_part(core.optimizer),
    }
    # Left out where they are as in runs that were written before there was a choice.
    if core.hooks:
        settings["hooks"] = [described_part(hook) for hook in core.hooks]
    if core.averaging.average:
        settings["averaging"] = core.averaging.average
    if core.averaging.span:
        settings["averaging_span"] = core.averaging.span
    if core.initial == "known":  # nodes keep what differs from version 0: it must be the same when the run goes on
        settings["version_0"] = wire.replica_hash(*core.parts(core.first[1], core.statistics)).hex()
    return settings
