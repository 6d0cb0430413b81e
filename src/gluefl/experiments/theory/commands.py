"""`gluefl plan`: planning on the command line."""

import json
from pathlib import Path
from typing import Any

import click


@click.command()
@click.option("--clients", type=int, required=True, help="N, the number of clients.")
@click.option("--cohort", type=int, help="K, the number of clients that a round uses; lean: chosen if not given.")
@click.option("--sticky-size", type=int, help="S; chosen if not given.")
@click.option("--sticky-cohort", type=int, help="C; chosen if not given.")
@click.option("--strategy", type=click.Choice(["gluefl", "lean"]), default="gluefl", show_default=True)
@click.option("--rounds", type=int, help="Rounds over which the download is averaged; 1000, lean: 300.")
@click.option("--over-commitment", default=1.0, show_default=True)
@click.option("--parameters", type=int, help="d, for bytes; with --network, for seconds too.")
@click.option("--network", help="edge, 5g or cloud.")
@click.option("--online-share", type=float, help="The lowest share of the clients that is online.")
@click.option("--q", type=float, help="GlueFL: 0.2 if not given.")
@click.option("--q-shared", type=float, help="GlueFL: 0.16 if not given.")
@click.option("--regenerate-every", help="GlueFL: I, a number of rounds, or never; 10 if not given.")
@click.option("--staleness-cost", help="GlueFL: shares downloaded after 1,2,… rounds (0.23,0.28,…), or a run's folder.")
@click.option("--variance-exponent", type=float, help="GlueFL: x, where the rounds to a target grow like A^x.")
@click.option("--figure", type=click.Path(path_type=Path), help="GlueFL: draw the trade-off (.svg, .png, .pdf).")
@click.option("--model", help="Lean: a model by its name, instead of --parameters.")
@click.option("--statistics", type=int, help="Lean: the number of BatchNorm means and variances.")
@click.option("--tensors", type=int, help="Lean: the number of tensors.")
@click.option("--from", "run", type=click.Path(path_type=Path), help="Lean: take the movement of cells from this run.")
@click.option("--changed", type=float, help="Lean: ρ, the share of the cells that changes in a round.")
@click.option("--growth", type=float, help="Lean: α, where 1 − (1−ρ)^(τ^α) of the cells change in τ rounds.")
@click.option("--recurring", type=float, help="Lean: φ, the share of a round's changes that soon comes back.")
@click.option("--step", type=float, help="Lean: s; chosen if not given.")
@click.option("--upload-share", type=float, help="Lean: p; chosen if not given.")
@click.option("--initial", type=click.Choice(["known", "download"]), help="Lean: how clients come to version 0.")
@click.option("--rounds-exponent", type=float, help="Lean: x, where the rounds to a target grow like (1/K)^x.")
@click.option("--most-round-s", type=float, help="Lean: a round may take so long; needs --network.")
@click.option("--most-round-bytes", type=float, help="Lean: the messages of a round may have so many bytes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
def plan(clients: int, cohort: int | None, figure: Path | None, as_json: bool, **options: Any) -> None:
    """Predict downloads and the effect of sticky sampling without training, and choose the sizes."""
    from gluefl.errors import UsageError
    from gluefl.experiments.theory import planning
    from gluefl.experiments.theory.options import read_options

    result = planning.plan(clients, cohort, **read_options(options))
    if figure is not None:
        if not isinstance(result, planning.Plan):
            raise UsageError("--figure draws the trade-off of GlueFL; there is none for lean.")
        from gluefl.experiments.report.tradeoff import draw

        draw(result, figure)
    if as_json:
        click.echo(json.dumps(result.as_json()))
        return
    from gluefl.experiments.console import console
    from gluefl.experiments.theory.tables import tables

    for part in tables(result):
        console().print(part)
