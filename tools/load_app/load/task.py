"""Model and strategies of the load test, and an app that does not train."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict

from gluefl import FedAvg, GlueFL, Lean

PARAMETERS = 100_000
STRATEGIES = {"fedavg": FedAvg(), "lean": Lean(), "gluefl": GlueFL()}


def initial_model(parameters: int) -> torch.nn.Module:
    """Version 0, the same on the server and on every node."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(parameters // 100, 100, bias=False))


def step(message: Message, context: Context) -> Message:
    """Move every weight by noise, in place of training."""
    generator = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    arrays = message.content["arrays"].to_torch_state_dict()
    moved = {name: array + 0.01 * torch.randn(array.shape, generator=generator) for name, array in arrays.items()}
    metrics = MetricRecord({"train_loss": 0.5, "num-examples": 10})
    return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message)
