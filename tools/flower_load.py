"""How many nodes one ServerApp serves a second, and where its time goes: `python tools/flower_load.py [--superlink]`.

Nodes do not train. The real strategy and the real client mod exchange real Flower messages: over a grid in this
process, which has no network, or with `--superlink` over a SuperLink on loopback (`superlink_load.py`). Without a
network the seconds of the nodes are subtracted; the rest is the work of the ServerApp on one core, and every message is
also serialised as Flower does for the network.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1", OMP_NUM_THREADS="1")
sys.path.insert(0, str(Path(__file__).parent / "load_app"))

import superlink_load
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.supercore.task_identity import TaskIdentity
from load.client_app import app_of
from load.parts import Clock, watched
from load.task import PARAMETERS, STRATEGIES, initial_model

from gluefl.flower import GlueFLStrategy, Uniform

# Flower's processes set this when they start; without it no message can be made.
TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
FIRST_ID = 100


@dataclass
class Info:
    node_id: int
    registered_at: str
    public_key: bytes


class Grid:
    """What the strategy uses of Flower's grid; nodes answer at once."""

    def __init__(self, nodes: int, folder: Path, clock: Clock, parameters: int) -> None:
        self.nodes, self.folder, self.app, self.replies = nodes, folder, app_of(parameters), list[Message]()
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
        settings = {"partition-id": place, "gluefl-dir": str(self.folder / f"device-{place}")}
        return self.app(message, Context(1, message.metadata.dst_node_id, settings, RecordDict(), {}))

    def pull_messages(self, ids: Any) -> list[Message]:
        replies, self.replies = self.replies, []
        return replies


def measure(name: str, cohort: int, nodes: int, parameters: int, rounds: int) -> dict[str, Any]:
    """CPU seconds of the server by part, for one strategy and cohort, without a network."""
    clock = Clock()
    with tempfile.TemporaryDirectory(prefix="gluefl-load-") as work, watched(clock):
        grid = Grid(nodes, Path(work), clock, parameters)
        server = GlueFLStrategy(Uniform(cohort=cohort), STRATEGIES[name], seed=1, out=f"{work}/server")
        arrays = ArrayRecord(initial_model(parameters).state_dict())
        began = time.process_time()
        server.start(grid, arrays, num_rounds=rounds, timeout=60.0)
        total = time.process_time() - began
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
    parser.add_argument("--superlink", action="store_true", help="over a SuperLink on loopback")
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--cohorts", default="10,100")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--parameters", type=int, default=PARAMETERS)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    cohorts, rest = [int(cohort) for cohort in options.cohorts.split(",")], (options.parameters, options.rounds)
    if options.superlink:
        with tempfile.TemporaryDirectory(prefix="gluefl-load-") as work:
            report = superlink_load.measure(Path(work), options.strategies, cohorts, options.nodes, *rest)
    else:
        pairs = [(name, cohort) for name in options.strategies for cohort in cohorts]
        report = {"rows": [measure(name, cohort, options.nodes, *rest) for name, cohort in pairs]}
    print(json.dumps(report, indent=1))
    if "unfinished" in report:
        raise SystemExit(report["unfinished"])


if __name__ == "__main__":
    main()
