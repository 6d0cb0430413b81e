"""The figure of `gluefl plan`: download against variance for all candidate sizes."""

from pathlib import Path

from gluefl.errors import MissingExtra, UsageError
from gluefl.experiments.theory.planning import Plan

FORMATS = (".svg", ".png", ".pdf")


def draw(plan: Plan, path: Path) -> None:
    """A line for every S, with a point for every C; the chosen pair is marked."""
    if path.suffix not in FORMATS:
        raise UsageError(f"{path}: a figure ends in {', '.join(FORMATS)}.")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("report", "a figure") from error

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for size in sorted({pair.sticky_size for pair in plan.candidates}):
        line = sorted((c for c in plan.candidates if c.sticky_size == size), key=lambda c: c.sticky_cohort)
        shares = [pair.download_share for pair in line]
        axes.plot([pair.variance_factor for pair in line], shares, marker="o", markersize=3, label=f"S = {size}")
    chosen = f"S = {plan.sticky_size}, C = {plan.sticky_cohort}"
    axes.plot(plan.variance_factor, plan.expected_download_share, "k*", markersize=12, label=chosen)
    axes.plot(1, plan.uniform_download_share, "ks", markersize=5, label="uniform sampling")
    axes.set_xlabel("variance factor A (effective cohort K/A)")
    axes.set_ylabel("share of the model downloaded\nper client and round")
    axes.set_title(f"N = {plan.clients:,}, K = {plan.cohort}")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
