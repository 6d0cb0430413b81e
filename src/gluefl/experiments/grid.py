"""Runs that are to be made: every variant with every seed, in folders that tell whether they are done."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gluefl.config import Config, to_toml
from gluefl.errors import UsageError


@dataclass(frozen=True)
class Planned:
    """A run to be made."""

    label: str
    seed: int
    folder: Path
    config: Config

    @property
    def name(self) -> str:
        """As people read it."""
        return f"{self.label}, seed {self.seed}"

    def is_this(self) -> bool:
        """Whether the folder holds a run of exactly this configuration."""
        config = self.folder / "config.toml"
        return config.exists() and config.read_text(encoding="utf-8") == to_toml(self.config)

    def summary(self) -> dict[str, Any] | None:
        """What the run added up to, if it is done."""
        path = self.folder / "summary.json"
        if not path.exists() or not self.is_this():
            return None
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found


def planned(variants: Mapping[str, Config], seeds: Sequence[int], out: Path, single: bool = False) -> list[Planned]:
    """Every variant with every seed, into `out/<label>-<seed>/`; a single run into `out` itself."""
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise UsageError(f"seeds {', '.join(map(str, seeds))}: each must be a whole number from 0 up, and different.")
    return [
        Planned(label, seed, out if single else out / f"{label}-{seed}", config.model_copy(update={"seed": seed}))
        for seed in seeds
        for label, config in variants.items()
    ]


def check(runs: Sequence[Planned], resume: bool) -> None:
    """Refuse folders that are taken; and the last run before the first is made, as far as N is known."""
    taken = [run.folder for run in runs if (run.folder / "config.toml").exists()]
    if taken and not resume:
        raise UsageError(f"{taken[0]} holds a run already: choose another --out, or go on with it by --resume.")
    from gluefl.simulation.build import (
        build_sampler,  # torch comes with it: after everything that can be refused at once
    )

    for run in runs:
        build_sampler(run.config).check(run.config.population.clients or sys.maxsize)
