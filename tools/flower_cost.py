"""What the strategy and the mod cost over Flower's own FedAvg: `python tools/flower_cost.py [--parameters 5000000]`.

Flower's simulation engine, nodes that do not train (they add a fixed step), the same model for all. Seconds per round
are the median over the rounds after the first two; bytes are those of the messages' arrays, both ways.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1", RAY_USAGE_STATS_ENABLED="0")

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg
from flwr.simulation import run_simulation

from gluefl import STC, FedAvg, GlueFL, Lean
from gluefl.flower import GlueFLStrategy, Sticky, Uniform, gluefl_mod

NAMES = ("FedAvg of Flower", "FedAvg of gluefl", "STC", "GlueFL", "lean")


def client_app(with_mod: bool) -> ClientApp:
    app = ClientApp(mods=[gluefl_mod] if with_mod else [])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(context.node_config["partition-id"])
        arrays = message.content["arrays"].to_torch_state_dict()
        moved = {name: t + 0.01 * torch.randn(t.shape, generator=generator) for name, t in arrays.items()}
        metrics = MetricRecord({"num-examples": 1, "train_loss": 0.0})
        return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message)

    return app


def measure(name: str, parameters: int, nodes: int, cohort: int, rounds: int) -> dict[str, Any]:
    side = int(parameters**0.5)
    model = {f"layer{i}": torch.zeros(side // 10, side) for i in range(10)}
    measured: dict[str, Any] = {}
    sticky = Sticky(cohort, 2 * cohort, cohort * 4 // 5)
    strategies = {
        NAMES[0]: lambda: FlowersFedAvg(fraction_train=cohort / nodes, fraction_evaluate=0.0),
        NAMES[1]: lambda: GlueFLStrategy(Uniform(cohort), FedAvg()),
        NAMES[2]: lambda: GlueFLStrategy(Uniform(cohort), STC()),
        NAMES[3]: lambda: GlueFLStrategy(sticky, GlueFL()),
        NAMES[4]: lambda: GlueFLStrategy(replace(sticky, weights="proportional"), Lean()),
    }
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        ends: list[float] = []
        strategy = strategies[name]()
        strategy.start(
            grid, ArrayRecord(model), num_rounds=rounds, evaluate_fn=lambda round, _: ends.append(time.perf_counter())
        )
        seconds = [b - a for a, b in itertools.pairwise(ends[2:])]
        size = 4 * sum(t.numel() for t in model.values())
        down = up = size * cohort
        if isinstance(strategy, GlueFLStrategy):
            lines = strategy.session.journal.lines[2:]
            down, up = (statistics.mean(line[key] for line in lines) for key in ("down_bytes", "up_bytes"))
        measured.update(seconds=statistics.median(seconds), down_mb=down / 1e6, up_mb=up / 1e6)

    # Two cores, one simulated node on each.
    run_simulation(
        server_app, client_app(name != NAMES[0]), nodes, backend_config={"client_resources": {"num_cpus": 1}}
    )
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=5_000_000)
    parser.add_argument("--nodes", type=int, default=40)
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = {name: measure(name, *vars(options).values()) for name in NAMES}
    print(f"{'':18} {'s a round':>10} {'added':>8} {'MB down':>9} {'MB up':>8}", file=sys.stderr)
    for name, row in rows.items():
        added = row["seconds"] - rows[NAMES[0]]["seconds"]
        print(
            f"{name:18} {row['seconds']:10.2f} {added:+8.2f} {row['down_mb']:9.1f} {row['up_mb']:8.1f}", file=sys.stderr
        )
    print(json.dumps({"options": vars(options), "rows": rows}))


if __name__ == "__main__":
    main()
