"""The tables that `gluefl plan` prints."""

import math
from io import StringIO

from rich.console import Console
from rich.table import Table

from gluefl.experiments.console import duration, plan_tables, volume
from gluefl.experiments.theory.lean_plan import LeanCandidate, LeanPlan
from gluefl.experiments.theory.planning import Plan

SHOWN = 10  # candidates
WIDTH = 120  # characters of a table as text


def tables(plan: Plan | LeanPlan) -> list[Table | str]:
    """A plan of either kind."""
    return plan_tables(plan) if isinstance(plan, Plan) else lean_tables(plan)


def text(plan: Plan | LeanPlan) -> str:
    """What `gluefl plan` prints."""
    console = Console(width=WIDTH, file=StringIO(), record=True)
    for part in tables(plan):
        console.print(part)
    return console.export_text()


def lean_tables(plan: LeanPlan) -> list[Table | str]:
    """The recommended parameters, packages by staleness, the cheapest candidates, and the reason."""
    best, float32 = plan.recommended, plan.fedavg_bytes
    title = f"Lean, recommended: K = {best.cohort}, {_group(best)}, s = {best.step:g}, p = {best.upload_share:g}"
    table = Table(show_header=False, title=title, title_justify="left")
    ratio = f"(float32 {volume(float32)}, {float32 / best.down_bytes:.0f} times as much)"
    table.add_row("download per client and round", f"{volume(best.down_bytes)} {ratio}")
    table.add_row("upload per client and round", f"{volume(best.up_bytes)} ({float32 / best.up_bytes:.0f} times less)")
    table.add_row("all messages of a round", volume(best.round_bytes))
    if best.round_s is not None:
        table.add_row("time of a round", duration(best.round_s))
    table.add_row("first download, version 0 known", volume(plan.newcomer_bytes))
    table.add_row("first download, the whole model as cells", volume(plan.whole_bytes))
    packages = Table(title="A package by staleness", title_justify="left")
    for heading in ("rounds missed", "weights changed", "bytes", "bits per weight"):
        packages.add_column(heading, justify="right")
    for package in plan.packages:
        bits = 8 * package.down_bytes / plan.model.weights
        packages.add_row(str(package.rounds), f"{package.share:.1%}", volume(package.down_bytes), f"{bits:.3f}")
    return [table, packages, _candidates(plan), plan.reason]


def _candidates(plan: LeanPlan) -> Table:
    table = Table(title="The cheapest candidates", title_justify="left")
    timed = plan.recommended.round_s is not None
    headings = ("K", "S", "C", "s", "p", "download per\nclient and round", "upload", "messages\nof a round")
    ends = ("rounds to a target,\nrule of thumb", "download to a target,\ncheapest = 1")
    for heading in (*headings, *(("time of\na round",) if timed else ()), *ends):
        table.add_column(heading, justify="right")
    for one in plan.candidates[:SHOWN]:
        sizes = (str(one.cohort), str(one.sticky_size or "–"), str(one.sticky_cohort or "–"))
        volumes = (volume(one.down_bytes), volume(one.up_bytes), volume(one.round_bytes))
        seconds = () if one.round_s is None else (duration(one.round_s),)
        least = plan.candidates[0].cost_bytes
        cost = one.cost_bytes / least if least else math.nan  # too small for a number
        relative = (f"{one.relative_rounds:.2f}", f"{cost:.2f}")
        table.add_row(*sizes, f"{one.step:g}", f"{one.upload_share:g}", *volumes, *seconds, *relative)
    return table


def _group(candidate: LeanCandidate) -> str:
    if not candidate.sticky_size:
        return "uniform sampling"
    return f"S = {candidate.sticky_size}, C = {candidate.sticky_cohort}"
