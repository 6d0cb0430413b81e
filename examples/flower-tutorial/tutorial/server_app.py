"""The server's side."""

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from torch.utils.data import DataLoader, TensorDataset

from gluefl import Lean, Sticky
from gluefl.flower import GlueFLStrategy
from tutorial.task import Net, images, initial_model
from tutorial.task import test as test_fn

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train a model with the nodes of the federation."""
    config = context.run_config
    model = initial_model()
    strategy = GlueFLStrategy(Sticky(4, 6, 3, weights="proportional"), Lean())
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
