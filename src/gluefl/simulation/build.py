"""From a configuration to a run: builds the parts a `Config` names and hands them to `train`."""

import sys
from dataclasses import replace
from typing import Any

import torch

from gluefl import models, populations
from gluefl.clients.losses import LOSSES
from gluefl.clients.metrics import METRICS
from gluefl.config import Config, to_toml
from gluefl.config.tables import local_rule, part, sampler, server_optimizer, strategy_of
from gluefl.core.averaging import Averaging
from gluefl.core.sampling import Sampler
from gluefl.errors import UsageError
from gluefl.fleet import Arrivals, Devices, Fleet, Instant
from gluefl.populations import Population, first_samples
from gluefl.populations.held_out import SHARE, HeldOut
from gluefl.simulation.arguments import unfit
from gluefl.simulation.result import Result
from gluefl.simulation.run import train
from gluefl.simulation.settings import Evaluation, Options, Setting


def run(config: Config, options: Options) -> Result:
    """Carry out a configuration; everything it says is checked before anything is written."""
    population = build_population(config)
    if skipped := getattr(population, "skipped", 0):
        print(f"{skipped} broken samples of {config.population.name} are left out", file=sys.stderr)
    population = held_out(population, config)
    device_gb, setting = config.residuals.device_gb, build_setting(config, population.clients)
    model = build_model(config, population.classes, population.shape)
    if reason := unfit(model, population, setting, first_samples(population)):
        raise UsageError(f"model '{config.model.name}' does not fit population '{config.population.name}': {reason}.")
    return train(
        model,
        population,
        strategy_of(config.strategy, config.wire),
        sampler=build_sampler(config),
        rounds=config.rounds,
        setting=setting,
        options=replace(
            options,
            description=to_toml(config),
            trainer=config.training.trainer,
            tf32=config.training.tf32 is not False,
            encode=config.wire.encode,
            checkpoint_every=config.checkpoint.every,
            checkpoints_kept=config.checkpoint.keep,
            residual_memory_bytes=int(config.residuals.memory_gb * 10**9),
            residual_device_bytes=None if device_gb is None else int(device_gb * 10**9),
            residual_half=config.residuals.half,
            journal_clients=config.journal.clients,
        ),
    )


def build_population(config: Config) -> Population:
    """The population of a configuration; `held_out` takes off a validation share."""
    table = config.population
    return populations.build(table.name, table.clients, table.seed, **(table.model_extra or {}))


def held_out(population: Population, config: Config) -> Population:
    """The population without its validation share; which one depends on the seed of the data, not of the run."""
    table = config.evaluation
    if table.held_out is None:
        return population
    return HeldOut(population, table.held_out, table.held_out_share or SHARE, config.population.seed)


def build_setting(config: Config, clients: int) -> Setting:
    """What a configuration says beside model, population, strategy and sampler."""
    evaluation = config.evaluation
    return Setting(
        seed=config.seed,
        training=local_rule(config.training, min(1.0, config.sampling.cohort / clients)),
        server=server_optimizer(config.server),
        averaging=Averaging(config.server.average, config.server.average_span),
        loss=LOSSES[config.training.loss or "cross_entropy"],
        importance=config.sampling.importance,
        devices=build_devices(config, clients),
        arrivals=part(Arrivals, config.fleet),
        initial=config.wire.initial,
        forget_residuals_after=config.residuals.forget_after,
        evaluation=Evaluation(
            every=evaluation.every,
            average=evaluation.average,
            metric=METRICS[evaluation.metric],
            batch=evaluation.batch,
            target=config.target,
            stop_at_target=evaluation.stop_at_target,
            clients=evaluation.clients,
        ),
    )


def build_model(config: Config, classes: int, shape: tuple[int, ...]) -> torch.nn.Module:
    """The model of a configuration with weights that depend on its seed alone."""
    options: dict[str, Any] = dict(config.model.model_extra or {})
    if taken := sorted(options.keys() & {"classes", "channels"}):
        raise UsageError(f"model.{taken[0]} follows from the population: remove it.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return models.build(config.model.name, classes=classes, channels=shape[0], **options)


def build_sampler(config: Config) -> Sampler:
    """The sampler of a configuration."""
    return sampler(config.sampling, config.fleet)


def build_devices(config: Config, clients: int) -> Devices:
    """The fleet of a configuration."""
    if config.fleet.network == "instant":
        return Instant()
    devices = part(Fleet, config.fleet)
    devices.check(clients)
    return devices
