"""A run on disk, so that it can go on: safetensors and JSON, nothing is pickled.

`state.json` is replaced last and in one step; it names the tensor file that belongs to it. Whatever moment a run is
killed at, the old checkpoint or the new one is whole.
"""

import json
import os
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from gluefl.clients.residuals import Residuals
from gluefl.core.federation import State
from gluefl.core.ledger import Ledger
from gluefl.errors import GlueFLError
from gluefl.strategies import Space

VERSION = 1
HOLDS = "a checkpoint holds a frozen dataclass of tensors, numbers and None, a Space, or None."


def save(folder: Path, state: State, residuals: Residuals) -> None:
    """Write a checkpoint beside the old one and switch to it."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors, numbers = _take_apart(state.strategy)
    tensors = {f"strategy.{name}": tensor for name, tensor in tensors.items()} | {
        "weights": state.weights,
        "statistics": state.statistics,
        "changed_at": state.ledger.changed_at,
    }
    if state.velocity is not None:
        tensors["velocity"] = state.velocity
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
        "strategy": numbers,
        "ledger": {
            "version": state.ledger.version,
            "held": {str(client): version for client, version in state.ledger.held.items()},
            "unused": sorted(state.ledger.unused),
        },
        "residuals": residuals.checkpoint(),
    }
    temporary = folder / "state.json.tmp"
    temporary.write_text(json.dumps(saved), encoding="utf-8")
    _sync(temporary)
    os.replace(temporary, folder / "state.json")
    for old in folder.glob("state-*.safetensors*"):
        if old.name != name:
            old.unlink()
    residuals.discard_old()


def check(state: State) -> None:
    """Refuse a strategy whose state a checkpoint could not hold, before anything is trained."""
    for name, value in _take_apart(state.strategy)[1].items():
        if not isinstance(value, int | float | None):
            raise GlueFLError(f"the strategy's state has {name} = {value!r}: {HOLDS}")


def load(folder: Path, fresh: State, residuals: Residuals) -> State:
    """The state of a checkpoint; `fresh` is the state of the same run before round 1."""
    try:
        saved = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        if saved["version"] != VERSION:
            raise GlueFLError(f"{folder}: checkpoint version {saved['version']}, this program reads {VERSION}.")
        device = fresh.weights.device
        tensors = load_file(folder / saved["tensors"], device=str(device))
        for name in ("weights", "statistics"):
            if tensors[name].shape != getattr(fresh, name).shape:
                raise GlueFLError(
                    f"{folder}: the checkpoint has {tensors[name].numel()} {name}, the model of this configuration "
                    f"has {getattr(fresh, name).numel()}. Resume with the configuration the run was started with."
                )
        residuals.restore(saved["residuals"])
        ledger = saved["ledger"]
        strategy = {n.removeprefix("strategy."): t for n, t in tensors.items() if n.startswith("strategy.")}
        return State(
            round=saved["round"],
            clock_s=saved["clock_s"],
            weights=tensors["weights"],
            statistics=tensors["statistics"],
            ledger=Ledger(
                tensors["changed_at"],
                ledger["version"],
                {int(client): version for client, version in ledger["held"].items()},
                frozenset(ledger["unused"]),
            ),
            sampler=tuple(saved["sampler"]),
            strategy=_put_together(fresh.strategy, strategy, saved["strategy"]),
            velocity=tensors.get("velocity"),
            up_bytes=saved["up_bytes"],
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise GlueFLError(
            f"the checkpoint in {folder} is damaged ({type(error).__name__}: {error}). "
            "Start the run again in another folder."
        ) from error


def exists(folder: Path) -> bool:
    """Whether there is a checkpoint to resume from."""
    return (folder / "state.json").exists()


def _take_apart(state: Any) -> tuple[dict[str, Tensor], dict[str, float | int | None]]:
    """A strategy's state as tensors and numbers; the space is known without it."""
    if isinstance(state, Space) or state is None:
        return {}, {}
    if not is_dataclass(state):
        raise GlueFLError(f"the strategy's state is a {type(state).__name__}: {HOLDS}")
    values = {field.name: getattr(state, field.name) for field in fields(state)}
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    return tensors, {n: v for n, v in values.items() if n not in tensors and not isinstance(v, Space)}


def _put_together(fresh: Any, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> Any:
    return replace(fresh, **tensors, **numbers) if tensors or numbers else fresh


def write_tensors(path: Path, tensors: dict[str, Tensor], notes: dict[str, str] | None = None) -> None:
    """As `save_file` of safetensors, whose error on a full disk is none of the system's and says less."""
    path.write_bytes(to_bytes(tensors, notes))


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
