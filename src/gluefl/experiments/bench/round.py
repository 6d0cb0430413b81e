"""A whole GlueFL round against its training part: what sampling, packages, compression, encoding and books cost."""

import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gluefl import models
from gluefl.clients.cohort import Cohort
from gluefl.clients.engine import LocalEngine
from gluefl.clients.residuals import Residuals, room_on
from gluefl.clients.trainers.choice import choose
from gluefl.core.federation import Federation, State, start
from gluefl.core.optimizer import Server
from gluefl.core.sampling import Pool, Sticky
from gluefl.experiments.bench.cohort import alternate, pin, spread
from gluefl.experiments.bench.workloads import CLIENTS, COHORT, SGD, Noisy, model
from gluefl.fleet import Devices, Instant
from gluefl.populations import Population
from gluefl.simulation.channel import Measured
from gluefl.simulation.round import play
from gluefl.storage.journal import Journal
from gluefl.strategies import Space
from gluefl.strategies.gluefl import GlueFL
from gluefl.vectors.layout import Layout

IN_A_ROW = 20  # rounds on a GPU: each begins the training of the next, so that they overlap, but not at the ends


def measure(
    rounds: int = 7, cores: int = 1, device: str = "cpu", model_name: str = "", over_commitment: float = 1.0
) -> dict[str, Any]:
    """Medians of `play` with a journal line, and of training the same cohort alone, taking turns. W1 by default."""
    pin(cores)
    with tempfile.TemporaryDirectory(prefix="gluefl-bench-") as folder:
        federation, state = setting(device, model_name, over_commitment, Path(folder))
        engine = federation.engine
        journal = Journal(Path(folder) / "journal.jsonl")

        in_a_row = 1 if device == "cpu" else IN_A_ROW

        def whole(rng: np.random.Generator) -> None:
            nonlocal state
            for _ in range(in_a_row):
                state, played = play(federation, state)
                journal.append(played.line)

        def training(rng: np.random.Generator) -> None:
            used = [c for c, fate in zip(*(journal.lines[-1]["clients"][k] for k in ("id", "fate"))) if fate == "used"]
            for _ in engine.train(Cohort(state.round, tuple(used), state.weights, state.statistics)):
                pass

        times = alternate({"round": whole, "training": training}, rounds, device, cores)
        times["round"] = [seconds / in_a_row for seconds in times["round"]]
    return {
        "round_s": statistics.median(times["round"]),
        "training_s": statistics.median(times["training"]),
        "ratio": statistics.median(times["round"]) / statistics.median(times["training"]),
        "round_spread_s": spread(times["round"]),
        "training_spread_s": spread(times["training"]),
        "parameters": federation.layout.size,
        "device": device,
        "cores": cores,
    }


def setting(
    device: str, model_name: str, over_commitment: float, folder: Path, devices: Devices | None = None
) -> tuple[Federation, State]:
    """GlueFL with the paper's sampling on the work of the benchmarks, before its first round."""
    torch.backends.cuda.matmul.allow_tf32 = True
    where = torch.device(device)
    population: Population = Noisy()
    module = (models.build(model_name, classes=62, channels=1) if model_name else model("w1")).to(where)
    layout = Layout.of(module)
    trainer = choose("auto", module, layout, population, torch.nn.functional.cross_entropy, where, SGD)
    federation = Federation(
        seed=0,
        run=bytes(8),
        layout=layout,
        space=Space(tuple(part.size for part in layout.weights), where),
        pool=Pool(CLIENTS, lambda client: 1 / CLIENTS),
        sampler=Sticky(COHORT, 4 * COHORT, 4 * COHORT // 5, over_commitment=over_commitment),
        strategy=GlueFL(),
        server=Server(),
        devices=devices or Instant(),
        engine=LocalEngine(population, trainer, SGD, seed=0, device=where),
        channel=Measured(),
        residuals=Residuals(layout.size, folder, device_bytes=room_on(where)),
    )
    return federation, start(federation, *layout.flatten(module))
