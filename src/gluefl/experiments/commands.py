"""The work behind `gluefl run`, `compare`, `demo` and `study`: from options to runs, tables and a page."""

import importlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from gluefl.config import validated, variants, with_sets
from gluefl.errors import Diverged, UsageError
from gluefl.experiments.cluster import ClusterRuns
from gluefl.experiments.console import comparison_table, console
from gluefl.experiments.grid import RunSpec, expand
from gluefl.experiments.processes import WorkerProcesses
from gluefl.experiments.report import page
from gluefl.experiments.runner import Executor, ThisProcess, execute
from gluefl.experiments.runs import NAMED, find, read_run
from gluefl.experiments.studies import pages
from gluefl.experiments.studies.conduct import Outcome
from gluefl.storage.names import FAILURE

KEYS = (
    "rounds",
    "mean_accuracy",
    "last_accuracy",
    "window_evaluations",
    "window_rounds",
    "target",
    "reached_round",
    "single_reached_round",
    "single_down_bytes",
    "down_bytes",
    "up_bytes",
    "total_bytes",
    "download_s",
    "total_s",
    "mean_download_share",
)


@dataclass(frozen=True)
class Place:
    """Where a run is carried out: device, engine and its workers."""

    device: str = "cpu"
    engine: str = "local"
    workers: int | None = None
    ray_address: str | None = None

    def __post_init__(self) -> None:
        if self.workers is not None and self.engine == "local":
            raise UsageError(f"--workers {self.workers}: give --engine processes or --engine ray with it.")
        if self.ray_address is not None and self.engine != "ray":
            raise UsageError(f"--ray-address {self.ray_address}: give --engine ray with it.")


@dataclass(frozen=True)
class RunOptions:
    """The options that `run`, `compare` and `demo` share."""

    out: Path | None
    sets: tuple[str, ...]
    device: str
    engine: str
    workers: int | None
    ray_address: str | None
    as_json: bool
    track: tuple[str, ...]
    resume: bool
    seed: int | None
    seeds: str | None = None

    @property
    def place(self) -> Place:
        """Where the runs are carried out."""
        return Place(self.device, self.engine, self.workers, self.ray_address)

    def configuration(self, raw: dict[str, Any]) -> dict[str, Any]:
        """A configuration with the overrides of `--set` and `--seed`."""
        return with_sets(raw, [*self.sets, *([] if self.seed is None else [f"seed={self.seed}"])])


def run_single(raw: dict[str, Any], source: Path, options: RunOptions) -> None:
    """Train one configuration."""
    config = validated(options.configuration(raw), str(source))
    if "compare" in raw:
        click.echo(
            f"{source} has a table [compare], which `run` leaves out: it trains {config.strategy.name} alone. "
            f"`gluefl compare {source}` trains all of its strategies.",
            err=True,
        )
    out = options.out or default_out(source.stem, options.resume)
    _run(expand({str(config.strategy.name): config}, [config.seed], out, single=True), out, options)


def run_comparison(raw: dict[str, Any], source: str, name: str, options: RunOptions) -> None:
    """Train every strategy of a configuration with every seed."""
    out = options.out or default_out(name, options.resume)
    configs = variants(options.configuration(raw), source)
    seeds = parse_seeds(options.seed, options.seeds) or [next(iter(configs.values())).seed]
    _run(expand(configs, seeds, out), out, options)


def show_study(outcome: Outcome, out: Path, as_json: bool, markdown: bool) -> None:
    """Print the tables of a study and write its page."""
    study = outcome.study
    if as_json:
        click.echo(json.dumps(outcome.json))
    elif markdown:
        click.echo(pages.markdown(study, outcome.grids, outcome.heading), nl=False)
    else:
        click.echo(f"{study.question}\nPaper: {study.finding}\n{outcome.heading}")
        pages.show(outcome.grids)
        click.echo(f"Results: {out}")
    write_page(out, quiet=as_json or markdown)


def write_page(out: Path, quiet: bool = False) -> None:
    """Write the page of all runs in a folder and print its path; with `quiet` on standard error."""
    if find([out]):
        page.write([out], out / "report.html")
        click.echo(f"Report: {out / 'report.html'}", err=quiet)


def parse_seeds(seed: int | None, seeds: str | None) -> list[int]:
    """The seeds of `--seed` or `--seeds`, empty without either."""
    if seed is not None and seeds is not None:
        raise UsageError(f"--seed {seed} and --seeds {seeds}: give one of them.")
    if seeds is None:
        return [] if seed is None else [seed]
    try:
        return [int(part) for part in seeds.split(",")]
    except ValueError as error:
        raise UsageError(f"--seeds {seeds}: write whole numbers with commas, for example --seeds 1,2,3.") from error


def default_out(name: str, resume: bool) -> Path:
    """A new folder named after the experiment and the time."""
    if resume:
        raise UsageError("--resume needs --out: the folder of the run to go on with.")
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def trackers(names: Sequence[str]) -> tuple[Any, ...]:
    """The trackers of `--track`; refuses those whose library is missing before anything is written."""
    modules = [importlib.import_module(f"gluefl.watching.{name}") for name in dict.fromkeys(names)]
    for module in modules:
        module.library()
    return tuple(module.TRACKER() for module in modules)


def study_executor(place: Place, jobs: int | None) -> Executor:
    """Runs at a time in processes of this machine, or spread over a Ray cluster."""
    if place.engine == "ray":
        return ClusterRuns(place.device, jobs if jobs is not None else place.workers, place.ray_address)
    if place.engine == "processes" and None not in (jobs, place.workers):
        raise UsageError(f"--jobs {jobs} and --workers {place.workers}: a study runs one process per run; give --jobs.")
    return WorkerProcesses(place.device, jobs if jobs is not None else place.workers)


def _executor(count: int, options: RunOptions) -> Executor:
    """One run after the other, each on the engine; several runs on a cluster at the same time."""
    place = options.place
    if place.engine == "ray" and count > 1:
        if options.track:
            raise UsageError(
                f"--track {', '.join(options.track)}: runs that a cluster carries out at the same time have no tracker."
            )
        return ClusterRuns(place.device, place.workers, place.ray_address)
    carried_out = {"engine": place.engine, "workers": place.workers, "ray_address": place.ray_address}
    return ThisProcess(place.device, trackers(options.track), carried_out)


def _run(specs: Sequence[RunSpec], out: Path, options: RunOptions) -> None:
    execute(specs, _executor(len(specs), options), options.resume)
    rows = _rows(specs)
    if options.as_json:
        click.echo(json.dumps({"runs": rows}))
    else:
        console().print(comparison_table(rows))
        click.echo(f"Results: {out}")
    write_page(out, quiet=options.as_json)


def _rows(specs: Sequence[RunSpec]) -> list[dict[str, Any]]:
    """One row per run, as in `--json`; an error if a run diverged."""
    runs = [(spec, read_run(spec.folder)) for spec in specs]
    diverged = [f"{spec.name}: {run.failure} Recorded in {spec.folder / FAILURE}." for spec, run in runs if run.failure]
    if diverged:
        raise Diverged("\n".join(diverged))
    return [
        {"strategy": spec.label, "seed": spec.seed}
        | {key: run.summary[key] for key in KEYS}
        | {key: run.summary[key] for key in NAMED if key in run.summary}
        for spec, run in runs
    ]
