"""A run on disk, so that it can go on: safetensors and JSON, nothing is pickled.

`state.json` is replaced last and in one step; it names the tensor file that belongs to it. Whatever moment a run is
killed at, the old checkpoint or the new one is whole.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from gluefl.core.ledger import Ledger
from gluefl.core.server import State
from gluefl.errors import GlueFLError
from gluefl.storage.tree import put_together, take_apart

VERSION = 3  # 2 held no average and no recurrence, 1 a flat strategy state and a velocity
NOTHING: Mapping[str, "Store"] = {}


class Store(Protocol):
    """What is too large to be written with every checkpoint and keeps files of its own beside it."""

    def checkpoint(self) -> dict[str, Any]:
        """Write what is not written yet and say where everything lies, as JSON can hold it."""
        ...

    def restore(self, saved: dict[str, Any]) -> None:
        """Go back to a checkpoint."""
        ...

    def discard_old(self) -> None:
        """Delete what the last checkpoint does not need."""
        ...


def save(folder: Path, state: State, stores: Mapping[str, Store] = NOTHING) -> None:
    """Write a checkpoint beside the old one and switch to it."""
    folder.mkdir(parents=True, exist_ok=True)
    skeletons, tensors = _trees(state)
    tensors |= {
        "weights": state.weights,
        "statistics": state.statistics,
        "changed_at": state.ledger.changed_at,
    }
    name = f"state-{state.round}.safetensors"
    write_tensors(folder / f"{name}.tmp", {key: tensor.cpu().clone() for key, tensor in tensors.items()})
    _sync(folder / f"{name}.tmp")
    os.replace(folder / f"{name}.tmp", folder / name)
    saved = {
        "version": VERSION,
        "tensors": name,
        "round": state.round,
        "clock_s": state.clock_s,
        "up_bytes": state.up_bytes,
        "sampler": list(state.sampler),
        **skeletons,
        "ledger": {
            "version": state.ledger.version,
            "held": {str(client): version for client, version in state.ledger.held.items()},
            "unused": sorted(state.ledger.unused),
        },
        "stores": {name: store.checkpoint() for name, store in stores.items()},
    }
    temporary = folder / "state.json.tmp"
    temporary.write_text(json.dumps(saved), encoding="utf-8")
    _sync(temporary)
    os.replace(temporary, folder / "state.json")
    for old in folder.glob("state-*.safetensors*"):
        if old.name != name:
            old.unlink()
    for store in stores.values():
        store.discard_old()


def check(state: State) -> None:
    """Refuse a state that a checkpoint could not hold, before anything is trained."""
    _trees(state)


def load(folder: Path, fresh: State, stores: Mapping[str, Store] = NOTHING) -> State:
    """The state of a checkpoint; `fresh` is the state of the same run before round 1."""
    try:
        saved = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        _check_format(folder, saved)
        tensors = load_file(folder / saved["tensors"], device=str(fresh.weights.device))
        for name in ("weights", "statistics"):
            if tensors[name].shape != getattr(fresh, name).shape:
                raise GlueFLError(
                    f"{folder}: the checkpoint has {tensors[name].numel()} {name}, the model of this configuration "
                    f"has {getattr(fresh, name).numel()}. Resume with the configuration the run was started with."
                )
        state = _state(saved, tensors, fresh)
        for name, store in stores.items():  # last, because a store changes its files
            store.restore(saved["stores"][name])
        return state
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise GlueFLError(
            f"the checkpoint in {folder} is damaged ({type(error).__name__}: {error}). "
            "Start the run again in another folder."
        ) from error


def _state(saved: dict[str, Any], tensors: dict[str, Tensor], fresh: State) -> State:
    ledger, changed_at = saved["ledger"], tensors["changed_at"]
    if (changed_at.shape, changed_at.dtype) != (fresh.ledger.changed_at.shape, fresh.ledger.changed_at.dtype):
        raise ValueError(f"changed_at is {changed_at.dtype} {tuple(changed_at.shape)}")
    return State(
        round=_count(saved["round"]),
        clock_s=float(saved["clock_s"]),
        weights=tensors["weights"],
        statistics=tensors["statistics"],
        ledger=Ledger(
            changed_at,
            _count(ledger["version"]),
            {int(client): _count(version) for client, version in ledger["held"].items()},
            frozenset(map(_count, ledger["unused"])),
            fresh.ledger.initial_known,
            put_together(saved["recurrence"], tensors, fresh.ledger.recurrence),
        ),
        sampler=tuple(map(_integer, saved["sampler"])),
        strategy=put_together(saved["strategy"], tensors, fresh.strategy),
        optimizer=put_together(saved["optimizer"], tensors, fresh.optimizer),
        average=put_together(saved["average"], tensors, fresh.average),
        up_bytes=None if saved["up_bytes"] is None else _count(saved["up_bytes"]),
    )


def _integer(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{value!r} where an integer is expected")
    return value


def _count(value: Any) -> int:
    count = _integer(value)
    if count < 0:
        raise ValueError(f"{count} where a number of rounds, clients or bytes is expected")
    return count


def check_format(folder: Path) -> None:
    """Refuse a checkpoint of another format, before anything else about its run is compared."""
    try:
        saved = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return  # `load` refuses what is damaged
    if isinstance(saved, dict) and "version" in saved:
        _check_format(folder, saved)


def _check_format(folder: Path, saved: dict[str, Any]) -> None:
    if saved["version"] != VERSION:
        raise GlueFLError(
            f"{folder} holds a checkpoint of format {saved['version']}, this version of gluefl reads format "
            f"{VERSION}: go on with the version that wrote it, or start the run again in another folder."
        )


def exists(folder: Path) -> bool:
    """Whether there is a checkpoint to resume from."""
    return (folder / "state.json").exists()


def _trees(state: State) -> tuple[dict[str, Any], dict[str, Tensor]]:
    trees = {
        "strategy": state.strategy,
        "optimizer": state.optimizer,
        "average": state.average,
        "recurrence": state.ledger.recurrence,
    }
    skeletons, tensors = {}, dict[str, Tensor]()
    for name, tree in trees.items():
        skeletons[name], parts = take_apart(tree, name)
        tensors |= parts
    return skeletons, tensors


def write_tensors(path: Path, tensors: dict[str, Tensor], notes: dict[str, str] | None = None) -> None:
    """As `save_file` of safetensors, whose error on a full disk is none of the system's and says less."""
    path.write_bytes(to_bytes(tensors, notes))


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
