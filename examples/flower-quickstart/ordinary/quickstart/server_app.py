"""The server's side."""

import json

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from quickstart.task import POPULATION, Net
from quickstart.task import test as test_fn

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train a model with the nodes of the federation."""
    config = context.run_config
    torch.manual_seed(1)
    strategy = FedAvg(
        min_available_nodes=config["num-nodes"],
        fraction_evaluate=config["fraction-evaluate"],
        fraction_train=config["cohort"] / config["num-nodes"],
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"lr": config["learning-rate"]}),
        num_rounds=config["num-server-rounds"],
        timeout=config["round-timeout"],
        evaluate_fn=evaluate,
    )
    accuracies = {round: metrics["accuracy"] for round, metrics in result.evaluate_metrics_serverapp.items()}
    print("accuracies:", json.dumps(accuracies), flush=True)


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Evaluate the model on writers that no node has."""
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    samples = POPULATION.test()
    loss, accuracy = test_fn(model, POPULATION.transform(samples.inputs), samples.labels)
    return MetricRecord({"loss": loss, "accuracy": accuracy})
