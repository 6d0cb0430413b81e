"""The server's side: the real strategy over Flower's grid, with its CPU seconds and the SuperLink's by round."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from gluefl.flower import GlueFLStrategy, Uniform
from load.parts import Clock, cpu_s, watched
from load.task import STRATEGIES, initial_model

app = ServerApp()
OTHERS = {"superlink": "superlink_s", "fleet": "nodes_s"}  # processes whose seconds are written down
WAIT_S = 120.0  # for nodes, and for a round


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds, and write down what they cost."""
    config, clock = context.run_config, Clock()
    torch.set_num_threads(1)
    out, rounds = Path(str(config["out"])), list[dict[str, Any]]()

    def note(round: int, arrays: ArrayRecord) -> None:
        """After each round, and before the first."""
        row = {"round": round, "clock_s": time.monotonic(), "server_s": time.process_time()}
        others = {name: cpu_s(int(config[f"{who}-pid"])) for who, name in OTHERS.items()}
        rounds.append(row | others | {"parts_s": dict(clock.seconds)})

    strategy = GlueFLStrategy(
        Uniform(int(config["cohort"])),
        STRATEGIES[str(config["strategy"])],
        out=out,
        min_available_nodes=int(config["num-nodes"]),
        wait_for_nodes_s=WAIT_S,
    )
    grid_parts = [(type(grid), "push_messages", "sending"), (type(grid), "pull_messages", "receiving")]
    with watched(clock, grid_parts):
        model = ArrayRecord(initial_model(int(config["parameters"])).state_dict())
        strategy.start(grid, model, num_rounds=int(config["num-server-rounds"]), timeout=WAIT_S, evaluate_fn=note)
    (out / "load.json").write_text(json.dumps(rounds))
