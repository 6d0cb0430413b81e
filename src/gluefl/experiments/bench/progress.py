"""Progress of a benchmark on standard error, in a terminal and in a pipe.

Lines instead of a bar: a bar is drawn by a thread, whose CPU seconds would be counted.
"""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import click

Item = TypeVar("Item")
LINES = 10  # at most, per count


def counted(items: Iterable[Item], what: str) -> Iterator[Item]:
    """The items; after every tenth of them a line: `rounds of w1: 3 of 9`."""
    known = list(items)
    step = -(-len(known) // LINES)
    for done, item in enumerate(known, 1):
        yield item
        if done % step == 0 or done == len(known):
            click.echo(f"{what}: {done} of {len(known)}", err=True)
