"""A real SuperLink on loopback, and many light nodes that one process connects to it over Flower's own connection.

A SuperNode and the process of its ClientApp take some 0.3 GB; a thousand of them do not fit on one machine. A node here
is what `flower-supernode` opens: a registered key, a connection of its own, a heartbeat, a request for messages every
three seconds. Threads of this process run the real mod for the nodes that are chosen.
"""

import contextlib
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flower_kills import family, free_ports
from flwr.app import Context, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects
from flwr.supernode.fleet_http_connection import http_request_response

APP = Path(__file__).parent / "load_app"
sys.path.insert(0, str(APP))

from load.client_app import app_of  # noqa: E402
from load.parts import cpu_s  # noqa: E402

POLL_S = 3.0  # between two requests of a SuperNode for messages
THREADS = 16
START_S = 60.0
RUN_S = 400.0
IDLE_S = 10.0  # for which the waiting nodes are watched


@dataclass
class Node:
    """One light node: its place, and the functions of its connection."""

    place: int
    folder: Path
    connection: tuple[Any, ...]

    def turn(self, app: Callable[[Message, Context], Message]) -> bool:
        """Ask for a message and answer it; returns whether there was one."""
        id_, receive, send, _, _, pull_object, push_object, confirm = self.connection
        received = receive()
        if received is None:
            return False
        head, tree = received
        run = head.metadata.run_id
        message = pull_and_inflate_object_from_tree(
            tree, lambda name: pull_object(run, name), lambda name: confirm(run, name), return_type=Message
        )
        message.metadata.__dict__["_message_id"] = tree.object_id
        settings = {"partition-id": self.place, "gluefl-dir": str(self.folder / f"device-{self.place}")}
        reply = app(message, Context(run, id_, settings, RecordDict(), {}))
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            objects = get_all_nested_objects(reply)
            wanted, session = send(reply, get_object_tree(reply), 0.0)
            push_objects(
                objects, lambda name, content: push_object(run, session, name, content), object_ids_to_push=wanted
            )
        return True


@dataclass
class Fleet:
    """Nodes that wait for messages, in threads of this process."""

    address: str
    folder: Path
    parameters: int
    nodes: list[Node] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    turns: list[bool] = field(default_factory=list)  # of all nodes: whether there was a message
    _due: "queue.PriorityQueue[tuple[float, int]]" = field(default_factory=queue.PriorityQueue)
    _ends: threading.Event = field(default_factory=threading.Event)

    def connect(self, count: int, connections: contextlib.ExitStack) -> None:
        """Register nodes at the SuperLink."""

        def connected(place: int) -> Node:
            connection = connections.enter_context(http_request_response(self.address, insecure=True))
            return Node(place, self.folder, connection)

        with ThreadPoolExecutor(THREADS) as pool:
            self.nodes = list(pool.map(connected, range(count)))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Let the nodes ask for messages, spread over the interval as those of a real fleet are."""
        began = time.monotonic()
        for node in self.nodes:
            self._due.put((began + POLL_S * node.place / len(self.nodes), node.place))
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ends.set()
            for thread in threads:
                thread.join(START_S)

    def _work(self) -> None:
        app = app_of(self.parameters)
        while not self._ends.is_set():
            try:
                due, place = self._due.get(timeout=0.1)
            except queue.Empty:
                continue
            self._ends.wait(max(0.0, due - time.monotonic()))
            try:
                self.turns.append(self.nodes[place].turn(app))
            except Exception as error:  # a node that fails must not end the others; the report counts it
                self.failures.append(f"node {place}: {type(error).__name__}: {error}")
            self._due.put((time.monotonic() + POLL_S, place))


@contextlib.contextmanager
def superlink(work: Path) -> Iterator[tuple[int, str, dict[str, str]]]:
    """A SuperLink without TLS on loopback: its process number, its address, the environment of Flower's commands."""
    address = f"127.0.0.1:{free_ports(1)}"
    home = work / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "loopback"\n\n[superlink.loopback]\naddress = "{address}"\ninsecure = true\n'
    )
    environment = {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    host, port = address.split(":")
    command = ["flower-superlink", "--insecure", "--host", host, "--port", port, "--database", "superlink.db"]
    with open(work / "superlink.log", "wb") as log:
        process = subprocess.Popen(
            command, cwd=work, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _until(lambda: _flwr(environment, "list", "loopback").returncode == 0, START_S, work / "superlink.log")
        yield process.pid, address, environment
    finally:
        for pid in family(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        process.wait()


def play(environment: dict[str, str], work: Path, **settings: Any) -> list[dict[str, Any]]:
    """One run of the app: what its rounds cost. Raises `Unfinished` with the last lines of its log."""
    out = work / f"{settings['strategy']}-{settings['cohort']}"
    config = " ".join(f"{name.replace('_', '-')}={json.dumps(value)}" for name, value in settings.items())
    log = work / f"{out.name}.log"
    command = ["run", str(APP), "loopback", "--stream", "--run-config", f'{config} out="{out}"']
    ended = "it ended without a result"
    try:
        with open(log, "wb") as stream:
            _flwr(environment, *command, stdout=stream, stderr=subprocess.STDOUT)
    except subprocess.TimeoutExpired:
        ended = f"it did not end within {RUN_S:.0f} s"
    if not (out / "load.json").exists():
        raise Unfinished(f"the run {out.name}: {ended}. {_last_lines(log)}\n{_last_lines(work / 'superlink.log')}")
    return list(json.loads((out / "load.json").read_text()))


class Unfinished(Exception):
    """A run that gave no measurement, and what its processes wrote last."""


def _last_lines(log: Path, count: int = 25) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join([f"The last lines of {log.name}:", *lines[-count:]])


def row(name: str, cohort: int, nodes: int, parameters: int, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the rounds but the first, in which connections are opened and nodes build version 0."""
    first, last = rounds[1], rounds[-1]
    count = last["round"] - first["round"]
    mean = {key: (last[key] - first[key]) / count for key in ("clock_s", "server_s", "superlink_s", "nodes_s")}
    parts = {part: (s - first["parts_s"].get(part, 0.0)) / count for part, s in last["parts_s"].items()}
    return {
        "strategy": name,
        "nodes": nodes,
        "cohort": cohort,
        "parameters": parameters,
        "round_s": mean["clock_s"],
        "replies_a_second": cohort / mean["clock_s"],
        "server_s_a_round": mean["server_s"],
        "replies_a_second_of_server_cpu": cohort / mean["server_s"],
        "superlink_s_a_round": mean["superlink_s"],
        "superlink_cores": mean["superlink_s"] / mean["clock_s"],
        "nodes_s_a_round": mean["nodes_s"],
        "parts_s": parts | {"other": mean["server_s"] - sum(parts.values())},
    }


def measure(
    work: Path, names: list[str], cohorts: list[int], nodes: int, parameters: int, rounds: int
) -> dict[str, Any]:
    """All strategies and cohorts over one SuperLink and one fleet; a run that fails ends them, and is reported."""
    report: dict[str, Any] = {"rows": []}
    # The SuperLink is ended first: connections to it then close without a farewell for every node.
    with contextlib.ExitStack() as connections, superlink(work) as (pid, address, environment):
        fleet, began = Fleet(address, work, parameters), (time.monotonic(), cpu_s(pid))
        fleet.connect(nodes, connections)
        report["registering"] = {"seconds": time.monotonic() - began[0], "superlink_s": cpu_s(pid) - began[1]}
        settings = {"num_nodes": nodes, "parameters": parameters, "num_server_rounds": rounds + 1}
        settings |= {"superlink_pid": pid, "fleet_pid": os.getpid()}
        with fleet.waiting():
            report["idle"] = _idle(fleet, pid)
            try:  # Flower's connections log an exception that passes through them, and hide it
                for name, cohort in itertools.product(names, cohorts):
                    played = play(environment, work, strategy=name, cohort=cohort, **settings)
                    report["rows"].append(row(name, cohort, nodes, parameters, played))
            except Unfinished as error:
                report["unfinished"] = str(error)
    return report | {"replies": sum(fleet.turns), "failures": fleet.failures}


def _idle(fleet: Fleet, pid: int) -> dict[str, float]:
    """What waiting nodes cost the SuperLink."""
    time.sleep(POLL_S)
    began, requests, cpu = time.monotonic(), len(fleet.turns), cpu_s(pid)
    time.sleep(IDLE_S)
    seconds, count = time.monotonic() - began, len(fleet.turns) - requests
    used = cpu_s(pid) - cpu
    return {
        "nodes": len(fleet.nodes),
        "requests_a_second": count / seconds,
        "superlink_cores": used / seconds,
        "superlink_s_a_request": used / max(1, count),
    }


def _flwr(environment: dict[str, str], *arguments: str, **streams: Any) -> "subprocess.CompletedProcess[bytes]":
    command = [str(Path(sys.executable).parent / "flwr"), *arguments]
    return subprocess.run(command, env=environment, timeout=RUN_S, **(streams or {"capture_output": True}))


def _until(done: Callable[[], bool], timeout_s: float, log: Path) -> None:
    ends = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > ends:
            raise SystemExit(f"the SuperLink does not answer:\n{log.read_text()[-3000:]}")
        time.sleep(0.5)
