"""The death of a whole node of a Ray cluster: several raylets on this machine, one of which is killed in a round."""

import contextlib
import hashlib
import importlib.util
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from gluefl import GlueFL
from gluefl.clients.remote import cluster as ray_workers
from gluefl.errors import GlueFLError
from runs import options, small_run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
ROUNDS, KILLED_IN = 5, 3
PATIENCE_S = 30
STORE_BYTES = 80 * 2**20
# Ray's own settings notice a dead node after half a minute.
NOTICES_SOON = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 2}


@pytest.fixture(scope="module")
def nodes():
    """A head without cores, to which nodes with one core each can be added."""
    ray_workers.library()
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=head | {"_system_config": NOTICES_SOON})
    yield cluster
    cluster.shutdown()


@dataclass(frozen=True)
class Waits:
    """A hook that changes nothing; the first worker that calls it in a round writes down its node and waits."""

    server: int
    marker: Path

    def on_delta(self, delta, task):
        if os.getpid() != self.server and task.round == KILLED_IN:
            with contextlib.suppress(FileExistsError), open(self.marker, "x") as file:
                import ray

                file.write(ray.get_runtime_context().get_node_id())
                file.flush()
                time.sleep(PATIENCE_S)
        return delta

    def on_sum(self, total, uploads, round):
        return total


@contextlib.contextmanager
def killer(cluster, marker):
    """Kill the node whose number a worker writes down, all its processes at once."""

    def kill() -> None:
        ends = time.monotonic() + PATIENCE_S
        while not (marker.exists() and marker.read_text()) and time.monotonic() < ends:
            time.sleep(0.02)
        node = next(node for node in cluster.list_all_nodes() if node.node_id == marker.read_text())
        cluster.remove_node(node, allow_graceful=False)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def run(out, hook, **carried_out):
    parts = {"strategy": GlueFL(regenerate_every=3), "hooks": (hook,), "rounds": ROUNDS, "out": out}
    result = small_run(**parts, options=options(**carried_out))
    return result, hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def test_a_node_that_dies_in_a_round_does_not_change_the_model(nodes, tmp_path) -> None:
    added = [nodes.add_node(num_cpus=1, object_store_memory=STORE_BYTES) for _ in range(2)]
    hook = Waits(os.getpid(), tmp_path / "node")
    _, undisturbed = run(tmp_path / "here", hook)
    with killer(nodes, hook.marker):
        result, model = run(tmp_path / "there", hook, engine="ray", ray_address=nodes.address)
    assert model == undisturbed
    assert sum(node.any_processes_alive() for node in added) == 1
    notes = {line["round"]: line["notes"] for line in result.journal if line["notes"]}
    assert [*notes] == [KILLED_IN]
    assert "node" in notes[KILLED_IN][0] and "trained by another worker" in notes[KILLED_IN][0]
    assert len(notes[KILLED_IN]) == 1


def test_a_cluster_without_nodes_ends_the_run_with_a_message(nodes, tmp_path, monkeypatch) -> None:
    if not nodes.worker_nodes:
        nodes.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
    monkeypatch.setattr(ray_workers, "ROOM_S", 0.5)
    hook = Waits(os.getpid(), tmp_path / "node")
    _, undisturbed = run(tmp_path / "here", hook)
    out, began = tmp_path / "there", time.monotonic()
    message = r"all workers have ended, and no node of the Ray cluster has a CPU for another.*go on with --resume"
    with killer(nodes, hook.marker), pytest.raises(GlueFLError, match=message):
        run(out, hook, engine="ray", ray_address=nodes.address)
    assert time.monotonic() - began < PATIENCE_S
    assert not (out / "model.safetensors").exists()
    result = small_run(
        strategy=GlueFL(regenerate_every=3), hooks=(hook,), rounds=ROUNDS, out=out, resume=True, options=options()
    )
    assert hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest() == undisturbed
    assert result.journal[-1]["round"] == ROUNDS
