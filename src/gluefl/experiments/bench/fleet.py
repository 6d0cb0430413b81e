"""The fleet against the GlueFL authors' logs, and the cost of one round's queries for small and large fleets.

`python -m gluefl.experiments.bench.fleet` prints the same object as `gluefl bench fleet --json`."""

import json
import subprocess
import sys
import time
import tracemalloc
from typing import Any

import numpy as np

from gluefl.errors import GlueFLError
from gluefl.experiments.bench.progress import counted
from gluefl.fleet import Fleet
from gluefl.randomness import stream

MODEL_BYTES = 22_180_000  # ShuffleNet on FEMNIST, as in the authors' logs
SAMPLES = 20 * 10  # batch times steps
CLIENTS, INVITED, USED = 2_800, 39, 30  # N, OC·K, K
FLEETS = 20  # rounds end with a slow client and one fleet has few of them: the mean over several fleets is stable
SCALES = (1_000, 1_000_000)
REPEATS = 5


def authors(network: str, availability: str = "always", seed: int = 0) -> Fleet:
    """A fleet with the factors of the authors' runs."""
    return Fleet(network, availability, seed, down_factor=0.8, up_factor=1.2, compute_factor=0.4)


def last_arrivals(network: str, rounds: int) -> dict[str, float]:
    """Mean seconds of the client that arrives 30th of 39, over rounds of several fleets of 2800."""
    fleets, parts = [authors(network, seed=seed) for seed in range(FLEETS)], []
    for number in range(rounds):
        fleet = fleets[number % FLEETS]
        cohort = stream(0, "fleet bench", number).choice(CLIENTS, INVITED, replace=False)
        download_s, compute_s, upload_s = fleet.durations(cohort, MODEL_BYTES, MODEL_BYTES, SAMPLES)
        last = np.argsort(download_s + compute_s + upload_s, kind="stable")[USED - 1]
        parts.append((download_s[last], upload_s[last], compute_s[last]))
    mean = np.mean(parts, axis=0)
    return {name: round(float(m), 3) for name, m in zip(("download_s", "upload_s", "compute_s"), mean)}


def one_round(fleet: Fleet, clients: int, number: int) -> int:
    """The queries of one round: draw clients until enough are online, then simulate the trip of each."""
    clock_s = 100.0 * number
    is_online, rng = fleet.is_online(clock_s), stream(0, "fleet bench", clients, number)
    invited: set[int] = set()
    while len(invited) < INVITED:
        client = int(rng.integers(clients))
        if client not in invited and is_online(client):
            invited.add(client)
    trips = [fleet.trip(client, clock_s, MODEL_BYTES, MODEL_BYTES, SAMPLES) for client in invited]
    return sum(trip.lost_s is None for trip in trips)


def _seconds(clients: int, rounds: int, seed: int) -> float:
    started = time.perf_counter()
    fleet = authors("edge", "diurnal", seed)
    for number in range(rounds):
        one_round(fleet, clients, number)
    return (time.perf_counter() - started) / rounds


def memory_mb(clients: int, rounds: int = 5) -> float:
    """Peak memory of a fleet and a few rounds, shipped tables included."""
    tracemalloc.start()
    try:
        fleet = authors("edge", "diurnal")
        for number in range(rounds):
            one_round(fleet, clients, number)
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


def _fresh_memory_mb(clients: int) -> float:
    # In a new process, so that nothing allocated before counts.
    program = f"from gluefl.experiments.bench.fleet import memory_mb; print(memory_mb({clients}))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)  # noqa: S603 - a program of our own
    if done.returncode:
        raise GlueFLError(
            f"measuring the memory of {clients} clients in a process of its own ended with status {done.returncode}; "
            f"the end of its standard error:\n{done.stderr[-2000:]}"
        )
    return float(done.stdout)


def scale(rounds: int) -> dict[str, dict[str, float]]:
    """Seconds per round and memory for a thousand and for a million clients."""
    best = dict.fromkeys(SCALES, float("inf"))
    # Alternating, and the best of each: other load on the machine affects both alike.
    for seed in counted(range(REPEATS), "repetitions"):
        for clients in SCALES:  # a new fleet each time, because a fleet keeps the results of earlier queries
            best[clients] = min(best[clients], _seconds(clients, rounds, clients + seed))
    return {
        str(clients): {"round_s": round(best[clients], 6), "memory_mb": round(_fresh_memory_mb(clients), 3)}
        for clients in SCALES
    }


def measure(rounds: int = 2000) -> dict[str, Any]:
    """The object that `gluefl bench fleet --json` prints."""
    return {
        "networks": {name: last_arrivals(name, rounds) for name in counted(("edge", "5g", "cloud"), "networks")},
        "scale": scale(rounds=max(1, rounds // 100)),
    }


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
