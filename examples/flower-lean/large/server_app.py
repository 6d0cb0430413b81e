"""The server's side: lean, or Flower's FedAvg with the same nodes, model and training."""

import json

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy

from gluefl import Lean
from gluefl.flower import GlueFLStrategy, Uniform
from large.task import POPULATION, Net, initial_model
from large.task import test as test_fn

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train a model with the nodes of the federation."""
    config = context.run_config
    torch.set_num_threads(1)
    result = strategy_of(config).start(
        grid=grid,
        initial_arrays=ArrayRecord(initial_model().state_dict()),
        num_rounds=config["num-server-rounds"],
        evaluate_fn=evaluate,
    )
    accuracies = {round: metrics["accuracy"] for round, metrics in result.evaluate_metrics_serverapp.items()}
    print("accuracies:", json.dumps(accuracies), flush=True)


def strategy_of(config: dict) -> Strategy:  # type: ignore[type-arg]
    """The strategy that the run's configuration names; no node is asked to evaluate."""
    nodes, cohort = config["num-nodes"], min(config["cohort"], config["num-nodes"])
    if config["strategy"] == "fedavg":
        return FedAvg(fraction_train=cohort / nodes, fraction_evaluate=0.0, min_available_nodes=nodes)
    return GlueFLStrategy(
        Uniform(cohort), Lean(), initial=config["initial"], out=config["out"] or None, min_available_nodes=nodes
    )


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Evaluate the model on writers that no node has."""
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    samples = POPULATION.test()
    loss, accuracy = test_fn(model, POPULATION.transform(samples.inputs), samples.labels)
    return MetricRecord({"loss": loss, "accuracy": accuracy})
