"""A figure by matplotlib: for papers, slides and the README."""

import itertools
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gluefl.experiments.report.chart import Axis, Figure, Series

COLOURS = ("#2a78d6", "#eb6834", "#1a9c6e", "#6a4bbf", "#c98a00", "#d6487f", "#0f7f8c", "#7a6a58")
DASHES: tuple[Any, ...] = (  # of the page: lines that coincide are told apart
    "-", (0, (5, 2.5)), (0, (6, 6)), (0, (5.6, 1.6, 1.2, 1.6)), (0, (8, 2)), (0, (2, 1.6)), (0, (1, 1.2)), (0, (7, 2.4))
)  # fmt: skip
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
KINDS: dict[str, dict[str, Any]] = {
    "mean": {"linewidth": 1.6},
    "seed": {"linewidth": 0.6, "alpha": 0.5},
    "theory": {"linewidth": 1, "linestyle": ":"},
}


def draw(figure: Figure, places: Mapping[str, int], size: tuple[float, float] | None = None) -> Any:
    """A matplotlib figure, of one column's width unless a size in inches is given; `places` as from `palette`."""
    from matplotlib.figure import Figure as Canvas

    usual = (4.2, 0.7 + 0.35 * len(figure.bars) if figure.bars else 2.8)
    canvas = Canvas(figsize=size or usual, layout="constrained")
    axes = canvas.subplots()
    if figure.bars:
        x_factor = _bars(figure, axes)
    else:
        x_factor = _lines(figure, axes, places)
    axes.set_xlabel(_title(figure.x, x_factor))
    axes.set_axisbelow(True)
    if not figure.bars:
        factors = x_factor, _factor(figure.y, [y for one in figure.series for y in one.y])
        means = [one for one in figure.series if one.kind == "mean"]
        ends = {one.label: (one.x[-1] / factors[0], one.y[-1] / factors[1]) for one in means if one.x}
        _names(canvas, axes, ends, places)
    return canvas


def _lines(figure: Figure, axes: Any, places: Mapping[str, int]) -> float:
    x_factor = _x_factor(figure)
    y_factor = _factor(figure.y, [y for one in figure.series for y in one.y])
    for one in figure.series:
        _line(figure, one, axes, places[one.label], (x_factor, y_factor))
    if figure.target:
        axes.axhline(figure.target / y_factor, color="#888888", linewidth=0.8, linestyle="--")
        target = f"dashed: target {figure.target / y_factor:g}{'%' if figure.y.unit == 'share' else ''}"
        # Above the axes, where it lies on no line and no name.
        place = {"xy": (0, 1), "xycoords": "axes fraction", "xytext": (0, 8), "textcoords": "offset points"}
        axes.annotate(target, **place, size=8, color="#666666")
    _scales(figure, axes, y_factor)
    axes.set_ylabel(textwrap.fill(_title(figure.y, y_factor), 30))
    return x_factor


def _line(figure: Figure, one: Series, axes: Any, place: int, factors: tuple[float, float]) -> None:
    """A line with its band, or points. Where a mean is drawn, seeds are the edges of its band and dots."""
    x, y = ([value / factor for value in values] for values, factor in zip((one.x, one.y), factors))
    colour = COLOURS[place % len(COLOURS)]
    if figure.points or (len(x) == 1 and one.kind == "mean"):
        face = {"markerfacecolor": "white"} if one.unreached else {}
        axes.plot(x, y, "o", color=colour, markersize=7 if one.kind == "mean" else 3, **face)
        return
    if one.low:
        edges = [[value / factors[1] for value in edge] for edge in (one.low, one.high)]
        axes.fill_between(x, *edges, color=colour, alpha=0.15, linewidth=0)
    dashes = {"linestyle": DASHES[(place + place // len(COLOURS)) % len(DASHES)]} if one.kind == "mean" else {}
    if one.kind != "seed":
        axes.plot(x, y, color="#333333" if one.kind == "theory" else colour, **KINDS[one.kind], **dashes)
    if one.reached is not None:
        axes.plot(x[one.reached], y[one.reached], "o", color=colour, markersize=4)


def _scales(figure: Figure, axes: Any, y_factor: float) -> None:
    """Limits and ticks; room at the right for the names of the lines."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for axis, scale, line in ((figure.x, axes.set_xscale, axes.xaxis), (figure.y, axes.set_yscale, axes.yaxis)):
        if axis.log:
            scale("log")
            line.set_major_locator(LogLocator(subs=(1, 2, 5)))
            line.set_major_formatter("{x:g}")
            line.set_minor_formatter(NullFormatter())
    means = [one for one in figure.series if one.kind == "mean"]
    if not figure.y.zero:
        low = min((min(one.y[len(one.y) // 4 :]) for one in means), default=0) / y_factor
        axes.set_ylim(bottom=math.floor(low / 5) * 5 if figure.y.unit == "share" else None)
    elif not figure.y.log:
        axes.set_ylim(bottom=0)
    if figure.points and not figure.x.log:
        axes.set_xlim(left=0)
    left, right = axes.get_xlim()
    wide = 0.05 + 0.022 * max((len(one.label) for one in means), default=0) * (4.2 / axes.figure.get_figwidth())
    axes.set_xlim(right=right * (right / left) ** wide if figure.x.log else right + wide * (right - left))


def _names(canvas: Any, axes: Any, ends: Mapping[str, tuple[float, float]], places: Mapping[str, int]) -> None:
    """The name of each line at its end, or the nearest place beside it where no line and no other name is."""
    canvas.draw_without_rendering()
    frame, unit = axes.get_window_extent(), canvas.dpi / 72
    strokes = [point for line in axes.lines for point in _points(line, 4 * unit)]
    height, gap = 11 * unit, 6 * unit
    written = list[tuple[float, float, float]]()
    for label, end in sorted(ends.items(), key=lambda item: -item[1][1]):
        x, y = axes.transData.transform(end)
        colour = COLOURS[places[label] % len(COLOURS)]
        text = axes.text(*end, label, color=colour, size=8.5, weight="bold", va="center", clip_on=False)
        wide = text.get_window_extent().width

        def free(place: tuple[float, float], wide: float = wide) -> bool:
            left, middle = place
            right, low, high = left + wide, middle - height / 2, middle + height / 2
            inside = frame.x0 < left and low > frame.y0 and middle < frame.y1
            apart = all(right < a or a + w < left or abs(b - middle) >= height for a, b, w in written)
            return inside and apart and not any(left < a < right and low < b < high for a, b in strokes)

        shifts = [sign * step * 2 * unit for step in range(60) for sign in (1, -1)]
        beside = [(x + gap, y + shift) for shift in shifts] + [(x - gap - wide, y + shift) for shift in shifts]
        beside.sort(key=lambda place: abs(place[1] - y) + height * (place[0] < x))
        left, middle = next(filter(free, beside), beside[0])
        written.append((left, middle, wide))
        text.set_position(axes.transData.inverted().transform((left, middle)))
        if abs(middle - y) > height:
            near = axes.transData.inverted().transform((left if left > x else left + wide, middle))
            axes.plot(*zip(end, near), color="#888888", linewidth=0.5, scalex=False, scaley=False)


def _points(line: Any, radius: float) -> Iterator[tuple[float, float]]:
    """What a line or its dots cover, as points on the canvas."""
    corners = [(float(x), float(y)) for x, y in line.get_transform().transform(line.get_xydata())]
    if line.get_linestyle() == "None":
        yield from ((x + shift, y) for x, y in corners for shift in (-radius, 0.0, radius))
        return
    for (a, b), (x, y) in itertools.pairwise(corners):
        yield from ((a + (x - a) * part / 40, b + (y - b) * part / 40) for part in range(41))


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


def _x_factor(figure: Figure) -> float:
    """Times are in the largest unit in which no line ends below 1, as in the tables."""
    if figure.x.unit == "seconds":
        return _factor(figure.x, [min((one.x[-1] for one in figure.series if one.kind == "mean" and one.x), default=1)])
    return _factor(figure.x, [x for one in figure.series for x in one.x])


def _factor(axis: Axis, values: Sequence[float]) -> float:
    high = max(values, default=1)
    return next((factor for factor, _ in UNITS[axis.unit] if high >= factor), UNITS[axis.unit][-1][0])


def _title(axis: Axis, factor: float) -> str:
    unit = dict(UNITS[axis.unit])[factor]
    notes = ", ".join(note for note in (unit, "log scale" if axis.log and unit else "") if note)
    return f"{axis.title} ({notes})" if notes else axis.title
