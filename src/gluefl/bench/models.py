"""Training one cohort of the paper's models: our layers for many clients against `vmap`, and what TF32 is worth."""

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gluefl import models
from gluefl.bench.cohort import alternate, pin
from gluefl.bench.workloads import CLASSES, COHORT, SAMPLES, SGD
from gluefl.layout import Layout
from gluefl.populations import Samples
from gluefl.training import Job
from gluefl.training.stacked import Stacked

# Name, channels and side of the pictures, options.
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
    """Median seconds a round, with and without TF32, and by vmap, which is what a GPU without our layers would do."""
    pin(cores)
    found = {}
    for name in names or tuple(WORK):
        candidates = {
            "gluefl_s": _round(name, device, cohort, side, tf32=True),
            "without_tf32_s": _round(name, device, cohort, side, tf32=False),
            "vmap_s": _round(name, device, cohort, side, tf32=True, by_vmap=True),
        }
        times = alternate(candidates, rounds, device, cores)
        medians = {key: statistics.median(some) for key, some in times.items()}
        found[name] = {**medians, "ratio": medians["gluefl_s"] / medians["vmap_s"]}
    return {"models": found, "cohort": cohort, "device": device, "cores": cores}


def _round(
    name: str, device: str, cohort: int, side: int | None, tf32: bool, by_vmap: bool = False
) -> Callable[[np.random.Generator], None]:
    channels, usual, options = WORK[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = models.build(name, classes=CLASSES, channels=channels, **options).to(device)
    layout = Layout.of(module)
    weights, tracked = layout.flatten(module)
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(
        rng.integers(256, size=(SAMPLES, channels, side or usual, side or usual), dtype=np.uint8)
    ).to(device)
    labels = torch.from_numpy(rng.integers(CLASSES, size=SAMPLES)).to(device)
    jobs = [Job(i, Samples(inputs, labels), SGD.batches(rng, SAMPLES)) for i in range(cohort)]
    trainer = Stacked(module, layout, lambda x: x.float() / 255 - 0.5, torch.nn.functional.cross_entropy)
    if by_vmap:
        trainer._many = None

    def play(_: np.random.Generator) -> None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        for _outcome in trainer.train(weights, tracked.to(device), jobs, SGD, SGD.lr, None):
            pass

    return play
