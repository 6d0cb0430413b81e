"""GlueFL on Flower's own simulation engine: no replica is kept per node, and the engine sees the true bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

from flower_nodes import Grid, Node, initial_arrays
from gluefl import GlueFL
from gluefl.flower import GlueFLStrategy, Sticky
from stubs import ROOT

NODES, ROUNDS = 12, 3

CODE = """
import sys
sys.path.insert(0, {tests!r})
from flower_nodes import app, initial_arrays
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
from gluefl import GlueFL
from gluefl.flower import GlueFLStrategy, Sticky, gluefl_mod

server = ServerApp()

@server.main()
def main(grid, context):
    GlueFLStrategy(Sticky(4, 6, 3), GlueFL(), out={out!r}, seed=5).start(grid, initial_arrays(), num_rounds={rounds})

run_simulation(server, app([gluefl_mod]), {nodes}, backend_config={{"client_resources": {{"num_cpus": 1}}}})
"""


class InMemoryGrid(Grid):
    """By this name of Flower's grid the strategy recognises a simulation."""


def on_disks_of_their_own(tmp_path: Path) -> list[str]:
    """The versions of a federation whose nodes each keep a replica."""
    nodes = [Node(place, tmp_path / str(place)) for place in range(NODES)]
    server = GlueFLStrategy(Sticky(4, 6, 3), GlueFL(), seed=5)
    server.start(Grid(nodes), initial_arrays(), num_rounds=ROUNDS)
    return [line["hash"] for line in server.session.journal.lines]


def test_nodes_of_a_simulation_share_the_newest_version(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))  # as inside its actors
    nodes = [Node(place, tmp_path / "unused") for place in range(NODES)]
    server = GlueFLStrategy(Sticky(4, 6, 3), GlueFL(), out=tmp_path / "run", seed=5)
    server.start(InMemoryGrid(nodes), initial_arrays(), num_rounds=ROUNDS)
    lines = server.session.journal.lines
    assert [line["used"] for line in lines] == [4] * ROUNDS and not any(line["incidents"] for line in lines)
    kept = [path.name for path in (tmp_path / "run" / "simulation").rglob("*.safetensors")]
    assert kept.count("replica.safetensors") == 1 and kept.count("pending.safetensors") >= 4
    assert not (tmp_path / "unused").exists()
    assert [line["hash"] for line in lines] == on_disks_of_their_own(tmp_path)


@pytest.mark.slow
def test_a_simulation_keeps_versions_only(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    code = CODE.format(tests=str(ROOT / "tests"), out=str(tmp_path / "run"), rounds=ROUNDS, nodes=NODES)
    offline = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "FLWR_HOME": str(tmp_path / "flwr"),
        "HOME": str(tmp_path / "home"),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src")]),
    }
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **offline}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    assert [line["used"] for line in lines] == [4] * ROUNDS
    assert not any(line["incidents"] for line in lines)
    kept = sorted(path.name for path in (tmp_path / "run" / "simulation").rglob("*.safetensors"))
    assert kept.count("replica.safetensors") == 1  # the server's; the nodes keep what they did not send
    assert not (tmp_path / "home" / ".gluefl").exists()

    # Client i is partition i: nodes with disks of their own, in the same places, come to the same versions.
    assert [line["hash"] for line in lines] == on_disks_of_their_own(tmp_path)
