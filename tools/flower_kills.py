"""Kill parts of a loopback federation and see whether it goes on: `python tools/flower_kills.py [--rounds 20]`.

SuperLink and five SuperNodes with TLS and keys run the quickstart. A node is killed (-9) in the middle of a round and
comes back with its disk; another comes back without; then SuperLink and ServerApp are killed and the run is taken up.
At the end every node's replica must be the server's model of the version it says, bit for bit.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from gluefl import wire
from gluefl.flower.run_folder import Saved
from gluefl.storage.journal import Journal
from gluefl.storage.names import JOURNAL

ROOT = Path(__file__).parents[1]
APP = ROOT / "examples" / "flower-quickstart"


class Loopback:
    """A federation on this machine, each part a process group that can be killed on its own."""

    def __init__(self, work: Path, nodes: int, app: Path = APP) -> None:
        self.work, self.nodes, self.parts = work, nodes, dict[str, subprocess.Popen[bytes]]()
        python = str(Path(sys.executable).parent)
        self.environment = {
            **os.environ,
            "NODES": str(nodes),
            "PORT": str(free_ports(nodes + 1)),
            "WORK": str(work),
            "APP": str(app),
            "PATH": f"{python}{os.pathsep}{os.environ['PATH']}",
        }
        self.call("keys")

    def call(self, *arguments: str) -> str:
        """Run a command of federation.sh to its end."""
        done = subprocess.run(
            [str(APP / "federation.sh"), *arguments], env=self.environment, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"federation.sh {arguments}: {done.stdout}{done.stderr}")
        return done.stdout

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a command of federation.sh in a process group of its own."""
        with open(self.work / f"{name}.log", "ab") as log:
            self.parts[name] = subprocess.Popen(
                [str(APP / "federation.sh"), *arguments],
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.parts[name]

    def start_superlink(self) -> None:
        """Start the SuperLink and wait until it answers."""
        self.start("superlink", "superlink")
        self.wait("the SuperLink", lambda: self.answers(), 60)

    def start_all(self) -> None:
        """SuperLink, keys and nodes."""
        self.start_superlink()
        self.start_nodes()

    def start_nodes(self) -> None:
        """Keys and nodes."""
        self.call("register")
        for node in range(self.nodes):
            self.start(f"node-{node}", "node", str(node))

    def answers(self) -> bool:
        """Whether the SuperLink does. A command takes seconds, so it is asked only when the port is open."""
        try:
            socket.create_connection(("127.0.0.1", int(self.environment["PORT"])), timeout=5).close()
            self.counters()
        except (OSError, RuntimeError, ValueError, KeyError):
            return False
        return True

    def counters(self) -> list[dict[str, Any]]:
        """Flower's own account of the runs."""
        text = self.call("counters")
        return list(json.loads(text[text.index("{") :])["runs"])

    def run(self, **settings: Any) -> subprocess.Popen[bytes]:
        """Start a run, and stream its log."""
        pairs = [f"{name.replace('_', '-')}={json.dumps(value)}" for name, value in settings.items()]
        return self.start("run", "run", *pairs)

    def kill(self, name: str) -> None:
        """SIGKILL for a part and all of its children."""
        part = self.parts.pop(name)
        for pid in family(part.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        part.wait()

    def stop(self) -> None:
        """End everything."""
        for name in list(self.parts):
            self.kill(name)

    def wait(self, what: str, done: Callable[[], bool], timeout_s: float) -> float:
        """Seconds until something is true."""
        began = time.monotonic()
        while not done():
            if time.monotonic() - began > timeout_s:
                raise TimeoutError(f"{what}: not after {timeout_s} s. Logs are in {self.work}.")
            time.sleep(0.5)
        return time.monotonic() - began

    def journal(self) -> list[dict[str, Any]]:
        """The rounds that were written down."""
        path = self.work / "run" / "journal.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def rounds(self) -> int:
        """How many were written down."""
        return len(self.journal())

    def used_after(self, node: int, round: int) -> bool:
        """Whether a node was used in a round after this one."""
        return any(
            client == node and fate == "used"
            for line in self.journal()[round:]
            for client, fate in zip(line["clients"]["id"], line["clients"]["fate"])
        )

    def replica_times(self, node: int) -> dict[Path, float]:
        """When a node's replica was written."""
        return {path: path.stat().st_mtime for path in self.work.glob(f"device-{node}/*/*/replica.safetensors")}

    def replicas(self) -> dict[int, tuple[int, str]]:
        """Version and hash of every node's replica, as they lie on its disk."""
        replicas = {}
        for node in range(self.nodes):
            for path in self.work.glob(f"device-{node}/*/node-*/replica.safetensors"):
                with safe_open(path, framework="pt") as file:
                    version = int(file.metadata()["version"])
                    hash_ = wire.replica_hash(file.get_tensor("weights"), file.get_tensor("statistics"))
                replicas[node] = version, hash_.hex()
        return replicas

    def wrong_replicas(self) -> list[int]:
        """Nodes that do not hold the server's model of the version they say."""
        hashes = hashes_of(self.work / "run")
        return [node for node, (version, hash_) in self.replicas().items() if hashes[version] != hash_]


def hashes_of(run: Path) -> dict[int, str]:
    """The hash of every version that a server published."""
    saved = Saved.read(run)
    if saved is None:
        raise SystemExit(f"{run} holds no run")
    return {0: saved.version_0.hex()} | {line["round"]: line["hash"] for line in Journal(run / JOURNAL).stored()}


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    processes = [pid]
    for process in processes:
        processes += children.get(process, [])
    return processes


def free_ports(count: int) -> int:
    """The first of some consecutive free ports."""
    for first in range(21000 + os.getpid() % 3000, 60000, count + 1):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for offset, one in enumerate(sockets):
                one.bind(("127.0.0.1", first + offset))
            return first
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
    raise RuntimeError("no free ports")


def bring_back(federation: Loopback, node: int) -> float:
    """Restart a node; the SuperLink refuses it until its heartbeat has run out. Seconds until it stays."""
    began = time.monotonic()
    while time.monotonic() - began < 300:
        log = federation.work / f"node-{node}.log"
        before = log.stat().st_size
        part = federation.start(f"node-{node}", "node", str(node))
        while part.poll() is None and time.monotonic() - began < 300:
            if b"SuperNode ID" in log.read_bytes()[before:]:
                return time.monotonic() - began
            time.sleep(0.5)
        time.sleep(3)
    raise TimeoutError(f"node {node} did not come back")


def kill_node_in_a_round(federation: Loopback, node: int, lose_disk: bool) -> dict[str, Any]:
    """In the middle of a round: the node has just got its package and is about to train. How long everything took."""
    at, seen = federation.rounds(), federation.replica_times(node)
    federation.wait(f"node {node} to be invited", lambda: federation.replica_times(node) != seen, 600)
    began, killed_at = time.monotonic(), federation.rounds() + 1
    federation.kill(f"node-{node}")
    if lose_disk:
        shutil.rmtree(federation.work / f"device-{node}")
    federation.wait("the round to go on", lambda: federation.rounds() >= killed_at, 300)
    went_on = time.monotonic() - began
    bring_back(federation, node)
    back = time.monotonic() - began
    used = federation.wait(f"node {node} to be used again", lambda: federation.used_after(node, killed_at), 900)
    return {
        "killed_in_round": killed_at,
        "round_ended_after_s": round(went_on, 1),
        "node_back_after_s": round(back, 1),
        "used_again_after_s": round(back + used, 1),
        "rounds_before": at,
        "incidents": [i for line in federation.journal()[killed_at - 1 :] for i in line["incidents"]],
    }


def kill_server(federation: Loopback, settings: Mapping[str, Any]) -> dict[str, Any]:
    """SuperLink and ServerApp, after which the run is taken up."""
    before, began = federation.rounds(), time.monotonic()
    federation.kill("superlink")
    federation.kill("run")
    federation.start_superlink()
    federation.run(**settings)
    federation.wait("the next round", lambda: federation.rounds() > before, 300)
    return {"killed_after_round": before, "next_round_after_s": round(time.monotonic() - began, 1)}


def outcome(federation: Loopback, rounds: int) -> dict[str, Any]:
    """Whether every round was written once, and who holds what."""
    lines = federation.journal()
    return {
        "rounds_written": [line["round"] for line in lines] == list(range(1, rounds + 1)),
        "used_per_round": [line["used"] for line in lines],
        "replicas": {node: version for node, (version, _) in sorted(federation.replicas().items())},
        "wrong_replicas": federation.wrong_replicas(),
        "refused": [i for line in lines for i in line["incidents"] if i["what"] == "refused"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--work", type=Path, default=None, help="keep keys, logs and journals here")
    options = parser.parse_args()
    work = (options.work or Path(tempfile.mkdtemp(prefix="gluefl-kills-"))).absolute()
    work.mkdir(parents=True, exist_ok=True)
    federation = Loopback(work, nodes=5)
    settings = {
        "num_server_rounds": options.rounds,
        "cohort": 3,
        "sticky_size": 3,
        "sticky_cohort": 2,
        "out": str(work / "run"),
    }
    report: dict[str, Any] = {"rounds": options.rounds}
    try:
        federation.start_all()
        federation.run(**settings)
        federation.wait("three rounds", lambda: federation.rounds() >= 3, 300)
        report["node, with its disk"] = kill_node_in_a_round(federation, 0, lose_disk=False)
        report["node, without its disk"] = kill_node_in_a_round(federation, 1, lose_disk=True)
        report["SuperLink and ServerApp"] = kill_server(federation, settings)
        federation.wait("the last round", lambda: federation.rounds() >= options.rounds, 3600)
        report |= outcome(federation, options.rounds)
    finally:
        federation.stop()
    print(json.dumps(report, indent=2))
    sys.exit(bool(report["wrong_replicas"] or not report["rounds_written"]))


if __name__ == "__main__":
    main()
