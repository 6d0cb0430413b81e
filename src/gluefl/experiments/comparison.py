"""Several runs after each other, with progress, and what they add up to."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from gluefl.config import Config
from gluefl.experiments.console import RunProgress
from gluefl.experiments.grid import check, planned

Tracker = Callable[[Path], AbstractContextManager[list[Callable[[Any, Any], None]]]]  # callbacks for a run's folder

KEYS = (
    "rounds",
    "accuracy",
    "target",
    "reached_round",
    "down_bytes",
    "up_bytes",
    "total_bytes",
    "download_s",
    "total_s",
    "mean_download_share",
)


def execute(
    variants: Mapping[str, Config],
    seeds: Sequence[int],
    out: Path,
    device: str = "cpu",
    resume: bool = False,
    single: bool = False,
    tracker: Tracker = lambda folder: nullcontext([]),
) -> list[dict[str, Any]]:
    """Run every variant with every seed into `out/<label>-<seed>/` (a single run into `out` itself)."""
    plan = planned(variants, seeds, out, single)
    check(plan, resume)
    from gluefl.simulation.build import run  # torch comes with it: after everything that can be refused at once
    from gluefl.simulation.settings import Options

    runs = []
    with RunProgress() as progress:
        for item in plan:
            summary = item.summary() if resume else None
            if summary is None:
                name = item.label if len(seeds) == 1 else item.name
                shown = progress.run(name, item.config.rounds, item.config.target)
                with shown as show, tracker(item.folder) as others:
                    summary = run(
                        item.config,
                        Options(item.folder, resume, (show, *others), progress=False, device=device),
                    ).summary
            runs.append({"strategy": item.label, "seed": item.seed} | {key: summary[key] for key in KEYS})
    return runs
