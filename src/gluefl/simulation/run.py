"""A whole training: rounds, evaluation, journal, checkpoints. `train` is the Python interface of the laboratory."""

import hashlib
import tomllib
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from gluefl import wire
from gluefl.accel.resources import resources
from gluefl.accel.streams import on_side_stream
from gluefl.clients.cohort import Engine
from gluefl.clients.evaluation import Evaluator
from gluefl.clients.metrics import key_of
from gluefl.clients.remote import UploadingEngine
from gluefl.clients.residuals import Residuals, room_on
from gluefl.core.averaging import Averaging
from gluefl.core.sampling import LISTABLE, Pool, Sampler, Sticky, Uniform, draw
from gluefl.core.server import Core, State, start
from gluefl.errors import DataError
from gluefl.populations import Population
from gluefl.populations.stored import described
from gluefl.randomness import stream
from gluefl.scores import perplexity
from gluefl.simulation.arguments import FROZEN, check_arguments, check_shapes, copy_of, explained, load_weights
from gluefl.simulation.channel import Encoded, Measured
from gluefl.simulation.engines import engine_of
from gluefl.simulation.fingerprint import fingerprint
from gluefl.simulation.folder import RunFolder, describe
from gluefl.simulation.lookahead import player as player  # without look-ahead: from gluefl.simulation.round
from gluefl.simulation.loop import Loop, Records
from gluefl.simulation.parts import Simulation
from gluefl.simulation.process import device_of
from gluefl.simulation.result import Result, percentiles
from gluefl.simulation.round import Player, play
from gluefl.simulation.settings import Options, Setting
from gluefl.storage.evaluations import Spacing
from gluefl.storage.journal import Journal, Totals
from gluefl.storage.names import CHECKPOINT, JOURNAL
from gluefl.strategies import Space, Strategy
from gluefl.strategies.registry import name_of, row_of
from gluefl.vectors.frozen import frozen_digest, frozen_parameters
from gluefl.vectors.layout import Layout
from gluefl.vectors.sparse import whole
from gluefl.watching import Goal, Watched


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

    model: any module with trainable parameters; it is copied, except its frozen parameters, which the result shares.
        Only parameters that require a gradient travel.
    population: who owns which data, for instance `gluefl.populations.glyphs.Glyphs(clients=300)`.
    strategy: what travels, for instance `GlueFL()`.
    sampler: which clients are invited, for instance `Sticky(cohort=10, sticky_size=40, sticky_cohort=8)`; by default
        30 clients, uniform or sticky by strategy.
    rounds: how many rounds to play, unless a target ends the run before; 0 returns the initial model.
    setting: what else is computed: seed, local training, server optimiser, loss, hooks, fleet, evaluation.
    options: how it is carried out: folder, resume, callbacks, device, trainer, engine, checkpoints.

    >>> result = gluefl.train(model, Glyphs(clients=300), GlueFL(), sampler=Sticky(10, 40, 8), rounds=50)
    >>> result.summary["down_bytes"]
    """
    check_arguments(model, population, sampler, rounds, setting, options)
    setting, options = setting or Setting(), options or Options()
    evaluation, device = setting.evaluation, device_of(options.device)
    population, metric, module = evaluation.applied_to(population), evaluation.metric, copy_of(model).to(device)
    if setting.initial_weights is not None:
        load_weights(module, setting.initial_weights)
    chosen = sampler or _default_sampler(strategy, population.clients)
    description = describe(module, population, strategy, chosen, setting, options)
    with resources(), explained(model, population, setting), ExitStack() as held:
        core = _core(module, strategy, chosen, setting, description)
        sim, state = held.enter_context(_simulation(core, module, population, setting, options))
        evaluator = Evaluator(module, core.layout, population, setting.loss, metric, evaluation.batch, device)
        evaluator.check()
        check_shapes(module, population, setting)
        folder, journal = None, Journal(clients=options.journal_clients)
        if options.folder is not None:
            identity = fingerprint(module, sim.core.layout, population, setting.loss, metric)
            folder = RunFolder(options.folder, description, identity, rounds, sim.stores, options.checkpoints_kept)
            held.enter_context(folder.locked(options.resume, state))
            journal = Journal(options.folder / JOURNAL, options.journal_clients)
            state = folder.open(state, journal)
        spacing = Spacing(evaluation.every, rounds)
        totals = Totals.of(journal.stored(), evaluation.target, evaluation.average, metric.score, spacing)
        goal = Goal(metric.score.on(evaluator.decides_on), evaluation.target, evaluation.average, spacing)
        watched = _watched(sim, module, rounds, goal, description, options, journal)
        loop = Loop(rounds, evaluation, options, watched)
        first = [state]  # handed over: it would stay in memory for the whole run
        del state
        state = loop.run(_player(sim), sim, first.pop(), Records(journal, totals, folder), evaluator)
        summary = _summary(sim, totals) | {"stopped": "; ".join(watched.reasons) or None} | _measured(evaluator, state)
        if evaluation.clients:
            summary["client_accuracy"] = _percentiles(evaluator, state, population, evaluation.clients, setting.seed)
        _end(sim, state, module, folder, summary, _left_out(module, options), watched.notes)
    return Result(module.cpu().eval(), journal, summary, population, metric, description)


def _end(
    sim: Simulation,
    state: State,
    module: nn.Module,
    folder: RunFolder | None,
    summary: dict[str, Any],
    left_out: Collection[str],
    notes: Callable[[], Mapping[str, str]],
) -> None:
    """Fill the module with the result, and write it if the run has a folder."""
    named = sim.core.layout.state_dict(module, *state.model, leave_out=left_out)
    if folder is not None:
        folder.finish(named, summary, notes())


def _default_sampler(strategy: Strategy, clients: int) -> Sampler:
    """The sampler that goes with a strategy, for 30 clients a round or as many as a small population allows."""
    row = row_of(strategy)
    cohort = min(30, clients // (row.sticky_size + 1))
    if row.sampler == "uniform" or cohort < 2:
        return Uniform(cohort=min(30, clients))
    sticky_cohort = max(1, int(row.sticky_cohort * cohort))
    return Sticky(cohort, row.sticky_size * cohort, sticky_cohort, weights=row.weights)


def _core(module: nn.Module, strategy: Strategy, sampler: Sampler, setting: Setting, description: str) -> Core:
    """What both sides of the federation agree on."""
    layout, device = Layout.of(module), next(module.parameters()).device
    layout = replace(layout, exchanged=setting.training.exchanged(layout.size))
    row, (weights, statistics) = row_of(strategy), layout.flatten(module)
    return Core(
        seed=setting.seed,
        run=hashlib.sha256(description.encode()).digest()[:8],
        layout=layout,
        space=Space.of(layout, device),
        sampler=sampler,
        strategy=strategy,
        weights=weights,
        statistics=statistics,
        optimizer=setting.server,
        averaging=setting.averaging or Averaging(row.average, row.average_span),
        hooks=setting.hooks,
        initial=setting.initial or row.initial,
    )


def _player(sim: Simulation) -> Player:
    """Look-ahead begins a training in this process, which has none to begin where clients train elsewhere."""
    return play if isinstance(sim.engine, UploadingEngine) else player(sim.core.space.device)


@contextmanager
def _simulation(
    core: Core, module: nn.Module, population: Population, setting: Setting, options: Options
) -> Iterator[tuple[Simulation, State]]:
    """The parts of a simulation and its state before round 1; refuses what cannot run before anything is written."""
    with engine_of(core, module, population, setting, options) as engine:
        sim = _parts(core, engine, population, setting, options)
        yield sim, start(core, sim.pool)


def _parts(core: Core, engine: Engine, population: Population, setting: Setting, options: Options) -> Simulation:
    layout, device = core.layout, core.space.device
    return Simulation(
        core=core,
        pool=_pool(population, setting),
        devices=setting.devices,
        engine=engine,
        memories=_memories(setting, options, layout),
        channel=Encoded(core) if options.encode else Measured(),
        residuals=Residuals(
            layout.size,
            options.folder / CHECKPOINT if options.folder else None,
            options.residual_memory_bytes,
            options.residual_half,
            room_on(device, options.residual_device_bytes),
            keep=options.checkpoints_kept,
            forget_after=setting.forget_residuals_after,
        ),
        arrivals=setting.arrivals,
    )


def _memories(setting: Setting, options: Options, layout: Layout) -> Residuals | None:
    """What the local rule keeps for every client, if it keeps anything."""
    kept = setting.training.kept(layout.size)
    if not kept:
        return None
    folder = options.folder / CHECKPOINT / "memories" if options.folder else None
    return Residuals(kept, folder, options.residual_memory_bytes, keep=options.checkpoints_kept)


def _watched(
    sim: Simulation,
    module: nn.Module,
    rounds: int,
    goal: Goal,
    description: str,
    options: Options,
    journal: Journal,
) -> Watched:
    """The run as its callbacks see it."""
    folder, left_out = options.folder, _left_out(module, options)
    return Watched(
        name=name_of(sim.core.strategy) if folder is None else folder.resolve().name,
        rounds=rounds,
        goal=goal,
        folder=folder,
        configuration=tomllib.loads(description),
        played=journal.stored,
        tensors=partial(_tensors, sim, module, left_out),
        notes=cache(lambda: _notes(module, left_out)),  # the digest of a large base takes seconds
    )


def _tensors(sim: Simulation, module: nn.Module, left_out: Collection[str], state: State) -> dict[str, Tensor]:
    """The model of a state under the names of the module, between two rounds."""
    with on_side_stream(sim.core.space.device, "evaluation"):
        return sim.core.layout.state_dict(module, *state.model, leave_out=left_out)


def _left_out(module: nn.Module, options: Options) -> Collection[str]:
    """The names of what the files of a run leave out."""
    return () if options.save_frozen else frozen_parameters(module)


def _notes(module: nn.Module, left_out: Collection[str]) -> dict[str, str]:
    """What the file of a model says of the part that it leaves out."""
    return {FROZEN: str(frozen_digest(module))} if left_out else {}


def _summary(sim: Simulation, totals: Totals) -> dict[str, Any]:
    core = sim.core
    everything = wire.Body(
        # The whole model in one message: what a client that holds nothing downloads under FedAvg.
        update=whole(torch.zeros(core.space.size)),
        statistics=torch.zeros(core.layout.statistics_size),
        shared=wire.Shared(replace(core.space, device=torch.device("cpu")).mask(True)),
        sends_mask=True,
    )
    trainer = getattr(sim.engine, "trainer", sim.engine)
    return {
        "strategy": name_of(core.strategy),
        "seed": core.seed,
        "parameters": core.space.size,
        **totals.summary(wire.measure(everything)),
        "trainer": type(trainer).__name__.lower(),
        "client_accuracy": None,
    }


def _measured(evaluator: Evaluator, state: State) -> dict[str, Any]:
    """What the journal's `accuracy` is; where it was decided on validation samples, the result on the test samples."""
    named = evaluator.metric.score.keys() | {"evaluated_on": evaluator.decides_on, "test_accuracy": None}
    named["metric_key"] = key_of(evaluator.metric)  # by which `load` finds it
    named["transform"] = described(evaluator.population)  # which `load` applies to raw inputs
    if evaluator.decides_on == "test":
        return named
    final = evaluator.test(*state.model)
    test = {"test_accuracy": final.accuracy, "test_loss": final.loss, "perplexity": perplexity(final.loss)}
    return named | test


def _pool(population: Population, setting: Setting) -> Pool:
    size, fleet = population.clients, setting.devices

    def speed(client: int) -> float:
        return -fleet.trip(client, 0.0, 10**7, 10**7, 200).arrival_s

    known = speed if fleet.timed else None
    if setting.importance == "uniform":
        return Pool(size, lambda client: 1 / size, speed=known)
    sizes = array("q", (population.size(client) for client in range(size)))
    total = sum(sizes)
    if not total:
        raise DataError("importance = 'samples' needs clients that have samples; none of this population has any.")
    return Pool(size, lambda client: sizes[client] / total, speed=known)


def _percentiles(
    evaluator: Evaluator, state: State, population: Population, count: int, seed: int
) -> dict[str, float] | None:
    size, rng = population.clients, stream(seed, "percentiles")
    clients = draw(rng, size, count, lambda _: True) if size > LISTABLE else rng.permutation(size)[:count].tolist()
    return percentiles(evaluator.clients(*state.model, clients))
