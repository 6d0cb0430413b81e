"""A round without training for small and large populations: seconds, memory per client ever invited, checkpoints."""

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gluefl import models
from gluefl.accel.resources import resources
from gluefl.clients.cohort import Cohort, Outcome
from gluefl.clients.residuals import Residuals
from gluefl.core.ledger import Ledger
from gluefl.core.sampling import Pool
from gluefl.core.server import Core, State, start
from gluefl.experiments.bench.cohort import pin, spread
from gluefl.experiments.bench.progress import counted
from gluefl.experiments.bench.round import Work
from gluefl.fleet import Instant
from gluefl.randomness import stream
from gluefl.simulation.channel import Measured
from gluefl.simulation.parts import Simulation
from gluefl.simulation.round import play
from gluefl.storage import checkpoint
from gluefl.storage.client_log import ClientLog
from gluefl.storage.journal import Journal
from gluefl.strategies import Space
from gluefl.strategies.registry import ROWS
from gluefl.vectors.layout import Layout

HIDDEN = 8  # units of the model
EVERY = 5  # rounds from one checkpoint to the next
TOGETHER = 1000  # clients that enter the ledger at a time before the first round
FEWEST = 100_000  # clients whose memory is told from that of the rest of the process


@dataclass(frozen=True)
class Untrained:
    """An engine that trains nothing: all clients of a round return the same noise."""

    size: int

    def train(self, cohort: Cohort) -> Iterator[Outcome]:
        """One outcome per client."""
        noise = stream(0, "scale", cohort.round).standard_normal(self.size, dtype="float32")
        delta: Tensor = torch.from_numpy(noise) / 100
        return (Outcome(client, delta, cohort.statistics, 1.0) for client in cohort.clients)

    def work(self, client: int) -> int:
        """Any number of samples."""
        return 1


class Federation:
    """A population of some size, of which many clients were invited before."""

    def __init__(self, work: Work, known: int, folder: Path) -> None:
        self.clients, self.folder = work.clients, folder / str(work.clients)
        self.folder.mkdir()
        self.sim, state = _simulation(work, self.folder)
        before = resident_bytes()
        ledger = invited_before(state.ledger, self.clients, min(known, self.clients // 2))
        grown = resident_bytes() - before
        self.known = len(ledger.clients)
        self.bytes_per_client = grown / self.known if self.known >= FEWEST else None
        self.state = replace(state, ledger=ledger)
        self._journal, self._log = Journal(self.folder / "journal.jsonl"), ClientLog()
        self.round_s, self.checkpoint_s = list[float](), list[float]()

    def play(self) -> None:
        """A round with its journal line, and now and then a checkpoint."""
        began = time.process_time()
        self.state, played = play(self.sim, self.state)
        self._journal.append(played.line)
        self.round_s.append(time.process_time() - began)
        if self.state.round % EVERY == 0:
            began = time.process_time()
            stores = {"residuals": self.sim.residuals}
            checkpoint.save(self.folder / "checkpoint", self.state, stores, {}, log=self._log)
            self.checkpoint_s.append(time.process_time() - began)

    def measured(self) -> dict[str, Any]:
        """What the rounds took. The first two are left out, and the first checkpoint, which writes all clients."""
        rounds, checkpoints = self.round_s[2:], self.checkpoint_s[1:]
        return {
            "clients": self.clients,
            "known_clients": self.known,
            "round_s": statistics.median(rounds),
            "round_spread_s": spread(rounds),
            "checkpoint_s": statistics.median(checkpoints),
            "first_checkpoint_s": self.checkpoint_s[0],
            "bytes_per_known_client": self.bytes_per_client,
            "journal_bytes_per_round": (self.folder / "journal.jsonl").stat().st_size / self.state.round,
        }


def measure(sizes: Sequence[int], work: Work, rounds: int = 40, known: int = 300_000) -> dict[str, Any]:
    """Rounds of all populations in turns, in CPU seconds of one core: other load concerns all of them alike."""
    pin(1)
    with tempfile.TemporaryDirectory(prefix="gluefl-bench-") as folder, resources():
        federations = [Federation(replace(work, clients=size), known, Path(folder)) for size in sizes]
        for _ in counted(range(max(rounds, 3 * EVERY)), "rounds"):
            for federation in federations:
                federation.play()
        results = [federation.measured() for federation in federations]
    for before, result in zip([None, *results], results):
        result["ratio_to_previous"] = result["round_s"] / before["round_s"] if before else None
    parameters = federations[0].sim.core.space.size
    return {"strategy": work.strategy, "cohort": work.cohort, "parameters": parameters, "populations": results}


def invited_before(ledger: Ledger, clients: int, count: int) -> Ledger:
    """The ledger after `count` invitations: every third client was used, every third lost its upload."""
    for number, at in enumerate(range(0, count, TOGETHER)):
        drawn = stream(0, "invited", number).integers(clients, size=min(TOGETHER, count - at)).tolist()
        ledger = ledger.synchronised(drawn).answered(drawn[::3], drawn[1::3])
    return ledger


def resident_bytes() -> int:
    """The memory of this process."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _simulation(work: Work, folder: Path) -> tuple[Simulation, State]:
    row = ROWS[work.strategy]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = models.build("mlp", classes=62, channels=1, hidden=HIDDEN)
    layout = Layout.of(module)
    core = Core(
        seed=0,
        run=bytes(8),
        layout=layout,
        space=Space.of(layout),
        sampler=work.sampler,
        strategy=row.kind(),
        weights=layout.flatten(module)[0],
        statistics=layout.flatten(module)[1],
        initial=row.initial,
    )
    sim = Simulation(
        core=core,
        pool=Pool(work.clients, lambda client: 1 / work.clients),
        devices=Instant(),
        engine=Untrained(layout.size),
        channel=Measured(),
        residuals=Residuals(layout.size, folder / "checkpoint"),
    )
    return sim, start(core, sim.pool)
