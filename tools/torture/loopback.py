"""A real federation on loopback, with TLS and keys, in which one of five nodes after the other attacks.

Every attack must be refused and named in the journal, and every version must be, bit for bit, the one of a federation
in which the hostile node is lost instead. `python tools/torture loopback [--count ROUNDS]`
"""

import importlib.util
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from attacks import NODES, STRATEGIES, hostile_in, ways_of
from progress import Progress

import flower_nodes
import test_flower_hostile as tests
from gluefl import Uniform
from gluefl.flower import exchange
from gluefl.flower import nodes as waiting
from gluefl.storage.journal import Journal, Line

ROOT = Path(__file__).parents[2]
APP = Path(__file__).parent / "loopback_app"
LONGEST_S = 7200.0


def federation(work: Path) -> Any:
    """SuperLink and SuperNodes, whose apps find this folder and the tests."""
    spec = importlib.util.spec_from_file_location("flower_kills", ROOT / "tools" / "flower_kills.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    started = module.Loopback(work, nodes=NODES, app=APP)
    folders = [str(ROOT / "src"), str(ROOT / "tests"), str(Path(__file__).parent)]
    started.environment["PYTHONPATH"] = os.pathsep.join(folders)
    return started


def play(work: Path, rounds: int) -> dict[str, list[Line]]:
    """The journals of the attacked federations, by strategy."""
    parts = federation(work)
    total = sum(min(rounds, len(ways_of(name))) for name in STRATEGIES)
    said = Progress("loopback", total)

    def journals() -> dict[str, list[Line]]:
        return {name: Journal(work / "runs" / name / "journal.jsonl").lines for name in STRATEGIES}

    def is_over() -> bool:
        said.at(sum(map(len, journals().values())))
        return run.poll() is not None

    try:
        parts.start_all()
        logs = [work / f"node-{node}.log" for node in range(NODES)]
        parts.wait("the nodes", lambda: all(b"SuperNode ID" in log.read_bytes() for log in logs), 300)
        run = parts.run(out=str(work / "runs"), most_rounds=rounds)
        parts.wait("the run", is_over, LONGEST_S)
    finally:
        parts.stop()
    return journals()


def alone(folder: Path, name: str, rounds: int) -> list[Line]:
    """The journal of the same federation in this process, in which hostile nodes are lost instead."""
    grid_nodes = []
    for place in range(NODES):
        node = flower_nodes.Node(place, folder / f"device-{place}", ours={"initial": flower_nodes.initial_arrays})
        node.meddle = _lost(name, place)
        grid_nodes.append(node)
    polls = exchange.POLL_S, waiting.POLL_S
    exchange.POLL_S = waiting.POLL_S = 0.0
    try:
        server, _, _ = flower_nodes.federation(
            folder, nodes=grid_nodes, sampler=Uniform(NODES), strategy=STRATEGIES[name], rounds=rounds
        )
    finally:
        exchange.POLL_S, waiting.POLL_S = polls
    return list(server.session.journal.lines)


def _lost(name: str, place: int) -> Any:
    ways, lost = ways_of(name), tests.Fails()

    def meddle(round: int, reply: Any) -> Any:
        is_hostile = place == hostile_in(round) and ways[round - 1]
        return lost.lost(reply) if is_hostile else reply

    return meddle


def judge(name: str, lines: list[Line], reference: list[Line], counts: Counter[str]) -> list[str]:
    """What is wrong with the journal of an attacked federation."""
    wrong = []
    if len(lines) != len(reference):
        wrong.append(f"{name}: {len(lines)} rounds were written, {len(reference)} were to be")
    for line, other in zip(lines, reference):
        way, hostile = ways_of(name)[line["round"] - 1], hostile_in(line["round"])
        fates = dict(zip(line["clients"]["id"], line["clients"]["fate"]))
        named = [one["client"] for one in line["incidents"] if one["what"] in ("refused", "failed")]
        if way:
            counts["attacks"] += 1
            counts["refused and named"] += fates[hostile] in ("refused", "failed") and named == [hostile]
        expected = [] if not way else [hostile]
        if [client for client, fate in sorted(fates.items()) if fate != "used"] != expected or named != expected:
            wrong.append(f"{name}, round {line['round']}, {way or 'honest'}: {fates} {line['incidents']}")
        counts["rounds"] += 1
        counts["versions that are those of the honest nodes, bit for bit"] += line["hash"] == other["hash"]
        if line["hash"] != other["hash"]:
            wrong.append(f"{name}, round {line['round']}, {way or 'honest'}: another model")
    return wrong


def run(work: Path, rounds: int, seed: int) -> dict[str, Any]:
    """Every way of every strategy, or the first of them."""
    missing = [name for name in ("openssl", "ssh-keygen") if shutil.which(name) is None]
    if missing:
        return {"skipped": f"{', '.join(missing)} is not installed", "wrong": []}
    lines, counts, wrong = play(work.absolute(), rounds), Counter[str](), list[str]()
    for name in STRATEGIES:
        reference = alone(work / f"alone-{name}", name, min(rounds, len(ways_of(name))))
        wrong += judge(name, lines[name], reference, counts)
    return {"nodes": NODES, **counts, "wrong": wrong}
