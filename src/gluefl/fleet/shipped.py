"""The tables that the package ships: small CSV files written by tools/make_fleet_tables.py."""

import csv
from importlib import resources


def rows(name: str) -> list[dict[str, str]]:
    """Read one shipped table, rows by column. Objects that need a table read it once and keep it."""
    text = resources.files("gluefl.fleet").joinpath("tables", name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))
