"""Workers as actors of a Ray cluster, or of one that is started on this machine.

The model of a round is put into the object store once and copied once per node. Ray pickles what travels, with the
trust that a cluster has in its members.
"""

import os
import pickle
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gluefl.clients.remote.messages import Broadcast, Ended, Event, Failed, Kit, Ready, Slice
from gluefl.errors import GlueFLError, MissingExtra, UsageError

PATIENCE_S = 600  # without any event
ROOM_S = 60  # without any worker and any node that has room for one; Ray needs some 30 s to notice a dead machine
KNOCK_S = 5  # for a connection to a cluster
NODE_DIED = "the death of its node"
STORE_BYTES = 2**30  # of a local cluster's object store, at most a third of the memory that is free


def library() -> Any:
    """The package `ray`, or the line that installs it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own, 15, lets workers starve beside other work
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("ray", "the engine 'ray'") from error
    return ray


@contextmanager
def connected(address: str | None, cores: int | None = None) -> Iterator[Any]:
    """Ray, connected to a cluster: to the one at an address, to the one this process uses already, or to a new one on
    this machine, which ends with the context."""
    ray = library()
    if ray.is_initialized():
        yield ray
        return
    quiet = {"include_dashboard": False, "logging_level": "error", "log_to_driver": False}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if address is None:
                ray.init(address="local", num_cpus=cores, object_store_memory=_store_bytes(), **quiet)
            else:
                _check_reachable(address)
                ray.init(address=address, logging_level="error", log_to_driver=False)
    except Exception as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        if address is None:
            raise GlueFLError(f"Ray could not be started on this machine: {reason}.") from error
        raise UsageError(
            f"no Ray cluster could be reached at '{address}': {reason}. Start one with `ray start --head`, and give "
            "--ray-address auto on the same machine or HOST:6379 on another; without it one is started here."
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise an error at once if no process accepts connections: Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_S).close()


def resources_of(ray: Any, gpu: bool, workers: int | None) -> tuple[int, dict[str, float]]:
    """How many workers run on the cluster, and what each of them reserves: a GPU and a core, or a core."""
    present = room(ray, "GPU" if gpu else "CPU")
    count = present if workers is None else workers
    if not 0 < count <= present:
        raise UsageError(
            f"the Ray cluster has {present} {'GPUs' if gpu else 'cores'}, {max(1, count)} workers need one each: give "
            "fewer --workers, or add nodes to the cluster."
        )
    return count, {"num_cpus": 0 if gpu else 1, "num_gpus": 1 if gpu else 0}


def room(ray: Any, kind: str) -> int:
    """How many GPUs or cores (`kind` GPU or CPU) the nodes have that live, as far as Ray knows."""
    return int(ray.cluster_resources().get(kind, 0))


class Actors:
    """A transport to actors. Ray keeps a queue for each: the next slice is there when the last one is done."""

    ahead = 1

    def __init__(self, ray: Any, kit: Kit, count: int, needs: dict[str, float]) -> None:
        self._ray, self.count = ray, count
        self._device = "cuda" if needs["num_gpus"] else "cpu"
        self._kind = "GPU" if needs["num_gpus"] else "CPU"
        self._class = ray.remote(max_restarts=0, max_concurrency=1, **needs)(Actor)
        try:
            self._kit = ray.put((sys.path, ray.cloudpickle.dumps(kit)))
        except Exception as error:
            raise UsageError(
                f"model, population, strategy or another part of this run cannot be sent to a cluster: {error}. "
                "Open files, locks and generators cannot; use the local engine, or open them when they are first used."
            ) from error
        self._model: Any = None
        self._actors: list[Any] = []
        self._pending: dict[Any, int] = {}  # by the reference of an answer, the worker that owes it
        self._starting: set[int] = set()
        for worker in range(count):
            self._actors.append(None)
            self._start(worker)

    @property
    def ids(self) -> list[int]:
        """The process numbers of the workers, each on its node."""
        ids: Sequence[int] = self._ray.get([actor.process_id.remote() for actor in self._actors])
        return list(ids)

    def publish(self, broadcast: Broadcast) -> None:
        """Put the vectors of a round into the object store."""
        self._model = self._ray.put((broadcast.round, broadcast.version, broadcast.arrays()))

    def send(self, worker: int, part: Slice) -> None:
        """Call an actor. One that has died is noticed by `events`."""
        self._pending[self._actors[worker].train.remote(self._model, part)] = worker

    def events(self) -> list[tuple[int, Event]]:
        """What the actors have answered. Raises an error if no actor is left and no node has room for another."""
        ends = time.monotonic() + PATIENCE_S
        while time.monotonic() < ends:
            ready, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=ROOM_S)
            if ready:
                return [(self._answered(reference), self._event(reference)) for reference in ready]
            present = room(self._ray, self._kind)
            if len(self._starting) == self.count and not present:
                raise GlueFLError(
                    f"all workers have ended, and no node of the Ray cluster has a {self._kind} for another: the nodes "
                    "have died or were removed. Add nodes to the cluster, then go on with --resume."
                )
            if len(self._starting) == len(self._pending) and present < self.count > len(self._starting):
                break  # nobody trains, and those that have not started cannot: the others need not wait for them
        return []

    def _answered(self, reference: Any) -> int:
        worker = self._pending.pop(reference)
        self._starting.discard(worker)
        return worker

    def _event(self, reference: Any) -> Event:
        errors = self._ray.exceptions
        try:
            event: Event = self._ray.get(reference)
            return event
        except errors.ActorDiedError as error:
            reason = _reason(error)
            return Ended(reason, reason == NODE_DIED)
        except errors.ActorUnavailableError:  # Ray does not know yet whether the node has died, too
            return Ended("a node or a process that cannot be reached")
        except (errors.ObjectLostError, errors.NodeDiedError):
            return Ended(NODE_DIED, with_machine=True)
        except errors.RayTaskError as error:
            return Failed(RuntimeError(str(error).strip().splitlines()[-1]), str(error))

    def replace(self, worker: int) -> None:
        """Start another actor, on any node that has room."""
        self._pending = {reference: other for reference, other in self._pending.items() if other != worker}
        self._ray.kill(self._actors[worker])
        self._start(worker)

    def _start(self, worker: int) -> None:
        self._actors[worker] = self._class.remote(self._kit, self._device)
        self._pending[self._actors[worker].ready.remote()] = worker
        self._starting.add(worker)

    def close(self) -> None:
        """End all actors."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors, self._pending, self._model = [], {}, None


class Actor:
    """A worker in a process of Ray."""

    def __init__(self, kit: tuple[list[str], bytes], device: str) -> None:
        from gluefl.accel.memory import keep_freed_memory
        from gluefl.clients.remote.worker import Worker

        keep_freed_memory()
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # vectors of the object store
        self._worker: Worker | None = None
        self._failed: Failed | None = None
        try:
            self._worker = Worker(unpacked(*kit), device)
        except Exception as error:
            self._failed = Failed.of(error)

    def ready(self) -> Event:
        """Whether it has started."""
        return self._failed or Ready()

    def process_id(self) -> int:
        """Its process number."""
        return os.getpid()

    def train(self, model: tuple[int, int, dict[str, Any]], part: Slice) -> Event:
        """Train a slice."""
        assert self._worker is not None
        round, version, arrays = model
        return self._worker.answer(Broadcast.from_arrays(round, version, arrays), part)


def unpacked(path: Sequence[str], data: bytes) -> Kit:
    """A kit in a process of the cluster, which finds modules where the server's process finds them."""
    sys.path.extend(folder for folder in path if folder not in sys.path and os.path.isdir(folder))
    try:
        kit: Kit = pickle.loads(data)  # noqa: S301 - from the process that started this actor
    except (AttributeError, ImportError) as error:
        raise UsageError(
            f"a part of the run cannot be made on a node of the cluster: {error}. Install the module on all nodes, or "
            "define it in the script that is started: what is defined there is sent along."
        ) from error
    return kit


def _store_bytes() -> int:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else STORE_BYTES
    return max(80 * 2**20, min(STORE_BYTES, free // 3))


def _reason(error: Exception) -> str:
    text = str(error)
    reasons = (
        ("NODE_DIED", NODE_DIED),
        ("its node has died", NODE_DIED),
        ("OOM", "its node had no memory left"),
        ("SYSTEM_ERROR", "its process was killed"),
        ("creation task", text.strip().splitlines()[-1]),
    )
    return next((reason for sign, reason in reasons if sign in text), "its process ended")
