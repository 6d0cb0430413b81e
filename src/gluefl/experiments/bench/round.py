"""A whole round against its training part: what sampling, packages, compression, encoding and records cost."""

import statistics
import tempfile
from dataclasses import dataclass
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
from gluefl.core.sampling import Pool, Sticky
from gluefl.core.server import Core, State, start
from gluefl.experiments.bench.cohort import alternate, pin, spread
from gluefl.experiments.bench.workloads import CLIENTS, COHORT, SGD, Noisy, model
from gluefl.fleet import Devices, Instant
from gluefl.populations import Population
from gluefl.simulation.channel import Measured
from gluefl.simulation.parts import Simulation
from gluefl.simulation.run import player
from gluefl.storage.journal import Journal
from gluefl.strategies import Space
from gluefl.strategies.gluefl import GlueFL
from gluefl.vectors.layout import Layout

IN_A_ROW = 20  # rounds on a GPU: each begins the training of the next, so that they overlap, but not at the ends


@dataclass(frozen=True)
class Work:
    """What is measured."""

    device: str = "cpu"
    model: str = ""  # the LEAF CNN of W1 if none is given
    over_commitment: float = 1.0


def measure(work: Work, rounds: int = 7, cores: int = 1) -> dict[str, Any]:
    """Medians of a round with its journal line, and of training the same cohort alone, taking turns."""
    pin(cores)
    in_a_row = 1 if work.device == "cpu" else IN_A_ROW
    with tempfile.TemporaryDirectory(prefix="gluefl-bench-") as folder, resources():
        sim, state = setting(work, Path(folder))
        journal, play = Journal(Path(folder) / "journal.jsonl"), player(sim.core.space.device)

        def whole(rng: np.random.Generator) -> None:
            nonlocal state
            for _ in range(in_a_row):
                state, played = play(sim, state)
                journal.append(played.line)

        def training(rng: np.random.Generator) -> None:
            clients = journal.lines[-1]["clients"]
            used = tuple(c for c, fate in zip(clients["id"], clients["fate"]) if fate == "used")
            for _ in sim.engine.train(Cohort(state.round, used, state.weights, state.statistics)):
                pass

        times = alternate({"round": whole, "training": training}, rounds, work.device, cores)
    seconds = [second / in_a_row for second in times["round"]]
    return {
        "round_s": statistics.median(seconds),
        "training_s": statistics.median(times["training"]),
        "ratio": statistics.median(seconds) / statistics.median(times["training"]),
        "round_spread_s": spread(seconds),
        "training_spread_s": spread(times["training"]),
        "parameters": sim.core.layout.size,
        "device": work.device,
        "cores": cores,
    }


def setting(work: Work, folder: Path, devices: Devices | None = None) -> tuple[Simulation, State]:
    """GlueFL with the paper's sampling on the work of the benchmarks, before its first round."""
    torch.backends.cuda.matmul.allow_tf32 = True
    device = torch.device(work.device)
    population: Population = Noisy()
    module = (models.build(work.model, classes=62, channels=1) if work.model else model("w1")).to(device)
    layout = Layout.of(module)
    trainer = choose("auto", module, layout, population, torch.nn.functional.cross_entropy, device, SGD)
    weights, statistics = layout.flatten(module)
    core = Core(
        seed=0,
        run=bytes(8),
        layout=layout,
        space=Space.of(layout, device),
        sampler=Sticky(COHORT, 4 * COHORT, 4 * COHORT // 5, over_commitment=work.over_commitment),
        strategy=GlueFL(),
        weights=weights,
        statistics=statistics,
    )
    sim = Simulation(
        core=core,
        pool=Pool(CLIENTS, lambda client: 1 / CLIENTS),
        devices=devices or Instant(),
        engine=LocalEngine(population, trainer, SGD, seed=0, device=device),
        channel=Measured(),
        residuals=Residuals(layout.size, folder, device_bytes=room_on(device)),
    )
    return sim, start(core, sim.pool)
