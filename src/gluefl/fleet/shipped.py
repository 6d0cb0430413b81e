"""The shipped tables, read once: small CSV files made by tools/make_fleet_tables.py."""

import csv
import functools
from importlib import resources


@functools.cache
def rows(name: str) -> tuple[dict[str, str], ...]:
    """The lines of one shipped table, by column."""
    text = resources.files("gluefl.fleet").joinpath("tables", name).read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))
