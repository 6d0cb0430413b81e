"""Time and memory of each round of a long run: neither may grow with the number of rounds.

`python tools/torture rounds [--count 100000]`
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from progress import Progress
from torch import Tensor, nn

from gluefl import GlueFL, LocalSGD, Sticky, train
from gluefl.populations import Samples
from gluefl.simulation.settings import Evaluation, Options, Setting

BLOCK = 1000  # rounds of which time and memory are one point of the line
PAGE_BYTES = 4096


@dataclass(frozen=True)
class Few:
    """Twenty clients with four samples of four numbers each."""

    clients: int = 20
    classes: int = 2
    shape: tuple[int, ...] = (4,)

    def size(self, client: int) -> int:
        """Four samples."""
        return 4

    def train(self, client: int) -> Samples:
        """Four samples of two classes."""
        inputs = torch.arange(16, dtype=torch.float32).reshape(4, 4).remainder(3 + client % 5) - 1
        return Samples(inputs, torch.arange(4).remainder(2))

    def test(self) -> Samples:
        """Those of client 0."""
        return self.train(0)

    def transform(self, inputs: Tensor) -> Tensor:
        """As they are."""
        return inputs


@dataclass
class Clockwork:
    """A callback that writes down time and memory every thousand rounds."""

    said: Progress
    began_s: float = field(default_factory=time.process_time)
    blocks: list[tuple[float, int]] = field(default_factory=list)  # milliseconds of the processor, bytes of memory

    def __call__(self, line: dict[str, Any], state: Any) -> None:
        """One round more."""
        self.said.at(line["round"])
        if line["round"] % BLOCK == 0:
            now_s = time.process_time()  # other programs of the machine do not count
            self.blocks.append((1000 * (now_s - self.began_s) / BLOCK, resident_bytes()))
            self.began_s = now_s


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def line_through(values: np.ndarray, positions: np.ndarray) -> tuple[float, float, float]:
    """Slope of a straight line, and its 95% interval with errors that are correlated from block to block.

    Neighbouring blocks share what else the machine does, so that the number of independent blocks is estimated from
    the correlation of neighbouring residuals.
    """
    centred = positions - positions.mean()
    slope = float(centred @ values / (centred @ centred))
    rest = values - values.mean() - slope * centred
    correlation = max(0.0, float(rest[1:] @ rest[:-1] / max(float(rest @ rest), 1e-300)))
    independent = max(3.0, len(values) * (1 - correlation) / (1 + correlation))
    error = float(np.sqrt(rest @ rest / (centred @ centred) / (independent - 2)))
    return slope, slope - 1.96 * error, slope + 1.96 * error


def play(folder: Path, rounds: int) -> list[tuple[float, int]]:
    """Milliseconds a round and bytes of memory, by thousands of rounds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    clockwork = Clockwork(Progress("rounds", rounds))
    train(
        nn.Linear(4, 2),
        Few(),
        GlueFL(),
        sampler=Sticky(cohort=2, sticky_size=6, sticky_cohort=1),
        rounds=rounds,
        setting=Setting(training=LocalSGD(steps=1, batch=2, lr=1e-3), evaluation=Evaluation(every=BLOCK, target=1.0)),
        options=Options(out=folder, trainer="loop", checkpoint_every=BLOCK, callbacks=(clockwork,), progress=False),
    )
    return clockwork.blocks


def run(work: Path, rounds: int, seed: int) -> dict[str, Any]:
    """Slopes over the rounds after the first tenth, in which caches fill."""
    blocks = play(work / "long", rounds)
    used = blocks[len(blocks) // 10 :]
    thousands = np.arange(len(used), dtype=np.float64)
    times, sizes = np.array([t for t, _ in used]), np.array([float(size) for _, size in used])
    slower, larger = line_through(times, thousands), line_through(sizes, thousands)
    wrong = []
    if slower[1] > 0:
        wrong.append(f"a round takes {slower[1]:.2g} ms more after every 1000 rounds, at least")
    if larger[1] > 8 * BLOCK:  # less than what one number a round would take
        wrong.append(f"memory grows by {larger[1] / BLOCK:.2g} bytes a round, at least")
    return {
        "rounds": rounds,
        "ms a round": round(float(np.median(times)), 2),
        "ms more after 1000 rounds, 95%": [round(value, 4) for value in slower],
        "MB of memory": round(sizes[-1] / 1e6, 1),
        "bytes of memory a round, 95%": [round(value / BLOCK, 2) for value in larger],
        "wrong": wrong,
    }
