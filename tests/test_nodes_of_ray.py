"""The death of a whole node of a Ray cluster: several raylets on this machine, one of which is killed in a round."""

import contextlib
import hashlib
import importlib.util
import os
import signal
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from gluefl import GlueFL, files
from gluefl.clients.remote import cluster as ray_workers
from gluefl.config import to_toml, variants
from gluefl.errors import GlueFLError
from gluefl.experiments import cluster as ray_runs
from gluefl.experiments.cluster import ClusterRuns
from gluefl.experiments.grid import expand
from gluefl.experiments.runner import ThisProcess, execute
from runs import options, small_run

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
pytestmark = [needs_ray, pytest.mark.slow]
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


def only(cluster, count):
    """Nodes with a core, and no others."""
    for node in list(cluster.worker_nodes):
        cluster.remove_node(node, allow_graceful=False)
    return [cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES) for _ in range(count)]


@dataclass(frozen=True)
class Waits:
    """A hook that changes nothing; the first worker that calls it in a round writes down its node and waits."""

    server: int
    marker: Path

    def on_delta(self, delta, task):
        if os.getpid() != self.server and task.round == KILLED_IN:
            with contextlib.suppress(FileExistsError), open(self.marker, "x") as file:
                import ray

                file.write(f"{ray.get_runtime_context().get_node_id()} {os.getpid()}")
                file.flush()
                time.sleep(PATIENCE_S)
        return delta

    def on_sum(self, total, uploads, round):
        return total


@contextlib.contextmanager
def killer(cluster, chosen):
    """Kill a node and a worker on it as soon as they are chosen."""

    def kill() -> None:
        ends, found = time.monotonic() + PATIENCE_S, None
        while found is None and time.monotonic() < ends:
            time.sleep(0.02)
            found = chosen()
        node, worker = found
        os.kill(worker, signal.SIGSTOP)  # a worker may live on for seconds without its node
        cluster.remove_node(node, allow_graceful=False)
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def written_down(cluster, marker):
    """The node and the process number that a worker has written down."""
    name, _, worker = (marker.read_text() if marker.exists() else "").partition(" ")
    return next(((node, int(worker)) for node in cluster.list_all_nodes() if node.node_id == name), None)


def run(out, hook, **carried_out):
    parts = {"strategy": GlueFL(regenerate_every=3), "hooks": (hook,), "rounds": ROUNDS, "out": out}
    result = small_run(**parts, options=options(**carried_out))
    return result, hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def test_a_node_that_dies_in_a_round_does_not_change_the_model(nodes, tmp_path) -> None:
    both = only(nodes, 2)
    hook = Waits(os.getpid(), tmp_path / "node")
    _, undisturbed = run(tmp_path / "here", hook)
    with killer(nodes, partial(written_down, nodes, hook.marker)):
        result, model = run(tmp_path / "there", hook, engine="ray", ray_address=nodes.address)
    assert model == undisturbed
    assert sum(node.any_processes_alive() for node in both) == 1
    notes = {line["round"]: line["notes"] for line in result.journal if line["notes"]}
    assert [*notes] == [KILLED_IN]
    assert "node" in notes[KILLED_IN][0] and "trained by another worker" in notes[KILLED_IN][0]
    assert len(notes[KILLED_IN]) == 1


def test_a_cluster_without_nodes_ends_the_run_with_a_message(nodes, tmp_path, monkeypatch) -> None:
    only(nodes, 1)
    monkeypatch.setattr(ray_workers, "ROOM_S", 0.5)
    hook = Waits(os.getpid(), tmp_path / "node")
    _, undisturbed = run(tmp_path / "here", hook)
    out, began = tmp_path / "there", time.monotonic()
    message = r"all workers have ended, and no node of the Ray cluster has a CPU for another.*go on with --resume"
    with killer(nodes, partial(written_down, nodes, hook.marker)), pytest.raises(GlueFLError, match=message):
        run(out, hook, engine="ray", ray_address=nodes.address)
    assert time.monotonic() - began < PATIENCE_S
    assert not (out / "model.safetensors").exists()
    result = small_run(
        strategy=GlueFL(regenerate_every=3), hooks=(hook,), rounds=ROUNDS, out=out, resume=True, options=options()
    )
    assert hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest() == undisturbed
    assert result.journal[-1]["round"] == ROUNDS


# Studies and comparisons

GRID = {"rounds": 60, "population": {"clients": 24}, "model": {"name": "mlp"}, "sampling": {"cohort": 2},
        "evaluation": {"every": 50}, "compare": {"strategies": ["fedavg", "lean"]}}  # fmt: skip


def grid(out):
    return expand(variants(GRID), [1], out)


def stopping(marker):
    """The task of a run; the first that is past a checkpoint writes down its node and stops in the middle of a round.
    A function within a function is sent by its code: the nodes cannot import this file."""

    def task(text, folder, device, shared):
        import contextlib
        import os
        import signal
        import threading
        import time
        from pathlib import Path

        import ray

        from gluefl.experiments.cluster import run_on_node

        def stop() -> None:
            journal = Path(folder, "journal.jsonl")
            while not journal.exists() or journal.read_bytes().count(b"\n") <= 12:
                time.sleep(0.002)
            with contextlib.suppress(FileExistsError), open(marker, "x") as file:
                file.write(f"{node} {os.getpid()}")
                file.flush()
                os.kill(os.getpid(), signal.SIGSTOP)

        node = ray.get_runtime_context().get_node_id()
        threading.Thread(target=stop, daemon=True).start()
        return run_on_node(text, folder, device, shared)

    return task


def models(out):
    return [(run.folder / "model.safetensors").read_bytes() for run in grid(out)]


@pytest.fixture(scope="module")
def grid_here(tmp_path_factory):
    out = tmp_path_factory.mktemp("grid") / "here"
    execute(grid(out), ThisProcess())
    return models(out)


def test_a_run_of_a_grid_whose_node_dies_goes_on_elsewhere(nodes, grid_here, tmp_path, monkeypatch) -> None:
    both, runs, marker = only(nodes, 2), grid(tmp_path / "runs"), tmp_path / "node"
    monkeypatch.setattr(ray_runs, "run_on_node", stopping(marker))
    with killer(nodes, partial(written_down, nodes, marker)):
        execute(runs, ClusterRuns(jobs=1, address=nodes.address))
    assert sum(node.any_processes_alive() for node in both) == 1
    assert models(tmp_path / "runs") == grid_here


def test_a_grid_without_nodes_names_its_runs_and_the_way_on(nodes, grid_here, tmp_path, monkeypatch) -> None:
    only(nodes, 1)
    runs, marker = grid(tmp_path / "runs"), tmp_path / "node"
    monkeypatch.setattr(ray_workers, "ROOM_S", 0.5)
    monkeypatch.setattr(ray_runs, "run_on_node", stopping(marker))
    message = r"no node of the Ray cluster is left for the runs in progress \(fedavg, seed 1\).*--resume"
    with killer(nodes, partial(written_down, nodes, marker)), pytest.raises(GlueFLError, match=message):
        execute(runs, ClusterRuns(jobs=1, address=nodes.address))
    assert not any(run.is_done() for run in runs)
    execute(runs, ThisProcess(), resume=True)
    assert models(tmp_path / "runs") == grid_here


def test_a_task_that_ray_repeats_finds_the_run_that_another_process_ended(tmp_path, monkeypatch) -> None:
    """The node died between the end of the run and its answer, or the process outlived its node for a while."""
    monkeypatch.setattr(ray_runs, "POLL_S", 0.01)
    (run,) = expand(variants({**GRID, "rounds": 2, "compare": {"strategies": ["fedavg"]}}), [1], tmp_path)
    task = to_toml(run.config), str(run.folder), "cpu", str(tmp_path)
    assert ray_runs.run_on_node(*task) == (0, "")
    before = {file: file.stat().st_mtime_ns for file in run.folder.iterdir()}
    has_lock, given_back_s = threading.Event(), []

    def write_a_while() -> None:
        with files.locked(run.folder):
            has_lock.set()
            time.sleep(0.3)
            given_back_s.append(time.monotonic())

    thread = threading.Thread(target=write_a_while)
    thread.start()
    has_lock.wait()
    assert ray_runs.run_on_node(*task) == (0, "") and time.monotonic() >= given_back_s[0]
    thread.join()
    assert before == {file: file.stat().st_mtime_ns for file in run.folder.iterdir()}
