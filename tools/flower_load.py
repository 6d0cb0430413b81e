"""How many nodes one ServerApp serves a second, and where its time goes: `python tools/flower_load.py`.

The real strategy and the real client mod exchange real Flower messages over a grid in this process, which has no
network. Nodes do not train. The seconds of the nodes are subtracted; the rest is the work of the ServerApp on one core,
and what remains of it beside the parts of the table. Every message is also serialised as Flower does for gRPC.
"""

import argparse
import json
import logging
import os
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1", OMP_NUM_THREADS="1")

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.supercore.task_identity import TaskIdentity

from gluefl import GlueFL, Lean
from gluefl.flower import GlueFLMod, GlueFLStrategy, Uniform, exchange, guarding, outbox, session
from gluefl.flower import nodes as nodes_of_a_run
from gluefl.storage import checkpoint

# Flower's processes set this when they start; without it no message can be made.
TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
FIRST_ID = 100


@dataclass
class Clock:
    """CPU seconds by part."""

    seconds: dict[str, float] = field(default_factory=dict)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its seconds added to a part."""

        def call(*arguments: Any, **named: Any) -> Any:
            began = time.process_time()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds[part] = self.seconds.get(part, 0.0) + time.process_time() - began

        return call


@dataclass
class Info:
    node_id: int
    registered_at: str
    public_key: bytes


def step(message: Message, context: Context) -> Message:
    """An app that does not train: it moves every weight by noise."""
    generator = torch.Generator().manual_seed(context.node_config["partition-id"])
    arrays = message.content["arrays"].to_torch_state_dict()
    moved = {name: array + 0.01 * torch.randn(array.shape, generator=generator) for name, array in arrays.items()}
    metrics = MetricRecord({"train_loss": 0.5, "num-examples": 10})
    return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message)


class Grid:
    """What the strategy uses of Flower's grid; nodes answer at once."""

    def __init__(self, nodes: int, folder: Path, clock: Clock, model: torch.nn.Module) -> None:
        self.nodes, self.folder, self.model, self.replies = nodes, folder, model, list[Message]()
        self.answer = clock.timed("nodes", self._answer)
        self.travel = clock.timed(
            "serialisation by Flower", lambda message: message_from_proto(message_to_proto(message))
        )

    def get_nodes(self) -> list[Info]:
        return [Info(FIRST_ID + n, f"{n:09d}", n.to_bytes(32, "big")) for n in range(self.nodes)]

    def push_messages(self, messages: Any) -> list[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid.uuid4())
            ids.append(message.metadata.message_id)
            self.replies.append(self.travel(self.answer(self.travel(message))))
        return ids

    def _answer(self, message: Message) -> Message:
        place = message.metadata.dst_node_id - FIRST_ID
        context = Context(1, message.metadata.dst_node_id, {"partition-id": place}, RecordDict(), {})
        client = ClientApp(mods=[GlueFLMod(self.folder / f"device-{place}", initial=lambda: self.model)])
        client.train()(step)
        return client(message, context)

    def pull_messages(self, ids: Any) -> list[Message]:
        replies, self.replies = self.replies, []
        return replies


def measure(name: str, cohort: int, nodes: int, parameters: int, rounds: int) -> dict[str, Any]:
    """CPU seconds of the server by part, for one strategy and cohort."""
    clock = Clock()
    model = torch.nn.Sequential(torch.nn.Linear(parameters // 100, 100, bias=False))
    watched = [
        (outbox.Outbox, "message", "packages"), (exchange, "read_reply", "reading replies"),
        (guarding.Protection, "refuse", "guard"), (session, "aggregate", "aggregation"),
        (checkpoint, "save", "checkpoint"), (nodes_of_a_run.Nodes, "refresh", "list of nodes"),
    ]  # fmt: skip
    before = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in watched]
    with tempfile.TemporaryDirectory(prefix="gluefl-load-") as work:
        grid = Grid(nodes, Path(work), clock, model)
        for owner, attribute, part in watched:
            setattr(owner, attribute, clock.timed(part, getattr(owner, attribute)))
        try:
            strategy = {"lean": Lean(), "gluefl": GlueFL()}[name]
            server = GlueFLStrategy(Uniform(cohort=cohort), strategy, seed=1, out=f"{work}/server")
            began = time.process_time()
            server.start(grid, ArrayRecord(model.state_dict()), num_rounds=rounds, timeout=60.0)
            total = time.process_time() - began
        finally:
            for owner, attribute, function in before:
                setattr(owner, attribute, function)
    parts = {part: seconds / rounds for part, seconds in clock.seconds.items() if part != "nodes"}
    server_s = (total - clock.seconds["nodes"]) / rounds
    parts["other"] = server_s - sum(parts.values())
    return {
        "strategy": name,
        "nodes": nodes,
        "cohort": cohort,
        "parameters": parameters,
        "server_s_a_round": server_s,
        "replies_a_second": cohort / server_s,
        "parts_s": parts,
        "node_s": clock.seconds["nodes"] / rounds / cohort,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cohorts", default="10,100")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--parameters", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    rows = [
        measure(name, int(cohort), options.nodes, options.parameters, options.rounds)
        for name in ("lean", "gluefl")
        for cohort in options.cohorts.split(",")
    ]
    print(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
