"""30% of the invited clients fail in random phases: the mean accuracy over seeds stays within one point.

`python tools/torture failures [--count 5]`
"""

import statistics
from pathlib import Path
from typing import Any

import torch
from progress import Progress

from gluefl import GlueFL, LocalSGD, Sticky, train
from gluefl.fleet import Fleet
from gluefl.models import build
from gluefl.populations.glyphs import Glyphs
from gluefl.simulation.settings import Evaluation, Options, Setting

SHARE, ROUNDS, EVERY, LAST = 0.3, 150, 5, 5


def play(seed: int, failure_share: float, rounds: int, said: Progress) -> tuple[float, list[dict[str, Any]]]:
    """Mean accuracy of the last evaluations, and the journal."""
    runs = 2 * (seed - 1) + bool(failure_share)  # that were played before
    torch.manual_seed(seed)
    population = Glyphs(clients=200, difficulty=0.3, test_samples=1000)
    result = train(
        build("mlp", classes=population.classes, channels=population.shape[0]),
        population,
        GlueFL(),
        sampler=Sticky(cohort=10, sticky_size=40, sticky_cohort=8, over_commitment=1.3),
        rounds=rounds,
        setting=Setting(
            seed=seed,
            training=LocalSGD(steps=5, batch=20, lr=0.05),
            devices=Fleet("edge", "always", seed=seed, failure_share=failure_share),
            evaluation=Evaluation(every=EVERY),
        ),
        options=Options(progress=False, callbacks=(lambda line, state: said.at(runs * rounds + line["round"]),)),
    )
    accuracies = [line["accuracy"] for line in result.journal if line["accuracy"] is not None]
    return statistics.fmean(accuracies[-LAST:]), result.journal


def run(seeds: int, work: Path | None = None, rounds: int = ROUNDS) -> dict[str, Any]:
    """Means over seeds with and without failures; every loss is in the journal."""
    torch.set_num_threads(1)
    said = Progress("failures", 2 * seeds * rounds)
    pairs = [[play(seed, share, rounds, said) for share in (0.0, SHARE)] for seed in range(1, seeds + 1)]
    whole, failing = ([pair[place] for pair in pairs] for place in (0, 1))
    lines = [line for _, journal in failing for line in journal]
    wrong = [
        f"round {line['round']}: {line['lost']} lost, {line['clients']['fate'].count('lost')} fates"
        for line in lines
        if line["lost"] != line["clients"]["fate"].count("lost")
    ]
    invited, lost = sum(line["invited"] for line in lines), sum(line["lost"] for line in lines)
    means = [100 * statistics.fmean(accuracy for accuracy, _ in runs) for runs in (whole, failing)]
    if not 0.27 < lost / invited < 0.33 and invited > 1000:
        wrong.append(f"{lost} of {invited} clients were lost, {SHARE:.0%} were to be")
    if means[1] < means[0] - 1:
        wrong.append(f"the mean accuracy is {means[1]:.2f}%, undisturbed it is {means[0]:.2f}%")
    return {
        "seeds": seeds,
        "invited": invited,
        "lost": lost,
        "undisturbed": [round(100 * accuracy, 2) for accuracy, _ in whole],
        "with failures": [round(100 * accuracy, 2) for accuracy, _ in failing],
        "mean undisturbed": round(means[0], 2),
        "mean with failures": round(means[1], 2),
        "wrong": wrong,
    }
