"""The command line. Commands import what they need when they run, so that `gluefl --help` is fast."""

import errno
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import click

from gluefl import __version__
from gluefl.accel.memory import keep_freed_memory
from gluefl.errors import GlueFLError
from gluefl.experiments import inspecting
from gluefl.experiments.bench.commands import bench
from gluefl.experiments.theory.commands import plan

ENGINES = ("local", "processes", "ray")
WHERE = "Where clients train: in this process, in one process per GPU or core, or on a Ray cluster."
LARGE = "training.batch, evaluation.batch, sampling.cohort, population.clients or the model's size"


class Program(click.Group):
    """Prints every error that a user can cause as one message and exits with its code; other exceptions are bugs."""

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
        except (MemoryError, RuntimeError) as error:
            if not _is_memory(error):
                raise
            click.echo(f"gluefl: out of memory: {_first_line(error)}. Lower {LARGE}.", err=True)
            ctx.exit(1)
        except OSError as error:
            path = f"{error.filename}: " if error.filename else ""
            hint = ". Free some space and go on with --resume" if error.errno == errno.ENOSPC else ""
            click.echo(f"gluefl: {path}{error.strerror or error}{hint}.", err=True)
            ctx.exit(1)


def _is_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "alloc" in str(error) or "out of memory" in str(error)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["an array could not be made"])[0].rstrip(".")


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gluefl")
def main() -> None:
    """Bandwidth-efficient federated learning: lean, GlueFL, FedAvg, STC and APF; bytes are measured."""
    keep_freed_memory()


for command in (bench, plan, *inspecting.COMMANDS):
    main.add_command(command)


def common(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every command that trains; `--skip-broken` and `--trainer` are abbreviations of `--set`."""

    @functools.wraps(command)
    def invoked(*args: Any, sets: tuple[str, ...], skip_broken: bool, trainer: str | None, **rest: Any) -> Any:
        short = ["population.skip_broken=true"] if skip_broken else []
        short += [f"training.trainer={trainer}"] if trainer is not None else []
        return command(*args, sets=(*sets, *short), **rest)

    decorated: Callable[..., Any] = invoked
    for option in (
        click.option("--skip-broken", is_flag=True, help="Leave out broken samples and count them."),
        click.option("--trainer", help="auto, loop, workers, dense or stacked."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output."),
        click.option("--ray-address", help="A Ray cluster: auto, or HOST:6379. By default one is started here."),
        click.option("--workers", type=click.IntRange(1), help="Number of workers; by default one per GPU or core."),
        click.option("--engine", type=click.Choice(ENGINES), default="local", show_default=True, help=WHERE),
        click.option("--device", default="cpu", show_default=True, help="cpu, cuda, cuda:1, …"),
        click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Override a configuration key."),
        click.option("--out", type=click.Path(path_type=Path), help="Folder for the results."),
    ):
        decorated = option(decorated)
    return decorated


tracked = click.option(
    "--track",
    multiple=True,
    type=click.Choice(["tensorboard", "mlflow", "wandb"]),
    help="Also log every round there; may be repeated.",
)


@main.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--seed", type=int, help="Override the seed.")
@click.option("--resume", is_flag=True, help="Continue the run in --out.")
@tracked
@common
def run(config: Path, **options: Any) -> None:
    """Train one configuration."""
    from gluefl.config import read
    from gluefl.experiments.commands import RunOptions, run_single

    run_single(read(config), config, RunOptions(**options))


@main.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--seeds", help="Several seeds, for example 1,2,3: every strategy runs with each of them.")
@click.option("--seed", type=int, help="One seed.")
@click.option("--resume", is_flag=True, help="Continue the runs in --out; finished runs are not repeated.")
@tracked
@common
def compare(config: Path, **options: Any) -> None:
    """Train several strategies on the same configuration, side by side."""
    from gluefl.config import read
    from gluefl.experiments.commands import RunOptions, run_comparison

    run_comparison(read(config), str(config), config.stem, RunOptions(**options))


@main.command()
@click.option("--seeds", help="Several seeds, for example 1,2,3.")
@click.option("--seed", type=int, help="One seed.")
@click.option("--resume", is_flag=True, help="Continue the runs in --out.")
@tracked
@common
def demo(**options: Any) -> None:
    """Train FedAvg, STC, APF, GlueFL and lean on generated handwriting and compare what their clients download."""
    import tomllib
    from importlib.resources import files

    from gluefl.experiments.commands import RunOptions, run_comparison

    raw = tomllib.loads((files("gluefl") / "demo.toml").read_text(encoding="utf-8"))
    run_comparison(raw, "the demo", "demo", RunOptions(**options))


def _studies(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The studies, for the completion of a shell."""
    from gluefl.experiments.studies import catalogue

    return [name for name in catalogue.names() if name.startswith(incomplete)]


@main.command()
@click.argument("name", required=False, shell_complete=_studies)
@click.option("--scale", type=click.Choice(["small", "paper"]), default="small", show_default=True)
@click.option("--population", help="A population instead of the generated one.")
@click.option("--model", help="A model instead of the default one of the study.")
@click.option("--rounds", type=int, help="A number of rounds instead of the default one of the study.")
@click.option("--seeds", help="Several seeds, for example 1,2,3.")
@click.option("--seed", type=int, help="One seed.")
@click.option("--only", help="Only the runs with these labels: gluefl,stc.")
@click.option("--jobs", type=int, help="Runs at a time; by default one per core, or one on a GPU.")
@click.option("--resume", is_flag=True, help="Continue the study in --out; finished runs are not repeated.")
@click.option("--reuse", type=click.Path(path_type=Path), help="Take runs of the same configuration from this folder.")
@click.option(
    "--at", type=click.FloatRange(0, 1, min_open=True), help="The target accuracy of the tables; no run is repeated."
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
    engine: str,
    workers: int | None,
    ray_address: str | None,
    as_json: bool,
) -> None:
    """Repeat a table or figure of the paper; without a NAME, list them."""
    from gluefl.experiments.studies import catalogue

    if name is None:
        if as_json:
            studies = [{"study": title, "question": catalogue.load(title).question} for title in catalogue.names()]
            click.echo(json.dumps({"studies": studies}))
            return
        for title in catalogue.names():
            click.echo(f"{title:<9} {catalogue.load(title).question}")
        return
    chosen = catalogue.load(name)
    from gluefl.experiments import commands
    from gluefl.experiments.studies.conduct import conduct

    labels, numbers = tuple(only.split(",")) if only else (), tuple(commands.parse_seeds(seed, seeds))
    choice = catalogue.Choice(scale, population, model, rounds, sets, labels, numbers)
    out = out or commands.default_out(name, resume)
    executor = commands.study_executor(commands.Place(device, engine, workers, ray_address), jobs)
    outcome = conduct(chosen, choice, out, executor, resume, reuse, at)
    commands.show_study(outcome, out, as_json, markdown)


if __name__ == "__main__":
    sys.exit(main())
