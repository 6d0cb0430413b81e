"""What a package promises: one version, the Python versions that CI checks, commands that need no extra."""

import re
import subprocess
import sys
import tomllib

import gluefl
from stubs import ROOT, load
from test_architecture import CORNERS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_one_version_everywhere() -> None:
    version = PROJECT["version"]
    assert gluefl.__version__ == version
    assert f"\nversion: {version}\n" in read("CITATION.cff")
    assert re.search(
        rf"^## ({re.escape(version)} \(\d{{4}}-\d\d-\d\d\)|Unreleased)$", read("CHANGELOG.md"), re.MULTILINE
    )


def test_ci_checks_every_python_that_is_promised() -> None:
    promised = {name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d", name)}
    matrices = re.findall(r"python: \[(.*)\]", read(".github/workflows/ci.yml"))
    assert promised and [set(re.findall(r"3\.\d+", matrix)) for matrix in matrices] == [promised] * len(matrices)
    assert min(promised) == PROJECT["requires-python"].removeprefix(">=")


def test_commands_of_the_core_need_no_extra(tmp_path) -> None:
    """The commands that ./dev wheel runs, where importing an optional library fails."""
    package = load(ROOT / "tools" / "check_package.py")
    (tmp_path / "small.toml").write_text(package.SMALL)
    commands = [command.split() for command in package.COMMANDS if not command.startswith(("--", "demo"))]
    code = f"""
import sys
sys.modules.update(dict.fromkeys({sorted({*CORNERS, *package.EXTRAS.split()} - {"triton"})}))
from gluefl.cli import main
for command in {commands}:
    main(command, standalone_mode=False)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "model.safetensors").exists() and (tmp_path / "compare").is_dir()
