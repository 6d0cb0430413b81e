"""Write both lock files: `.venv/bin/python tools/make_lock.py` after a change of dependencies.

Needs uv, which Flower brings along. CUDA's libraries are left out: torch's own metadata pin their versions, and a CPU
build of torch does not need them. CPU_BUILDS are the hashes of such builds, for machines whose index offers one.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKS = {"requirements.lock": (), "requirements-dev.lock": ("--extra", "dev")}
OF_TORCH = re.compile(r"^(nvidia-|cuda-|triton)")
CPU_BUILDS = {"torch": ["6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"]}
HEADER = """\
# What ./dev {command} installs, with hashes, for Python 3.11 and newer. Made by tools/make_lock.py; do not edit.
# The hash of a CPU build of torch can be added to CPU_BUILDS of that file.
"""


def main() -> None:
    for name, extras in LOCKS.items():
        packages = [_with_builds(package) for package in compiled(extras) if not OF_TORCH.match(package)]
        header = HEADER.format(command="test" if extras else "demo")
        (ROOT / name).write_text(header + "".join(packages), "utf-8")


def compiled(extras: Sequence[str]) -> list[str]:
    """The packages of the project with these extras, each with its hashes."""
    with tempfile.TemporaryDirectory() as folder:
        build = Path(folder) / "build.in"
        build.write_text("setuptools>=68\n", encoding="utf-8")  # pyproject's build-system, for an editable install
        command = [
            *(sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11"),
            *("--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url", *extras),
            *("--constraint", str(ROOT / "constraints.txt"), str(ROOT / "pyproject.toml"), str(build)),
        ]
        text = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout
    return re.findall(r"^\S.*\n(?:[ \t]+.*\n)*", text, re.MULTILINE)


def _with_builds(package: str) -> str:
    name = re.split(r"[=<> ]", package, maxsplit=1)[0]
    hashes = "".join(f" \\\n    --hash=sha256:{one}" for one in CPU_BUILDS.get(name, []))
    return package.rstrip("\n") + hashes + "\n"


if __name__ == "__main__":
    main()
