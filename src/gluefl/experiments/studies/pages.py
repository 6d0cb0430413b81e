"""The tables of a study, for the terminal and as markdown."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from gluefl.experiments.console import duration, volume
from gluefl.experiments.studies.catalogue import Study
from gluefl.experiments.studies.findings import Grid
from gluefl.experiments.studies.intervals import Estimate
from gluefl.experiments.studies.measures import Form

WIDTH = 240  # characters, where standard output is not a terminal
FORMS = {
    "count": "{:.0f}",
    "number": "{:.2f}",
    "percent": "{:.1%}",
    "seconds": "{:.1f} s",
}


def written(value: float, form: Form) -> str:
    """A number with its unit."""
    if form == "volume":
        return volume(value)
    if form == "speed":
        return f"{value:.3g}" if value < 100 else f"{value:,.0f}"
    return duration(value) if form == "duration" else FORMS[form].format(value)


def cell(value: Estimate | None, form: Form) -> str:
    """Mean ± half the width of the interval; a dash without a value, a star where a seed has none."""
    if value is None:
        return "–"
    spread = "" if value.half_width is None else f" ± {written(value.half_width, form)}"
    return f"{written(value.mean, form)}{spread}{'*' if value.missing else ''}"


def show(grids: Sequence[Grid]) -> None:
    """Print all tables; wide if standard output is not a terminal."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for grid in grids:
        console.print(table(grid))


def table(grid: Grid) -> Table:
    """For the terminal."""
    result = Table(title=grid.title, title_justify="left", caption_justify="left")
    result.add_column(grid.corner)
    for column in grid.columns:
        result.add_column(column.heading, justify="right")
    for row in _cells(grid):
        result.add_row(*row)
    result.caption = "\n".join([*grid.notes, *_legend(grid)]) or None
    return result


def markdown(study: Study, grids: Sequence[Grid], heading: str) -> str:
    """For docs/reproduction.md: the question, the tables, their notes."""
    return (
        "\n\n".join([f"### {study.name}: {study.question}", f"Paper: {study.finding}", heading, tables(grids)]) + "\n"
    )


def tables(grids: Sequence[Grid]) -> str:
    """The tables as markdown, each with its notes."""
    parts = list[str]()
    for grid in grids:
        header = [grid.corner, *(column.heading for column in grid.columns)]
        lines = [f"**{grid.title}**", "", _line(header), _line(["---"] + ["---:"] * len(grid.columns))]
        parts.append("\n".join(lines + [_line(row) for row in _cells(grid)]))
        parts.append(" ".join([*grid.notes, *_legend(grid)]))
    return "\n\n".join(part for part in parts if part)


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table of texts for the terminal."""
    result = Table(show_lines=True)
    for heading in header:
        result.add_column(heading)
    for row in rows:
        result.add_row(*row)
    return result


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts as markdown."""
    return "\n".join([_line(header), _line(["---"] * len(header)), *map(_line, rows)])


def _cells(grid: Grid) -> list[list[str]]:
    return [
        [label, *(cell(cells[column.name], column.form) for column in grid.columns)]
        for label, cells in grid.rows.items()
    ]


def _legend(grid: Grid) -> list[str]:
    values = [value for cells in grid.rows.values() for value in cells.values() if value]
    legend = ["± is half of the 95% interval over the seeds."] if any(e.half_width is not None for e in values) else []
    return legend + (["* not in all seeds."] if any(e.missing for e in values) else [])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
