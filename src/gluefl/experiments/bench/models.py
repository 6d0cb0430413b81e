"""Training one cohort of the paper's models: on a GPU stacked layers against `vmap`, and the effect of TF32; on a CPU
the trainer `workers` against the reference loop."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gluefl import models
from gluefl.clients.cohort import Cohort, Job, Outcome, Trainer
from gluefl.clients.rules import LocalSGD
from gluefl.clients.trainers.loop import Loop
from gluefl.clients.trainers.stacked import Stacked
from gluefl.clients.trainers.workers import Workers
from gluefl.experiments.bench.cohort import alternate, pin
from gluefl.experiments.bench.progress import counted
from gluefl.experiments.bench.workloads import CLASSES, COHORT, SAMPLES, SGD
from gluefl.populations import Samples
from gluefl.simulation.process import device_of
from gluefl.vectors.layout import Layout

# Channels and side of the images, options of the model.
WORK: dict[str, tuple[int, int, dict[str, Any]]] = {
    "shufflenet_v2_x2_0": (3, 28, {}),
    "mobilenet_v2": (3, 28, {}),
    "resnet34": (3, 32, {"stem": "3x3"}),
    "leaf_cnn": (1, 28, {}),
    "small_cnn": (1, 28, {}),
}


def measure(
    rounds: int = 5,
    cores: int = 1,
    device: str = "cpu",
    names: tuple[str, ...] = (),
    cohort: int = COHORT,
    side: int | None = None,
) -> dict[str, Any]:
    """Median seconds per round of every model.

    On a GPU with and without TF32, and by `vmap`, the alternative to the stacked layers; `tf32_apart`, `vmap_apart`:
    relative L2 distance of one step's deltas to those of stacked layers without TF32. On a CPU by the trainer
    `workers` and by the reference loop; `loop_apart` is the distance between the two.
    """
    pin(cores)
    on_cpu = device_of(device).type == "cpu"
    compare = partial(_on_cpu, cores) if on_cpu else _stacked
    results = {}
    for name in counted(names or tuple(WORK), "models"):
        candidates, apart = compare(partial(_Work, name, device, cohort, side))
        times = alternate({key: work.play for key, work in candidates.items()}, rounds, device, cores)
        medians = {key: statistics.median(seconds) for key, seconds in times.items()}
        other = "loop_s" if on_cpu else "vmap_s"
        results[name] = {**medians, "ratio": medians["gluefl_s"] / medians[other], **apart}
    return {"models": results, "cohort": cohort, "device": device, "cores": cores}


def _stacked(work: Callable[..., "_Work"]) -> tuple[dict[str, "_Work"], dict[str, float]]:
    candidates = {"gluefl_s": work(Stacked), "without_tf32_s": work(Stacked, tf32=False), "vmap_s": work(_by_vmap)}
    exact = candidates["without_tf32_s"].step()
    by_vmap = work(_by_vmap, tf32=False).step()
    return candidates, {"tf32_apart": _apart(work(Stacked).step(), exact), "vmap_apart": _apart(by_vmap, exact)}


def _on_cpu(cores: int, work: Callable[..., "_Work"]) -> tuple[dict[str, "_Work"], dict[str, float]]:
    candidates = {"gluefl_s": work(partial(Workers, count=cores)), "loop_s": work(Loop)}
    return candidates, {"loop_apart": _apart(candidates["gluefl_s"].step(), candidates["loop_s"].step())}


def _by_vmap(*arguments: Any) -> Stacked:
    trainer = Stacked(*arguments)
    trainer.layers = None
    return trainer


class _Work:
    """A fixed cohort to train. A captured step keeps the TF32 setting of its capture, so each object has its own."""

    def __init__(
        self,
        name: str,
        device: str,
        cohort: int,
        side: int | None,
        trainer: Callable[..., Trainer],
        tf32: bool = True,
    ) -> None:
        self.tf32 = tf32
        channels, usual, options = WORK[name]
        side = side or usual
        options = {**options, "side": side} if "side" in models.option_names(name) else options
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = models.build(name, classes=CLASSES, channels=channels, **options).to(device)
        layout = Layout.of(module)
        weights, statistics_ = layout.flatten(module)
        self.start = weights, statistics_.to(device)
        rng = np.random.default_rng(0)
        shape = (SAMPLES, channels, side, side)
        inputs = torch.from_numpy(rng.integers(256, size=shape, dtype=np.uint8)).to(device)
        labels = torch.from_numpy(rng.integers(CLASSES, size=SAMPLES)).to(device)
        self.jobs = [Job(i, Samples(inputs, labels), SGD.batches(rng, SAMPLES)) for i in range(cohort)]
        self.trainer = trainer(module, layout, lambda x: x.float() / 255 - 0.5, torch.nn.functional.cross_entropy)

    def play(self, _: np.random.Generator) -> None:
        """All steps."""
        self._train(self.jobs, SGD)

    def step(self) -> Tensor:
        """The deltas of one step, one row per client."""
        jobs = [replace(job, batches=job.batches[:1]) for job in self.jobs]
        return torch.stack([outcome.delta for outcome in self._train(jobs, replace(SGD, steps=1))])

    def _train(self, jobs: Sequence[Job], sgd: LocalSGD) -> list[Outcome]:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.tf32
        cohort = Cohort(1, tuple(job.client for job in jobs), *self.start)
        return sorted(self.trainer.train(cohort, jobs, sgd), key=lambda outcome: outcome.client)


def _apart(deltas: Tensor, exact: Tensor) -> float:
    return float(torch.linalg.norm(deltas - exact) / torch.linalg.norm(exact))
