"""The client's side."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from gluefl.flower import GlueFLMod
from tutorial.task import Net, initial_model, load_data
from tutorial.task import test as test_fn
from tutorial.task import train as train_fn

app = ClientApp(mods=[GlueFLMod(initial=initial_model)])


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model on this node's images."""
    model, config = Net(), context.run_config
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    loader, _ = load_data(context.node_config["partition-id"], config["batch-size"])
    loss = train_fn(model, loader, config["local-epochs"], config["learning-rate"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate the model on this node's images."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    _, loader = load_data(context.node_config["partition-id"], context.run_config["batch-size"])
    loss, accuracy = test_fn(model, loader)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(loader.dataset)})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
