"""From a configuration to a run: builds the parts a `Config` names and hands them to `train`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gluefl import models, populations
from gluefl.clients.evaluation import METRICS
from gluefl.clients.rules import LocalSGD
from gluefl.config import Config, to_toml
from gluefl.config.tables import part, sampler
from gluefl.core.optimizer import Server
from gluefl.core.sampling import Sampler
from gluefl.fleet import Devices, Fleet, Instant
from gluefl.simulation.run import Callback, Options, Result, train


def run(
    config: Config,
    out: Path | None,
    device: str = "cpu",
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    checkpoint_at_end: bool = True,
) -> Result:
    """Carry out a configuration; everything it says is checked before anything is written."""
    population = populations.build(
        config.population.name,
        config.population.clients,
        config.population.seed,
        **(config.population.model_extra or {}),
    )
    if skipped := getattr(population, "skipped", 0):
        print(f"{skipped} broken samples of {config.population.name} are left out", file=sys.stderr)
    return train(
        model=build_model(config, population.classes, population.shape),
        population=population,
        strategy=config.strategy.build(),
        sampler=build_sampler(config),
        rounds=config.rounds,
        target=config.target,
        seed=config.seed,
        training=part(LocalSGD, config.training),
        server=part(Server, config.server),
        devices=build_devices(config, population.clients),
        importance=config.sampling.importance,
        metric=METRICS[config.evaluation.metric],
        evaluate_every=config.evaluation.every,
        average=config.evaluation.average,
        evaluation_batch=config.evaluation.batch,
        stop_at_target=config.evaluation.stop_at_target,
        client_percentiles=config.evaluation.clients,
        arrivals={
            "deadline_s": config.fleet.deadline_s,
            "authors_arrivals": config.fleet.authors_arrivals,
            "stop_late_downloads": config.fleet.stop_late_downloads,
        },
        callbacks=callbacks,
        out=out,
        resume=resume,
        description=to_toml(config),
        options=Options(
            device=device,
            trainer=config.training.trainer,
            tf32=config.training.tf32 is not False,
            encode=config.wire.encode,
            checkpoint_every=config.checkpoint.every,
            checkpoint_at_end=checkpoint_at_end,
            residual_memory_bytes=int(config.residuals.memory_gb * 10**9),
            residual_device_bytes=None if (gb := config.residuals.device_gb) is None else int(gb * 10**9),
            residual_half=config.residuals.half,
        ),
    )


def build_model(config: Config, classes: int, shape: tuple[int, ...]) -> torch.nn.Module:
    """The model of a configuration with weights that depend on its seed alone."""
    options: dict[str, Any] = dict(config.model.model_extra or {})
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
