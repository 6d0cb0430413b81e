"""Mutated messages, guided by the branches they reach: atheris, where it is installed (`pip install atheris`).

`python tools/torture guided [--count SECONDS]`. The first byte of an input chooses a message, the rest is its body; the
header and the checksums are right.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from progress import Progress

FOUND = re.compile(r"#(\d+)\s.*?cov: (\d+)")
DONE = re.compile(r"Done (\d+) runs")
HERE = Path(__file__).parent
LONGEST_S, MOST_MB = 10, 2048


def run(work: Path, seconds: int, seed: int) -> dict[str, Any]:
    """Fuzz for some seconds in a process of its own, which ends at the first input that is not refused properly."""
    if find_spec("atheris") is None:
        return {"skipped": "atheris is not installed", "wrong": []}
    from mutation import seeds

    corpus = work / "corpus"
    corpus.mkdir()
    for number, one in enumerate(seeds().values()):
        (corpus / str(number)).write_bytes(bytes([number]) + one.parts[1])
    command = [sys.executable, str(HERE / "guided.py"), str(corpus), f"-max_total_time={seconds}", f"-seed={seed}"]
    command += [f"-timeout={LONGEST_S}", f"-rss_limit_mb={MOST_MB}", "-max_len=600", f"-artifact_prefix={work}/"]
    messages, branches, lines, said = 0, 0, list[str](), Progress("guided", seconds)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines = [*lines[-30:], line]
            if match := FOUND.search(line):
                messages, branches = int(match[1]), int(match[2])
                said.at(min(int(said.elapsed_s), seconds - 1), f"{messages} messages, {branches} branches")
            elif match := DONE.search(line):
                messages = int(match[1])
    wrong = ["".join(lines)[-2000:]] if process.returncode else []
    return {"seconds of search": seconds, "messages": messages, "branches reached": branches, "wrong": wrong}


def main() -> None:
    """Read inputs until the time is up."""
    import atheris  # type: ignore[import-not-found]

    with atheris.instrument_imports(include=["gluefl.wire", "gluefl.vectors"]):
        from mutation import seeds

        from gluefl.errors import WireError

    subjects = list(seeds().values())

    def read(data: bytes) -> None:
        if not data:
            return
        subject = subjects[data[0] % len(subjects)]
        message = subject.signed(subject.parts[0], data[1:])
        try:
            is_sound = subject.is_sound(message)
        except WireError:
            return
        if not is_sound:
            raise AssertionError(f"not sound: {message.hex()}")

    atheris.Setup(sys.argv, read)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
