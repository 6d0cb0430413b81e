"""One run of a study in a process of its own, on cores of its own; the configuration comes on standard input.

`python -m gluefl.experiments.studies.worker FOLDER DEVICE CORES SHARE`: CORES as in `0,4,8`, SHARE of a GPU's memory.
"""

import os
import shutil
import sys
import tomllib
from pathlib import Path


def main(folder: str, device: str, cores: str, share: str) -> int:
    """Run or go on; a run that is done keeps no checkpoint, which may be many times its other files."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})  # before torch counts them
    from gluefl.config import validated
    from gluefl.errors import GlueFLError
    from gluefl.simulation.build import run
    from gluefl.simulation.settings import Options

    _limit(device, float(share))
    try:
        config = validated(tomllib.loads(sys.stdin.read()))
        run(config, Options(Path(folder), True, progress=False, device=device, checkpoint_at_end=False))
    except GlueFLError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    shutil.rmtree(Path(folder) / "checkpoint", ignore_errors=True)
    return 0


def _limit(device: str, share: float) -> None:
    """Runs that share a GPU start at the same time, and each would find all of its memory free."""
    import torch

    if device.startswith("cuda") and torch.cuda.is_available() and share < 1:
        torch.cuda.set_per_process_memory_fraction(share, torch.device(device).index or 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
