"""Check downloaded wheels against requirements.lock; for ./dev and PyTorch, which comes in several builds.

A build of another index, by its local version (torch-2.13.0+cpu), may be missing in the lock: it is named and taken,
because the user has chosen that index.
"""

import hashlib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main(folder: str) -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    for wheel in Path(folder).glob("*.whl"):
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if f"--hash=sha256:{digest}" in lock:
            continue
        if "+" not in wheel.name:
            sys.exit(
                f"dev: {wheel.name} has the hash {digest}, which is not in requirements.lock: it is not installed."
            )
        print(f"dev: {wheel.name} is not in requirements.lock; it is taken as your index offers it", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1])
