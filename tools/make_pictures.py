"""The pictures of docs/architecture.md (packages, one round), lean.md, how-it-works.md, reproduction.md and the README.

python tools/make_pictures.py [FOLDER]      # docs/pictures by default; --png writes PNG files beside the SVG files

gluefl demo --out runs/demo && python tools/make_pictures.py --demo runs/demo     # the README's, from runs of the demo
"""

import argparse
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"  # of studies
DARK, GREY, PAPER = "#1b1f24", "#57606a", "#ffffff"
BLUE, GREEN, SAND, VIOLET, PLAIN = "#dbeafe", "#dcfce7", "#fef3c7", "#ede9fe", "#f3f4f6"
PLACES = {"30": (6, 5), "15": (-38, -3), "10": (6, 5), "7": (6, -11), "5": (-9, -14)}  # of labels, by cohort size
SETTINGS = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": DARK,
    "svg.hashsalt": "gluefl",  # the same identifiers in every build of the file
}


@dataclass(frozen=True)
class Box:
    """A box with a title and lines below it; x and y are its left and lower edges, in tenths of an inch."""

    x: float
    y: float
    width: float
    height: float
    title: str
    lines: tuple[str, ...] = ()
    colour: str = PLAIN

    @property
    def top(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height

    @property
    def bottom(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y

    @property
    def left(self) -> tuple[float, float]:
        return self.x, self.y + self.height / 2

    @property
    def right(self) -> tuple[float, float]:
        return self.x + self.width, self.y + self.height / 2

    def draw(self, axes: Axes) -> None:
        shape = FancyBboxPatch(
            (self.x, self.y),
            self.width,
            self.height,
            boxstyle="round,pad=0,rounding_size=0.8",
            facecolor=self.colour,
            edgecolor=GREY,
            linewidth=0.9,
        )
        axes.add_patch(shape)
        rows = (self.title, *self.lines)
        pitch = 1.85
        first = self.y + self.height / 2 + pitch * (len(rows) - 1) / 2
        for place, row in enumerate(rows):
            axes.text(
                self.x + self.width / 2,
                first - pitch * place,
                row,
                ha="center",
                va="center",
                weight="bold" if place == 0 else "normal",
                size=10.5 if place == 0 else 8.5,
            )


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    style = {"arrowstyle": "-|>", "color": GREY, "linewidth": 1.1, "shrinkA": 1, "shrinkB": 1}
    axes.annotate("", end, start, arrowprops=style)


def note(axes: Axes, x: float, y: float, text: str) -> None:
    axes.text(x, y, text, ha="left", va="center", size=8.5, color=GREY)


def page(width: float, height: float) -> tuple[plt.Figure, Axes]:
    figure = plt.figure(figsize=(width / 10, height / 10), facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    return figure, axes


def modules() -> plt.Figure:
    """The packages. Imports implied by a chain of other imports are left out."""
    figure, axes = page(100, 82)
    boxes = {
        "cli": Box(36, 75, 24, 5, "cli", ("the command line",)),
        "experiments": Box(
            26, 64.5, 44, 7, "experiments", ("many runs: grid, runner, studies,", "report, bench, theory"), VIOLET
        ),
        "config": Box(3, 52, 18, 7.5, "config", ("TOML → checked", "dataclasses"), VIOLET),
        "simulation": Box(
            27, 52, 34, 7.5, "simulation", ("the laboratory: round, channel,", "arrivals, look-ahead, train"), BLUE
        ),
        "flower": Box(72, 52, 25, 7.5, "flower", ("the deployment: server,", "mod, nodes"), BLUE),
        "storage": Box(58, 42, 26, 6, "storage", ("journal, checkpoint",), PLAIN),
        "clients": Box(3, 33, 24, 7.5, "clients", ("rules, trainers, engine,", "residuals, evaluation"), SAND),
        "core": Box(
            50, 32, 36, 7, "core", ("sampling, ledger, replica, optimiser,", "packages → aggregate → publish"), GREEN
        ),
        "strategies": Box(50, 23, 36, 6.5, "strategies", ("FedAvg, STC, APF, GlueFL; hooks",), GREEN),
        "wire": Box(50, 14.5, 36, 6, "wire", ("messages as bytes",), GREEN),
        "vectors": Box(50, 6, 36, 6, "vectors", ("layout, mask, sparse, top-k",), GREEN),
        "worlds": Box(3, 18, 28, 7, "populations   models   fleet", ("data, modules, devices",), SAND),
        "accel": Box(31, 6, 14, 6, "accel", ("GPU, threads",), PLAIN),
        "ground": Box(3, 0.7, 83, 3.2, "errors   randomness   parameters", (), PLAIN),
    }
    for box in boxes.values():
        box.draw(axes)

    def joined(start: str, end: str, out: str = "bottom", into: str = "top", dx: float = 0, dy: float = 0) -> None:
        (x, y), target = getattr(boxes[start], out), getattr(boxes[end], into)
        arrow(axes, (x + dx, y + dy), target)

    joined("cli", "experiments")
    joined("experiments", "config", into="top", dx=-16)
    joined("experiments", "simulation", dx=-4)
    arrow(axes, boxes["simulation"].left, boxes["config"].right)
    arrow(axes, (52, 52), (62, 48))
    arrow(axes, (84.5, 52), (78, 48))
    arrow(axes, boxes["config"].bottom, (12, 40.5))
    arrow(axes, (36, 52), (22, 40.5))
    arrow(axes, (47, 52), (56, 39))
    arrow(axes, (92, 52), (83, 39))
    arrow(axes, boxes["storage"].bottom, (70, 39))
    joined("core", "strategies")
    joined("strategies", "wire")
    joined("wire", "vectors")
    arrow(axes, boxes["vectors"].left, boxes["accel"].right)
    arrow(axes, (15, 33), (15, 25))
    arrow(axes, (27, 34.5), (50, 11))
    arrow(axes, (50, 33.5), (31, 22.5))
    arrow(axes, (15, 18), (15, 3.9))
    note(axes, 89.3, 22.5, "shared by\nsimulation\nand flower")
    axes.plot([87.5, 88.3, 88.3, 87.5], [39, 39, 6, 6], color=GREY, linewidth=0.9)
    note(axes, 72, 77.5, "an arrow points to\nwhat is imported")
    return figure


def one_round() -> plt.Figure:
    """The steps of `play`, from top to bottom."""
    figure, axes = page(104, 122)
    for x, name in ((35.5, "server"), (81, "network and clients")):
        axes.text(x, 119, name, ha="center", va="center", size=12, weight="bold", color=GREY)
    axes.text(1, 119, "round.py", ha="left", va="center", size=12, weight="bold", color=GREY)
    left, right, width = 17, 60, 42
    steps = [
        (left, 106.5, 9, GREEN, "1  invite", "simulation/arrivals.py  invite", "core/sampling.py  Sampler.invite"),
        (left, 93, 11, GREEN, "2  packages", "core/server.py  packages", "strategies/  Strategy.mask, the shared mask",
         "core/ledger.py  missing"),
        (right, 82, 9, BLUE, "3  send", "simulation/channel.py  send", "wire/encoder.py, wire/messages.py"),
        (right, 70.5, 9, SAND, "4  first arrivals", "simulation/arrivals.py  trips, first_arrivals",
         "fleet/devices.py  trip"),
        (right, 56.5, 11, SAND, "5  train", "clients/engine.py  data and batches", "clients/trainers/  the hardware",
         "clients/rules.py  init, step, final"),
        (right, 42.5, 11, SAND, "6  compress", "simulation/uploads.py  compress",
         "Hook.on_delta, then Strategy.compress", "clients/residuals/  what was left out"),
        (left, 27, 13, GREEN, "7  aggregate", "core/server.py  aggregate", "Strategy.combine, then Hook.on_sum,",
         "then Strategy.aggregate; the optimiser", "before or after it (Traits)"),
        (left, 14, 9, GREEN, "8  record", "core/records.py  record", "true bytes, seconds, the journal line"),
        (left, 1, 11, GREEN, "9  publish", "core/server.py  publish", "core/ledger.py  next version, held versions",
         "core/sampling.py  Sampler.next_state"),
    ]  # fmt: skip
    boxes = [Box(x, y, width, height, title, tuple(lines), colour) for x, y, height, colour, title, *lines in steps]
    for box in boxes:
        box.draw(axes)
    _, packages, send, arrivals, _, compress, aggregate, _, _ = boxes
    for upper, lower in ((0, 1), (2, 3), (3, 4), (4, 5), (6, 7), (7, 8)):
        arrow(axes, boxes[upper].bottom, boxes[lower].top)
    arrow(axes, packages.right, (send.x + 10, send.top[1]))
    note(axes, 73, 96, "package: header, mask,\npositions, values, statistics")
    arrow(axes, (compress.x + 10, compress.y), aggregate.right)
    note(axes, 73, 37.5, "upload: header, positions,\nvalues, statistics")
    spans = (
        ("prepare", arrivals.y, boxes[0].top[1]),
        ("train", boxes[4].y, boxes[4].top[1]),
        ("compress", compress.y, compress.top[1]),
        ("aggregate", aggregate.y, aggregate.top[1]),
        ("close", boxes[8].y, boxes[7].top[1]),
    )
    for name, low, high in spans:
        axes.plot([13.5, 12.7, 12.7, 13.5], [low, low, high, high], color=GREY, linewidth=1)
        axes.text(11.6, (low + high) / 2, name, ha="right", va="center", size=10, weight="bold")
    axes.plot([13.5, 102], [25, 25], color=GREY, linewidth=0.9, linestyle=(0, (4, 3)))
    ahead = "simulation/lookahead.py, on a GPU: packages\nand training of the guessed next round\n"
    note(axes, 62, 20, ahead + "start here, during steps 8 and 9")
    return figure


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


def wire() -> plt.Figure:
    """What a message of each format holds."""
    figure, axes = page(102, 27)
    rows = (
        (20, "package, format 1", (("header", 13), ("shared mask", 16), ("positions", 15), ("float32 values", 24),
                                   ("statistics", 14))),
        (11, "package, lean", (("header", 11), ("tensors sent", 17), ("steps, counts", 17), ("gaps", 12),
                               ("cells", 12))),
        (2, "upload, lean", (("header", 11), ("scales", 10), ("one bit per rotated weight", 34), ("statistics", 14))),
    )  # fmt: skip
    colours = (PLAIN, SAND, BLUE, GREEN, VIOLET)
    for y, name, sections in rows:
        note(axes, 1, y + 2.5, name)
        x = 17.0
        for colour, (title, width) in zip(colours, sections):
            Box(x, y, width - 0.8, 5, title, (), colour).draw(axes)
            x += width
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
        "lean": ("lean", "#cf222e", "o"),
    }
    for family, (title, colour, marker) in styles.items():
        points = [
            (cells["total_time"]["mean"] / 3600, cells["download"]["mean"] / 1e9, label.split("-")[1])
            for label, cells in rows.items()
            if label.startswith(family) and cells["download"]
        ]
        axes.plot(
            [point[0] for point in points],
            [point[1] for point in points],
            marker,
            linestyle=":",
            color=colour,
            label=title,
        )
        for hour, size_gb, cohort in points:
            place = PLACES[cohort]  # points that are close to each other have their labels on different sides
            axes.annotate(f"K = {cohort}", (hour, size_gb), xytext=place, textcoords="offset points", fontsize=8.5)
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
