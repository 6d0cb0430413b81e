"""A small run, the same in a test and in a process of its own that is killed in the middle of it."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gluefl import GlueFL, LocalSGD, Sticky, train
from gluefl.errors import GlueFLError
from gluefl.simulation.run import Result
from gluefl.simulation.settings import Evaluation, Options, Setting
from stubs import Blobs, mlp

ROUNDS, KILLED_AT = 20, 7


EVALUATION = {"evaluate_every": "every", "average": "average", "target": "target", "stop_at_target": "stop_at_target",
              "metric": "metric", "evaluation_batch": "batch", "client_percentiles": "clients"}  # fmt: skip
SETTING = (
    "seed",
    "training",
    "server",
    "devices",
    "loss",
    "initial_weights",
    "importance",
    "arrivals",
    "hooks",
    "initial",
    "forget_residuals_after",
)
CARRIED_OUT = ("out", "resume", "callbacks", "engine", "progress")


def small_run(**parts: Any) -> Result:
    """Twenty rounds of GlueFL with 4 of 40 clients, residuals on disk, a checkpoint every third round."""
    flat: dict[str, Any] = {
        "model": mlp(norm=True),
        "population": Blobs(),
        "strategy": GlueFL(regenerate_every=6),
        "sampler": Sticky(cohort=4, sticky_size=12, sticky_cohort=3),
        "rounds": ROUNDS,
        "training": LocalSGD(steps=2, batch=8, lr=0.05, lr_decay_every=4),
        "evaluate_every": 5,
        "options": options(),
        **parts,
    }
    evaluation = Evaluation(**{name: flat.pop(key) for key, name in EVALUATION.items() if key in flat})
    setting = Setting(evaluation=evaluation, **{key: flat.pop(key) for key in SETTING if key in flat})
    carried_out = {key: flat.pop(key) for key in CARRIED_OUT if key in flat}
    if "callbacks" in carried_out:
        carried_out["callbacks"] = tuple(carried_out["callbacks"])
    return train(setting=setting, options=replace(flat.pop("options"), **carried_out), **flat)


def options(**changes: Any) -> Options:
    return Options(**{"trainer": "loop", "checkpoint_every": 3, "residual_memory_bytes": 1, **changes})


def main(out: str, number: str, half: str) -> None:
    """Run, and receive a signal when round 7 has been played and written down."""
    torch.set_num_threads(1)

    def killer(line: Any, state: Any) -> None:
        if line["round"] == KILLED_AT:
            os.kill(os.getpid(), signal.Signals[number])

    try:
        small_run(out=Path(out), callbacks=[killer], options=options(residual_half=half == "half"))
    except GlueFLError as error:
        sys.exit(f"gluefl: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
