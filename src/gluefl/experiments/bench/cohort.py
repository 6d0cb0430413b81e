"""One cohort of FedAvg against a bare loop on the same work, alternating in one process."""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from gluefl.clients.cohort import Cohort
from gluefl.clients.engine import LocalEngine
from gluefl.clients.trainers.choice import choose
from gluefl.experiments.bench.progress import counted
from gluefl.experiments.bench.workloads import CLIENTS, COHORT, MODELS, SGD, Noisy, bare_round, model
from gluefl.simulation.process import device_of
from gluefl.vectors.layout import Layout


def measure(rounds: int = 7, cores: int = 1, device: str = "cpu", trainer: str = "auto") -> dict[str, Any]:
    """Medians and spreads of both, and their ratio, for W1 and W2; CPU seconds on one core."""
    pin(cores)
    torch.backends.cuda.matmul.allow_tf32 = True
    population = Noisy()
    results = {}
    for workload in MODELS:
        ours = gluefl_round(workload, population, device, trainer)
        bare = bare_round(workload, population)
        times = alternate({"gluefl": ours, "bare": bare}, rounds if workload == "w1" else 10 * rounds, device, cores)
        results[workload] = {
            "gluefl_s": statistics.median(times["gluefl"]),
            "bare_s": statistics.median(times["bare"]),
            "ratio": statistics.median(times["gluefl"]) / statistics.median(times["bare"]),
            "gluefl_spread_s": spread(times["gluefl"]),
            "bare_spread_s": spread(times["bare"]),
        }
    return {"workloads": results, "cores": cores, "device": device}


def gluefl_round(
    workload: str, population: Noisy, device: str = "cpu", trainer: str = "auto"
) -> Callable[[np.random.Generator], None]:
    """The same work through an engine of gluefl: train a cohort and average it."""
    where = device_of(device)
    module = model(workload).to(where)
    layout = Layout.of(module)
    weights, statistics_ = layout.flatten(module)
    chosen = choose(trainer, module, layout, population, torch.nn.functional.cross_entropy, where, SGD)
    engine = LocalEngine(population, chosen, SGD, seed=0, device=where)
    number = 0

    def play(rng: np.random.Generator) -> None:
        nonlocal weights, number
        number += 1
        clients = rng.choice(CLIENTS, COHORT, replace=False).tolist()
        total = torch.zeros_like(weights)
        for outcome in engine.train(Cohort(number, tuple(clients), weights, statistics_)):
            total.add_(outcome.delta, alpha=1 / COHORT)
        weights = weights + total

    return play


def alternate(
    rounds_of: Mapping[str, Callable[[np.random.Generator], None]], rounds: int, device: str, cores: int
) -> dict[str, list[float]]:
    """Run the candidates alternately, so that other load affects all of them; the first two rounds do not count."""
    clock = time.process_time if cores == 1 and device == "cpu" else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in rounds_of}
    for number in counted(range(rounds + 2), f"rounds of {', '.join(rounds_of)}"):
        for name, play in rounds_of.items():
            began = clock()
            play(np.random.default_rng(number))
            if device != "cpu":
                torch.cuda.synchronize()
            times[name].append(clock() - began)
    return {name: seconds[2:] for name, seconds in times.items()}


def spread(times: list[float]) -> float:
    """Half the interquartile range."""
    low, _, high = statistics.quantiles(times, n=4)
    return (high - low) / 2


def pin(cores: int) -> None:
    """Restrict this process to `cores` cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-cores:])
    torch.set_num_threads(cores)
