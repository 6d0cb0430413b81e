"""`gluefl bench`: the benchmarks on the command line."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import click

STRATEGIES = ("fedavg", "stc", "apf", "gluefl", "lean")  # of the registry, which would import torch
ROUNDS = click.IntRange(2, 10**6)  # spreads need two
MANY = click.IntRange(1, 10**6)


@click.group()
def bench() -> None:
    """Benchmarks: each compares within one run and prints ratios; `profile` splits the time of a round by step."""


@bench.command("cohort")
@click.option("--rounds", type=ROUNDS, default=7, show_default=True)
@click.option("--cores", type=MANY, default=1, show_default=True, help="CPU cores to use.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--trainer", default="auto", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
def bench_cohort(rounds: int, cores: int, device: str, trainer: str, as_json: bool) -> None:
    """Training a cohort against a bare PyTorch loop: W1 a CNN, W2 a small MLP."""
    from gluefl.experiments.bench.cohort import measure

    _show(measure(rounds, cores, device, trainer), as_json)


def of_a_round(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of the commands that play whole rounds: the fields of `Work`."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output."),
        click.option("--cohort", type=MANY, default=30, show_default=True, help="K, clients that a round uses."),
        click.option("--clients", type=MANY, default=2800, show_default=True, help="N, clients of the population."),
        click.option("--model", default="", help="Any model by its name; by default the LEAF CNN."),
        click.option("--strategy", type=click.Choice(STRATEGIES), default="gluefl", show_default=True),
        click.option("--device", default="cpu", show_default=True),
        click.option("--cores", type=MANY, default=1, show_default=True, help="CPU cores to use."),
    ):
        command = option(command)
    return command


over_commitment = partial(click.option, "--over-commitment", show_default=True, help="Invited clients per used client.")


@bench.command("round")
@click.option("--rounds", type=ROUNDS, default=7, show_default=True)
@over_commitment(default=1.0)
@of_a_round
def bench_round(rounds: int, cores: int, as_json: bool, **work: Any) -> None:
    """A whole round of a strategy against its training part and against FedAvg's round."""
    from gluefl.experiments.bench.round import Work, measure

    _show(measure(Work(**work), rounds, cores), as_json)


@bench.command("profile")
@click.option("--rounds", type=ROUNDS, default=20, show_default=True)
@over_commitment(default=1.3)
@click.option("--network", type=click.Choice(["edge", "5g", "cloud", "instant"]), default="edge", show_default=True)
@of_a_round
def bench_profile(rounds: int, cores: int, network: str, as_json: bool, **work: Any) -> None:
    """The time of a whole round by step; on a GPU also by kernel."""
    from gluefl.experiments.bench.profile import measure
    from gluefl.experiments.bench.round import Work

    _show(measure(Work(**work), rounds, cores, network), as_json)


@bench.command("timeline")
@click.option("--rounds", type=MANY, default=2, show_default=True)
@over_commitment(default=1.3)
@click.option("--network", type=click.Choice(["edge", "5g", "cloud", "instant"]), default="instant", show_default=True)
@of_a_round
def bench_timeline(rounds: int, cores: int, network: str, as_json: bool, **work: Any) -> None:
    """When each part of a round began and ended, on the host and on a GPU, without a profiler."""
    from gluefl.experiments.bench.round import Work
    from gluefl.experiments.bench.timeline import lines, measure

    played = measure(Work(**work), rounds, cores, network)
    click.echo(json.dumps({"rounds": played}) if as_json else "\n".join(lines(played)))


@bench.command("models")
@click.option("--rounds", type=ROUNDS, default=5, show_default=True)
@click.option("--cores", type=MANY, default=1, show_default=True, help="CPU cores to use.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--model", "names", multiple=True, help="Only this model; may be given several times.")
@click.option("--cohort", type=MANY, default=30, show_default=True, help="Clients that are trained together.")
@click.option("--side", type=click.IntRange(1, 2**16), help="Pixels of a picture's side; by default each model's own.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
def bench_models(
    rounds: int, cores: int, device: str, names: tuple[str, ...], cohort: int, side: int | None, as_json: bool
) -> None:
    """Training a cohort of each of the paper's models: stacked layers against vmap, on a CPU against a plain loop."""
    from gluefl.experiments.bench.models import WORK, measure

    if unknown := [name for name in names if name not in WORK]:
        raise click.UsageError(f"no benchmark for {', '.join(unknown)}; there are {', '.join(WORK)}.")
    _show(measure(rounds, cores, device, names, cohort, side), as_json)


@bench.command("peers")
@click.option("--rounds", type=ROUNDS, default=5, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
def bench_peers(rounds: int, as_json: bool) -> None:
    """The same workloads on pfl and Flower, if they are installed: CPU seconds per round on one core."""
    from gluefl.experiments.bench.peers import measure

    _show(measure(rounds), as_json)


@bench.command("engines")
@click.option("--rounds", type=ROUNDS, default=5, show_default=True)
@click.option("--workers", type=click.IntRange(2, 4096), default=2, show_default=True, help="Compared with one.")
@click.option("--strategy", type=click.Choice(STRATEGIES), default="fedavg", show_default=True, help="For W1.")
@click.option("--cohort", type=MANY, default=10, show_default=True, help="Idle: K.")
@click.option("--parameters", type=click.IntRange(1, 10**9), default=5_000_000, show_default=True, help="Idle: d.")
@click.option("--engine", "engines", type=click.Choice(["processes", "ray"]), multiple=True, help="Only this one.")
@click.option("--only", type=click.Choice(["w1", "idle"]), help="Only one of the two parts.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
def bench_engines(as_json: bool, engines: tuple[str, ...], **work: Any) -> None:
    """Seconds of a round of W1 with several workers and with one; of idle rounds, whose clients do nothing, also in
    Flower's simulation."""
    from gluefl.experiments.bench.engines import Work, measure

    _show(measure(Work(engines=engines or ("processes", "ray"), **work)), as_json)


@bench.command("node")
@click.option("--parameters", type=click.IntRange(100, 10**9), default=5_000_000, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
def bench_node(parameters: int, as_json: bool) -> None:
    """Messages of FedAvg, GlueFL and lean on one core: CPU time of both ends, memory and disk of a client."""
    from gluefl.experiments.bench.node import measure

    _show(measure(parameters), as_json)


@bench.command("fleet")
@click.option("--rounds", type=ROUNDS, default=2000, show_default=True, help="Rounds per network.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
def bench_fleet(rounds: int, as_json: bool) -> None:
    """The simulated devices against the authors' logs, and the cost of a million of them."""
    from gluefl.experiments.bench.fleet import measure

    _show(measure(rounds), as_json)


def sizes_of(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Sizes of populations with commas between them; refuses those that are too small for a cohort or too large."""
    try:
        sizes = tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} must be whole numbers with commas between them.") from None
    if not all(1000 <= size <= 10**10 for size in sizes):
        raise click.BadParameter(f"{value!r}: populations have from 1000 to {10**10} clients.")
    return sizes


@bench.command("scale")
@click.option("--clients", callback=sizes_of, default="1000,1000000,100000000", show_default=True, help="Populations.")
@click.option("--rounds", type=click.IntRange(15, 10**6), default=40, show_default=True)
@click.option(
    "--known", type=MANY, default=300_000, show_default=True, help="Clients that were invited before, at most N/2."
)
@click.option("--cohort", type=click.IntRange(5, 100), default=30, show_default=True, help="K, clients of a round.")
@click.option("--strategy", type=click.Choice(STRATEGIES), default="gluefl", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
def bench_scale(clients: tuple[int, ...], rounds: int, known: int, cohort: int, strategy: str, as_json: bool) -> None:
    """A round without training for small and large populations, and what a client ever invited takes."""
    from gluefl.experiments.bench.round import Work
    from gluefl.experiments.bench.scale import measure

    _show(measure(clients, Work(strategy=strategy, cohort=cohort), rounds, known), as_json)


def _show(results: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(results))
        return
    from gluefl.experiments.console import console, nested_table

    console().print(nested_table(results))
