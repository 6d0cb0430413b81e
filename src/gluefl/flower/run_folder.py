"""What the server writes into the folder of a run beside journal and checkpoint: `federation.json`.

It holds what a checkpoint does not: the run's name, its settings, the nodes' places, accepted uploads, hashes.
"""

import json
import os
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from gluefl import wire
from gluefl.core.server import Core
from gluefl.errors import GlueFLError, UsageError
from gluefl.storage import checkpoint
from gluefl.strategies import Strategy
from gluefl.strategies.coded import Coded
from gluefl.strategies.registry import STRATEGIES

NAME = "federation.json"


@dataclass(frozen=True)
class Saved:
    """A run as its folder knows it."""

    run: bytes
    settings: dict[str, Any]  # what must be the same for the run to go on
    places: dict[str, int]  # of the nodes, by their keys
    accepted: dict[int, tuple[int, str]]  # client → round and digest of its last upload that was used
    hashes: dict[int, bytes]  # of every version

    def write(self, folder: Path) -> None:
        """Replace the file in one step."""
        fields = {
            "run": self.run.hex(),
            "settings": self.settings,
            "places": self.places,
            "accepted": {str(client): list(last) for client, last in self.accepted.items()},
            "hashes": {str(version): hash_.hex() for version, hash_ in self.hashes.items()},
        }
        temporary = folder / "federation.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(fields, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / NAME)

    @classmethod
    def read(cls, folder: Path | None) -> "Saved | None":
        """The run that a folder holds, None if it has no checkpoint."""
        if folder is None or not checkpoint.exists(folder / "checkpoint"):
            return None
        try:
            fields = json.loads((folder / NAME).read_text(encoding="utf-8"))
            return cls(
                run=bytes.fromhex(fields["run"]),
                settings=fields["settings"],
                places=dict(fields["places"]),
                accepted={int(client): (last, digest) for client, (last, digest) in fields["accepted"].items()},
                hashes={int(version): bytes.fromhex(hash_) for version, hash_ in fields["hashes"].items()},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise GlueFLError(
                f"{folder}/{NAME} is damaged ({type(error).__name__}: {error}). Start the run in another folder."
            ) from error

    def check(self, now: dict[str, Any], folder: Path) -> None:
        """Refuse to go on with other settings than those of `settings_of`."""
        if now != self.settings:
            unlike = now.get("version_0") != self.settings.get("version_0")
            hint = " The initial model is another one: build it from a fixed seed." if unlike else ""
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
        "sampler": _described(core.sampler),
        "server": _described(core.optimizer),
    }
    # Left out where they are as in runs that were written before there was a choice.
    if core.hooks:
        settings["hooks"] = [_described(hook) for hook in core.hooks]
    if core.averaging.average:
        settings["averaging"] = core.averaging.average
    if core.initial == "known":  # nodes keep what differs from version 0: it must be the same when the run goes on
        settings["version_0"] = wire.replica_hash(*core.parts(core.first[1], core.statistics)).hex()
    return settings


def described_strategy(strategy: Strategy) -> dict[str, Any]:
    """A strategy by its name and parameters, as a node can build it; one with codecs must be given to the node."""
    if isinstance(strategy, Coded):
        return {**_described(strategy), "strategy": described_strategy(strategy.strategy)}
    name = next((name for name, kind in STRATEGIES.items() if type(strategy) is kind), type(strategy).__name__)
    return {**_described(strategy), "name": name}


def _described(part: Any) -> dict[str, Any]:
    """A part by its type and, if it is a dataclass, its fields, as JSON can hold them."""
    fields = asdict(part) if is_dataclass(part) and not isinstance(part, type) else {}
    described: dict[str, Any] = json.loads(json.dumps({"name": type(part).__name__, **fields}, default=_name))
    return described


def _name(value: object) -> str:
    # Not `str`, which has an address for functions and objects: it would differ in the next process.
    return str(getattr(value, "__qualname__", type(value).__qualname__))
