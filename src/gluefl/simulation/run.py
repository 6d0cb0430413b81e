"""A whole training: rounds, evaluation, journal, checkpoints. `train` is the Python interface of the laboratory."""

import copy
import hashlib
import json
import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from gluefl import wire
from gluefl.accel.resources import resources
from gluefl.accel.streams import on_side_stream
from gluefl.clients.engine import LocalEngine
from gluefl.clients.evaluation import Evaluator
from gluefl.clients.residuals import Residuals, room_on
from gluefl.clients.trainers.choice import choose
from gluefl.core.averaging import Averaging
from gluefl.core.sampling import Pool, Sampler, Sticky, Uniform
from gluefl.core.server import Core, State, start
from gluefl.errors import DataError, Diverged, Interrupted, UsageError
from gluefl.populations import Population
from gluefl.randomness import stream
from gluefl.simulation import folder as run_folder
from gluefl.simulation.arguments import check_arguments, explained, load_weights
from gluefl.simulation.channel import Encoded, Measured
from gluefl.simulation.fingerprint import fingerprint
from gluefl.simulation.lookahead import player as player  # without look-ahead: from gluefl.simulation.round
from gluefl.simulation.parts import Simulation
from gluefl.simulation.process import device_of, interruptible, tf32
from gluefl.simulation.progress import progress
from gluefl.simulation.settings import Callback, Evaluation, Options, Setting
from gluefl.storage import checkpoint
from gluefl.storage.journal import Journal, Line, reached_round, summarise
from gluefl.strategies import Space, Strategy
from gluefl.strategies.registry import name_of, row_of
from gluefl.vectors.layout import Layout
from gluefl.vectors.sparse import whole


@dataclass(frozen=True)
class Result:
    """What a run gives back: the trained module, the journal's lines and their summary."""

    module: nn.Module
    journal: list[Line]
    summary: dict[str, Any]


def train(
    model: nn.Module,
    population: Population,
    strategy: Strategy,
    *,
    sampler: Sampler | None = None,
    rounds: int = 100,
    setting: Setting | None = None,
    options: Options | None = None,
) -> Result:
    """Train a module on a population of clients and return it with its journal.

    model: any module with trainable parameters; it is copied. Only parameters that require a gradient travel.
    population: who owns which data, for instance `gluefl.populations.glyphs.Glyphs(clients=300)`.
    strategy: what travels, for instance `GlueFL()`.
    sampler: who is invited, for instance `Sticky(cohort=10, sticky_size=40, sticky_cohort=8)`; by default 30 clients,
        at random or sticky as goes with the strategy.
    rounds: how many rounds to play, unless a target ends the run before.
    setting: what else is computed: seed, local training, server optimiser, loss, hooks, fleet, evaluation.
    options: how it is carried out: folder, resume, callbacks, device, trainer, engine, checkpoints.

    >>> result = gluefl.train(model, Glyphs(clients=300), GlueFL(), sampler=Sticky(10, 40, 8), rounds=50)
    >>> result.summary["down_bytes"]
    """
    check_arguments(model, population, sampler, rounds, setting, options)
    setting, options = setting or Setting(), options or Options()
    device = device_of(options.device)
    module = copy.deepcopy(model).to(device)
    if setting.initial_weights is not None:
        load_weights(module, setting.initial_weights)
    chosen = sampler or _default_sampler(strategy, population.clients)
    description = run_folder.description(module, population, strategy, chosen, setting, options)
    with resources(), explained(model, population, setting):
        sim, state = _assemble(module, population, strategy, chosen, setting, options, description)
        journal = Journal(options.folder / "journal.jsonl" if options.folder else None)
        if options.folder is not None:
            identity = fingerprint(module, sim.core.layout, population, setting.loss)
            run = run_folder.RunFolder(options.folder, description, identity)
            state = run.open(options.resume, state, journal, sim.stores)
        evaluation = setting.evaluation
        evaluator = Evaluator(
            module, sim.core.layout, population, setting.loss, evaluation.metric, evaluation.batch, device
        )
        with progress(rounds, options.progress) as shown:
            loop = _Loop(rounds, evaluation, options, (*shown, *options.callbacks))
            state = loop.run(sim, state, journal, evaluator)
        summary = _summary(sim, journal, setting)
        if evaluation.clients:
            summary["client_accuracy"] = _percentiles(evaluator, state, population, evaluation.clients, setting.seed)
    named = sim.core.layout.state_dict(module, *state.model)
    if options.folder is not None:
        checkpoint.write_tensors(options.folder / "model.safetensors", named)
        whole_file = options.folder / "summary.json.tmp"  # a summary is whole or absent: it says that a run is done
        whole_file.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        whole_file.replace(options.folder / "summary.json")
    return Result(module.cpu().eval(), journal.lines, summary)


def _default_sampler(strategy: Strategy, clients: int) -> Sampler:
    """The sampler that goes with a strategy, for 30 clients a round or as many as a small population allows."""
    row = row_of(strategy)
    cohort = min(30, clients // (row.sticky_size + 1))
    if row.sampler == "uniform" or cohort < 2:
        return Uniform(cohort=min(30, clients))
    sticky_cohort = max(1, int(row.sticky_cohort * cohort))
    return Sticky(cohort, row.sticky_size * cohort, sticky_cohort, weights=row.weights)


def _assemble(
    module: nn.Module,
    population: Population,
    strategy: Strategy,
    sampler: Sampler,
    setting: Setting,
    options: Options,
    description: str,
) -> tuple[Simulation, State]:
    """The parts of a simulation and its state before round 1; refuses what cannot run before anything is written."""
    layout, device = Layout.of(module), next(module.parameters()).device
    layout = replace(layout, exchanged=setting.training.exchanged(layout.size))
    row, (weights, statistics) = row_of(strategy), layout.flatten(module)
    core = Core(
        seed=setting.seed,
        run=hashlib.sha256(description.encode()).digest()[:8],
        layout=layout,
        space=Space.of(layout, device),
        sampler=sampler,
        strategy=strategy,
        weights=weights,
        statistics=statistics,
        optimizer=setting.server,
        averaging=setting.averaging or Averaging(row.average),
        hooks=setting.hooks,
        initial=setting.initial or row.initial,
    )
    sim = Simulation(
        core=core,
        pool=_pool(population, setting),
        devices=setting.devices,
        engine=options.engine or _engine(module, layout, population, setting, options),
        memories=_memories(setting, options, layout),
        channel=Encoded(core) if options.encode else Measured(),
        residuals=Residuals(
            layout.size,
            options.folder / "checkpoint" if options.folder else None,
            options.residual_memory_bytes,
            options.residual_half,
            room_on(device, options.residual_device_bytes),
        ),
        arrivals=setting.arrivals,
    )
    return sim, start(core, sim.pool)


def _engine(
    module: nn.Module, layout: Layout, population: Population, setting: Setting, options: Options
) -> LocalEngine:
    device = next(module.parameters()).device
    trainer = choose(options.trainer, module, layout, population, setting.loss, device, setting.training)
    return LocalEngine(population, trainer, setting.training, setting.seed, device, room_on(device) // 2)


def _memories(setting: Setting, options: Options, layout: Layout) -> Residuals | None:
    """What the local rule keeps for every client, if it keeps anything."""
    kept = setting.training.kept(layout.size)
    if not kept:
        return None
    folder = options.folder / "checkpoint" / "memories" if options.folder else None
    return Residuals(kept, folder, options.residual_memory_bytes)


@dataclass(frozen=True)
class _Loop:
    """When a run ends, and what happens between its rounds."""

    rounds: int
    evaluation: Evaluation
    options: Options
    callbacks: Sequence[Callback]

    def is_over(self, state: State, journal: Journal) -> bool:
        reached = reached_round(journal.lines, self.evaluation.target, self.evaluation.average)
        return state.round >= self.rounds or (self.evaluation.stop_at_target and reached is not None)

    def run(self, sim: Simulation, state: State, journal: Journal, evaluator: Evaluator) -> State:
        """Round after round; what is journaled and checkpointed survives whatever happens then."""
        play, device, folder = player(sim.core.space.device), sim.core.space.device, self.options.folder
        with interruptible() as interrupted, tf32(self.options.tf32), closing(sim):
            stop = False
            while not (self.is_over(state, journal) or stop or interrupted):
                began = time.perf_counter()
                state, played = play(sim, state)
                line = played.line
                if state.round % self.evaluation.every == 0 or state.round == self.rounds:
                    line |= _evaluated(evaluator, state, device)
                line["wall_s"] = time.perf_counter() - began
                journal.append(line)
                stop = any([callback(line, state) for callback in self.callbacks])  # noqa: C419 - all are called
                ends = stop or interrupted or (self.options.checkpoint_at_end and self.is_over(state, journal))
                if folder and (state.round % self.options.checkpoint_every == 0 or ends):
                    journal.sync()  # a checkpoint must never be ahead of it
                    with on_side_stream(device, "checkpoint"):
                        checkpoint.save(folder / "checkpoint", state, sim.stores)
        if interrupted:
            hint = f" Go on with --resume --out {folder}." if folder else ""
            raise Interrupted(f"interrupted after round {state.round} of {self.rounds}.{hint}")
        return state


def _evaluated(evaluator: Evaluator, state: State, device: torch.device) -> dict[str, float]:
    with on_side_stream(device, "evaluation"):
        result = evaluator(*state.model)
    if not math.isfinite(result.loss):
        raise Diverged(f"round {state.round}: the test loss is {result.loss}: the training diverged.")
    if not math.isfinite(result.accuracy):
        raise UsageError(
            f"round {state.round}: the metric is {result.accuracy} where the test loss is {result.loss:.4g}. "
            "Pass Evaluation(metric=…) a function that returns one finite number per sample."
        )
    return {"accuracy": result.accuracy, "test_loss": result.loss}


def _summary(sim: Simulation, journal: Journal, setting: Setting) -> dict[str, Any]:
    core, evaluation = sim.core, setting.evaluation
    everything = wire.Body(
        # The whole model in one message: what a client that holds nothing downloads under FedAvg.
        update=whole(torch.zeros(core.space.size)),
        statistics=torch.zeros(core.layout.statistics_size),
        shared=wire.Shared(replace(core.space, device=torch.device("cpu")).mask(True)),
        sends_mask=True,
    )
    totals = summarise(journal.lines, evaluation.target, evaluation.average, wire.measure(everything))
    trainer = getattr(sim.engine, "trainer", sim.engine)
    return {
        "strategy": name_of(core.strategy),
        "seed": core.seed,
        "parameters": core.space.size,
        **totals,
        "trainer": type(trainer).__name__.lower(),
        "client_accuracy": None,
    }


def _pool(population: Population, setting: Setting) -> Pool:
    size, fleet = population.clients, setting.devices

    def speed(client: int) -> float:
        return -fleet.trip(client, 0.0, 10**7, 10**7, 200).arrival_s

    if setting.importance == "uniform":
        return Pool(size, lambda client: 1 / size, speed=speed)
    sizes = [population.size(client) for client in range(size)]
    total = sum(sizes)
    if not total:
        raise DataError("importance = 'samples' needs clients that have samples; none of this population has any.")
    return Pool(size, lambda client: sizes[client] / total, speed=speed)


def _percentiles(evaluator: Evaluator, state: State, population: Population, count: int, seed: int) -> dict[str, float]:
    clients = stream(seed, "percentiles").permutation(population.clients)[:count].tolist()
    accuracies = evaluator.clients(*state.model, clients)
    return {f"p{p}": float(np.percentile(accuracies, p)) for p in (5, 10, 25, 50, 75, 90, 95)}
