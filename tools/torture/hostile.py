"""Hostile nodes and a hostile server, over a federation in this process: the tests of the guard, with other seeds.

`python tools/torture hostile [--count 60]`. Every federation has the next node hostile and another seed.
"""

import copy
import logging
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Message
from mutation import changed
from progress import Progress

import flower_nodes
import test_flower_hostile as nodes
from gluefl import Uniform
from gluefl.flower import exchange, messages
from gluefl.flower import nodes as waiting

REFUSALS = ("WireError", "GlueFLError", "Damaged", "UsageError", "ParameterError")
ROUNDS = 4


def model_of(result: Any) -> torch.Tensor:
    """All arrays of a result as one vector."""
    return torch.cat([array.reshape(-1).double() for array in result.arrays.to_torch_state_dict().values()])


def hostile_nodes(seed: int, ways: list[tuple[str, str]], counts: Counter[str], said: Progress) -> list[str]:
    """One node attacks in every way; what the tests check holds, whichever node and seed it is."""
    honest_run, nodes.HOSTILE, wrong = nodes.run, seed % 5, []

    def seeded(*arguments: Any, **parts: Any) -> Any:
        return honest_run(*arguments, **{"seed": seed, **parts})

    nodes.run = seeded
    try:
        with tempfile.TemporaryDirectory() as folder:
            alone = {
                name: model_of(seeded(Path(folder) / name, name, nodes.Fails())[2])
                for name in sorted({name for name, _ in ways})
            }
            for number, (name, way) in enumerate(ways):
                nodes.BY_TRAINING["replayed"] = nodes.Replays()
                try:
                    nodes.test_a_hostile_reply_is_refused_and_named_and_the_model_is_that_of_the_others(
                        Path(folder) / str(number), alone, name, way
                    )
                except Exception as error:
                    wrong.append(f"node {nodes.HOSTILE}, seed {seed}, {name}, {way}: {error!r:.300}")
                counts["hostile nodes: federations"] += 1
                said.at(counts["hostile nodes: federations"])
                counts["hostile nodes: replies refused"] += len(nodes.ATTACKED)
    finally:
        nodes.run = honest_run
    return wrong


class HostileServer(flower_nodes.Grid):
    """Before a node gets its task it gets mutants of it."""

    def __init__(self, grid_nodes: list[Any], rng: random.Random, mutants: int) -> None:
        super().__init__(grid_nodes)
        self.rng, self.mutants, self.answers = rng, mutants, Counter[str]()

    def push_messages(self, tasks: Any) -> list[str]:
        """Deliver mutants of every task, then the task."""
        tasks = list(tasks)
        for task in tasks:
            task.metadata.__dict__["_message_id"] = "mutant"
            if messages.is_ours(task):
                node = self.nodes[task.metadata.dst_node_id - self.first_id]
                for _ in range(self.mutants):
                    self.answers[self.answer(node, mutated(task, self.rng))] += 1
        return super().push_messages(tasks)

    def answer(self, node: Any, task: Message) -> str:
        """What a node makes of a mutant: refused with a message, asked for a model, used, or something else."""
        reply = node.handle(task)
        if reply.has_error():
            reason = reply.error.reason
            if reason == "KeyError: 'arrays'":  # of the app: the server says under which name it gets the model
                return "that the app refused"
            return "refused" if reason.startswith(REFUSALS) else f"wrong: {reason[:300]}"
        said = messages.read_said(reply.content) if messages.is_ours(reply) else None
        return "asked for a model" if said is not None and said.needs_model else "used"


def mutated(task: Message, rng: random.Random) -> Message:
    """A copy of a task in which package, header or text is changed."""
    task = copy.deepcopy(task)
    ours, where = task.content.config_records[messages.OURS], rng.randrange(4)
    if where == 0:
        ours["header"] = changed(bytes(ours["header"]), [], rng)
    elif where == 1:
        text = changed(str(ours["task"]).encode(), [], rng)
        ours["task"] = text.decode("utf-8", "replace")
    else:
        data = changed(messages.read_array(task.content, messages.PACKAGE, None), [], rng)
        arrays = dict(task.content.array_records[messages.BODY].items())
        task.content[messages.BODY] = ArrayRecord({**arrays, messages.PACKAGE: messages.to_array(data)})
    return task


def hostile_server(seed: int, name: str, mutants: int, counts: Counter[str]) -> list[str]:
    """A federation whose nodes get mutants of every task before it; their replicas and the model stay right."""

    def federation(folder: Path, mutants: int) -> tuple[Any, Any, Any, HostileServer]:
        grid_nodes = [
            flower_nodes.Node(place, folder / f"device-{place}", ours={"initial": flower_nodes.initial_arrays})
            for place in range(5)
        ]
        grid = HostileServer(grid_nodes, random.Random(seed), mutants)  # noqa: S311 - mutations
        server = flower_nodes.GlueFLStrategy(Uniform(4), nodes.STRATEGIES[name], seed=seed, out=None)
        result = server.start(grid, flower_nodes.initial_arrays(), num_rounds=ROUNDS, timeout=5.0)
        return server, grid_nodes, result, grid

    with tempfile.TemporaryDirectory() as folder:
        server, grid_nodes, result, grid = federation(Path(folder) / "hostile", mutants)
        whole = federation(Path(folder) / "honest", 0)[2]
        wrong = [answer for answer in grid.answers if answer.startswith("wrong")]
        flower_nodes.check_replicas(server, grid_nodes)
        if not torch.equal(model_of(result), model_of(whole)) and not grid.answers["used"]:
            wrong.append(f"{name}, seed {seed}: the model is another one")
    counts.update({f"hostile server: tasks {answer}": count for answer, count in grid.answers.items()})
    counts["hostile server: federations"] += 1
    return wrong


def run(federations: int, seed: int) -> dict[str, Any]:
    """Federations with hostile nodes, and as many with a hostile server."""
    exchange.POLL_S = waiting.POLL_S = 0.0
    logging.getLogger("flwr").setLevel(logging.ERROR)
    rng, counts, wrong = random.Random(seed), Counter[str](), list[str]()  # noqa: S311 - ways
    ways, number = list[tuple[str, str]](), 0
    said = Progress("hostile", federations + max(1, federations // 4))
    while number < federations:
        ways = rng.sample(nodes.CASES, min(len(nodes.CASES), federations - number))
        wrong += hostile_nodes(seed + number, ways, counts, said)
        number += len(ways)
    names, servers = sorted(nodes.STRATEGIES), max(1, federations // 4)
    for number in range(servers):
        wrong += hostile_server(seed + number, names[number % len(names)], 10, counts)
        said.at(federations + number + 1)
    return {**{name: count for name, count in counts.items() if "wrong" not in name}, "wrong": wrong}
