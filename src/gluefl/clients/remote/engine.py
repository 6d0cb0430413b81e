"""`RemoteEngine`: cuts a cohort into slices, gives them to workers, and survives the death of workers."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from gluefl.clients.cohort import Cohort, Outcome, Trainer
from gluefl.clients.remote.messages import Broadcast, Done, Ended, Failed, Kept, Ready, Reply, Slice, Transport
from gluefl.clients.rules import LocalRule
from gluefl.errors import GlueFLError, UsageError
from gluefl.populations import Population

MOST_DEATHS = 3  # of workers that train one slice, or that start one after the other
# Slices per worker in a round. One after the other, clients balance best in small slices; stacked, they train best in
# large ones, and how a stack is cut may change the rounding: so it depends on the number of workers alone.
SLICES = {"stacked": 1, "dense": 2}
SMALL_SLICES = 8


@dataclass
class RemoteEngine:
    """Clients train in the workers of a transport: processes of this machine, or actors of a Ray cluster."""

    population: Population
    rule: LocalRule
    trainer: Trainer  # of the workers, by its kind
    transport: Transport
    _idle: list[int] = field(default_factory=list)
    _notes: list[str] = field(default_factory=list)
    _failed_starts: int = 0

    def wait_for_workers(self) -> None:
        """Wait until all workers have started, or some have and the others do not for a long time; these are used
        once they have started. Raises the error of one that fails."""
        while len(self._idle) < self.transport.count:
            events = list(self._events(may_be_none=bool(self._idle)))
            if not events:
                break
            for worker, event in events:
                if isinstance(event, Ended):
                    self._replace(worker, event, has_started=False)
                elif isinstance(event, Ready):
                    self._idle.append(worker)

    def train(self, cohort: Cohort) -> Iterator[Outcome]:
        """Updates come back encoded only."""
        raise UsageError("this engine returns uploads, not dense updates: call upload.")

    def upload(
        self, broadcast: Broadcast, weights: Mapping[int, float], kept: Callable[[int], Kept]
    ) -> Iterator[Reply]:
        """Clients train on all workers. A slice whose worker dies is trained by another one, with the same result."""
        self._notes = []
        waiting, running = deque(self.slices(tuple(weights))), dict[int, tuple[int, ...]]()
        deaths: dict[tuple[int, ...], int] = {}
        if waiting:
            self.transport.publish(broadcast)
        try:
            while waiting or running:
                while waiting and self._idle:
                    worker, clients = self._idle.pop(0), waiting.popleft()
                    running[worker] = clients
                    part = Slice(clients, tuple(weights[c] for c in clients), tuple(kept(c) for c in clients))
                    self.transport.send(worker, part)
                for worker, event in self._events():
                    if isinstance(event, Ended):
                        lost = running.pop(worker, None)
                        self._replace(worker, event, lost is not None or worker in self._idle)
                        if lost is not None:
                            deaths[lost] = deaths.get(lost, 0) + 1
                            self._note(worker, lost, event.reason, deaths[lost])
                            waiting.appendleft(lost)
                        continue
                    self._idle.append(worker)
                    if isinstance(event, Done):
                        del running[worker]
                        yield from event.replies
        finally:
            if running:  # an error ends the run: what the others still train must not reach another round
                self.transport.close()

    def slices(self, clients: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The cohort in pieces, in its order."""
        kind = type(self.trainer).__name__.lower()
        pieces = SLICES.get(kind, SMALL_SLICES) * self.transport.count
        length = max(1, math.ceil(len(clients) / pieces))
        return [clients[at : at + length] for at in range(0, len(clients), length)]

    def notes(self) -> list[str]:
        """Which workers died in the last round."""
        return self._notes

    def work(self, client: int) -> int:
        """Steps times batch."""
        return self.rule.steps_for(self.population.size(client)) * self.rule.batch

    def close(self) -> None:
        """End the workers."""
        self.transport.close()

    def _events(self, may_be_none: bool = False) -> Iterator[tuple[int, Ready | Done | Ended]]:
        events = self.transport.events()
        if not events and not may_be_none:
            raise GlueFLError(
                "no worker has answered or started for a long time: see whether the cluster has the cores or GPUs that "
                "the workers need, then go on with --resume."
            )
        for worker, event in events:
            if isinstance(event, Failed):
                raise event.raised()
            if isinstance(event, Ready):
                self._failed_starts = 0
            yield worker, event

    def _replace(self, worker: int, ended: Ended, has_started: bool) -> None:
        # A machine that has died is offered workers until its death is noticed: that is no failure of theirs.
        self._failed_starts += not has_started and not ended.with_machine
        if self._failed_starts >= MOST_DEATHS:
            raise GlueFLError(f"{MOST_DEATHS} workers ended before they had started, the last by {ended.reason}.")
        self._idle = [other for other in self._idle if other != worker]
        self.transport.replace(worker)

    def _note(self, worker: int, clients: tuple[int, ...], reason: str, times: int) -> None:
        named = ", ".join(map(str, clients[:5])) + (", …" if len(clients) > 5 else "")
        if times == MOST_DEATHS:
            raise GlueFLError(
                f"{times} workers ended while they trained the clients {named}, the last by {reason}. If the system "
                "is short of memory, use fewer workers, a smaller model or smaller batches."
            )
        self._notes.append(f"worker {worker} ended ({reason}): the clients {named} were trained by another worker")
