"""The command line. Heavy imports happen inside the commands, so that `gluefl --help` answers at once."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gluefl import __version__
from gluefl.errors import GlueFLError, UsageError


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
            click.echo(f"gluefl: {error.filename or ''}: {error.strerror or error}", err=True)
            ctx.exit(1)


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gluefl")
def main() -> None:
    """Bandwidth-efficient federated learning: FedAvg, STC, APF and GlueFL with true bytes."""


def common(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that every run takes."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output."),
        click.option("--device", default="cpu", show_default=True, help="cpu, cuda, cuda:1, …"),
        click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Override a configuration key."),
        click.option("--out", type=click.Path(path_type=Path), help="Folder for the results."),
    ):
        command = option(command)
    return command


@main.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--seed", type=int, help="Override the seed.")
@click.option("--resume", is_flag=True, help="Go on with the run in --out.")
@common
def run(
    config: Path,
    seed: int | None,
    resume: bool,
    out: Path | None,
    sets: tuple[str, ...],
    device: str,
    as_json: bool,
) -> None:
    """Train one configuration."""
    from gluefl import comparison
    from gluefl.config import read, validated, with_sets

    settings = validated(with_sets(read(config), [*sets, *_seed(seed)]), str(config))
    out = out or _default_out(config.stem, resume)
    runs = comparison.execute({settings.strategy.name: settings}, [settings.seed], out, device, resume, single=True)
    _report(runs, as_json, out)


@main.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--seeds", help="Several seeds, for example 1,2,3: every strategy runs with each of them.")
@click.option("--seed", type=int, help="One seed.")
@click.option("--resume", is_flag=True, help="Go on with the runs in --out; what is done is not run again.")
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
) -> None:
    """Train several strategies on the same configuration, side by side."""
    from gluefl.config import read

    raw = read(config)
    out = out or _default_out(config.stem, resume)
    _compare(raw, str(config), seeds, seed, resume, out, sets, device, as_json)


@main.command()
@click.option("--seeds", help="Several seeds, for example 1,2,3.")
@click.option("--seed", type=int, help="One seed.")
@click.option("--resume", is_flag=True, help="Go on with the runs in --out.")
@common
def demo(
    seeds: str | None,
    seed: int | None,
    resume: bool,
    out: Path | None,
    sets: tuple[str, ...],
    device: str,
    as_json: bool,
) -> None:
    """Train FedAvg, STC, APF and GlueFL on generated handwriting and compare what their clients download."""
    import tomllib
    from importlib.resources import files

    raw = tomllib.loads((files("gluefl") / "demo.toml").read_text(encoding="utf-8"))
    _compare(raw, "the demo", seeds, seed, resume, out or _default_out("demo", resume), sets, device, as_json)


@main.group()
def bench() -> None:
    """Benchmarks: each compares within one run and prints ratios."""


@bench.command("fleet")
@click.option("--rounds", default=2000, show_default=True, help="Rounds per network.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
def bench_fleet(rounds: int, as_json: bool) -> None:
    """The simulated devices against the authors' logs, and what a million of them cost."""
    from gluefl.bench.fleet import measure

    _print_bench(measure(rounds), as_json)


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
) -> None:
    from gluefl import comparison
    from gluefl.config import variants, with_sets

    settings = variants(with_sets(raw, [*sets, *_seed(seed)]), source)
    chosen = _seeds(seeds) if seeds else [next(iter(settings.values())).seed]
    _report(comparison.execute(settings, chosen, out, device, resume), as_json, out)


def _report(runs: list[dict[str, Any]], as_json: bool, out: Path) -> None:
    if as_json:
        click.echo(json.dumps({"runs": runs}))
        return
    from gluefl.tables import comparison_table, console

    console().print(comparison_table(runs))
    click.echo(f"Results: {out}")


def _print_bench(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(found))
        return
    from gluefl.tables import console, nested_table

    console().print(nested_table(found))


def _seed(seed: int | None) -> list[str]:
    return [] if seed is None else [f"seed={seed}"]


def _seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--seeds {text}: write whole numbers with commas, for example --seeds 1,2,3.") from error


def _default_out(name: str, resume: bool) -> Path:
    if resume:
        raise UsageError("--resume needs --out: the folder of the run to go on with.")
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


if __name__ == "__main__":
    sys.exit(main())
