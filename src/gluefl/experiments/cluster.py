"""Runs of a grid on a Ray cluster: one task per run, on any node that has a core or a GPU free.

The folders of the runs must lie where every node sees them. A run whose node dies goes on from its last checkpoint on
another one: Ray repeats the task, and a run that has begun is resumed. If no node is left, the grid ends.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gluefl import files
from gluefl.clients.remote import cluster
from gluefl.clients.remote.cluster import connected, resources_of
from gluefl.config import to_toml
from gluefl.errors import GlueFLError, Interrupted, UsageError
from gluefl.experiments.grid import RunSpec
from gluefl.experiments.progress import GridProgress, RunProgress
from gluefl.experiments.runner import record_divergence
from gluefl.experiments.worker import DIVERGED, carry_out, failure
from gluefl.simulation.process import interruptible
from gluefl.storage.names import CONFIG, SUMMARY

POLL_S = 0.5
RETRIES = 3  # of a run whose node or process dies
SEEN = ".gluefl-cluster"  # a file by which a node sees that it shares the folder
FREE_S = 120  # until the lock of a process on a dead machine is given back by a network drive
FOREIGN = 4  # exit code of a run whose node does not


@dataclass(frozen=True)
class ClusterRuns:
    """Up to `jobs` runs at a time, each on one core or one GPU: by default as many as the cluster has."""

    device: str = "cpu"
    jobs: int | None = None
    address: str | None = None

    def run(self, specs: Sequence[RunSpec], progress: GridProgress) -> None:
        """Run all specs. The first error lets the runs in progress finish and starts no others."""
        if not specs:
            return
        with connected(self.address, self.jobs) as ray, interruptible(second_ends=False) as received:
            count, needs = resources_of(ray, self.device != "cpu", self.jobs)
            task = ray.remote(max_retries=RETRIES, max_calls=1, **needs)(run_on_node)
            marker = _marked(specs[0].folder.resolve().parent)
            try:
                ended = self._run(ray, task, list(specs), count, progress, (received, marker))
            finally:
                marker.unlink(missing_ok=True)
        if received:
            raise Interrupted
        if ended is not None:
            raise ended

    def _run(
        self,
        ray: Any,
        task: Any,
        waiting: list[RunSpec],
        count: int,
        progress: GridProgress,
        context: tuple[list[int], Path],
    ) -> GlueFLError | None:
        received, marker = context
        running: dict[Any, tuple[RunSpec, RunProgress]] = {}
        stopping, had_room_s = False, time.monotonic()
        ended: GlueFLError | None = None
        while running or (waiting and not received and ended is None):
            while waiting and len(running) < count and not received and ended is None:
                spec = waiting.pop(0)
                arguments = to_toml(spec.config), str(spec.folder.resolve()), self.device, str(marker)
                running[task.remote(*arguments)] = (spec, progress.start(spec))
            if received and not stopping:
                stopping = True
                for reference in running:
                    ray.cancel(reference)  # as Ctrl-C: the run writes a checkpoint and ends
            ready, _ = ray.wait(list(running), num_returns=1, timeout=POLL_S)
            for reference in ready:
                spec, display = running.pop(reference)
                ended = ended or _finished(ray, reference, spec, display, stopping)
            for _, display in running.values():
                display.update()
            if ready or cluster.room(ray, "CPU" if self.device == "cpu" else "GPU"):
                had_room_s = time.monotonic()
            elif time.monotonic() - had_room_s > cluster.ROOM_S:
                return ended or _deserted(ray, running)
        return ended


def _deserted(ray: Any, running: dict[Any, tuple[RunSpec, RunProgress]]) -> GlueFLError:
    """Give up the runs that wait for a node; returns the error of the grid."""
    for reference, (_, display) in running.items():
        ray.cancel(reference)
        display.finish("stopped")
    names = "; ".join(spec.name for spec, _ in running.values())
    return GlueFLError(
        f"no node of the Ray cluster is left for the runs in progress ({names}). Add nodes to the cluster, then go on "
        "with --resume: they continue from their last checkpoints."
    )


def run_on_node(text: str, folder: str, device: str, marker: str) -> tuple[int, str]:
    """One run, in a process of a node. Ray may repeat it: the run may have ended before its node died, and its process
    may live on for a while after Ray has lost the node."""
    if not Path(marker).exists():
        return FOREIGN, f"a node of the cluster does not see {marker}"
    out = Path(folder)
    _wait_until_free(out)
    if _is_done(text, out):
        return 0, ""
    return carry_out(text, out, device)


def _wait_until_free(folder: Path) -> None:
    """Wait while another process writes into a folder, but not for ever: the run itself will then say so."""
    ends = time.monotonic() + FREE_S
    while folder.exists() and time.monotonic() < ends:
        try:
            with files.locked(folder):
                return
        except GlueFLError:
            time.sleep(POLL_S)


def _is_done(text: str, folder: Path) -> bool:
    from gluefl.experiments.verify import damage_of_result  # torch comes with it

    has_ended = (folder / SUMMARY).exists() and (folder / CONFIG).read_bytes() == text.encode()
    return has_ended and damage_of_result(folder) is None


def _finished(ray: Any, reference: Any, spec: RunSpec, display: RunProgress, stopping: bool) -> GlueFLError | None:
    """Record the outcome of a run; returns an error if the grid has to end because of it."""
    try:
        code, message = ray.get(reference)
    except (ray.exceptions.RayError, KeyboardInterrupt) as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        code, message = 1, f"{reason} Go on with --resume: the run continues from its last checkpoint."
    if code == FOREIGN:
        raise UsageError(f"{message}: give an --out that all nodes share, on a network drive for instance.")
    diverged = code == DIVERGED
    display.finish(record_divergence(spec, message) if diverged else "" if code == 0 else "stopped")
    return None if code == 0 or diverged or stopping else failure(spec.name, code, message)


def _marked(folder: Path) -> Path:
    """A file in the folder of the grid that nodes look for."""
    files.make_folder(folder)
    marker = folder / f"{SEEN}-{uuid.uuid4().hex}"
    files.write(marker, f"{time.time()}\n")
    return marker
