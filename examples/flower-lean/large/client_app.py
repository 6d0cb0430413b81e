"""The client's side. The mod passes messages of other strategies, such as Flower's FedAvg, on untouched."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from gluefl.flower import GlueFLMod
from large.task import Net, initial_model, load_data
from large.task import train as train_fn

app = ClientApp(mods=[GlueFLMod(initial=initial_model)])
torch.set_num_threads(1)


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model on this node's data."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    inputs, labels = load_data(context.node_config["partition-id"])
    config = context.run_config
    loss = train_fn(model, inputs, labels, config["steps"], config["batch-size"], config["learning-rate"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(labels)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)
