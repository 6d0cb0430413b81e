"""Lean against Flower's own FedAvg on a loopback federation: `python tools/flower_traffic.py [--rounds 20]`.

A SuperLink and five SuperNodes with TLS and keys run `examples/flower-lean` (five million weights, real training, no
federated evaluation) three times: with Flower's FedAvg, with lean whose nodes know version 0, and with lean whose nodes
download the model as cells. Bytes are those of Flower's own counters (`flwr list`). At the end every node's replica
must be the server's model of the version it says, bit for bit.
"""

import argparse
import importlib
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from flower_kills import ROOT, Loopback, hashes_of

from gluefl import Lean
from gluefl.flower.node_store import NodeStore
from gluefl.flower.run_folder import Saved
from gluefl.flower.synchronise import Receiver

APP = ROOT / "examples" / "flower-lean"
RUNS = {
    "FedAvg of Flower": {"strategy": "fedavg"},
    "lean, version 0 known": {"strategy": "lean", "initial": "known"},
    "lean, model downloaded": {"strategy": "lean", "initial": "download"},
}
LEAST = {"down": 25.0, "up": 20.0}  # times fewer bytes than FedAvg, with version 0 known


def origin_of(folder: Path) -> torch.Tensor:
    """Version 0 as the nodes compute it."""
    sys.path.insert(0, str(APP))
    initial_model = importlib.import_module("large.task").initial_model
    replica, _ = Receiver(NodeStore(folder), Lean(), initial_model).built()
    return torch.cat([replica.weights, replica.statistics])


def replicas(federation: Loopback, out: Path, initial: str) -> dict[str, Any]:
    """The versions that the nodes hold, whether they are the server's, and their bytes on the disk."""
    saved, hashes = Saved.read(out), hashes_of(out)
    run = saved.run.hex() if saved is not None else ""
    versions, wrong, disk_bytes = {}, [], []
    for node in range(federation.nodes):
        (folder,) = federation.work.glob(f"device-{node}/{run}/node-*")
        origin = origin_of(folder) if initial == "known" else None
        stored = NodeStore(folder).replica(Lean(), origin)
        versions[node] = None if stored is None else stored[0].version
        if stored is None or stored[0].hash.hex() != hashes[stored[0].version]:
            wrong.append(node)
        disk_bytes.append(sum(path.stat().st_size for path in folder.iterdir()))
    return {"versions": versions, "wrong_replicas": wrong, "disk_mb": max(disk_bytes) / 1e6}


def play(federation: Loopback, name: str, rounds: int) -> dict[str, Any]:
    """One run, and what Flower counted of it."""
    out, log = federation.work / name.replace(" ", "-").replace(",", ""), federation.work / "run.log"
    before = {run["run-id"] for run in federation.counters()}
    began, written = time.monotonic(), log.stat().st_size if log.exists() else 0
    settings = RUNS[name] | {"cohort": federation.nodes, "num_server_rounds": rounds}
    run = federation.run(**settings, out="" if name.startswith("FedAvg") else str(out))
    federation.wait(name, lambda: run.poll() is not None, 3600)
    seconds, text = time.monotonic() - began, log.read_bytes()[written:].decode(errors="replace")
    (counted,) = [run for run in federation.counters() if run["run-id"] not in before]
    accuracies = re.findall(r"accuracies: (\{.*\})", text)
    if not accuracies:
        raise RuntimeError(f"{name} did not end well:\n{text[-3000:]}")
    traffic = counted["network-traffic"]
    row: dict[str, Any] = {
        "down_mb": traffic["outbound-bytes"] / 1e6,
        "up_mb": traffic["inbound-bytes"] / 1e6,
        "accuracy": json.loads(accuracies[-1])[str(rounds)],
        "seconds": round(seconds),
    }
    if out.exists():
        lines = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]
        row["journal_down_mb"] = sum(line["down_bytes"] for line in lines) / 1e6
        row["journal_up_mb"] = sum(line["up_bytes"] for line in lines) / 1e6
        row["used"] = [line["used"] for line in lines]
        row["incidents"] = [incident for line in lines for incident in line["incidents"]]
        row |= replicas(federation, out, str(RUNS[name]["initial"]))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--work", type=Path, default=None, help="keep keys, logs and journals here")
    options = parser.parse_args()
    work = (options.work or Path(tempfile.mkdtemp(prefix="gluefl-traffic-"))).absolute()
    work.mkdir(parents=True, exist_ok=True)
    federation = Loopback(work, options.nodes, APP)
    try:
        federation.start_all()
        rows = {name: play(federation, name, options.rounds) for name in options.runs}
    finally:
        federation.stop()
    first = rows[options.runs[0]]
    print(f"{'':24} {'MB down':>9} {'less':>7} {'MB up':>9} {'less':>7} {'accuracy':>9} {'disk MB':>8} {'s':>6}")
    for name, row in rows.items():
        ratios = {key: first[f"{key}_mb"] / row[f"{key}_mb"] for key in ("down", "up")}
        row["times_less"] = ratios
        print(
            f"{name:24} {row['down_mb']:9.2f} {ratios['down']:6.1f}x {row['up_mb']:9.2f} {ratios['up']:6.1f}x "
            f"{row['accuracy']:9.3f} {row.get('disk_mb', 0.0):8.2f} {row['seconds']:6}"
        )
    print(json.dumps({"rounds": options.rounds, "rows": rows}))
    is_whole = set(options.runs) == set(RUNS)
    lean = rows.get("lean, version 0 known", {})
    enough = not is_whole or all(lean["times_less"][key] >= least for key, least in LEAST.items())
    wrong = any(row.get("wrong_replicas") for row in rows.values())
    sys.exit(wrong or not enough)


if __name__ == "__main__":
    main()
