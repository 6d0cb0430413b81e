"""Commands that read the folders of runs, or this installation: `report`, `claims`, `export`, `verify`, `doctor`."""

import contextlib
import json
import time
from pathlib import Path

import click


@click.command()
@click.argument("folders", nargs=-1, required=True, metavar="DIR…", type=click.Path(exists=True, path_type=Path))
@click.option("--markdown", is_flag=True, help="Print the table as markdown.")
def claims(folders: tuple[Path, ...], markdown: bool) -> None:
    """Compare the studies in the given folders with the claims of the paper, by intervals over the seeds."""
    from gluefl.experiments.console import console
    from gluefl.experiments.studies import claims, pages

    header, rows = claims.table(claims.results(folders))
    if markdown:
        click.echo(pages.markdown_table(header, rows))
    else:
        console().print(pages.plain_table(header, rows))


@click.command()
@click.argument("folders", nargs=-1, required=True, metavar="DIR…", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="The page to write; by default report.html.")
@click.option("--figures", type=click.Path(path_type=Path), help="Folder for figures as SVG, PNG and CSV.")
@click.option("--watch", is_flag=True, help="Serve the page on this machine and refresh it during the runs.")
@click.option("--port", type=click.IntRange(0, 65535), default=8321, show_default=True, help="For --watch; 0: any.")
def report(folders: tuple[Path, ...], out: Path | None, figures: Path | None, watch: bool, port: int) -> None:
    """Print the table of the runs in the given folders; write a page of tables, figures, configuration differences."""
    from gluefl.experiments.console import console
    from gluefl.experiments.report import live, page, plots, tables

    if figures is not None:
        click.echo(f"Figures: {len(plots.write(folders, figures))} files in {figures}")
    if out is not None or (figures is None and not watch):
        out = out or Path("report.html")
        for part in tables.tables(page.write(folders, out)):
            console().print(part, highlight=False, markup=False, soft_wrap=isinstance(part, str))
        click.echo(f"Report: {out}")
    if watch:
        with live.serving(folders, port) as address:
            click.echo(f"Serving {address} until Ctrl-C")
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    time.sleep(3600)


@click.command()
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The file to write, FILE.safetensors.")
@click.option("--device", default="cpu", show_default=True, help="Where both models are evaluated: cpu, cuda, …")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
def export(run: Path, out: Path, device: str, as_json: bool) -> None:
    """Write the model that a lean run published, as small integers and scales, and evaluate it."""
    from gluefl.experiments import export as exports

    result = exports.export(run, out, device)
    if as_json:
        click.echo(json.dumps(result.as_json))
        return
    from gluefl.experiments.console import console

    console().print(exports.export_table(result))


@click.command()
@click.argument("folders", nargs=-1, required=True, metavar="DIR…", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
@click.pass_context
def verify(ctx: click.Context, folders: tuple[Path, ...], as_json: bool) -> None:
    """Read every file of the runs in the given folders and compare it with its checksum; exit code 1 if one differs."""
    from gluefl.experiments import verify as verification
    from gluefl.experiments.console import console

    checks = verification.verify(folders)
    damaged = sum(check.damage is not None for check in checks)
    if as_json:
        rows = [{"run": str(c.run), "file": c.file, "checked": c.checked, "damage": c.damage} for c in checks]
        click.echo(json.dumps({"files": rows, "damaged": damaged}))
    else:
        console().print(verification.verification_table(checks))
        click.echo(f"{len(checks)} checks, {damaged} damaged")
    ctx.exit(1 if damaged else 0)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Check this installation: versions, devices, optional parts, a small run; exit code 1 if a part failed."""
    from gluefl.experiments import doctor as examination
    from gluefl.experiments.console import console, findings_table

    findings = examination.examine()
    if as_json:
        click.echo(json.dumps(examination.as_json(findings)))
    else:
        console().print(findings_table(findings))
    ctx.exit(0 if examination.healthy(findings) else 1)


COMMANDS = (claims, report, export, verify, doctor)
