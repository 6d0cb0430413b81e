"""Figures for a paper: each as SVG, PNG and CSV, and the tables as CSV."""

import csv
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gluefl.errors import MissingExtra, UsageError
from gluefl.experiments.report.comparison import Comparison, palette, read
from gluefl.experiments.report.figures import Axis, Figure, figures
from gluefl.experiments.report.headline import Headline, headlines

COLOURS = ("#2a78d6", "#eb6834", "#1a9c6e", "#6a4bbf", "#c98a00", "#d6487f", "#0f7f8c", "#7a6a58")
PARTS = ("#2a5d9c", "#b9c3d0", "#7fb0e4", "#e6c98f")
UNITS: dict[str, tuple[tuple[float, str], ...]] = {
    "bytes": ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")),
    "seconds": ((3600, "h"), (60, "min"), (1, "s")),
    "share": ((0.01, "%"),),
    "count": ((1, ""),),
    "number": ((1, ""),),
}
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e7eb",
    "font.size": 9,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "gluefl",  # the same figure gives the same file
}


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
    colours = {label: COLOURS[i % len(COLOURS)] for label, i in palette(comparison.variants).items()}
    written = []
    for figure in figures(comparison):
        _csv(Path(f"{stem}{figure.key}.csv"), rows(figure))
        drawn = draw(figure, colours)
        for kind in ("svg", "png"):
            drawn.savefig(f"{stem}{figure.key}.{kind}", dpi=200, metadata={"Date": None} if kind == "svg" else None)
        written += [Path(f"{stem}{figure.key}.{kind}") for kind in ("svg", "png", "csv")]
    for i, table in enumerate(headlines(comparison), 1):
        path = Path(f"{stem}table{i if i > 1 else ''}.csv")
        _csv(path, _rows(table))
        written.append(path)
    return written


def draw(figure: Figure, colours: Mapping[str, str]) -> Any:
    """A matplotlib figure of one column's width."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(4.2, 0.7 + 0.35 * len(figure.bars) if figure.bars else 2.8), layout="constrained")
    axes = canvas.subplots()
    if figure.bars:
        x_factor = _bars(figure, axes)
    else:
        x_factor = _lines(figure, axes, colours)
    axes.set_xlabel(_title(figure.x, x_factor))
    axes.set_axisbelow(True)
    return canvas


def _lines(figure: Figure, axes: Any, colours: Mapping[str, str]) -> float:
    x_factor = _factor(figure.x, [x for one in figure.series for x in one.x])
    y_factor = _factor(figure.y, [y for one in figure.series for y in one.y])
    styles: dict[str, dict[str, Any]] = {
        "mean": {"linewidth": 1.6},
        "seed": {"linewidth": 0.6, "alpha": 0.5},
        "theory": {"linewidth": 1, "linestyle": ":"},
    }
    for one in figure.series:
        x, y = [v / x_factor for v in one.x], [v / y_factor for v in one.y]
        label = {"label": one.label} if one.kind == "mean" else {}
        marker = {"marker": "o"} if len(x) == 1 else {}
        axes.plot(x, y, color=colours[one.label], **styles[one.kind], **label, **marker)
        if one.reached is not None:
            axes.plot(x[one.reached], y[one.reached], "o", color=colours[one.label], markersize=4)
    if figure.target:
        axes.axhline(figure.target / y_factor, color="#888888", linewidth=0.8, linestyle="--")
    if figure.x.log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.set_ylabel(_title(figure.y, y_factor))
    axes.legend()
    return x_factor


def _bars(figure: Figure, axes: Any) -> float:
    left = [0.0] * len(figure.bars)
    factor = _factor(figure.x, [sum(values) for values in zip(*(one.y for one in figure.series))])
    for one, colour in zip(figure.series, PARTS):
        sizes = [value / factor for value in one.y]
        axes.barh(figure.bars, sizes, left=left, color=colour, label=one.label, height=0.6)
        left = [a + b for a, b in zip(left, sizes)]
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.legend(ncols=len(figure.series), loc="lower left", bbox_to_anchor=(0, 1))
    return factor


def _factor(axis: Axis, values: Sequence[float]) -> float:
    high = max(values, default=1)
    return next((factor for factor, _ in UNITS[axis.unit] if high >= factor), UNITS[axis.unit][-1][0])


def _title(axis: Axis, factor: float) -> str:
    unit = dict(UNITS[axis.unit])[factor]
    return f"{axis.title} ({unit})" if unit else axis.title


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
