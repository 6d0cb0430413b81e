"""The client's side: an honest app, and a mod around ours that sends something else when it is this node's turn."""

import torch
from attacks import attack_on
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from flower_nodes import initial_arrays
from flower_nodes import train as honest_train
from gluefl.flower import GlueFLMod, messages

WAY, LAST = "torture-way", "torture-last"  # what a node remembers
torch.set_num_threads(1)


def hostile_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Change the reply of this node, if it is its turn."""
    name = messages.read_package(message.content)[0].strategy["name"]
    round, place = int(message.metadata.group_id), context.node_config["partition-id"]
    way, attack = attack_on(name, round, place)
    context.state[WAY] = ConfigRecord({"way": way})
    reply = call_next(message, context)
    body = reply.content.array_records.get(messages.BODY) if reply.has_content() else None
    if body is not None:
        before = context.state.array_records.get(LAST)
        context.state[LAST] = ArrayRecord(dict(body.items()))
        if way == "replayed" and before is not None:
            reply.content[messages.BODY] = before
    return attack.sent(reply) if way and body is not None else reply


app = ClientApp(mods=[hostile_mod, GlueFLMod(initial=initial_arrays)])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train as the tests do; a hostile node returns something else."""
    reply = honest_train(message, context)
    way = str(context.state[WAY]["way"])
    return attack_on("", 0, 0, way)[1].trained(reply) if way else reply
