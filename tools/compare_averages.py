"""Averages over the versions of one run: python tools/compare_averages.py CONFIG.toml --out DIR --set rounds=600

Averaging changes only the model that is evaluated, so that one run serves all averages. They are evaluated in the last
rounds of every hundred, where the run is; DIR/averages.jsonl has a line for each evaluation. The table shows the means
of five evaluations. CONFIG.toml may be that of a run of a study.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import click

from gluefl import Averaging
from gluefl.clients.evaluation import Evaluator
from gluefl.clients.losses import LOSSES
from gluefl.clients.metrics import METRICS
from gluefl.config import Config, read, validated, with_sets
from gluefl.simulation.build import build_model, build_population, run
from gluefl.simulation.process import device_of
from gluefl.simulation.settings import Options
from gluefl.vectors.layout import Layout

AVERAGES = {
    "none": Averaging(),
    "0.9": Averaging(0.9),
    "0.9, span 0.05": Averaging(0.9, span=0.05),
    "0.9, span 0.1": Averaging(0.9, span=0.1),
    "0.97": Averaging(0.97),
}
WINDOW = 5  # evaluations


def evaluator_of(config: Config, device: str) -> tuple[Evaluator, Layout]:
    """What the run itself evaluates with."""
    population = build_population(config)
    module = build_model(config, population.classes, population.shape).to(device_of(device))
    layout, loss = Layout.of(module), LOSSES[config.training.loss or "cross_entropy"]
    metric = METRICS[config.evaluation.metric]
    return Evaluator(module, layout, population, loss, metric, config.evaluation.batch, device_of(device)), layout


class Averages:
    """A callback that keeps and evaluates them."""

    def __init__(self, config: Config, device: str, out: Path) -> None:
        self.every, self.rounds, self.path = config.evaluation.every, config.rounds, out / "averages.jsonl"
        self.evaluator, layout = evaluator_of(config, device)
        initial = tuple(vector.to(device_of(device)) for vector in layout.flatten(self.evaluator.module))
        self.kept: dict[str, Any] = dict.fromkeys(AVERAGES, initial)
        self.accuracies: dict[int, dict[str, float]] = {}

    def __call__(self, line: dict[str, Any], state: Any) -> None:
        """After a round."""
        version = state.weights, state.statistics
        for name, averaging in AVERAGES.items():
            averaged = averaging.average > 0
            self.kept[name] = averaging.step(self.kept[name], *version, state.round) if averaged else version
        last = -state.round % 100 < WINDOW * self.every or self.rounds - state.round < WINDOW * self.every
        if last and line["accuracy"] is not None:
            found = {name: self.evaluator(*kept).accuracy for name, kept in self.kept.items()}
            self.accuracies[state.round] = found
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"round": state.round, **found}) + "\n")

    def table(self) -> list[str]:
        """Markdown: a row per hundred rounds, the mean of the evaluations before."""
        by_end = defaultdict(list)
        for round, found in self.accuracies.items():
            by_end[min(-(-round // 100) * 100, self.rounds)].append(found)
        rows = [
            [str(end), *(f"{sum(found[name] for found in group) / len(group):.2%}" for name in AVERAGES)]
            for end, group in by_end.items()
            if len(group) == WINDOW
        ]
        header = ["after round", *AVERAGES]
        return [f"| {' | '.join(row)} |" for row in (header, ["---:"] * len(header), *rows)]


@click.command()
@click.argument("config", type=click.Path(path_type=Path, exists=True))
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE")
@click.option("--device", default="cpu", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(config: Path, sets: tuple[str, ...], device: str, out: Path) -> None:
    """One run, and the accuracy of several averages over its versions."""
    chosen = validated(with_sets(read(config), [*sets, "evaluation.stop_at_target=false"]), str(config))
    averages = Averages(chosen, device, out)
    run(chosen, Options(out, callbacks=(averages,), device=device))
    print("\n".join(averages.table()))


if __name__ == "__main__":
    main()
