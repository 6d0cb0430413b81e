"""The errors a person can cause. The command line prints them as one message, never as a traceback."""

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """What somebody who wrote `word` may have meant, as the end of a message; nothing if nothing is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


class GlueFLError(Exception):
    """Something went wrong that the message explains: what was found, what was needed, what to do."""

    exit_code = 1


class UsageError(GlueFLError):
    """Wrong usage: a configuration, an option or a combination that cannot run. Exit code 2."""

    exit_code = 2


class Diverged(GlueFLError):
    """The training diverged: a loss or an update is not finite."""


class DataError(GlueFLError):
    """A data or trace file that is missing, broken or not what it should be."""


class WireError(GlueFLError):
    """A message that is malformed, foreign or too large. The only error that decoding raises."""


class MissingExtra(UsageError):
    """An optional dependency that is not installed; the message holds the line that installs it."""

    def __init__(self, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs an optional part: pip install 'gluefl[{extra}]'")
