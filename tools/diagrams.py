"""Diagrams of boxes and arrows, drawn by make_pictures.py: packages, one round, messages."""

from dataclasses import dataclass

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

DARK, GREY, PAPER = "#1b1f24", "#57606a", "#ffffff"
BLUE, GREEN, SAND, VIOLET, PLAIN = "#dbeafe", "#dcfce7", "#fef3c7", "#ede9fe", "#f3f4f6"


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
