"""Build wheel and source distribution into dist/, and try the wheel as a user would: `./dev wheel`.

The wheel must hold every file of the package. It is installed in a new virtual environment with the core dependencies
alone; then every command that needs no extra must run there.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
BUILD = "from setuptools import build_meta as b; print(b.build_wheel('dist'), b.build_sdist('dist'), sep='\\n')"
EXTRAS = "flwr ray matplotlib pandas PIL pyarrow tensorboardX mlflow wandb transformers peft dp_accounting mkdocs"
SMALL = """
rounds = 2
target = 0.5
evaluation = { average = 1 }
population = { name = "glyphs", clients = 40, test_samples = 62 }
model = { name = "mlp" }
strategy = { name = "lean" }
sampling = { cohort = 5, sticky_size = 10, sticky_cohort = 4 }
compare = { strategies = ["fedavg", "lean"] }
"""
COMMANDS = (
    "--version",
    "--help",
    "demo --set rounds=2 --out demo",
    "run small.toml --out run",
    "compare small.toml --out compare",
    "report compare",
    "plan --clients 2800 --cohort 30",
    "verify run compare",
    "export run --out model.safetensors",
    "study",
)


def build() -> Path:
    """Both distributions, checked for completeness; returns the wheel."""
    for folder in (DIST, ROOT / "build"):  # an old build folder would put deleted files into the wheel
        shutil.rmtree(folder, ignore_errors=True)
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the package cannot be built:\n{done.stdout}{done.stderr}")
    (wheel,), (source,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    files = {path for path in (ROOT / "src" / "gluefl").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    with zipfile.ZipFile(wheel) as archive, tarfile.open(source) as tar:
        packed, names = set(archive.namelist()), {name.partition("/")[2] for name in tar.getnames()}
    missing = sorted(str(path) for path in files if path.relative_to(ROOT / "src").as_posix() not in packed)
    missing += sorted(str(path) for path in files if path.relative_to(ROOT).as_posix() not in names)
    if missing:
        sys.exit(f"missing in {wheel.name} or {source.name}: {', '.join(missing)}")
    print(f"dist/{wheel.name} ({wheel.stat().st_size:,} bytes), dist/{source.name}: {len(files)} files of the package")
    return wheel


def try_out(wheel: Path, folder: Path) -> None:
    """Install the wheel without extras, and run the commands of the core."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    constraints = ["-c", str(ROOT / "constraints.txt")]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *constraints, str(wheel)], check=True)
    found = f"import importlib.util as i; print(*[n for n in {EXTRAS.split()!r} if i.find_spec(n)])"
    extras = subprocess.run(
        [python, "-c", found], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.split()
    if extras:
        sys.exit(f"the core brings optional libraries along: {', '.join(extras)}")
    (folder / "small.toml").write_text(SMALL)
    for command in COMMANDS:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [python, "-m", "gluefl", *command.split()], cwd=folder, env=environment, capture_output=True, text=True
        )
        print(f"gluefl {command}: {'ok' if done.returncode == 0 else done.returncode}", flush=True)
        if done.returncode:
            sys.exit(f"{done.stdout[-2000:]}{done.stderr[-4000:]}")


def main() -> None:
    wheel = build()
    with tempfile.TemporaryDirectory(prefix="gluefl-package-") as folder:
        try_out(wheel, Path(folder))


if __name__ == "__main__":
    main()
