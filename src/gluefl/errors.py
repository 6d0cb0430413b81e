"""Errors that users can cause. The command line prints them as one message, never as a traceback."""

import difflib
import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path


def nearest(word: str, valid: Iterable[str]) -> str:
    """The closest of the valid words, as the end of a message; empty if none is close."""
    close = difflib.get_close_matches(str(word), list(valid), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def pip_install(what: str) -> str:
    """The command that installs something for the Python that runs this, which need not be the one on the path."""
    python, pip = Path(sys.executable), shutil.which("pip")
    if pip is not None and Path(pip).parent == python.parent:
        return f"pip install '{what}'"
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    return f"{shlex.quote(str(python))} -m pip install '{what}'"


class GlueFLError(Exception):
    """An error whose message says what was found, what was needed and what to do."""

    exit_code = 1


class UsageError(GlueFLError):
    """Wrong usage: a configuration, an option or a combination that cannot run. Exit code 2."""

    exit_code = 2


class Damaged(GlueFLError):
    """A file of a run does not hold what was written into it: its checksum differs, or a part of it is missing."""


class Diverged(GlueFLError):
    """Training produced NaN or infinite values. It would again, so that grids of runs record it as a result."""


class Interrupted(GlueFLError):
    """A run was stopped by a signal; its last round is in a checkpoint."""


class DataError(GlueFLError):
    """A data or trace file is missing, broken or of another format."""


class WireError(GlueFLError):
    """A message is malformed, foreign or too large. The only error that decoding raises."""


class MissingExtra(UsageError):
    """An optional dependency is not installed; the message contains the command that installs it."""

    def __init__(self, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs an optional part: {pip_install(f'gluefl[{extra}]')}")
