"""The server's side: a federation for each strategy, one after the other, with the guard as it is by default."""

from pathlib import Path

from attacks import STRATEGIES, ways_of
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_nodes import initial_arrays
from gluefl import Uniform
from gluefl.flower import GlueFLStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """As many rounds as there are ways to attack."""
    config = context.run_config
    for name, strategy in STRATEGIES.items():
        server = GlueFLStrategy(
            Uniform(config["num-nodes"]),
            strategy,
            seed=5,
            out=Path(config["out"]) / name,
            min_available_nodes=config["num-nodes"],
        )
        rounds = min(len(ways_of(name)), config["most-rounds"])
        server.start(grid, initial_arrays(), num_rounds=rounds, timeout=300.0)
