"""The parameters of `train`: what is computed (`Setting`), when it is evaluated, and how it is carried out."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Strict
from torch import nn

from gluefl.clients.cohort import Engine
from gluefl.clients.metrics import TOP_1, AnyMetric
from gluefl.clients.rules import LocalRule, LocalSGD, Loss
from gluefl.clients.trainers.choice import TRAINERS
from gluefl.core.averaging import Averaging
from gluefl.core.optimizer import Optimizer, Server
from gluefl.core.server import Initial
from gluefl.fleet import Arrivals, Devices, Instant
from gluefl.parameters import Count, Finite, Has, NonNegativeCount, OneOf, OpenShare, Seed, checked
from gluefl.populations import Population
from gluefl.populations.held_out import SHARE, By, HeldOut
from gluefl.storage.journal import ClientsForm
from gluefl.strategies.hooks import Hooks

Rule = Annotated[LocalRule, Has(("rate", "batches", "steps_for", "exchanged", "kept"))]
AnyDevices = Annotated[Devices, Has(("timed", "is_online", "next_change_s", "trip"))]
Named = Literal["local", "processes", "ray"]  # engines by name


def _callback(value: Any) -> Any:
    if isinstance(value, type) or not (callable(value) or hasattr(value, "watch")):
        raise ValueError("input should be a function of (line, state), or an object that has watch")
    return value


def _problem_of_toml(text: str) -> str | None:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return str(error)
    return None


Callbacks = Annotated[tuple[Annotated[Any, BeforeValidator(_callback)], ...], Strict(False)]


@checked
@dataclass(frozen=True)
class Evaluation:
    """When the global model is evaluated, how, and which result ends the run."""

    every: Count = 10  # rounds
    average: Count = 5  # a target is compared with the mean of this many evaluations
    metric: AnyMetric = TOP_1  # a Metric, a name of `METRICS` or a function
    batch: Count = 1000
    target: Finite | None = None  # reached from below, or from above where lower is better
    stop_at_target: bool = True
    clients: NonNegativeCount = 0  # at the end, percentiles of the metric over this many clients
    held_out: By | None = None  # decide on a share of the samples or clients; the test set is for the end
    held_out_share: OpenShare | None = None  # 0.1

    def problems(self) -> Iterator[str]:
        """A target must be a possible value; a share needs to know of what."""
        if problem := self.metric.score.problem(self.target):
            yield f"target: {problem}"
        if self.held_out_share is not None and self.held_out is None:
            yield 'held_out_share needs held_out = "samples" or "clients"'

    def applied_to(self, population: Population) -> Population:
        """The population without the validation share, where one is asked for."""
        if self.held_out is None:
            return population
        return HeldOut(population, self.held_out, self.held_out_share or SHARE)


@checked
@dataclass(frozen=True)
class Setting:
    """What is computed, beside model, population, strategy and sampler."""

    seed: Seed = 1
    training: Rule = LocalSGD()  # noqa: RUF009 - frozen
    server: Annotated[Optimizer, Has(("init", "step"))] = Server()  # noqa: RUF009 - frozen
    averaging: Averaging | None = None  # over versions; by strategy: lean averages, the others do not
    loss: Loss = nn.functional.cross_entropy
    hooks: Hooks = ()  # on a client's update and on the server's sum
    importance: Literal["uniform", "samples"] = "uniform"  # p_i: equal, or by numbers of samples
    devices: AnyDevices = Instant()  # noqa: RUF009 - frozen
    arrivals: Arrivals = Arrivals()  # noqa: RUF009 - frozen
    evaluation: Evaluation = Evaluation()
    initial: Initial | None = None  # how a client comes to version 0; by strategy: known for lean, else download
    forget_residuals_after: Count | None = None  # rounds in which a client was not used; by default they stay
    initial_weights: Path | str | None = None  # a safetensors file instead of the weights of the module


@checked
@dataclass(frozen=True)
class Options:
    """How a run is carried out; what is computed stays the same, except rounding where it is mentioned."""

    out: Path | str | None = None  # folder of the run; without one nothing is written
    resume: bool = False  # go on with the run in `out`
    callbacks: Callbacks = ()  # functions called after every round, and objects that watch a run
    progress: bool = True  # a bar in a terminal or a notebook, elsewhere a line per evaluation
    engine: Named | Annotated[Engine, Has(("train", "work"))] | None = None  # where clients train; by default here
    workers: Count | None = None  # of the engines processes and ray; by default one per GPU or core
    ray_address: str | None = None  # of a Ray cluster; by default one is started on this machine
    device: str = "cpu"  # sums are rounded in another order elsewhere,
    trainer: Annotated[str, OneOf(TRAINERS)] = "auto"  # and by another trainer
    tf32: bool = True  # on a GPU, products of ten-bit mantissas, as PyTorch's convolutions have by default
    encode: bool = False  # encode, decode and check every message
    checkpoint_every: Count = 10  # rounds
    checkpoints_kept: Count = 2  # the last ones, to go back to if a file is damaged
    checkpoint_at_end: bool = True  # so that a finished run can be given more rounds
    save_frozen: bool = False  # the model's file holds the frozen parameters, too
    journal_clients: ClientsForm = "lines"  # in the lines of the journal, as "columns" in a binary file, or "none"
    residual_memory_bytes: NonNegativeCount = 3 * 10**8
    residual_device_bytes: NonNegativeCount | None = None  # on a GPU: a third of what is free
    residual_half: bool = False  # half precision rounds what clients remember
    description: str | None = field(default=None, repr=False)  # the text of config.toml, if it was made from one

    def problems(self) -> Iterator[str]:
        """A run is resumed from its folder; workers belong to an engine."""
        if self.resume and self.out is None:
            yield "resume = True needs out, the folder of the run to go on with"
        if self.workers is not None and self.engine not in ("processes", "ray"):
            yield f"workers = {self.workers} needs engine = 'processes' or 'ray'"
        if self.trainer != "auto" and not isinstance(self.engine, str | None):
            yield f"trainer = {self.trainer!r} has no effect on an engine object, which has a trainer of its own"
        if self.description is not None and (problem := _problem_of_toml(self.description)):
            yield f"description must be the text of a TOML file: {problem}"
        if self.ray_address is not None and self.engine != "ray":
            yield f"ray_address = {self.ray_address!r} needs engine = 'ray'"

    @property
    def folder(self) -> Path | None:
        """The folder of the run."""
        return Path(self.out) if self.out is not None else None
