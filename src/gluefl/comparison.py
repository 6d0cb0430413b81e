"""Several runs after each other, with progress, and what they add up to."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from gluefl.config import Config
from gluefl.errors import UsageError
from gluefl.tables import RunProgress

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
    if min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise UsageError(f"seeds {', '.join(map(str, seeds))}: each must be a whole number from 0 up, and different.")
    planned = [
        (label, seed, out if single else out / f"{label}-{seed}", config.model_copy(update={"seed": seed}))
        for seed in seeds
        for label, config in variants.items()
    ]
    taken = [folder for _, _, folder, _ in planned if (folder / "config.toml").exists()]
    if taken and not resume:
        raise UsageError(f"{taken[0]} holds a run already: choose another --out, or go on with it by --resume.")
    from gluefl.lab import (
        build_sampler,
        run,
    )  # torch comes with it: after everything that can be refused at once

    for (
        _,
        _,
        _,
        config,
    ) in planned:  # the last of them is refused before the first is run, as far as N is known
        build_sampler(config).check(config.population.clients or sys.maxsize)

    runs = []
    with RunProgress() as progress:
        for label, seed, folder, config in planned:
            summary = _done(folder, config) if resume else None
            if summary is None:
                name = label if len(seeds) == 1 else f"{label}, seed {seed}"
                with progress.run(name, config.rounds, config.target) as show, tracker(folder) as others:
                    summary = run(config, folder, device, resume, [show, *others]).summary
            runs.append({"strategy": label, "seed": seed} | {key: summary[key] for key in KEYS})
    return runs


def _done(folder: Path, config: Config) -> dict[str, Any] | None:
    """The summary of a run that is over; its folder is checked by the run itself if it has to go on."""
    from gluefl.config import to_toml

    path = folder / "summary.json"
    if not path.exists() or (folder / "config.toml").read_text(encoding="utf-8") != to_toml(config):
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
