"""The server's side."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch.utils.data import DataLoader, TensorDataset

from tutorial.task import Net, images
from tutorial.task import test as test_fn

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train a model with the nodes of the federation."""
    config = context.run_config
    torch.manual_seed(1)
    model = Net()
    strategy = FedAvg(fraction_train=0.4, fraction_evaluate=0.0)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=config["num-server-rounds"],
        evaluate_fn=evaluate,
    )
    for round, metrics in result.evaluate_metrics_serverapp.items():
        print(f"round {round}: accuracy {metrics['accuracy']:.3f}", flush=True)


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Evaluate the model on images that no node has."""
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy = test_fn(model, DataLoader(TensorDataset(*images(99_999, 500)), 100))
    return MetricRecord({"loss": loss, "accuracy": accuracy})
