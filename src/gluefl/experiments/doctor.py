"""The work behind `gluefl doctor`: versions, devices, optional parts, and a self-test of about a second."""

import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from gluefl import __version__
from gluefl.errors import pip_install

State = Literal["ok", "absent", "failed"]  # absent: an optional part that is not installed; not a failure
DEVELOPMENT = "dev"  # the extra of people who work on this project
SELF_TESTS = "lean round trip", "resume", "checksums"


@dataclass(frozen=True)
class Finding:
    """One row: a part of this installation, its state, and what to do if it is not as it should be."""

    part: str
    state: State
    detail: str
    advice: str = ""


def examine() -> list[Finding]:
    """Everything that `gluefl doctor` looks at."""
    return [*versions(), *devices(), *extras(), *self_test()]


def versions() -> Iterator[Finding]:
    """This program, Python, and the libraries that it needs."""
    yield Finding("gluefl", "ok", f"{__version__}, {Path(__file__).parents[1]}")
    yield Finding("python", "ok", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    for name, bounds, extra in _requirements():
        if not extra:
            yield _library(name, bounds, pip_install(f"{name}{bounds}"), missing="failed")


def devices() -> Iterator[Finding]:
    """The CPU, and every GPU that PyTorch can use."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("cpu", "ok", f"{cores} cores, {torch.get_num_threads()} threads of PyTorch")
    if not torch.cuda.is_available():
        built = f"PyTorch {torch.__version__} is built {'with' if torch.version.cuda else 'without'} CUDA"
        yield Finding("cuda", "absent", built, "everything runs on the CPU")
        return
    for number in range(torch.cuda.device_count()):
        name, size = f"cuda:{number}", torch.cuda.get_device_properties(number).total_memory
        try:
            works = float(torch.ones(2, device=name).sum()) == 2
            detail = f"{torch.cuda.get_device_name(number)}, {size / 2**30:.0f} GiB"
            yield Finding(name, "ok" if works else "failed", detail, "" if works else "it computed 1 + 1 wrongly")
        except RuntimeError as error:
            yield Finding(name, "failed", str(error).partition("\n")[0], "check the driver, or use --device cpu")


def extras() -> Iterator[Finding]:
    """The optional parts: what is installed, or the line that installs it."""
    names = dict.fromkeys(extra for _, _, extra in _requirements() if extra not in ("", DEVELOPMENT))
    for extra in names:
        line = pip_install(f"gluefl[{extra}]")
        found = [_library(name, bounds, line, "absent") for name, bounds, of in _requirements() if of == extra]
        worst = next((one for one in found if one.state != "ok"), found[0])
        yield Finding(extra, worst.state, ", ".join(one.detail for one in found), worst.advice)


def self_test() -> Iterator[Finding]:
    """A small run of lean whose messages are encoded, decoded and checked; the same run stopped and resumed."""
    with tempfile.TemporaryDirectory(prefix="gluefl-doctor-") as folder:
        checks: Sequence[Callable[[Path], str]] = (_round_trip, _resume, _checksums)
        for name, check in zip(SELF_TESTS, checks):
            try:
                yield Finding(name, "ok", check(Path(folder)))
            except Exception as error:  # whatever is wrong with this installation is the result
                detail = f"{type(error).__name__}: {error}".partition("\n")[0]
                yield Finding(name, "failed", detail, "reinstall, or report it with this table")
                return  # the later checks need the earlier ones


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings as one object; `ok` is false if a part failed."""
    return {"ok": healthy(findings), "findings": [asdict(one) for one in findings]}


def healthy(findings: Sequence[Finding]) -> bool:
    """Whether nothing failed; optional parts may be absent."""
    return all(one.state != "failed" for one in findings)


def _train(out: Path | None, rounds: int, resume: bool = False) -> Any:
    import torch

    from gluefl.clients.rules import LocalSGD
    from gluefl.core.sampling import Sticky
    from gluefl.populations.glyphs import Glyphs
    from gluefl.simulation.run import train
    from gluefl.simulation.settings import Evaluation, Options, Setting
    from gluefl.strategies.lean import Lean

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(28 * 28, 62))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more would take longer to start than this takes to compute
    try:
        return train(
            model,
            Glyphs(clients=12, median_samples=22, test_samples=62),
            Lean(),
            sampler=Sticky(3, 6, 2),
            rounds=rounds,
            setting=Setting(training=LocalSGD(steps=1, batch=8, lr=0.05), evaluation=Evaluation(every=2)),
            options=Options(out, resume, progress=False, encode=True, trainer="loop"),
        )
    finally:
        torch.set_num_threads(threads)


def _round_trip(folder: Path) -> str:
    summary = _train(folder / "whole", rounds=4).summary
    return f"4 rounds, {summary['down_bytes']:,} bytes down, {summary['up_bytes']:,} up, every message decoded"


def _resume(folder: Path) -> str:
    _train(folder / "stopped", rounds=2)
    _train(folder / "stopped", rounds=4, resume=True)
    models = [(folder / name / "model.safetensors").read_bytes() for name in ("whole", "stopped")]
    if models[0] != models[1]:
        raise AssertionError("a resumed run ended with another model")
    return "stopped after 2 rounds and resumed: the same model, bit for bit"


def _checksums(folder: Path) -> str:
    from gluefl.experiments.verify import verify

    checks = verify([folder])
    if damaged := [check.file for check in checks if check.damage is not None]:
        raise AssertionError(f"damaged: {', '.join(damaged)}")
    return f"{len(checks)} checks of files, all whole"


def _requirements() -> list[tuple[str, str, str]]:
    """Name, bounds and extra of every library in the metadata of this installation."""
    try:
        lines = metadata.requires("gluefl") or []
    except metadata.PackageNotFoundError:  # a source tree on the path: nothing says what belongs to it
        return []
    found = []
    for line in lines:
        need, _, marker = line.partition(";")
        name = re.match(r"[\w.-]+", need)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        if name is not None and name[0] != "gluefl":
            bounds = re.sub(r"\[[^]]*\]", "", need[name.end() :]).strip()
            found.append((name[0], bounds, extra[1] if extra else ""))
    return found


def _library(name: str, bounds: str, line: str, missing: State) -> Finding:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, missing, f"{name} is not installed", line)
    if not within(version, bounds):
        return Finding(name, "failed", f"{name} {version}, needed {bounds}", line)
    return Finding(name, "ok", f"{name} {version}")


def within(version: str, bounds: str) -> bool:
    """Whether a version lies within bounds such as `>=1.41,<1.42`."""
    own = _numbers(version)
    for sign, bound in re.findall(r"(>=|<=|==|!=|<|>)\s*([\w.]+)", bounds):
        limit = _numbers(bound)
        order = (own > limit) - (own < limit)
        if not {">=": order >= 0, "<=": order <= 0, "==": order == 0, "!=": order != 0, "<": order < 0}.get(
            sign, order > 0
        ):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """2.8.0+cpu as (2, 8): zeros at the end do not count."""
    numbers = [int(part) for part in re.match(r"[\d.]*", version)[0].split(".") if part]  # type: ignore[index]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
