"""A whole round against its training part and against FedAvg's round: what a strategy and its messages cost."""

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gluefl import models
from gluefl.accel.resources import resources
from gluefl.clients.cohort import Cohort
from gluefl.clients.engine import LocalEngine
from gluefl.clients.residuals import Residuals, room_on
from gluefl.clients.trainers.choice import choose
from gluefl.core.sampling import Pool, Sampler, Sticky, Uniform
from gluefl.core.server import Core, State, start
from gluefl.errors import UsageError
from gluefl.experiments.bench.cohort import alternate, pin, spread
from gluefl.experiments.bench.workloads import CLIENTS, COHORT, SGD, Noisy, model
from gluefl.fleet import Devices, Instant
from gluefl.populations import Population
from gluefl.simulation.channel import Measured
from gluefl.simulation.parts import Simulation
from gluefl.simulation.process import device_of
from gluefl.simulation.run import player
from gluefl.storage.journal import Journal
from gluefl.strategies import Space
from gluefl.strategies.registry import ROWS
from gluefl.vectors.layout import Layout

IN_A_ROW = 20  # rounds on a GPU: each begins the training of the next, so that they overlap, but not at the ends


@dataclass(frozen=True)
class Work:
    """What is measured."""

    device: str = "cpu"
    model: str = ""  # the LEAF CNN of W1 if none is given
    over_commitment: float = 1.0
    strategy: str = "gluefl"
    clients: int = CLIENTS
    cohort: int = COHORT

    @property
    def sampler(self) -> Sampler:
        """The sampler that goes with the strategy."""
        row, cohort = ROWS[self.strategy], self.cohort
        if row.sampler == "uniform":
            return Uniform(cohort, over_commitment=self.over_commitment)
        sticky_cohort = int(row.sticky_cohort * cohort)
        sizes = (cohort, row.sticky_size * cohort, sticky_cohort)
        return Sticky(*sizes, row.weights, self.over_commitment, row.sticky_share)


class Rounds:
    """A simulation that goes on from round to round."""

    def __init__(self, work: Work, folder: Path, population: Population) -> None:
        self.sim, self.state = setting(work, folder, population=population)
        self._journal = Journal(folder / f"{work.strategy}.jsonl")
        self._play = player(self.sim.core.space.device)
        self._clients: dict[str, Any] = {}
        self._in_a_row = 1 if work.device == "cpu" else IN_A_ROW

    def play(self, rng: np.random.Generator) -> None:
        """Whole rounds with their journal lines."""
        for _ in range(self._in_a_row):
            self.state, played = self._play(self.sim, self.state)
            self._journal.append(played.line)
            self._clients = played.line["clients"]

    def train(self, rng: np.random.Generator) -> None:
        """Only the training of the last cohort."""
        clients = self._clients
        used = tuple(c for c, fate in zip(clients["id"], clients["fate"]) if fate == "used")
        for _ in self.sim.engine.train(Cohort(self.state.round, used, self.state.weights, self.state.statistics)):
            pass

    def per_round(self, seconds: list[float]) -> list[float]:
        """Seconds of one round from those of a call of `play`."""
        return [second / self._in_a_row for second in seconds]


def measure(work: Work, rounds: int = 7, cores: int = 1) -> dict[str, Any]:
    """Medians of a round with its journal line, of FedAvg's and of training the same cohort alone, taking turns."""
    pin(cores)
    population = Noisy(work.clients)
    with tempfile.TemporaryDirectory(prefix="gluefl-bench-") as folder, resources():
        own = Rounds(work, Path(folder), population)
        turns: dict[str, Callable[[np.random.Generator], None]] = {"round": own.play, "training": own.train}
        if work.strategy != "fedavg":
            turns["fedavg"] = Rounds(replace(work, strategy="fedavg"), Path(folder), population).play
        times = alternate(turns, rounds, work.device, cores)
    seconds = own.per_round(times["round"])
    results = {
        "strategy": work.strategy,
        "round_s": statistics.median(seconds),
        "training_s": statistics.median(times["training"]),
        "ratio": statistics.median(seconds) / statistics.median(times["training"]),
        "round_spread_s": spread(seconds),
        "training_spread_s": spread(times["training"]),
    }
    if "fedavg" in times:
        fedavg = own.per_round(times["fedavg"])
        results["fedavg_round_s"] = statistics.median(fedavg)
        results["fedavg_round_spread_s"] = spread(fedavg)
        results["ratio_to_fedavg"] = statistics.median(seconds) / statistics.median(fedavg)
    return results | {"parameters": own.sim.core.layout.size, "device": work.device, "cores": cores}


def setting(
    work: Work, folder: Path, devices: Devices | None = None, population: Population | None = None
) -> tuple[Simulation, State]:
    """A strategy with its usual sampling on the work of the benchmarks, before its first round."""
    torch.backends.cuda.matmul.allow_tf32 = True
    device, row = device_of(work.device), ROWS[work.strategy]
    if work.model == "char_lstm":
        raise UsageError("char_lstm reads text, and the benchmark has pictures: choose another --model.")
    population = population or Noisy(work.clients)
    module = (models.build(work.model, classes=62, channels=1) if work.model else model("w1")).to(device)
    layout = Layout.of(module)
    trainer = choose("auto", module, layout, population, torch.nn.functional.cross_entropy, device, SGD)
    weights, statistics = layout.flatten(module)
    core = Core(
        seed=0,
        run=bytes(8),
        layout=layout,
        space=Space.of(layout, device),
        sampler=work.sampler,
        strategy=row.kind(),
        weights=weights,
        statistics=statistics,
        initial=row.initial,
    )
    sim = Simulation(
        core=core,
        pool=Pool(work.clients, lambda client: 1 / work.clients),
        devices=devices or Instant(),
        engine=LocalEngine(population, trainer, SGD, seed=0, device=device),
        channel=Measured(),
        residuals=Residuals(layout.size, folder / work.strategy, device_bytes=room_on(device)),
    )
    return sim, start(core, sim.pool)
