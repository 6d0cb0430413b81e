"""Torture: `./dev torture [PART …] [--short]`. Every part counts what it did; anything wrong ends in exit status 1."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests")]  # the golden messages and the hostile nodes of the tests

from command import main  # noqa: E402

if __name__ == "__main__":
    main()
