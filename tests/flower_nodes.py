"""A federation without a network: a grid that runs the nodes' apps at once, and lets tests meddle with messages."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from gluefl import GlueFL, Uniform
from gluefl.flower import GlueFLMod, GlueFLStrategy
from gluefl.flower.node_store import NodeStore
from stubs import dyadic, mlp

if TaskIdentity._run_id is None:
    # Flower's own processes set this before they import an app; without it no message can be made.
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
SAMPLER = Uniform(cohort=4)
NORM = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


@dataclass
class Info:
    node_id: int
    registered_at: str
    public_key: bytes


def train(message: Message, context: Context) -> Message:
    """The app of a test: moves every array by numbers that depend on the round and the node alone."""
    round, place = message.content["config"]["server-round"], context.node_config["partition-id"]
    moved = {}
    for number, (name, array) in enumerate(message.content["arrays"].to_torch_state_dict().items()):
        step = dyadic(array.numel(), round, place, number).reshape(array.shape)
        step = step.abs() if name.endswith("running_var") else step
        moved[name] = (array + step.to(array.dtype)) if array.is_floating_point() else array + 1
    metrics = MetricRecord({"train_loss": 0.5, "num-examples": 10})
    return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message)


def evaluate(message: Message, context: Context) -> Message:
    total = float(sum(t.double().sum() for t in message.content["arrays"].to_torch_state_dict().values()))
    metrics = MetricRecord({"total": total, "num-examples": 10})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def app(mods: list[Any], trains: Callable[[Message, Context], Message] = train) -> ClientApp:
    client = ClientApp(mods=mods)
    client.train()(trains)
    client.evaluate()(evaluate)
    return client


@dataclass
class Node:
    """A node with a disk of its own. `meddle` changes its replies, `silent` rounds are never answered."""

    place: int
    folder: Path
    mods: list[Any] = field(default_factory=list)  # after ours
    ours: dict[str, Any] = field(default_factory=dict)  # arguments of our mod
    trains: Callable[[Message, Context], Message] = train
    meddle: Callable[[int, Message], Message | list[Message] | None] = lambda round, reply: reply
    delay: Callable[[int], int] = lambda round: 0  # polls before an answer is there
    inbox: list[RecordDict] = field(default_factory=list)  # what it was sent; the mod replaces it in the message
    online: bool = True

    def handle(self, message: Message) -> Message:
        context = Context(1, 100 + self.place, {"partition-id": self.place}, RecordDict(), {})
        client = app([GlueFLMod(folder=self.folder, **self.ours), *self.mods], self.trains)
        try:
            return client(message, context)
        except Exception as error:  # Flower's SuperNode does the same
            return Message(Error(code=2, reason=f"{type(error).__name__}: {error}"), reply_to=message)

    def store(self, run: bytes | None = None) -> NodeStore:
        """What it holds of a run; without one, of the only one."""
        (folder,) = (path for path in self.folder.iterdir() if path.is_dir() and (not run or path.name == run.hex()))
        return NodeStore(folder / f"node-{self.place}")


class Grid:
    """What `GlueFLStrategy` uses of Flower's grid."""

    def __init__(self, nodes: list[Node], first_id: int = 100) -> None:
        self.nodes, self.replies, self.polls = nodes, [], 0  # replies: (ready at poll, message)
        self.first_id = first_id
        self.pushed: list[Message] = []

    def get_nodes(self) -> list[Info]:
        first = self.first_id
        return [Info(first + n.place, f"{n.place:04d}", bytes([n.place + 1]) * 32) for n in self.nodes if n.online]

    def push_messages(self, messages: Any) -> list[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid.uuid4())
            ids.append(message.metadata.message_id)
            self.pushed.append(message)
            node = self.nodes[message.metadata.dst_node_id - self.first_id]
            round = int(message.metadata.group_id)
            node.inbox.append(message.content)
            answer = node.meddle(round, node.handle(message))
            answers = answer if isinstance(answer, list) else [answer]
            self.replies += [(self.polls + 1 + node.delay(round), reply) for reply in answers if reply is not None]
        return ids

    def pull_messages(self, ids: Any) -> list[Message]:
        self.polls += 1
        wanted = set(ids)
        # A duplicate is returned even when it is no longer asked for: the server has to cope with it.
        ready = [(at, r) for at, r in self.replies if at <= self.polls]
        taken = [r for _, r in ready if r.metadata.reply_to_message_id in wanted or r.metadata.__dict__.get("_twice")]
        self.replies = [(at, r) for at, r in self.replies if all(r is not one for one in taken)]
        return taken


def initial_arrays() -> ArrayRecord:
    return ArrayRecord(mlp(norm=True).state_dict())


def weights_of(arrays: ArrayRecord) -> torch.Tensor:
    """The trainable part, in the order of the module."""
    return torch.cat([t.reshape(-1) for n, t in arrays.to_torch_state_dict().items() if n not in NORM])


def federation(tmp_path, count: int = 4, rounds: int = 3, sampler=SAMPLER, strategy=None, meddle=None, **parts):
    """Run some rounds; `meddle` is (place, round, reply) → reply. Returns strategy, nodes and result."""
    parts = {"timeout": 5.0, "seed": 5, "out": None, **parts}
    timeout, grid_nodes, first_id = parts.pop("timeout"), parts.pop("nodes", None), parts.pop("first_id", 100)
    grid_nodes = grid_nodes or [Node(place, tmp_path / f"device-{place}") for place in range(count)]
    if meddle is not None:
        for node in grid_nodes:
            node.meddle = lambda round, reply, place=node.place: meddle(place, round, reply)
    server = GlueFLStrategy(sampler, strategy or GlueFL(regenerate_every=4), **parts)
    result = server.start(Grid(grid_nodes, first_id), initial_arrays(), num_rounds=rounds, timeout=timeout)
    return server, grid_nodes, result


def check_replicas(server, grid_nodes) -> list[int]:
    """Every node's replica is the server's model of the version it says, bit for bit."""
    versions = []
    for node in grid_nodes:
        if node.folder.exists():
            replica, _ = node.store(server.session.core.run).replica(server.strategy, server.session.core.origin)
            assert replica.hash == server.session.hashes[replica.version]
            versions.append(replica.version)
    return versions


def fates(server, round: int) -> dict[int, str]:
    clients = server.session.journal.lines[round - 1]["clients"]
    return dict(zip(clients["id"], clients["fate"]))


def incidents(server, round: int) -> list[dict]:
    return server.session.journal.lines[round - 1]["incidents"]
