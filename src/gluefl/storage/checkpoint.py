"""A run on disk, so that it can go on: safetensors and JSON, nothing is pickled.

A checkpoint is a manifest, `state-ROUND.json`, and the files that it names with their checksums: tensors, and what the
server knows of every client. The manifest has a checksum of its own and is written last. The last few checkpoints are
kept: whatever moment a run is killed at, and whichever file is damaged, one of them is whole, or the run says that
none is.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes

from gluefl import files
from gluefl.core.server import State
from gluefl.errors import Damaged, GlueFLError, UsageError
from gluefl.storage.client_log import ClientLog, check_clients, discard, read_clients
from gluefl.storage.sealed import seal, unseal
from gluefl.storage.states import check_types, put_state_together, take_state_apart

# 5 held the places of all residuals in the manifest, 4 all clients, 3 had no checksums, 2 no average and no
# recurrence, 1 a flat strategy state.
VERSION = 6
KEPT = 2  # checkpoints
OLD = "state.json"  # the manifest of formats 1 to 3
NOTHING: Mapping[str, "Store"] = {}
NO_NOTES: Mapping[str, Any] = {}
Manifest = dict[str, Any]
MISREAD = (ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError)


class Store(Protocol):
    """What is too large to be written with every checkpoint and keeps files of its own beside it."""

    def checkpoint(self) -> dict[str, Any]:
        """Write what is not written yet and say where everything lies, as JSON can hold it."""
        ...

    def check(self, saved: dict[str, Any]) -> None:
        """Raise `Damaged` unless everything that a checkpoint names is as it was written; changes nothing."""
        ...

    def restore(self, saved: dict[str, Any], older: Sequence[dict[str, Any]] = ()) -> None:
        """Go back to a checkpoint; what the older ones need, oldest first, stays."""
        ...


@dataclass(frozen=True)
class Found:
    """The checkpoint to go on from, those before it, oldest first, and why newer ones are not used."""

    folder: Path
    manifest: Manifest
    older: Sequence[Manifest] = ()
    unusable: Sequence[str] = ()

    @property
    def round(self) -> int:
        """Rounds done."""
        return int(self.manifest["round"])

    def note(self, name: str) -> Any:
        """What was saved beside the state under a name."""
        if name not in self.manifest["notes"]:
            raise UsageError(
                f"{self.folder} holds a checkpoint without '{name}': a run of the laboratory cannot go on on Flower, "
                "nor the other way round. Choose another folder."
            )
        return self.manifest["notes"][name]

    @property
    def warning(self) -> str | None:
        """What to tell the user if this is not the newest checkpoint, else None."""
        reasons = "".join(f"\n  {reason}" for reason in self.unusable)
        return f"the run goes back to its checkpoint of round {self.round}:{reasons}" if reasons else None


def save(
    folder: Path,
    state: State,
    stores: Mapping[str, Store] = NOTHING,
    notes: Mapping[str, Any] = NO_NOTES,
    keep: int = KEPT,
    log: ClientLog | None = None,
    types: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint beside the last ones and delete the oldest; notes are what else JSON can hold.

    With the same log at every call, only the clients that changed since the last one are written. `types` is what
    `check` returned for the state before round 1.
    """
    fields, tensors = take_state_apart(state)
    if types is not None:
        check_types(fields, types)
    files.make_folder(folder)
    data = to_bytes({key: tensor.cpu().clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()})
    name = f"state-{state.round}.safetensors"
    files.write(folder / name, data)
    manifest = {
        "version": VERSION,
        "round": state.round,
        "tensors": {"name": name, "bytes": len(data), "digest": files.digest(data)},
        "clients": (log or ClientLog()).append(folder, state.ledger.clients, state.round),
        **fields,
        "stores": {name: store.checkpoint() for name, store in stores.items()},
        "notes": notes,
    }
    files.write(_manifest_path(folder, state.round), seal(manifest, allow_nan=True))
    _discard(folder, rounds_in(folder)[keep:])


def check(state: State) -> dict[str, Any]:
    """Refuse a state that a checkpoint could not hold, before anything is trained; returns the types in it."""
    return take_state_apart(state)[0]


def rounds_in(folder: Path) -> list[int]:
    """The rounds of the checkpoints in a folder, newest first."""
    names = (re.fullmatch(r"state-(0|[1-9]\d*)\.json", path.name) for path in folder.glob("state-*.json"))
    return sorted((int(name[1]) for name in names if name), reverse=True)


def exists(folder: Path) -> bool:
    """Whether there is a checkpoint to resume from, whole or not."""
    return bool(rounds_in(folder)) or (folder / OLD).exists()


def find(folder: Path, stores: Mapping[str, Store] = NOTHING, most_rounds: int | None = None) -> Found | None:
    """The newest whole checkpoint of at most so many rounds, None if there is no checkpoint; changes nothing.

    An error of the system, such as a missing permission, is raised as it is: it says nothing about the files.
    """
    check_format(folder)
    rounds = rounds_in(folder)
    if (folder / OLD).exists() and not rounds:
        raise Damaged(f"the checkpoint {folder / OLD} is damaged. Start the run again in another folder.")
    unusable = []
    for at, round in enumerate(rounds):
        if most_rounds is not None and round > most_rounds:
            unusable.append(f"checkpoint of round {round}: the journal has only {most_rounds} whole lines")
            continue
        try:
            manifest = _checked(folder, round, stores)
        except Damaged as error:
            unusable.append(f"checkpoint of round {round}: {error}")
            continue
        return Found(folder, manifest, _readable(folder, reversed(rounds[at + 1 :])), unusable)
    if not rounds:
        return None
    reasons = "".join(f"\n  {reason}" for reason in unusable)
    raise Damaged(
        f"no checkpoint in {folder} is whole, each is damaged:{reasons}\nCopy the folder of the run back from a "
        "backup, or start the run again in another folder."
    )


def load(found: Found, fresh: State, stores: Mapping[str, Store] = NOTHING) -> State:
    """The state of a checkpoint; `fresh` is the state of the same run before round 1. Newer ones are deleted."""
    folder, manifest = found.folder, found.manifest
    try:
        tensors = load_file(folder / manifest["tensors"]["name"], device=str(fresh.weights.device))
        for name in ("weights", "statistics"):
            if tensors[name].shape != getattr(fresh, name).shape:
                raise GlueFLError(
                    f"{folder}: the checkpoint has {tensors[name].numel()} {name}, the model of this configuration "
                    f"has {getattr(fresh, name).numel()}. Resume with the configuration the run was started with."
                )
        state = put_state_together(manifest, tensors, read_clients(folder, manifest["clients"]), fresh)
    except MISREAD as error:
        raise Damaged(
            f"the checkpoint of round {found.round} in {folder} is damaged ({type(error).__name__}: {error}), or it is "
            "of another configuration. Start the run again in another folder."
        ) from error
    for name, store in stores.items():  # last, because a store changes its files
        store.restore(manifest["stores"][name], [one["stores"][name] for one in found.older])
    _discard(folder, [round for round in rounds_in(folder) if round > found.round])
    return state


def _checked(folder: Path, round: int, stores: Mapping[str, Store]) -> Manifest:
    """The manifest of a checkpoint all files of which are as they were written."""
    manifest = read_manifest(folder, round)
    try:
        check_tensors(folder, manifest)
        check_clients(folder, manifest["clients"])
        for name, store in stores.items():
            store.check(manifest["stores"][name])
    except MISREAD as error:
        name = _manifest_path(folder, round).name
        raise Damaged(f"{name} cannot be read ({type(error).__name__}: {error})") from error
    return manifest


def read_manifest(folder: Path, round: int) -> Manifest:
    """The manifest of a checkpoint; raises `Damaged` unless it is as it was written."""
    path = _manifest_path(folder, round)
    try:
        manifest, is_sealed = unseal(path.read_bytes())
    except (ValueError, FileNotFoundError) as error:
        raise Damaged(f"{path.name} is damaged: {error}") from error
    if not is_sealed or manifest.get("round") != round:
        raise Damaged(f"{path.name} is damaged: it has no checksum, or is of another round")
    _check_version(folder, manifest)
    return manifest


def check_tensors(folder: Path, manifest: Manifest) -> None:
    """Raise `Damaged` unless the tensor file of a checkpoint is as it was written."""
    tensors = manifest["tensors"]
    path = folder / tensors["name"]
    if not path.exists():
        raise Damaged(f"{path.name} is missing")
    if (size_bytes := path.stat().st_size) != tensors["bytes"]:
        raise Damaged(f"{path.name} is damaged: it has {size_bytes} bytes, {tensors['bytes']} were written")
    if files.digest_of(path) != tensors["digest"]:
        raise Damaged(f"{path.name} is damaged: its checksum differs")


def check_format(folder: Path) -> None:
    """Refuse a checkpoint of an older format, before anything else about its run is compared."""
    if (folder / OLD).exists():
        try:
            manifest = json.loads((folder / OLD).read_bytes())
        except (ValueError, RecursionError):
            return  # `find` refuses what is damaged
        if isinstance(manifest, dict) and "version" in manifest:
            _check_version(folder, manifest)


def _check_version(folder: Path, manifest: Manifest) -> None:
    if manifest["version"] != VERSION:
        raise GlueFLError(
            f"{folder} holds a checkpoint of format {manifest['version']}, this version of gluefl reads format "
            f"{VERSION}: go on with the version that wrote it, or start the run again in another folder."
        )


def _manifest_path(folder: Path, round: int) -> Path:
    return folder / f"state-{round}.json"


def _readable(folder: Path, rounds: Iterable[int]) -> list[Manifest]:
    """The manifests of these checkpoints, without those that are damaged."""
    manifests = []
    for round in rounds:
        with contextlib.suppress(Damaged):
            manifests.append(read_manifest(folder, round))
    return manifests


def _discard(folder: Path, rounds: Iterable[int]) -> None:
    """Delete checkpoints, and files that none of the others needs."""
    for round in rounds:
        _manifest_path(folder, round).unlink()
    left = rounds_in(folder)
    discard(folder, left)
    names = {f"state-{round}.safetensors" for round in left}
    for path in folder.glob("state-*"):
        if path.suffix == files.TEMPORARY or (path.suffix == ".safetensors" and path.name not in names):
            path.unlink()
