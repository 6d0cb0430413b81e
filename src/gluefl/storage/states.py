"""The state of a server as the fields of a manifest and the tensors of a file, and back."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gluefl.core.ledger import Ledger
from gluefl.core.register import Register
from gluefl.core.server import State
from gluefl.errors import GlueFLError
from gluefl.storage.tree import put_together, take_apart, unknown_type

TREES = ("strategy", "optimizer", "average", "recurrence")  # of dataclasses, in the fields of a state


def take_state_apart(state: State) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What JSON can hold, and the tensors by name, without the clients of the ledger, which have a file of their own;
    refuses a state that a checkpoint cannot hold."""
    trees = {
        "strategy": state.strategy,
        "optimizer": state.optimizer,
        "average": state.average,
        "recurrence": state.ledger.recurrence,
    }
    fields: dict[str, Any] = {
        "clock_s": state.clock_s,
        "up_bytes": state.up_bytes,
        "sampler": list(state.sampler),
        "ledger_version": state.ledger.version,
    }
    tensors = {"weights": state.weights, "statistics": state.statistics, "changed_at": state.ledger.changed_at}
    for name, tree in trees.items():
        fields[name], parts = take_apart(tree, name)
        tensors |= parts
    return fields, tensors


def check_types(fields: Mapping[str, Any], fresh: Mapping[str, Any]) -> None:
    """Refuse a state with dataclasses that the state before round 1 does not have."""
    for name in TREES:
        if place := unknown_type(fields[name], fresh[name], name):
            raise GlueFLError(
                f"the state holds a dataclass at {place} that it did not hold before round 1: a checkpoint with it "
                "could not be read. Let `init` return a dataclass of the same type there."
            )


def put_state_together(saved: dict[str, Any], tensors: dict[str, Tensor], clients: Register, fresh: State) -> State:
    """The state of a manifest's fields; `fresh` is the state of the same run before round 1."""
    changed_at = tensors["changed_at"]
    if (changed_at.shape, changed_at.dtype) != (fresh.ledger.changed_at.shape, fresh.ledger.changed_at.dtype):
        raise ValueError(f"changed_at is {changed_at.dtype} {tuple(changed_at.shape)}")
    return State(
        round=_count(saved["round"]),
        clock_s=float(saved["clock_s"]),
        weights=tensors["weights"],
        statistics=tensors["statistics"],
        ledger=Ledger(
            changed_at,
            _count(saved["ledger_version"]),
            clients,
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
