"""Figures for a paper: each as SVG, PNG and CSV, and the tables as CSV."""

import csv
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gluefl.errors import MissingExtra, UsageError
from gluefl.experiments.report.chart import Figure
from gluefl.experiments.report.comparison import Comparison, palette, read
from gluefl.experiments.report.drawing import STYLE, draw
from gluefl.experiments.report.figures import figures
from gluefl.experiments.report.headline import Headline, headlines


def write(folders: Sequence[Path], out: Path) -> list[Path]:
    """Write all figures and tables of the given folders; names of a second comparison start with 2-."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError as error:
        raise MissingExtra("report", "--figures") from error
    comparisons = read(folders)
    if not comparisons:
        raise UsageError(f"there is no run in {', '.join(map(str, folders))}: a run folder holds a journal.jsonl.")
    out.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context(STYLE):
        for number, comparison in enumerate(comparisons, 1):
            written += _comparison(comparison, f"{out}/{number}-" if number > 1 else f"{out}/")
    return written


def _comparison(comparison: Comparison, stem: str) -> list[Path]:
    places = palette(comparison.variants)
    written = []
    for figure in figures(comparison):
        _csv(Path(f"{stem}{figure.key}.csv"), rows(figure))
        drawn = draw(figure, places)
        for kind in ("svg", "png"):
            drawn.savefig(f"{stem}{figure.key}.{kind}", dpi=200, metadata={"Date": None} if kind == "svg" else None)
        written += [Path(f"{stem}{figure.key}.{kind}") for kind in ("svg", "png", "csv")]
    for i, table in enumerate(headlines(comparison), 1):
        path = Path(f"{stem}table{i if i > 1 else ''}.csv")
        _csv(path, _rows(table))
        written.append(path)
    return written


def rows(figure: Figure) -> Sequence[dict[str, Any]]:
    """A figure as the rows of a CSV file."""
    if figure.bars:
        return [
            {"label": bar, "part": one.label, "seconds": one.y[i]}
            for i, bar in enumerate(figure.bars)
            for one in figure.series
        ]
    names = (figure.x.title, figure.y.title, figure.z)
    return [
        {"label": one.label, "kind": one.kind, "seed": "" if one.seed is None else one.seed}
        | dict(zip(names, (x, y, *z)))
        for one in figure.series
        for x, y, *z in (zip(one.x, one.y, one.z) if one.z else zip(one.x, one.y))
    ]


def _rows(table: Headline) -> list[dict[str, str]]:
    result = []
    for row in table.rows:
        line = {"table": table.title, "strategy": row.label, "seeds": str(row.seeds)}
        for (heading, _), cell in zip(table.columns, row.cells):
            line |= {heading: cell.text, f"{heading} ±": cell.spread}
            line |= {f"{heading} ratio": cell.ratio} if cell.ratio else {}
        result.append(line)
    return result


def _csv(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(key for line in lines for key in line)))
        writer.writeheader()
        writer.writerows(lines)
