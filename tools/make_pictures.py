"""The pictures of docs/architecture.md (packages, one round), lean.md, how-it-works.md, reproduction.md and the README.

python tools/make_pictures.py [FOLDER]      # docs/pictures by default; --png writes PNG files beside the SVG files

gluefl demo --out runs/demo && python tools/make_pictures.py --demo runs/demo     # the README's, from runs of the demo
"""

import argparse
import json
from functools import partial
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
from diagrams import DARK, PAPER, modules, one_round, wire
from matplotlib import pyplot as plt

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"  # of studies
POINTS = {"lean-fast-30": "S", "lean-fast-uniform-30": "U"}  # of the front that are no cohort size
PLACES = {  # of labels, by cohort size or name
    "30": (6, 5), "15": (-38, -3), "10": (6, 5), "7": (6, -11), "5": (-9, -14), "S": (6, 4), "U": (-4, 7),
}  # fmt: skip
SETTINGS = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": DARK,
    "svg.hashsalt": "gluefl",  # the same identifiers in every build of the file
}


def lean() -> plt.Figure:
    """Two coordinates under lean: the latent values move, the published ones follow in steps."""
    from gluefl.strategies import Space
    from gluefl.strategies.lean import Lean

    rounds, space = 60, Space((64,))
    generator = torch.Generator().manual_seed(11)
    strategy = Lean(refine_below=1e-9, coarsen_above=1.0)
    state, _ = strategy.init(space, torch.randn(64, generator=generator))
    step, drift = float(state.steps[0]), torch.randn(64, generator=generator)
    latent, published = [], []
    for round in range(rounds):
        move = step * (0.03 * drift + 0.12 * torch.randn(64, generator=generator))
        state, _ = strategy.aggregate(state, move, round + 1)
        latent.append((state.latent - state.origin) / step)
        published.append((state.published - state.origin) / step)
    paths, grids = torch.stack(latent), torch.stack(published)
    travelled = paths[-1].abs()
    far, near = int(travelled.argsort()[-3]), int(grids.diff(dim=0).ne(0).sum(0).argmax())
    figure, panels = plt.subplots(1, 2, figsize=(9.2, 3.1), sharex=True, layout="constrained")
    titles = ("a coordinate that moves away", "one that crosses a boundary and comes back")
    for panel, coordinate, title in zip(panels, (far, near), titles):
        path, cells = paths[:, coordinate], grids[:, coordinate]
        low, high = int(cells.min()) - 1, int(cells.max()) + 1
        for cell in range(low, high + 1):
            panel.axhline(cell, color="#d0d7de", linewidth=0.8, zorder=0)
        panel.plot(range(1, rounds + 1), path, color="#0969da", linewidth=1.3, label="latent")
        panel.step(range(1, rounds + 1), cells, where="post", color="#cf222e", linewidth=1.8, label="published")
        changed = (cells.diff().ne(0).nonzero().flatten() + 2).tolist()
        panel.plot(changed, cells[[round - 1 for round in changed]], "o", color="#cf222e", markersize=4)
        panel.set(title=title, xlabel="round", yticks=range(low, high + 1), ylim=(low - 0.2, high + 0.2))
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("steps from version 0")
    panels[0].legend(frameon=False, loc="best")
    return figure


def demo(runs: Path) -> plt.Figure:
    """Accuracy against download in the runs of `gluefl demo`; on white, so that it is readable on a dark page too."""
    from gluefl.experiments.report.comparison import palette, read
    from gluefl.experiments.report.drawing import STYLE, draw
    from gluefl.experiments.report.figures import accuracy_by_download

    comparison = read([runs])[0]
    with matplotlib.rc_context(STYLE | {"font.size": 10.5, "figure.facecolor": PAPER, "savefig.facecolor": PAPER}):
        return draw(accuracy_by_download(comparison), palette(comparison.variants), size=(7.6, 3.7))


def sticky() -> plt.Figure:
    """Who takes part in 60 rounds, by the samplers themselves."""
    import numpy as np

    from gluefl.core.sampling import Pool, Sticky, Uniform

    clients, rounds = 120, 60
    pool = Pool(clients, lambda client: 1 / clients)
    figure, panels = plt.subplots(1, 2, figsize=(9.2, 3.4), sharey=True, layout="constrained")
    samplers = (("uniform sampling", Uniform(6)), ("sticky sampling: 5 of 6 from a group of 24", Sticky(6, 24, 5)))
    for panel, (title, sampler) in zip(panels, samplers):
        rng = np.random.default_rng(5)
        state, points = sampler.init(pool, rng), []
        for round in range(1, rounds + 1):
            used = [client for group in sampler.invite(state, pool, rng) for client in group.clients]
            state = sampler.next_state(state, used, rng)
            points += [(round, client) for client in used]
        order = {client: place for place, client in enumerate(dict.fromkeys(client for _, client in points))}
        xs, ys = zip(*((round, order[client]) for round, client in points))
        panel.plot(xs, ys, "s", color="#0969da", markersize=2.6)
        panel.set(title=f"{title}\n{len(order)} different clients", xlabel="round")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("clients, by first participation")
    return figure


def staleness() -> plt.Figure:
    """What a client downloads after it has skipped rounds, and how many rounds it skips, by the formulas of plan."""
    import numpy as np

    from gluefl.core.sampling import Sticky, Uniform
    from gluefl.experiments.theory.lean import Model, Movement, package_bytes
    from gluefl.experiments.theory.staleness import in_bytes, missing_share, staleness

    rounds, model = np.arange(1, 61, dtype=np.float64), Model(116_202, 704, 20)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.3), layout="constrained")
    curves = {
        "STC, q = 20%": (in_bytes(missing_share(0.2, 0.0, None, 60), 0.0), "#8250df"),
        "GlueFL, q = 20%, 16% shared": (in_bytes(missing_share(0.2, 0.16, 10, 60), 0.16), "#bf8700"),
        "lean": (package_bytes(model, Movement(), rounds) / (4 * (model.weights + model.statistics)), "#cf222e"),
    }
    for name, (share, colour) in curves.items():
        left.plot(rounds, 100 * share, color=colour, label=name)
    left.set(xlabel="rounds since the last participation", ylabel="% of the model in a package", ylim=(0, 100))
    left.legend(frameon=False)
    samplers = (
        ("uniform, K = 30 of 2800", Uniform(30), "#57606a"),
        ("sticky, S = 240, C = 24", Sticky(30, 240, 24), "#0969da"),
    )
    for name, sampler, colour in samplers:
        right.plot(rounds, 100 * np.cumsum(staleness(sampler, 2800, 60)), color=colour, label=name)
    right.set(xlabel="rounds since the last participation, at most", ylabel="% of the invited clients", ylim=(0, 100))
    right.legend(frameon=False)
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def calibration() -> plt.Figure:
    """FedAvg on the default population and in the authors' logs."""
    result = json.loads((RESULTS / "calibration.json").read_text(encoding="utf-8"))
    figure, panels = plt.subplots(1, 2, figsize=(9.2, 3.2), sharey=True, layout="constrained")
    for panel, (name, curves) in zip(panels, result["models"].items()):
        for place, curve in enumerate(curves["seeds"].values()):
            label = f"gluefl, {len(curves['seeds'])} seeds" if place == 0 else None
            panel.plot(result["rounds"], [100 * share for share in curve], color="#0969da", linewidth=1, label=label)
        authors = [100 * share for share in curves["authors"]]
        panel.plot(result["rounds"], authors, "o--", color="#cf222e", markersize=4, linewidth=1, label="the authors")
        panel.set(title=name, xlabel="round", ylim=(20, 80))
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, loc="lower right")
    panels[0].set_ylabel("test accuracy of FedAvg, %")
    return figure


def front() -> plt.Figure:
    """Download and time until the same accuracy, by cohort size."""
    result = json.loads((RESULTS / "paper-front.json").read_text(encoding="utf-8"))
    rows = result["tables"][0]["rows"]
    figure, axes = plt.subplots(figsize=(7.6, 3.9), layout="constrained")
    styles = {
        "fedavg": ("FedAvg, float32", "#57606a", "s"),
        "int4": ("FedAvg, int4 down, rotated up, averaged", "#bf8700", "^"),
        "lean-fast": ("lean, fast: with sticky clients (S), uniform (U)", "#8250df", "D"),
        "lean": ("lean", "#cf222e", "o"),
    }
    for family, (title, colour, marker) in styles.items():
        points = [
            (cells["total_time"]["mean"] / 3600, cells["download"]["mean"] / 1e9, POINTS.get(label, label))
            for label, cells in rows.items()
            if label.rpartition("-")[0].removesuffix("-uniform") == family and cells["download"]
        ]
        axes.plot(
            [point[0] for point in points],
            [point[1] for point in points],
            marker,
            linestyle=":",
            color=colour,
            label=title,
        )
        for hour, size_gb, label in points:
            name = f"K = {label.split('-')[1]}" if "-" in label else label
            place = PLACES[label.split("-")[-1]]  # points that are close to each other have labels on different sides
            axes.annotate(name, (hour, size_gb), xytext=place, textcoords="offset points", fontsize=8.5)
    axes.set(
        xlabel="simulated hours", ylabel="GB downloaded by all clients", yscale="log", xlim=(0, 6), ylim=(0.5, 300)
    )
    axes.set_yticks([1, 10, 100], ["1", "10", "100"])
    axes.set_title(result["tables"][0]["title"].replace("At", "Until") + " (ShuffleNet, 2,800 clients, seed 1)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


PICTURES = (
    ("modules", modules), ("round", one_round), ("lean", lean), ("sticky", sticky), ("staleness", staleness),
    ("wire", wire), ("calibration", calibration), ("front", front),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent.parent / "docs" / "pictures")
    parser.add_argument("--png", action="store_true")
    parser.add_argument("--demo", type=Path, metavar="DIR", help="the folder of `gluefl demo`: draws only its picture")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(SETTINGS):
        for name, draw in (("demo", partial(demo, options.demo)),) if options.demo else PICTURES:
            figure = draw()
            figure.savefig(options.folder / f"{name}.svg", metadata={"Date": None})
            if options.png:
                figure.savefig(options.folder / f"{name}.png", dpi=100)


if __name__ == "__main__":
    main()
