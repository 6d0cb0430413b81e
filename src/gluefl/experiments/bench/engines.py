"""Engines: several workers against one on W1, and the cost of a round whose clients do nothing.

Every case runs in a process of its own, by the wall clock. A client that does nothing neither trains nor compresses;
what is left is the framework: invitation, the model to every worker, messages, aggregation, publication. "idle": the
uploads are empty. "dense": every upload holds all parameters. "residuals": uploads are empty, and every client has a
residual that travels to its worker and back.
"""

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gluefl.accel.memory import keep_freed_memory
from gluefl.clients.cohort import Cohort, Engine, Outcome
from gluefl.clients.remote.engine import RemoteEngine
from gluefl.clients.remote.messages import Kit
from gluefl.clients.residuals import Residuals
from gluefl.clients.trainers.loop import Loop
from gluefl.core.sampling import Pool, Uniform
from gluefl.core.server import Core, start
from gluefl.experiments.bench.peers import idle_flower, offline
from gluefl.experiments.bench.round import Work as RoundWork
from gluefl.experiments.bench.workloads import SGD, Noisy, model
from gluefl.fleet import Instant
from gluefl.simulation.channel import Measured
from gluefl.simulation.engines import transport_of
from gluefl.simulation.parts import Simulation
from gluefl.simulation.round import play
from gluefl.simulation.run import train
from gluefl.simulation.settings import Evaluation, Options, Setting
from gluefl.strategies import Space, Strategy, Task, Traits, Upload
from gluefl.strategies.fedavg import FedAvg
from gluefl.strategies.registry import ROWS
from gluefl.vectors.layout import Layout
from gluefl.vectors.mask import Mask
from gluefl.vectors.sparse import Sparse, nothing

WARM_UP = 2
CLIENTS = 300  # of W1's 2800: workers hold a copy of the data
IDLE = ("idle", "dense", "residuals")


@dataclass(frozen=True)
class Work:
    """What is measured."""

    rounds: int = 5
    workers: int = 2
    strategy: str = "fedavg"
    cohort: int = 10
    parameters: int = 5_000_000
    engines: tuple[str, ...] = ("processes", "ray")
    only: str | None = None


def measure(work: Work) -> dict[str, Any]:
    """Medians of seconds per round, and their ratios; None for what is not installed or did not finish."""
    results: dict[str, Any] = {"workers": work.workers}
    if work.only != "idle":
        results["w1"] = {engine: _compared(work, engine) for engine in work.engines}
    if work.only != "w1":
        for case in IDLE:
            seconds = {f"{engine}_s": _in_process(work, case, engine, work.workers) for engine in work.engines}
            if case != "residuals":
                seconds["flower_s"] = _in_process(work, case, "flower", work.workers)
            results[case] = seconds | _ratios(seconds)
    return results


def _compared(work: Work, engine: str) -> dict[str, float | None]:
    one, several = (_in_process(work, "w1", engine, workers) for workers in (1, work.workers))
    return {"one_s": one, "several_s": several, "ratio": one / several if one and several else None}


def _ratios(seconds: dict[str, float | None]) -> dict[str, float]:
    flower = seconds.get("flower_s")
    ours = {name.removesuffix("_s"): value for name, value in seconds.items() if value and name != "flower_s"}
    return {f"flower_to_{name}": flower / value for name, value in ours.items()} if flower else {}


def _in_process(work: Work, case: str, engine: str, workers: int) -> float | None:
    library = {"ray": "ray", "flower": "flwr", "processes": "gluefl"}[engine]
    if importlib.util.find_spec(library) is None:
        return None
    command = [sys.executable, "-m", "gluefl.experiments.bench.engines", case, engine, str(workers)]
    done = subprocess.run(  # noqa: S603 - a module of our own
        [*command, json.dumps(asdict(work))], capture_output=True, text=True, env=offline()
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    if done.returncode or not lines:
        print(f"{engine} did not finish {case}:\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    seconds: list[float] = json.loads(lines[-1])["seconds"]
    return statistics.median(seconds[WARM_UP:])


def w1(work: Work, engine: str, workers: int) -> list[float]:
    """Seconds of rounds of W1."""
    seconds: list[float] = []
    train(
        model("w1"),
        Noisy(CLIENTS),
        ROWS[work.strategy].kind(),
        sampler=RoundWork(strategy=work.strategy, clients=CLIENTS).sampler,
        rounds=work.rounds + WARM_UP + 1,
        setting=Setting(training=SGD, evaluation=Evaluation(every=10**6)),
        options=Options(
            callbacks=(lambda line, state: seconds.append(line["wall_s"]),),
            engine=engine,  # type: ignore[arg-type]
            workers=workers,
            progress=False,
        ),
    )
    return seconds[:-1]  # the last round evaluates the model


def idle(work: Work, case: str, engine: str, workers: int) -> list[float]:
    """Seconds of rounds whose clients do nothing."""
    module = nn.Linear(work.parameters, 1, bias=False)
    layout, population = Layout.of(module), Noisy(4 * work.cohort)
    strategy: Strategy = FedAvg() if case == "dense" else Idle(keeps=case == "residuals")
    weights, statistics_ = layout.flatten(module)
    kit = Kit(module, layout, population, SGD, nn.functional.cross_entropy, "loop", strategy, (), 0, bytes(8),
              engine=idle_engine)  # fmt: skip
    core = Core(
        0, bytes(8), layout, Space.of(layout), Uniform(work.cohort), strategy, weights, statistics_, initial="known"
    )
    options = Options(engine=engine, workers=workers)  # type: ignore[arg-type]
    with ExitStack() as held:
        transport = held.enter_context(closing(transport_of(kit, options, held)))
        trainer = Loop(module, layout, population.transform, nn.functional.cross_entropy)
        remote = RemoteEngine(population, SGD, trainer, transport)
        remote.wait_for_workers()
        pool = Pool(population.clients, lambda client: 1 / population.clients)
        sim = Simulation(core, pool, Instant(), remote, Measured(), Residuals(layout.size, memory_bytes=4 * 10**9))
        state, seconds = start(core, pool), list[float]()
        for _ in range(work.rounds + WARM_UP):
            began = time.perf_counter()
            state, _ = play(sim, state)
            seconds.append(time.perf_counter() - began)
    return seconds


def idle_engine(kit: Kit, device: torch.device, cores: int) -> Engine:
    """Clients that return the model as it is."""
    return IdleEngine(*kit.layout.flatten(kit.module))


@dataclass(frozen=True)
class IdleEngine:
    """Returns no change, at once."""

    weights: Tensor
    statistics: Tensor

    def train(self, cohort: Cohort) -> Iterator[Outcome]:
        """The same delta for every client."""
        yield from (Outcome(client, self.weights, self.statistics, 0.0) for client in cohort.clients)

    def work(self, client: int) -> int:
        """Nothing passes through the model."""
        return 1


@dataclass(frozen=True)
class Idle:
    """A strategy that sends nothing; with `keeps`, a client's residual is its whole update."""

    keeps: bool = False

    def traits(self, space: Space) -> Traits:
        """Those of FedAvg."""
        return Traits()

    def init(self, space: Space, initial: Tensor) -> tuple[Space, Tensor]:
        """No state but the space."""
        return space, initial

    def mask(self, state: Space, round: int) -> Mask:
        """Nothing is shared."""
        return state.mask(False)

    def frozen(self, mask: Mask) -> Mask | None:
        """Nothing is frozen."""
        return None

    def compress(self, delta: Tensor, task: Task, residual: Tensor | None) -> tuple[Sparse, Tensor | None]:
        """An empty upload."""
        return nothing(task.space.size, task.space.device), delta if self.keeps else None

    def combine(self, state: Space, uploads: Sequence[Upload], round: int) -> Tensor:
        """Zeros."""
        return torch.zeros(state.size, device=state.device)

    def aggregate(self, state: Space, total: Tensor, round: int) -> tuple[Space, Sparse]:
        """No update."""
        return state, nothing(state.size, state.device)


def main(case: str, engine: str, workers: str, text: str) -> None:
    """One case, in this process."""
    keep_freed_memory()  # as the program does
    work, count = Work(**json.loads(text)), int(workers)
    if case == "w1":
        seconds = w1(work, engine, count)
    elif engine == "flower":
        seconds = idle_flower(count, work.cohort, work.parameters, work.rounds + WARM_UP, case == "dense")
    else:
        seconds = idle(work, case, engine, count)
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    from gluefl.experiments.bench import engines  # under this name, workers find what the cases are made of

    engines.main(*sys.argv[1:])
