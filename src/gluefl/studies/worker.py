"""One run of a study in a process of its own: the configuration on standard input, one core, one thread.

`python -m gluefl.studies.worker FOLDER DEVICE CORE`, with CORE a number or `any`.
"""

import os
import shutil
import sys
import tomllib
from pathlib import Path


def main(folder: str, device: str, core: str) -> int:
    """Run or go on; a run that is done keeps no checkpoint, which may be many times its other files."""
    if core != "any" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(core)})  # before torch counts the cores
    from gluefl.config import validated
    from gluefl.errors import GlueFLError
    from gluefl.lab import run

    try:
        run(validated(tomllib.loads(sys.stdin.read())), Path(folder), device, resume=True)
    except GlueFLError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    shutil.rmtree(Path(folder) / "checkpoint", ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
