"""Clients in other processes: the same run on any engine, also if workers die."""

import importlib.util
import os
import signal
import sys
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gluefl import GlueFL, Lean, LocalSGD
from gluefl.cli import main
from gluefl.clients.cohort import Cohort
from gluefl.clients.engine import LocalEngine
from gluefl.clients.optimisers import Scaffold
from gluefl.clients.remote.block import MEMORY, Block, room_for
from gluefl.clients.remote.cluster import connected
from gluefl.clients.remote.engine import MOST_DEATHS, RemoteEngine
from gluefl.clients.remote.messages import Broadcast, Done, Ended, Failed, Kept, Kit, Ready, Reply, Slice
from gluefl.clients.remote.processes import Processes, packed
from gluefl.clients.remote.worker import Worker
from gluefl.clients.trainers.choice import choose
from gluefl.clients.trainers.loop import Loop
from gluefl.config import variants
from gluefl.errors import Diverged, GlueFLError, UsageError
from gluefl.experiments.cluster import ClusterRuns
from gluefl.experiments.grid import expand
from gluefl.experiments.runner import ThisProcess, execute
from gluefl.simulation.settings import Options
from gluefl.strategies.coded import Coded
from gluefl.strategies.fedavg import FedAvg
from gluefl.vectors.layout import Layout
from gluefl.vectors.mask import Mask
from gluefl.wire import UPLOAD, Expected, Shared, decode
from runs import options, small_run
from stubs import Blobs, mlp

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
ROUNDS = 5


@dataclass(frozen=True)
class DiesOnce:
    """A hook that changes nothing, and that kills the first worker that calls it in round 3."""

    server: int
    marker: Path

    def on_delta(self, delta, task):
        if os.getpid() != self.server and task.round == 3:
            try:
                self.marker.touch(exist_ok=False)
            except FileExistsError:
                return delta
            os.kill(os.getpid(), signal.SIGKILL)
        return delta

    def on_sum(self, total, uploads, round):
        return total


def lines(result):
    return [{key: value for key, value in line.items() if key not in ("wall_s", "notes")} for line in result.journal]


def assert_same(one, other) -> None:
    assert lines(one) == lines(other)
    for a, b in zip(one.module.state_dict().values(), other.module.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert one.summary == other.summary


def killed(tmp_path, engine: str):
    """Residuals, memories of the rule, and a worker that dies: on an engine, and without any of it."""
    hook = DiesOnce(os.getpid(), tmp_path / "died")
    parts = {
        "strategy": GlueFL(regenerate_every=3),
        "training": Scaffold(steps=2, batch=8, lr=0.05, share=0.1),
        "hooks": (hook,),
        "rounds": ROUNDS,
    }
    here = small_run(**parts)
    there = small_run(**parts, options=options(engine=engine, workers=2))
    assert hook.marker.exists()
    return here, there


def check_killed(here, there) -> None:
    assert_same(here, there)
    notes = {line["round"]: line["notes"] for line in there.journal if line["notes"]}
    assert [*notes] == [3] and "trained by another worker" in notes[3][0]
    assert not any(line["notes"] for line in here.journal)


def test_processes_are_equal_to_the_local_engine_when_a_worker_is_killed(tmp_path) -> None:
    check_killed(*killed(tmp_path, "processes"))


@needs_ray
@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_an_address_where_nobody_listens_is_named(address) -> None:
    with pytest.raises(UsageError, match=f"no Ray cluster could be reached at '{address}'"), connected(address):
        pass


@pytest.fixture(scope="module")
def cluster():
    """One Ray for the tests of this file."""
    with connected(None, 2) as ray:
        yield ray


@needs_ray
def test_ray_is_equal_to_the_local_engine_when_a_worker_is_killed(cluster, tmp_path) -> None:
    check_killed(*killed(tmp_path, "ray"))


@needs_ray
def test_runs_on_a_cluster_are_those_of_this_process(cluster, tmp_path) -> None:
    raw = {"rounds": 2, "population": {"clients": 24}, "model": {"name": "mlp"}, "sampling": {"cohort": 2},
           "compare": {"strategies": ["fedavg", "lean"]}}  # fmt: skip
    for name, executor in (("here", ThisProcess()), ("there", ClusterRuns(jobs=2))):
        execute(expand(variants(raw), [1], tmp_path / name), executor)
    for run in ("fedavg-1", "lean-1"):
        here, there = (tmp_path / name / run for name in ("here", "there"))
        assert (here / "model.safetensors").read_bytes() == (there / "model.safetensors").read_bytes()
        assert (here / "config.toml").read_bytes() == (there / "config.toml").read_bytes()
    assert not list((tmp_path / "there").glob(".gluefl*"))  # the file that nodes looked for


def test_a_run_of_processes_goes_on_here(tmp_path) -> None:
    parts = {"strategy": Lean(upload_block=64), "model": mlp()}
    here = small_run(**parts, rounds=ROUNDS, options=options(trainer="workers"))
    carried_out = options(trainer="workers", engine="processes", workers=2)
    stop = [lambda line, state: line["round"] == 3]
    small_run(**parts, rounds=ROUNDS, out=tmp_path, callbacks=stop, options=carried_out)
    assert_same(here, small_run(**parts, rounds=ROUNDS, out=tmp_path, resume=True, options=options(trainer="workers")))


def test_an_error_of_a_worker_is_that_of_the_run() -> None:
    with pytest.raises(Diverged, match=r"the loss of client \d+ is"):
        small_run(rounds=9, training=LocalSGD(lr=1e30), options=options(engine="processes", workers=1))


@pytest.mark.parametrize("strategy", [Lean(), Coded(FedAvg(), upload="int8"), FedAvg()], ids=["lean", "int8", "fedavg"])
def test_an_update_that_is_not_finite_diverges_wherever_it_is_encoded(strategy) -> None:
    away = LocalSGD(steps=1, lr=3e38, momentum=0.0, weight_decay=3e38)
    with pytest.raises(Diverged, match=r"the update of client \d+ is not finite"):
        small_run(strategy=strategy, rounds=2, training=away, options=options(engine="processes", workers=1))


# One worker, in this process

LAYOUT = Layout.of(mlp())
CLIENTS = (3, 5, 8, 13, 21, 34, 2, 9, 11, 30, 17)


def kit(trainer: str) -> Kit:
    parts = mlp(), LAYOUT, Blobs(), LocalSGD(steps=3, batch=8, lr=0.1), torch.nn.functional.cross_entropy
    return Kit(*parts, trainer, FedAvg(), (), 1, b"test run")


def deltas_in_slices(trainer: str, length: int) -> dict[int, torch.Tensor]:
    weights, statistics = LAYOUT.flatten(mlp())
    mask = torch.ones(LAYOUT.size, dtype=torch.bool)
    broadcast, worker = Broadcast(4, 3, weights, statistics, mask), Worker(kit(trainer))
    expected = Expected(b"test run", LAYOUT.fingerprint, LAYOUT.size, 0, UPLOAD, Shared(Mask(mask)))
    deltas = {}
    for at in range(0, len(CLIENTS), length):
        clients = CLIENTS[at : at + length]
        event = worker.answer(broadcast, Slice(clients, (1.0,) * len(clients), (Kept(),) * len(clients)))
        assert isinstance(event, Done)
        deltas |= {reply.client: decode(reply.message, expected)[1].update.dense() for reply in event.replies}
    return deltas


def deltas_at_once(trainer: str) -> dict[int, torch.Tensor]:
    own = kit(trainer)
    chosen = choose(trainer, own.module, LAYOUT, own.population, own.loss, torch.device("cpu"), own.rule)
    engine = LocalEngine(own.population, chosen, own.rule, own.seed)
    cohort = Cohort(4, CLIENTS, *LAYOUT.flatten(mlp()))
    return {outcome.client: outcome.delta for outcome in engine.train(cohort)}


@pytest.mark.parametrize("length", [1, 3, 11])
@pytest.mark.parametrize("trainer", ["loop", "workers", "dense", "stacked"])
def test_slices_of_a_cohort_give_the_updates_of_the_whole(trainer, length) -> None:
    whole, slices = deltas_at_once(trainer), deltas_in_slices(trainer, length)
    assert whole.keys() == slices.keys()
    for client, delta in whole.items():
        if trainer == "stacked":  # a stack of another size is rounded in another order
            torch.testing.assert_close(slices[client], delta, rtol=1e-4, atol=1e-6)
        else:
            assert torch.equal(slices[client], delta)


def test_an_error_that_cannot_travel_keeps_its_text() -> None:
    class Local(Exception):
        pass

    for error in (Local("lost"), ValueError("lost"), UsageError("lost")):
        assert "lost" in str(Failed.of(error).raised())
    assert isinstance(Failed.of(UsageError("lost")).raised(), UsageError)


# The engine, whatever its workers do


class Scripted:
    """Workers that answer in the order, and die at the times, that a test draws."""

    def __init__(self, count: int, draw, ahead: int = 0) -> None:
        self.count, self.draw, self.ahead = count, draw, ahead
        self.state: dict[int, list[Slice]] = {}
        self.waiting = deque[tuple[int, object]]((worker, Ready()) for worker in range(count))
        self.published = 0
        self.deaths: dict[tuple[int, ...], int] = {}

    def publish(self, broadcast) -> None:
        self.published += 1

    def send(self, worker: int, part: Slice) -> None:
        parts = self.state.setdefault(worker, [])
        parts.append(part)
        assert len(parts) <= 1 + self.ahead

    def events(self):
        if self.waiting:
            return [self.waiting.popleft()]
        busy = sorted(worker for worker, parts in self.state.items() if parts)
        worker = self.draw(st.sampled_from(busy))
        part = self.state[worker].pop(0)
        dead = self.deaths.get(part.clients, 0)
        if dead < MOST_DEATHS - 1 and self.draw(st.booleans()):
            self.deaths[part.clients] = dead + 1
            self.state[worker] = []
            return [(worker, Ended("a test"))]
        return [
            (
                worker,
                Done([Reply(c, str(w).encode(), 0.5, k) for c, w, k in zip(part.clients, part.weights, part.kept)]),
            )
        ]

    def replace(self, worker: int) -> None:
        self.waiting.append((worker, Ready()))

    def close(self) -> None:
        pass


def engine(transport) -> RemoteEngine:
    trainer = Loop(mlp(), LAYOUT, lambda inputs: inputs, torch.nn.functional.cross_entropy)
    return RemoteEngine(Blobs(), LocalSGD(), trainer, transport)


@given(st.data(), st.integers(1, 4), st.integers(0, 40), st.integers(0, 2))
def test_every_client_is_trained_once_whatever_dies(data, workers, clients, ahead) -> None:
    transport = Scripted(workers, data.draw, ahead)
    remote = engine(transport)
    remote.wait_for_workers()
    weights = {client: client + 0.5 for client in range(clients)}
    broadcast = Broadcast(1, 0, torch.zeros(2), torch.zeros(0), torch.ones(2, dtype=torch.bool))
    for _ in range(2):
        replies = list(remote.upload(broadcast, weights, lambda client: Kept(torch.full((1,), float(client)))))
        assert sorted(reply.client for reply in replies) == list(range(clients))
        assert all(float(reply.message) == weights[reply.client] == reply.kept.residual + 0.5 for reply in replies)
        assert len(remote.notes()) == sum(transport.deaths.values())
        transport.deaths.clear()
    assert transport.published == 2 * bool(clients)


@given(st.integers(1, 9), st.lists(st.integers(0, 999), unique=True))
def test_slices_are_the_cohort_in_its_order(workers, clients) -> None:
    slices = engine(Scripted(workers, None)).slices(tuple(clients))
    assert [client for part in slices for client in part] == clients
    longest = max(1, -(-len(clients) // (8 * workers)))
    assert all(1 <= len(part) <= longest for part in slices)
    assert all(len(part) == 1 for part in slices[-workers * longest :])  # so that all workers end together


class Late(Scripted):
    """Workers of which one does not start."""

    def events(self):
        return super().events() if self.waiting or any(self.state.values()) else []


def test_a_run_begins_with_the_workers_that_have_started() -> None:
    transport = Late(2, None)
    transport.waiting.pop()
    remote = engine(transport)
    remote.wait_for_workers()
    transport.draw = lambda strategy: 0  # nobody dies
    broadcast = Broadcast(1, 0, torch.zeros(2), torch.zeros(0), torch.ones(2, dtype=torch.bool))
    replies = list(remote.upload(broadcast, {4: 1.0, 7: 1.0, 9: 1.0}, lambda client: Kept()))
    assert [reply.client for reply in replies] == [4, 7, 9] and not transport.state.get(1)


@pytest.mark.parametrize("with_machine", [True, False])
def test_workers_that_end_before_they_start_end_the_run_unless_their_machine_died(with_machine) -> None:
    transport = Late(1, None)
    transport.waiting.clear()
    transport.waiting.extend([(0, Ended("a test", with_machine))] * MOST_DEATHS)
    remote = engine(transport)
    if with_machine:
        remote.wait_for_workers()  # the replacement starts
    else:
        with pytest.raises(GlueFLError, match="3 workers ended before they had started, the last by a test"):
            remote.wait_for_workers()


def test_a_run_without_workers_ends() -> None:
    transport = Late(2, None)
    transport.waiting.clear()
    with pytest.raises(GlueFLError, match="no worker has answered or started for a long time"):
        engine(transport).wait_for_workers()


def test_clients_that_end_every_worker_end_the_run() -> None:
    class Deadly(Scripted):
        def events(self):
            if self.waiting:
                return [self.waiting.popleft()]
            self.state[0] = []
            return [(0, Ended("signal 9"))]

    remote = engine(Deadly(1, None))
    remote.wait_for_workers()
    broadcast = Broadcast(1, 0, torch.zeros(2), torch.zeros(0), torch.ones(2, dtype=torch.bool))
    with pytest.raises(GlueFLError, match=r"3 workers ended while they trained the clients 4, .*signal 9"):
        list(remote.upload(broadcast, {4: 1.0}, lambda client: Kept()))


@given(st.lists(st.integers(0, 300), min_size=1, max_size=4))
def test_a_block_of_memory_returns_what_was_written(sizes) -> None:
    rng = np.random.default_rng(sum(sizes))
    arrays = {str(i): rng.standard_normal(size).astype("f4" if i % 2 else "?") for i, size in enumerate(sizes)}
    block = Block.of_size(room_for(arrays))
    other = Block(os.dup(block.descriptor), block.size_bytes)
    read = other.read(block.write(arrays))
    for name, array in arrays.items():
        assert np.array_equal(read[name], array)
        read[name][:] = 1  # a private copy
        assert np.array_equal(block.read(block.write(arrays))[name], array)


# What is refused, in words


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(UsageError, match=r"the loss .* cannot be sent to other processes.*or use the local engine"):
        packed(replace(kit("loop"), loss=lambda outputs, labels: outputs.sum()))


def shared_files() -> int:
    """How many files in shared memory this process holds."""
    held = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(path).startswith(MEMORY) for path in held if os.path.islink(path))


@pytest.mark.skipif(not os.path.isdir(MEMORY), reason="counts files in shared memory")
def test_workers_that_cannot_be_started_leave_nothing_behind(monkeypatch) -> None:
    before, started, start = shared_files(), [], Processes._started
    with pytest.raises(UsageError, match="the loss"):
        Processes.of(replace(kit("loop"), loss=lambda outputs, labels: outputs.sum()), ["cpu"])

    def failing(self, device):
        if started:
            raise OSError("no more processes")
        started.append(start(self, device))
        return started[0]

    monkeypatch.setattr(Processes, "_started", failing)
    with pytest.raises(OSError, match="no more processes"):
        Processes.of(kit("loop"), ["cpu", "cpu"])
    ((process, connection),) = started
    assert process.returncode is not None and connection.closed and shared_files() == before


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"workers": 2}, "needs engine = 'processes' or 'ray'"),
        ({"engine": "processes", "ray_address": "auto"}, "needs engine = 'ray'"),
        ({"engine": "spark"}, "engine"),
        ({"engine": "ray", "workers": 0}, "workers"),
    ],
)
def test_options_that_do_not_go_together_are_refused(fields, words) -> None:
    with pytest.raises(UsageError, match=words):
        Options(**fields)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--workers", "2"], "give --engine processes"), (["--ray-address", "auto"], "give --engine ray")],
)
def test_the_command_line_refuses_them_too(arguments, words, tmp_path) -> None:
    done = CliRunner().invoke(main, ["demo", "--out", str(tmp_path / "out"), *arguments])
    assert done.exit_code == 2 and words in done.output and not (tmp_path / "out").exists()


def test_a_missing_ray_names_the_line_that_installs_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'gluefl\[ray\]'"):
        small_run(rounds=1, options=options(engine="ray"))
