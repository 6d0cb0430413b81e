"""`RemoteEngine`: cuts a cohort into slices, gives them to workers, and survives the death of workers."""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

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
    _started: list[int] = field(default_factory=list)  # workers
    _notes: list[str] = field(default_factory=list)
    _failed_starts: int = 0

    def wait_for_workers(self) -> None:
        """Wait until all workers have started, or some have and the others do not for a long time; these are used
        once they have started. Raises the error of one that fails."""
        while len(self._started) < self.transport.count:
            events = list(self._events(may_be_none=bool(self._started)))
            if not events:
                break
            for worker, event in events:
                if isinstance(event, Ended):
                    self._replace(worker, event, has_started=False)
                elif isinstance(event, Ready):
                    self._started.append(worker)

    def train(self, cohort: Cohort) -> Iterator[Outcome]:
        """Updates come back encoded only."""
        raise UsageError("this engine returns uploads, not dense updates: call upload.")

    def upload(
        self, broadcast: Broadcast, weights: Mapping[int, float], kept: Callable[[int], Kept]
    ) -> Iterator[Reply]:
        """Clients train on all workers. A slice whose worker dies is trained by another one, with the same result."""
        self._notes = []
        waiting, running = deque(self.slices(tuple(weights))), dict[int, deque[tuple[int, ...]]]()
        deaths: dict[tuple[int, ...], int] = {}
        replies: list[Reply] = []
        if waiting:
            self.transport.publish(broadcast)
        try:
            while waiting or running:
                while waiting and (worker := self._free(running, len(waiting))) is not None:
                    clients = waiting.popleft()
                    running.setdefault(worker, deque()).append(clients)
                    part = Slice(clients, tuple(weights[c] for c in clients), tuple(kept(c) for c in clients))
                    self.transport.send(worker, part)
                yield from replies  # after the workers that sent them have their next slices
                replies = []
                for worker, event in self._events():
                    if isinstance(event, Ended):
                        lost = running.pop(worker, None)
                        self._replace(worker, event, worker in self._started)
                        if lost is not None:
                            deaths[lost[0]] = deaths.get(lost[0], 0) + 1  # the others had not begun
                            self._note(worker, lost, event.reason, deaths[lost[0]])
                            waiting.extendleft(reversed(lost))
                        continue
                    if isinstance(event, Ready):
                        self._started.append(worker)
                        continue
                    replies += event.replies
                    running[worker].popleft()
                    if not running[worker]:
                        del running[worker]
            yield from replies
        finally:
            if running:  # an error ends the run: what the others still train must not reach another round
                self.transport.close()

    def _free(self, running: Mapping[int, Collection[object]], waiting: int) -> int | None:
        """The worker with the fewest slices, None if all have enough. The last ones go to workers that have none, so
        that all end together."""
        most = self.transport.ahead if waiting > self.transport.count else 0
        worker = min(self._started, key=lambda worker: len(running.get(worker, ())), default=None)
        return None if worker is None or len(running.get(worker, ())) > most else worker

    def slices(self, clients: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The cohort in pieces, in its order."""
        kind = type(self.trainer).__name__.lower()
        pieces = SLICES.get(kind, SMALL_SLICES) * self.transport.count
        length = max(1, math.ceil(len(clients) / pieces))
        single = 0 if kind in SLICES else self.transport.count * length  # at the end, so that all end together
        first = len(clients) - single
        large = [clients[at : min(at + length, first)] for at in range(0, first, length)]
        return large + [clients[at : at + 1] for at in range(max(0, first), len(clients))]

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
        self._started = [other for other in self._started if other != worker]
        self.transport.replace(worker)

    def _note(self, worker: int, lost: Sequence[tuple[int, ...]], reason: str, times: int) -> None:
        if times == MOST_DEATHS:
            raise GlueFLError(
                f"{times} workers ended while they trained the clients {_named(lost[0])}, the last by "
                f"{reason}. If the system "
                "is short of memory, use fewer workers, a smaller model or smaller batches."
            )
        clients = _named([*chain.from_iterable(lost)])
        self._notes.append(f"worker {worker} ended ({reason}): the clients {clients} were trained by another worker")


def _named(clients: Sequence[int]) -> str:
    return ", ".join(map(str, clients[:5])) + (", …" if len(clients) > 5 else "")
