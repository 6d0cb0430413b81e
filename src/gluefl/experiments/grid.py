"""The grid of an experiment: every variant with every seed, one run folder each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gluefl.config import Config, to_toml
from gluefl.errors import UsageError
from gluefl.parameters import MOST
from gluefl.storage.names import CONFIG, FAILURE, SUMMARY


@dataclass(frozen=True)
class RunSpec:
    """One run of a grid: its configuration and its folder."""

    label: str
    seed: int
    folder: Path
    config: Config

    @property
    def name(self) -> str:
        """For messages: `gluefl, seed 1`."""
        return f"{self.label}, seed {self.seed}"

    def is_started(self) -> bool:
        """Whether the folder holds a run of exactly this configuration."""
        config = self.folder / CONFIG
        return config.exists() and config.read_bytes() == to_toml(self.config).encode()

    def is_done(self) -> bool:
        """Whether that run has ended: finished, or diverged, which it would do again."""
        return self.is_started() and any((self.folder / name).exists() for name in (SUMMARY, FAILURE))


def expand(variants: Mapping[str, Config], seeds: Sequence[int], out: Path, single: bool = False) -> list[RunSpec]:
    """Every variant with every seed, in `out/<label>-<seed>/`; a single run in `out` itself."""
    if not seeds or min(seeds) < 0 or max(seeds) > MOST or len(set(seeds)) < len(seeds):
        raise UsageError(
            f"seeds {', '.join(map(str, seeds))}: each must be a whole number from 0 to {MOST}, and different."
        )
    return [
        RunSpec(label, seed, out if single else out / f"{label}-{seed}", config.model_copy(update={"seed": seed}))
        for seed in seeds
        for label, config in variants.items()
    ]


def check(specs: Sequence[RunSpec], resume: bool) -> None:
    """Refuse folders that hold runs already, and samplers that cannot work, before the first run starts."""
    no_folders = [path for spec in specs for path in (spec.folder.parent, spec.folder) if path.is_file()]
    if no_folders:
        raise UsageError(f"{no_folders[0]} is a file; --out needs a folder.")
    taken = [spec.folder for spec in specs if (spec.folder / CONFIG).exists()]
    if taken and not resume:
        raise UsageError(f"{taken[0]} holds a run already: choose another --out, or go on with it by --resume.")
    # Imported here because it imports torch, which takes seconds: the check above fails at once.
    from gluefl.simulation.build import build_sampler

    for spec in specs:
        sampler, clients = build_sampler(spec.config), spec.config.population.clients
        if clients is not None:  # else the data say how many there are, and `train` checks it
            sampler.check(clients)
