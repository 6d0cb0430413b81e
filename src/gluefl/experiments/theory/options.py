"""Arguments of `gluefl.plan` from the options of the command line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gluefl.errors import UsageError
from gluefl.experiments.runs import read_run
from gluefl.experiments.theory.staleness import PlannedRounds, measured_share
from gluefl.parameters import check
from gluefl.storage.names import JOURNAL


def read_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `plan` from command-line options: `regenerate_every` may be "never", `staleness_cost` a list of
    shares or a run's folder."""
    arguments = {key: value for key, value in options.items() if value is not None}
    if (every := arguments.get("regenerate_every")) is not None:
        if every != "never" and not (str(every).isascii() and str(every).isdigit() and len(str(every)) < 19):
            raise UsageError(f"regenerate_every = {every}: write a number of rounds, or never.")
        arguments["regenerate_every"] = None if every == "never" else int(every)
    if (cost := arguments.get("staleness_cost")) is not None:
        check("a plan", rounds=(PlannedRounds, arguments.get("rounds", 1000)))
        arguments["staleness_cost"] = _read_cost(str(cost), int(arguments.get("rounds", 1000)))
    return arguments


def _read_cost(text: str, rounds: int) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        path = Path(text) / JOURNAL
    if not path.exists():
        raise UsageError(f"staleness_cost = {text}: write shares with commas, or the folder of a run.")
    run = read_run(path.parent)
    lines = run.lines
    if not lines:
        raise UsageError(f"{path} holds no whole line.")
    whole = run.model_bytes
    return [float(share) for share in measured_share(lines, whole, rounds, run.stops)]
