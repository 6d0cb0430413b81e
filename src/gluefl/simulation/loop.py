"""Round after round: evaluation, journal, checkpoints, and when a run ends."""

import math
import time
import warnings
from contextlib import closing
from dataclasses import dataclass

import torch

from gluefl.accel.streams import on_side_stream
from gluefl.clients.evaluation import Evaluator
from gluefl.core.server import State
from gluefl.errors import Diverged, Interrupted, UsageError
from gluefl.simulation.folder import RunFolder
from gluefl.simulation.parts import Simulation
from gluefl.simulation.process import interruptible, tf32
from gluefl.simulation.round import Player
from gluefl.simulation.settings import Evaluation, Options
from gluefl.storage.evaluations import Spacing, unreachable
from gluefl.storage.journal import Journal, Totals
from gluefl.watching import Watched, watching
from gluefl.watching.progress import Display


@dataclass(frozen=True)
class Records:
    """What a run writes down: every round, what they add up to, and checkpoints if it has a folder."""

    journal: Journal
    totals: Totals
    folder: RunFolder | None


@dataclass(frozen=True)
class Loop:
    """When a run ends, and what happens between its rounds."""

    rounds: int
    evaluation: Evaluation
    options: Options
    watched: Watched

    def is_over(self, state: State, totals: Totals) -> bool:
        """Whether the last round or the target was reached, or a callback ends the run."""
        reached = self.evaluation.stop_at_target and totals.reached_round is not None
        return state.round >= self.rounds or reached or bool(self.watched.reasons)

    def run(self, play: Player, sim: Simulation, state: State, records: Records, evaluator: Evaluator) -> State:
        """Round after round; what is journaled and checkpointed survives whatever happens then."""
        device, folder, evaluation = sim.core.space.device, records.folder, self.evaluation
        spacing = Spacing(evaluation.every, self.rounds)
        problem = unreachable(evaluation.target, self.rounds, evaluation.every, evaluation.average)
        if problem is not None and self.options.description is None:  # for a configuration the command has said it
            warnings.warn(problem, stacklevel=3)
        callbacks = (Display(self.options.progress), *self.options.callbacks)
        with (
            interruptible() as interrupted,
            tf32(self.options.tf32),
            closing(sim),
            watching(callbacks, self.watched) as after_round,
        ):
            while not (self.is_over(state, records.totals) or interrupted):
                began = time.perf_counter()
                state, played = play(sim, state)
                line = played.line
                if spacing.evaluates(state.round):
                    line |= _evaluated(evaluator, state, device)
                line["wall_s"] = time.perf_counter() - began
                records.journal.append(line)
                records.totals.add(line)
                after_round(line, state)
                is_over = self.options.checkpoint_at_end and self.is_over(state, records.totals)
                if folder and (state.round % self.options.checkpoint_every == 0 or interrupted or is_over):
                    records.journal.sync()  # a checkpoint must never be ahead of it
                    with on_side_stream(device, "checkpoint"):
                        folder.save(state)
            if interrupted:
                hint = f" Go on with --resume --out {folder.path}." if folder else ""
                raise Interrupted(f"interrupted after round {state.round} of {self.rounds}.{hint}")
        return state


def _evaluated(evaluator: Evaluator, state: State, device: torch.device) -> dict[str, float]:
    kind = evaluator.decides_on
    with on_side_stream(device, "evaluation"):
        result = evaluator(*state.model)
    if not math.isfinite(result.loss):
        raise Diverged(f"round {state.round}: the {kind} loss is {result.loss}: the training diverged.")
    if not math.isfinite(result.accuracy):
        raise UsageError(
            f"round {state.round}: the metric is {result.accuracy} where the {kind} loss is {result.loss:.4g}. "
            "Pass Evaluation(metric=…) a function that returns one finite number per sample."
        )
    return {"accuracy": result.accuracy, f"{kind}_loss": result.loss}
