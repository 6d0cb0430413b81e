"""One self-contained page: tables as HTML, figures as data that a script in the page draws."""

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from gluefl import __version__
from gluefl.errors import UsageError
from gluefl.experiments.report.chart import Figure, Series, thinned
from gluefl.experiments.report.comparison import Comparison, palette, read
from gluefl.experiments.report.figures import figures
from gluefl.experiments.report.headline import Headline, differences, headlines
from gluefl.experiments.runs import CLIENTS, Run
from gluefl.files import write as write_file
from gluefl.scores import Score

# About 20 bytes a point: the page stays well under 2 MB with any number of runs.
POINTS, POINTS_A_LINE = 50_000, 400


@dataclass(frozen=True)
class Section:
    """A comparison in the form that the template shows."""

    title: str
    facts: tuple[str, ...]
    reason: str
    headlines: list[Headline]
    figures: list[Figure]
    labels: list[str]
    differences: list[tuple[str, list[str]]]
    runs: list[Run]
    score: Score


def write(folders: Sequence[Path], out: Path) -> list[Comparison]:
    """Read the given folders and write their page; returns the comparisons that it shows."""
    comparisons = read(folders)
    if not comparisons:
        raise UsageError(f"there is no run in {', '.join(map(str, folders))}: a run folder holds a journal.jsonl.")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_file(out, render(comparisons))
    return comparisons


def render(comparisons: Sequence[Comparison], version: str = "") -> str:
    """The page. With a version it polls its server for a newer one; without, it makes no requests."""
    sections = [_section(comparison) for comparison in comparisons]
    lines = sum(len(figure.series) for section in sections for figure in section.figures)
    points = max(8, min(POINTS_A_LINE, POINTS // max(1, lines)))
    sections = [
        replace(section, figures=[thinned(figure, points) for figure in section.figures]) for section in sections
    ]
    data = {
        "colours": palette(label for section in sections for label in section.labels),
        "figures": {
            f"{i}-{figure.key}": _plain(figure) for i, section in enumerate(sections) for figure in section.figures
        },
    }
    environment = Environment(
        loader=PackageLoader("gluefl", "experiments/report"), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html").render(
        sections=sections,
        colours=data["colours"],
        # The data hold labels of users: without "<" none of them can end the script.
        data=Markup(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")),  # noqa: S704 - escaped here
        style=_asset("style.css"),
        scales=_asset("scales.js"),
        script=_asset("charts.js"),
        live=_asset("live.js") if version else "",
        version=version,
        program=f"gluefl {__version__}",
        when=time.strftime("%Y-%m-%d %H:%M"),
    )


def _asset(name: str) -> Markup:
    text = (files(__package__) / name).read_text(encoding="utf-8")
    return Markup(text)  # noqa: S704 - a file of this package


def _section(comparison: Comparison) -> Section:
    first = [*comparison.runs, *comparison.unread][0]
    config = first.config
    models = dict.fromkeys(str(run.config.get("model.name", run.config.get("model"))) for run in comparison.runs)
    population = config.get("population.name", config.get("population", "an unknown population"))
    networks = dict.fromkeys(run.config.get("fleet.network", "instant") for run in comparison.runs)
    seeds = sorted({run.seed for run in comparison.runs if run.seed is not None})
    facts = [
        f"{config[CLIENTS]:,} clients" if CLIENTS in config else "",
        f"{first.size('cohort')} used per round" if first.size("cohort") else "",
        "no target" if first.target is None else f"target {comparison.score.short(first.target)}",
        f"network {', '.join(networks)}" if any(name != "instant" for name in networks) else "",
        f"seed{'s' if len(seeds) > 1 else ''} {_ranges(seeds)}" if seeds else "",
    ]
    return Section(
        title=", ".join([str(population), *(name for name in models if name != "None")]),
        facts=tuple(fact for fact in facts if fact),
        reason=comparison.reason,
        headlines=headlines(comparison),
        figures=figures(comparison),
        labels=list(comparison.variants),
        differences=differences(comparison),
        runs=[*comparison.runs, *comparison.unread],
        score=comparison.score,
    )


def _ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 as 1–3, 7."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}–{part[-1]}" for part in parts)


def _plain(figure: Figure) -> dict[str, Any]:
    """A figure as JSON, with five significant digits."""

    def short(value: Any) -> Any:
        if isinstance(value, float):
            return int(value) if value.is_integer() else float(f"{value:.5g}")
        return value

    def series(one: Series) -> dict[str, Any]:
        fields = {key: value for key, value in vars(one).items() if value not in (None, (), False)}
        return {key: [short(v) for v in value] if isinstance(value, tuple) else value for key, value in fields.items()}

    return {
        "title": figure.title,
        "x": asdict(figure.x),
        "y": asdict(figure.y),
        "z": figure.z,
        "target": figure.target,
        "bars": figure.bars,
        "points": figure.points,
        "front": figure.front,
        "file": re.sub(r"[^\w-]", "-", figure.key),
        "series": [series(one) for one in figure.series],
    }
