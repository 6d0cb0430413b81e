"""One run in a process of its own, on its own cores; the configuration is read from standard input.

`python -m gluefl.experiments.worker FOLDER DEVICE CORES SHARE`: CORES as in `0,4,8`, SHARE of the GPU's memory.
"""

import os
import shutil
import sys
import tomllib
from pathlib import Path

from gluefl.errors import Diverged, GlueFLError, UsageError
from gluefl.storage.names import CHECKPOINT

DIVERGED = 3  # exit code, seen by the runner only; 1 and 2 are those of other errors


def main(folder: str, device: str, cores: str, share: str) -> int:
    """Start or resume the run."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})  # before torch counts the cores
    _limit_memory(device, float(share))
    code, message = carry_out(sys.stdin.read(), Path(folder), device)
    if message:
        print(message, file=sys.stderr)
    return code


def carry_out(text: str, folder: Path, device: str) -> tuple[int, str]:
    """Start or resume the run of a configuration: its exit code, and a message if that is not 0. A finished run keeps
    no checkpoint, which may be much larger than its other files."""
    from gluefl.config import validated
    from gluefl.simulation.build import run
    from gluefl.simulation.settings import Options

    try:
        config = validated(tomllib.loads(text))
        run(config, Options(folder, True, progress=False, device=device, checkpoint_at_end=False))
    except GlueFLError as error:
        return DIVERGED if isinstance(error, Diverged) else error.exit_code, str(error)
    except (OSError, MemoryError) as error:
        return 1, f"{type(error).__name__}: {error}"
    shutil.rmtree(folder / CHECKPOINT, ignore_errors=True)
    return 0, ""


def failure(name: str, code: int, message: str) -> GlueFLError:
    """The error that ends a grid, of the same kind as that of the run."""
    return (UsageError if code == UsageError.exit_code else GlueFLError)(f"the run {name} failed:\n{message}")


def _limit_memory(device: str, share: float) -> None:
    """Runs that share a GPU start at the same time: without a limit each would plan with all of its memory."""
    import torch

    if device.startswith("cuda") and torch.cuda.is_available() and share < 1:
        torch.cuda.set_per_process_memory_fraction(share, torch.device(device).index or 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
