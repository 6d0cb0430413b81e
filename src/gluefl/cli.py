"""The command line. Heavy imports happen inside the commands, so that `gluefl --help` answers at once."""

import contextlib
import errno
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import click

from gluefl import __version__
from gluefl.errors import GlueFLError, UsageError
from gluefl.experiments.bench.commands import bench


class Program(click.Group):
    """Turns every error a person can cause into one message and its exit code; anything else is a bug."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except GlueFLError as error:
            click.echo(f"gluefl: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("gluefl: interrupted", err=True)
            ctx.exit(1)
        except BrokenPipeError:
            ctx.exit(1)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            hint = ". Free some space and go on with --resume" if error.errno == errno.ENOSPC else ""
            click.echo(f"gluefl: {where}{error.strerror or error}{hint}.", err=True)
            ctx.exit(1)


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gluefl")
def main() -> None:
    """Bandwidth-efficient federated learning: FedAvg, STC, APF and GlueFL with true bytes."""


main.add_command(bench)


def common(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that every run takes; the two short ones stand for a `--set`."""

    @functools.wraps(command)
    def invoked(*args: Any, sets: tuple[str, ...], skip_broken: bool, trainer: str | None, **rest: Any) -> Any:
        short = ["population.skip_broken=true"] if skip_broken else []
        short += [f"training.trainer={trainer}"] if trainer else []
        return command(*args, sets=(*sets, *short), **rest)

    decorated: Callable[..., Any] = invoked
    for option in (
        click.option("--skip-broken", is_flag=True, help="Leave broken samples out, and count them."),
        click.option("--trainer", help="auto, loop, workers, dense or stacked."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output."),
        click.option("--device", default="cpu", show_default=True, help="cpu, cuda, cuda:1, …"),
        click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Override a configuration key."),
        click.option("--out", type=click.Path(path_type=Path), help="Folder for the results."),
    ):
        decorated = option(decorated)
    return decorated


tracked = click.option("--track", type=click.Choice(["tensorboard"]), help="Write every round for TensorBoard too.")


@main.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--seed", type=int, help="Override the seed.")
@click.option("--resume", is_flag=True, help="Go on with the run in --out.")
@tracked
@common
def run(
    config: Path,
    seed: int | None,
    resume: bool,
    out: Path | None,
    sets: tuple[str, ...],
    device: str,
    as_json: bool,
    track: str | None,
) -> None:
    """Train one configuration."""
    from gluefl.config import read, validated, with_sets
    from gluefl.experiments import comparison
    from gluefl.experiments.report.tracking import tracker

    settings = validated(with_sets(read(config), [*sets, *_seed(seed)]), str(config))
    out = out or _default_out(config.stem, resume)
    name, seeds = str(settings.strategy.name), [settings.seed]
    runs = comparison.execute({name: settings}, seeds, out, device, resume, single=True, tracker=tracker(track))
    _report(runs, as_json, out)


@main.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--seeds", help="Several seeds, for example 1,2,3: every strategy runs with each of them.")
@click.option("--seed", type=int, help="One seed.")
@click.option("--resume", is_flag=True, help="Go on with the runs in --out; what is done is not run again.")
@tracked
@common
def compare(
    config: Path,
    seeds: str | None,
    seed: int | None,
    resume: bool,
    out: Path | None,
    sets: tuple[str, ...],
    device: str,
    as_json: bool,
    track: str | None,
) -> None:
    """Train several strategies on the same configuration, side by side."""
    from gluefl.config import read

    raw = read(config)
    out = out or _default_out(config.stem, resume)
    _compare(raw, str(config), seeds, seed, resume, out, sets, device, as_json, track)


@main.command()
@click.option("--seeds", help="Several seeds, for example 1,2,3.")
@click.option("--seed", type=int, help="One seed.")
@click.option("--resume", is_flag=True, help="Go on with the runs in --out.")
@tracked
@common
def demo(
    seeds: str | None,
    seed: int | None,
    resume: bool,
    out: Path | None,
    sets: tuple[str, ...],
    device: str,
    as_json: bool,
    track: str | None,
) -> None:
    """Train FedAvg, STC, APF and GlueFL on generated handwriting and compare what their clients download."""
    import tomllib
    from importlib.resources import files

    raw = tomllib.loads((files("gluefl") / "demo.toml").read_text(encoding="utf-8"))
    _compare(raw, "the demo", seeds, seed, resume, out or _default_out("demo", resume), sets, device, as_json, track)


@main.command()
@click.argument("name", required=False)
@click.option("--scale", type=click.Choice(["small", "paper"]), default="small", show_default=True)
@click.option("--population", help="Another population than the generated one.")
@click.option("--model", help="Another model.")
@click.option("--rounds", type=int, help="Another number of rounds.")
@click.option("--seeds", help="Several seeds, for example 1,2,3.")
@click.option("--seed", type=int, help="One seed.")
@click.option("--only", help="Some of the runs, by their labels: gluefl,stc.")
@click.option("--jobs", type=int, help="Runs at a time; as many as there are cores, one on a GPU.")
@click.option("--resume", is_flag=True, help="Go on with the study in --out; what is done is not run again.")
@click.option("--reuse", type=click.Path(path_type=Path), help="Take runs of the same configuration from this folder.")
@click.option(
    "--at", type=click.FloatRange(0, 1, min_open=True), help="The accuracy of the tables; runs stay as they are."
)
@click.option("--markdown", is_flag=True, help="Print the tables as markdown.")
@common
def study(
    name: str | None,
    scale: Literal["small", "paper"],
    population: str | None,
    model: str | None,
    rounds: int | None,
    seeds: str | None,
    seed: int | None,
    only: str | None,
    jobs: int | None,
    resume: bool,
    reuse: Path | None,
    at: float | None,
    markdown: bool,
    out: Path | None,
    sets: tuple[str, ...],
    device: str,
    as_json: bool,
) -> None:
    """Repeat a table or figure of the paper; without a NAME, list them."""
    from gluefl.experiments.studies import catalogue

    if name is None:
        for known in catalogue.names():
            click.echo(f"{known:<9} {catalogue.load(known).question}")
        return
    chosen = catalogue.load(name)
    choice = catalogue.Choice(scale, population, model, rounds, sets, tuple(only.split(",")) if only else ())
    numbers = _seeds(seed, seeds)
    out = out or _default_out(name, resume)
    from gluefl.experiments.studies import pages
    from gluefl.experiments.studies.conduct import conduct

    outcome = conduct(chosen, choice, out, numbers, device, jobs, resume, reuse, at)
    if as_json:
        click.echo(json.dumps(outcome.json))
        _page(out, quiet=True)
        return
    if markdown:
        click.echo(pages.markdown(chosen, outcome.grids, outcome.heading), nl=False)
        _page(out, quiet=True)
        return
    click.echo(f"{chosen.question}\nPaper: {chosen.found}\n{outcome.heading}")
    pages.show(outcome.grids)
    click.echo(f"Results: {out}")
    _page(out)


@main.command()
@click.option("--clients", type=int, required=True, help="N, how many clients there are.")
@click.option("--cohort", type=int, required=True, help="K, how many of them a round uses.")
@click.option("--sticky-size", type=int, help="S; chosen if not given.")
@click.option("--sticky-cohort", type=int, help="C; chosen if not given.")
@click.option("--rounds", default=1000, show_default=True, help="Rounds over which the download is averaged.")
@click.option("--q", default=0.2, show_default=True)
@click.option("--q-shared", default=0.16, show_default=True)
@click.option("--regenerate-every", default="10", show_default=True, help="I; a number of rounds, or never.")
@click.option("--over-commitment", default=1.0, show_default=True)
@click.option("--parameters", type=int, help="d, for bytes; with --network, for seconds too.")
@click.option("--network", help="edge, 5g or cloud.")
@click.option("--staleness-cost", help="Shares downloaded after 1,2,… rounds (0.23,0.28,…), or a run's folder.")
@click.option("--variance-exponent", type=float, help="How rounds to a target grow with A: like A^x.")
@click.option("--online-share", type=float, help="The least share of the clients that is online.")
@click.option("--figure", type=click.Path(path_type=Path), help="Draw the trade-off into this file (.svg, .png, .pdf).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
def plan(clients: int, cohort: int, figure: Path | None, as_json: bool, **options: Any) -> None:
    """What sticky sampling will do, before anything is trained, and which sizes to choose."""
    from gluefl.experiments.theory import planning

    found = planning.plan(clients, cohort, **planning.read_options(options))
    if figure is not None:
        from gluefl.experiments.report.tradeoff import draw

        draw(found, figure)
    if as_json:
        click.echo(json.dumps(found.as_json()))
        return
    from gluefl.experiments.console import console, plan_tables

    for part in plan_tables(found):
        console().print(part)


@main.command()
@click.argument("folders", nargs=-1, required=True, metavar="DIR…", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="The page to write; report.html if nothing is chosen.")
@click.option("--figures", type=click.Path(path_type=Path), help="Folder for figures as SVG, PNG and CSV.")
@click.option("--watch", is_flag=True, help="Serve the page on this machine and refresh it while runs go on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8321, show_default=True, help="For --watch; 0: any.")
def report(folders: tuple[Path, ...], out: Path | None, figures: Path | None, watch: bool, port: int) -> None:
    """One page of the runs in some folders: tables, figures, what differs."""
    from gluefl.experiments.report import live, page, plots

    if figures is not None:
        click.echo(f"Figures: {len(plots.write(folders, figures))} files in {figures}")
    if out is not None or (figures is None and not watch):
        click.echo(f"Report: {page.write(folders, out or Path('report.html'))}")
    if watch:
        with live.serving(folders, port) as address:
            click.echo(f"Serving {address} until Ctrl-C")
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    time.sleep(3600)


def _compare(
    raw: dict[str, Any],
    source: str,
    seeds: str | None,
    seed: int | None,
    resume: bool,
    out: Path,
    sets: tuple[str, ...],
    device: str,
    as_json: bool,
    track: str | None,
) -> None:
    from gluefl.config import variants, with_sets
    from gluefl.experiments import comparison
    from gluefl.experiments.report.tracking import tracker

    settings = variants(with_sets(raw, [*sets, *_seed(seed)]), source)
    chosen = _seeds(seed, seeds) or [next(iter(settings.values())).seed]
    _report(comparison.execute(settings, chosen, out, device, resume, tracker=tracker(track)), as_json, out)


def _report(runs: list[dict[str, Any]], as_json: bool, out: Path) -> None:
    if as_json:
        click.echo(json.dumps({"runs": runs}))
    else:
        from gluefl.experiments.console import comparison_table, console

        console().print(comparison_table(runs))
        click.echo(f"Results: {out}")
    _page(out, quiet=as_json)


def _page(out: Path, quiet: bool = False) -> None:
    """Write the page of everything in a folder and say where it is; beside JSON, on standard error."""
    from gluefl.experiments.report import page, reading

    if reading.find([out]):
        click.echo(f"Report: {page.write([out], out / 'report.html')}", err=quiet)


def _seed(seed: int | None) -> list[str]:
    return [] if seed is None else [f"seed={seed}"]


def _seeds(seed: int | None, seeds: str | None) -> list[int] | None:
    if seed is not None and seeds is not None:
        raise UsageError(f"--seed {seed} and --seeds {seeds}: give one of them.")
    try:
        return [int(part) for part in seeds.split(",")] if seeds is not None else None if seed is None else [seed]
    except ValueError as error:
        raise UsageError(f"--seeds {seeds}: write whole numbers with commas, for example --seeds 1,2,3.") from error


def _default_out(name: str, resume: bool) -> Path:
    if resume:
        raise UsageError("--resume needs --out: the folder of the run to go on with.")
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


if __name__ == "__main__":
    sys.exit(main())
