"""A whole training: rounds, evaluation, journal, checkpoints. `train` is the Python interface of the laboratory."""

import copy
import hashlib
import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from gluefl import wire
from gluefl.accel.cores import overtaking
from gluefl.clients.engine import LocalEngine
from gluefl.clients.evaluation import Evaluator, Metric, top_1
from gluefl.clients.residuals import Residuals, room_on
from gluefl.clients.rules import LocalRule, LocalSGD, Loss
from gluefl.clients.trainers.choice import choose
from gluefl.core.federation import Federation, State, start
from gluefl.core.optimizer import Server
from gluefl.core.sampling import Pool, Sampler, Uniform
from gluefl.errors import GlueFLError, UsageError
from gluefl.fleet import Devices, Instant
from gluefl.populations import Population
from gluefl.randomness import stream
from gluefl.simulation.channel import Encoded, Measured
from gluefl.simulation.round import play
from gluefl.storage import checkpoint
from gluefl.storage.journal import Journal, Line, reached_round, summarise
from gluefl.strategies import Space, Strategy
from gluefl.vectors.layout import Layout
from gluefl.vectors.selection import Sparse

Callback = Callable[[Line, State], bool | None]  # returns True to stop the run


@dataclass(frozen=True)
class Result:
    """What a run gives back: the trained module, the journal's lines and their summary."""

    module: nn.Module
    journal: list[Line]
    summary: dict[str, Any]


@dataclass(frozen=True)
class Options:
    """How a run is carried out; what is computed stays the same, but for rounding where it says so."""

    device: str = "cpu"  # sums are rounded in another order elsewhere,
    trainer: str = "auto"  # and by another trainer
    tf32: bool = True  # on a GPU, products of ten-bit mantissas, as PyTorch's convolutions have by default
    encode: bool = False  # encode, decode and check every message
    checkpoint_every: int = 10
    checkpoint_at_end: bool = True  # so that a run that is done can be given more rounds
    residual_memory_bytes: int = 3 * 10**8
    residual_device_bytes: int | None = None  # on a GPU: a third of what is free
    residual_half: bool = False  # this one does: half precision rounds what clients remember


def train(
    model: nn.Module,
    population: Population,
    strategy: Strategy,
    *,
    sampler: Sampler | None = None,
    rounds: int = 100,
    target: float | None = None,
    seed: int = 1,
    training: LocalRule | None = None,
    server: Server | None = None,
    devices: Devices | None = None,
    importance: Literal["uniform", "samples"] = "uniform",
    loss: Loss = nn.functional.cross_entropy,
    metric: Metric = top_1,
    evaluate_every: int = 10,
    average: int = 5,
    evaluation_batch: int = 1000,
    stop_at_target: bool = True,
    client_percentiles: int = 0,
    arrivals: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    initial_weights: Path | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    description: str | None = None,
    options: Options | None = None,
) -> Result:
    """Train a module on a population of clients and return it with its journal.

    >>> result = gluefl.train(model, Glyphs(clients=300), GlueFL(), sampler=Sticky(10, 40, 8), rounds=50)
    >>> result.summary["down_bytes"]
    """
    if seed < 0:
        raise UsageError(f"seed = {seed}: a seed is a whole number from 0 up.")
    options, sgd = options or Options(), training or LocalSGD()
    device = _device(options.device)
    module = copy.deepcopy(model).to(device)
    if initial_weights is not None:
        _load_weights(module, initial_weights)
    layout = Layout.of(module)
    layout = replace(layout, exchanged=sgd.exchanged(layout.size))
    weights, statistics = layout.flatten(module)
    chosen: Sampler = sampler or Uniform(cohort=min(30, population.clients))
    parts = (strategy, chosen, sgd, server or Server(), devices or Instant(), importance)
    description = description or _describe(seed, module, population, *parts)
    run = hashlib.sha256(description.encode()).digest()[:8]
    folder = Path(out) if out is not None else None
    trainer = choose(options.trainer, module, layout, population, loss, device, sgd)
    federation = Federation(
        seed=seed,
        run=run,
        layout=layout,
        space=Space(tuple(part.size for part in layout.weights), device),
        pool=_pool(population, importance, devices),
        sampler=chosen,
        strategy=strategy,
        server=server or Server(),
        devices=devices or Instant(),
        engine=LocalEngine(population, trainer, sgd, seed, device, room_on(device) // 2),
        channel=Encoded(layout, run) if options.encode else Measured(),
        residuals=Residuals(
            layout.size,
            folder / "checkpoint" if folder else None,
            options.residual_memory_bytes,
            options.residual_half,
            room_on(device, options.residual_device_bytes),
        ),
        **(arrivals or {}),
    )
    state = start(federation, weights, statistics)  # refuses what cannot run, before anything is written
    journal = Journal(folder / "journal.jsonl" if folder else None)
    if folder is not None:
        state = _open(folder, description, resume, state, journal, federation.residuals)
    evaluator = Evaluator(module, layout, population, loss, metric, evaluation_batch, device)
    plan = _Plan(rounds, target, average, stop_at_target, evaluate_every, tuple(callbacks), folder, options)
    state = _carry_out(plan, federation, state, journal, evaluator)

    summary = _summary(federation, journal, strategy, seed, target, average)
    summary |= {"trainer": type(trainer).__name__.lower(), "client_accuracy": None}
    if client_percentiles:
        summary["client_accuracy"] = _percentiles(evaluator, state, population, client_percentiles, seed)
    named = layout.state_dict(module, state.weights, state.statistics)
    if folder is not None:
        checkpoint.write_tensors(folder / "model.safetensors", named)
        whole = folder / "summary.json.tmp"  # a summary is there in full, or not at all: it says that a run is done
        whole.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        whole.replace(folder / "summary.json")
    return Result(module.cpu().eval(), journal.lines, summary)


@dataclass(frozen=True)
class _Plan:
    """When a run ends, and what happens between its rounds."""

    rounds: int
    target: float | None
    average: int
    stop_at_target: bool
    evaluate_every: int
    callbacks: tuple[Callback, ...]
    folder: Path | None
    options: Options

    def is_over(self, state: State, journal: Journal) -> bool:
        reached = reached_round(journal.lines, self.target, self.average)
        return state.round >= self.rounds or (self.stop_at_target and reached is not None)


def _carry_out(plan: _Plan, f: Federation, state: State, journal: Journal, evaluator: Evaluator) -> State:
    """Round after round; what is journaled and checkpointed survives whatever happens then."""
    with _interruptible() as interrupted, _products(plan.options), closing(f.residuals):
        stop = False
        while not (plan.is_over(state, journal) or stop or interrupted):
            began = time.perf_counter()
            state, played = play(f, state)
            line = played.line
            if state.round % plan.evaluate_every == 0 or state.round == plan.rounds:
                with overtaking(f.space.device, "evaluation"):
                    found = evaluator(state.weights, state.statistics)
                if not math.isfinite(found.loss):
                    raise GlueFLError(f"round {state.round}: the test loss is {found.loss}: the training diverged.")
                line |= {"accuracy": found.accuracy, "test_loss": found.loss}
            line["wall_s"] = time.perf_counter() - began
            journal.append(line)
            stop = any([callback(line, state) for callback in plan.callbacks])  # noqa: C419 - every one is called
            ends = stop or interrupted or (plan.options.checkpoint_at_end and plan.is_over(state, journal))
            if plan.folder and (state.round % plan.options.checkpoint_every == 0 or ends):
                journal.sync()  # a checkpoint must never be ahead of it
                with overtaking(f.space.device, "checkpoint"):
                    checkpoint.save(plan.folder / "checkpoint", state, f.residuals)
    if interrupted:
        hint = f" Go on with --resume --out {plan.folder}." if plan.folder else ""
        raise GlueFLError(f"interrupted after round {state.round} of {plan.rounds}.{hint}")
    return state


def _summary(
    f: Federation, journal: Journal, strategy: Strategy, seed: int, target: float | None, average: int
) -> dict[str, Any]:
    everything = wire.Body(
        # The whole model in one message: what a client that holds nothing downloads under FedAvg.
        update=Sparse.full(torch.zeros(f.space.size)),
        statistics=torch.zeros(f.layout.statistics_size),
        shared=wire.Shared(f.space.mask(True)),
        sends_mask=True,
    )
    totals = summarise(journal.lines, target, average, wire.measure(everything))
    return {"strategy": type(strategy).__name__.lower(), "seed": seed, "parameters": f.space.size, **totals}


def _pool(population: Population, importance: str, devices: Devices | None) -> Pool:
    size = population.clients
    fleet = devices or Instant()

    def speed(client: int) -> float:
        return -fleet.trip(client, 0.0, 10**7, 10**7, 200).arrival_s

    if importance == "uniform":
        return Pool(size, lambda client: 1 / size, speed=speed)
    sizes = [population.size(client) for client in range(size)]
    total = sum(sizes)
    return Pool(size, lambda client: sizes[client] / total, speed=speed)


def _open(folder: Path, description: str, resume: bool, fresh: State, journal: Journal, residuals: Residuals) -> State:
    """Make a run's folder, or go on in it."""
    checkpoint.check(fresh)
    config = folder / "config.toml"
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; --out needs a folder.")
    if config.exists() and not resume:
        raise UsageError(f"{folder} holds a run already: choose another --out, or go on with it by --resume.")
    if not config.exists() and folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty and holds no run of gluefl: choose another --out.")
    folder.mkdir(parents=True, exist_ok=True)
    if config.exists():
        _same(config.read_text(encoding="utf-8"), description, folder)
    state = fresh
    if checkpoint.exists(folder / "checkpoint"):
        state = checkpoint.load(folder / "checkpoint", fresh, residuals)
    (folder / "summary.json").unlink(missing_ok=True)  # it is of the rounds that were done before
    config.write_text(description, encoding="utf-8")
    journal.cut(state.round)
    return state


def _same(old: str, new: str, folder: Path) -> None:
    """A run goes on with the configuration it was started with; only its end and its memory may be moved."""
    movable = ("rounds =", "target =", "stop_at_target =", "memory_gb =", "device_gb =")
    kept = [[line for line in text.splitlines() if not line.startswith(movable)] for text in (old, new)]
    if kept[0] != kept[1]:
        differing = sorted(set(kept[0]) ^ set(kept[1]))
        raise UsageError(
            f"{folder} holds a run of another configuration, it cannot be resumed with this one. They differ in:\n"
            + "\n".join(f"  {line}" for line in differing)
        )


def _percentiles(evaluator: Evaluator, state: State, population: Population, count: int, seed: int) -> dict[str, float]:
    chosen = stream(seed, "percentiles").permutation(population.clients)[:count].tolist()
    found = evaluator.clients(state.weights, state.statistics, chosen)
    return {f"p{p}": float(np.percentile(found, p)) for p in (5, 10, 25, 50, 75, 90, 95)}


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # streams, graphs and kernels go to the current device
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device '{name}' cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def _load_weights(module: nn.Module, path: Path) -> None:
    try:
        module.load_state_dict(load_file(path))
    except Exception as error:
        raise UsageError(f"{path} does not fit this model: {error}") from error


def _describe(seed: int, module: nn.Module, population: Population, *parts: Any) -> str:
    """A run that was not made from a file, in words that tell whether it is the same again."""
    tables = [
        f"seed = {seed}",
        f'model = "{type(module).__name__}"',
        f'population = "{type(population).__name__}"',
    ]
    for part in parts:
        values = asdict(part) if is_dataclass(part) and not isinstance(part, type) else {"value": part}
        tables.append(f"\n[{type(part).__name__}]")
        tables += [f"{key} = {json.dumps(value, default=str)}" for key, value in values.items()]
    return "\n".join(tables) + "\n"


@contextmanager
def _products(options: Options) -> Iterator[None]:
    """How exact products on a GPU are, as long as a run goes on."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = options.tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """SIGINT and SIGTERM end the run after the round in progress, with a checkpoint; a second one ends it at once."""
    received: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    try:
        previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals are somebody else's
        previous = {}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
