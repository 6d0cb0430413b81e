"""The arguments of `GlueFLStrategy`: their types and limits."""

from collections.abc import Mapping
from typing import Annotated, Any

from gluefl.core.averaging import Averaging
from gluefl.core.guard import Guard
from gluefl.core.server import Initial
from gluefl.flower.arrays import Statistics
from gluefl.parameters import ClosedShare, Count, File, Has, NonNegative, NonNegativeCount, Seed, check
from gluefl.strategies import PARTS
from gluefl.strategies.hooks import Hooks

ARGUMENTS: dict[str, Any] = {
    "sampler": Annotated[Any, Has(("cohort", "check", "init", "invite", "next_state"))],
    "strategy": Annotated[Any, Has(PARTS)] | None,
    "server": Annotated[Any, Has(("init", "step"))] | None,
    "averaging": Averaging | None,
    "initial": Initial | None,
    "guard": Guard | None,
    "hooks": Hooks,
    "seed": Seed,
    "out": File | None,
    "checkpoints_kept": Count,
    "statistics": Statistics,
    "fraction_evaluate": ClosedShare,
    "min_available_nodes": NonNegativeCount,
    "wait_for_nodes_s": NonNegative,
    "weighted_by_key": str,
    "arrayrecord_key": str,
    "configrecord_key": str,
}


def check_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments; refuses what cannot be used, all of it at once."""
    return check("GlueFLStrategy", **{name: (kind, given[name]) for name, kind in ARGUMENTS.items()})
