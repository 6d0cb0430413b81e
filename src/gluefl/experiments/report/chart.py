"""A figure as plain series: what the page, the plots and the CSV files draw."""

from dataclasses import dataclass, replace
from typing import Literal

Unit = Literal["bytes", "seconds", "share", "count", "number"]
Kind = Literal["mean", "seed", "theory"]


@dataclass(frozen=True)
class Axis:
    """Quantity and scale of an axis. Without `zero` it starts where the later three quarters of the lines begin."""

    title: str
    unit: Unit
    log: bool = False
    zero: bool = True


@dataclass(frozen=True)
class Series:
    """A line, a set of points, or one kind of segment in stacked bars. `z` is shown with a point."""

    label: str
    kind: Kind
    x: tuple[float, ...]
    y: tuple[float, ...]
    z: tuple[float, ...] = ()
    low: tuple[float, ...] = ()  # of the seeds, at the points of their mean
    high: tuple[float, ...] = ()
    seed: int | None = None
    reached: int | None = None  # index of the point at which the target was reached
    unreached: bool = False  # a point that lies below the cost of the target


@dataclass(frozen=True)
class Figure:
    """A figure. A bar chart has `bars`, their labels, and a series for each kind of segment."""

    key: str
    title: str
    caption: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    z: str = ""  # the name of z
    target: float | None = None
    bars: tuple[str, ...] = ()
    points: bool = False  # single points instead of lines
    front: tuple[str, ...] = ()  # of points: the labels that no other label beats on both axes, from left to right


def thinned(figure: Figure, points: int) -> Figure:
    """The figure with about `points` points per line; the first, the last and the reached point are kept."""
    return replace(figure, series=tuple(_thin(series, points) for series in figure.series))


def _thin(series: Series, points: int) -> Series:
    count = len(series.x)
    if count <= points:
        return series
    chosen = {round(i * (count - 1) / (points - 1)) for i in range(points)}
    kept = sorted(chosen if series.reached is None else chosen | {series.reached})
    x, y, z, low, high = (
        tuple(values[i] for i in kept if values) for values in (series.x, series.y, series.z, series.low, series.high)
    )
    reached = None if series.reached is None else kept.index(series.reached)
    return replace(series, x=x, y=y, z=z, low=low, high=high, reached=reached)
